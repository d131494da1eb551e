"""One round of calls to a server, and what it answered: of SGLang kept in a file, of the stub compared with that file.

Compared are status and shape: names, types, forms of a finish reason; not tokens, numbers or wording.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ostinato_engines.sglang_engine.http import LocalClient, Reply
from ostinato_engines.sglang_engine.protocol import ServerInfo

_CALL_S = 120.0
_BEGUN_S = 0.5
"""A long request has begun by then."""
_PROMPT = [5, 6, 7, 8]
_LONG = {"max_new_tokens": 4000, "ignore_eos": True}
_KEPT = (*(field for field in ServerInfo.__struct_fields__), "status", "context_length", "dtype")


class Exchange(msgspec.Struct, frozen=True):
    """One call and its answer."""

    name: str
    method: str
    path: str
    status: int
    answer: Any
    """Decoded JSON, or the text."""


class Recorder:
    """Makes the calls.

    Args:
        client: Of a server that is idle, with a tokenizer in its checkpoint.
        stranger: A client of the same server with another key.
        folder: Of the weights that it serves.
        can_sleep: Whether it was started so that it can free its memory.
        keep: Gets each exchange as soon as it is over.
    """

    def __init__(
        self,
        client: LocalClient,
        stranger: LocalClient,
        folder: Path,
        *,
        can_sleep: bool,
        keep: Callable[[Exchange], None],
    ) -> None:
        self._client = client
        self._stranger = stranger
        self._folder = folder
        self._can_sleep = can_sleep
        self._keep_exchange = keep

    async def record(self) -> None:
        """All exchanges; the server is as before, but for its cache."""
        await self._about()
        await self._requests()
        await self._chat()
        await self._refusals()
        await self._pauses()
        await self._weights()

    async def _about(self) -> None:
        await self._call("model_info", "/model_info", get=True)
        reply = await self._client.get("/server_info", timeout_s=_CALL_S)
        told = msgspec.json.decode(reply.body)
        self._keep(
            "server_info",
            "GET",
            "/server_info",
            reply.status,
            {name: told[name] for name in _KEPT if name in told},
        )
        reply = await self._client.get("/openapi.json", timeout_s=_CALL_S)
        paths = {path: sorted(ways) for path, ways in msgspec.json.decode(reply.body)["paths"].items()}
        self._keep("openapi", "GET", "/openapi.json", reply.status, {"paths": paths})
        self._take("unauthorized", "POST", "/generate", await self._stranger.post("/generate", {}, timeout_s=_CALL_S))
        await self._call("unknown_path", "/no_such_endpoint", {})

    async def _requests(self) -> None:
        few = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
        await self._generate("length", "r-1", few)
        await self._generate("length_with_logprobs", "r-2", few, return_logprob=True)
        reply = await self._client.post(
            "/generate", {"rid": "r-3", "input_ids": _PROMPT, "sampling_params": few}, timeout_s=_CALL_S
        )
        first = msgspec.json.decode(reply.body)["output_ids"][0]
        stop = {"max_new_tokens": 3, "temperature": 0.0, "stop_token_ids": [first]}
        await self._generate("stop", "r-4", stop, return_logprob=True)
        await self._generate("cached", "r-5", few)
        await self._during("abort_running", "/abort_request", {"rid": "long-abort_running"}, logprobs=True)
        await self._during("abort_all", "/abort_request", {"abort_all": True}, logprobs=False)
        await self._call("abort_unknown", "/abort_request", {"rid": "nobody"})

    async def _chat(self) -> None:
        asked = {"model": str(self._folder), "messages": [{"role": "user", "content": "w5 w6"}]}
        few = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
        await self._call("chat", "/v1/chat/completions", {**asked, **few})
        await self._call("chat_without_messages", "/v1/chat/completions", {"model": str(self._folder)})
        await self._call("chat_high_penalty", "/v1/chat/completions", {**asked, **few, "repetition_penalty": 2.5})

    async def _refusals(self) -> None:
        few = {"max_new_tokens": 3}
        await self._generate("too_long", "r-6", few, input_ids=[5] * 1_000_000)
        await self._generate("high_penalty", "r-8", {**few, "repetition_penalty": 2.5})
        await self._generate("top_k_of_zero", "r-9", {**few, "top_k": 0})
        await self._call("unknown_mode", "/pause_generation", {"mode": "sideways"})
        await self._during("flush_while_busy", "/flush_cache", None, logprobs=False)
        await self._during("flush_while_busy_in_time", "/flush_cache?timeout=0.2", None, logprobs=False)
        await self._call("flush", "/flush_cache?timeout=30")

    async def _pauses(self) -> None:
        for mode in ("in_place", "retract", "abort"):
            await self._during(f"pause_{mode}", "/pause_generation", {"mode": mode}, logprobs=True, thaw=True)
        await self._call("flush_after_pauses", "/flush_cache?timeout=30")

    async def _weights(self) -> None:
        if self._can_sleep:
            tags = {"tags": ["kv_cache"]}
            await self._call("release", "/release_memory_occupation", tags)
            await self._call("model_info_asleep", "/model_info", get=True)
            await self._call("resume", "/resume_memory_occupation", tags)
        body = {"model_path": str(self._folder), "weight_version": "7"}
        await self._call("update_from_disk", "/update_weights_from_disk", body)
        await self._generate("after_update", "r-10", {"max_new_tokens": 2, "ignore_eos": True}, return_logprob=True)
        await self._call("update_without_a_path", "/update_weights_from_disk", {})

    async def _during(
        self, name: str, path: str, body: dict[str, Any] | None, *, logprobs: bool, thaw: bool = False
    ) -> None:
        """A call while a long request runs, and that request's answer, which an abort brings on."""
        rid = f"long-{name}"
        long = asyncio.ensure_future(
            self._client.post(
                "/generate",
                {"rid": rid, "input_ids": _PROMPT, "sampling_params": _LONG, "return_logprob": logprobs},
                timeout_s=_CALL_S,
            )
        )
        await asyncio.sleep(_BEGUN_S)
        await self._call(name, path, body)
        if thaw:
            await self._call(f"{name}_and_continue", "/continue_generation", {})
        while not long.done():
            await self._client.post("/abort_request", {"rid": rid}, timeout_s=_CALL_S)
            await asyncio.wait([long], timeout=0.2)
        self._take(f"request_of_{name}", "POST", "/generate", long.result())

    async def _generate(self, name: str, rid: str, sampling: dict[str, Any], **more: Any) -> None:
        await self._call(name, "/generate", {"rid": rid, "input_ids": _PROMPT, "sampling_params": sampling, **more})

    async def _call(self, name: str, path: str, body: dict[str, Any] | None = None, *, get: bool = False) -> None:
        if get:
            self._take(name, "GET", path, await self._client.get(path, timeout_s=_CALL_S))
        else:
            self._take(name, "POST", path, await self._client.post(path, body, timeout_s=_CALL_S))

    def _take(self, name: str, method: str, path: str, reply: Reply) -> None:
        try:
            answer = msgspec.json.decode(reply.body)
        except msgspec.DecodeError:
            answer = reply.body.decode(errors="replace")
        self._keep(name, method, path, reply.status, answer)

    def _keep(self, name: str, method: str, path: str, status: int, answer: Any) -> None:
        self._keep_exchange(Exchange(name, method, path, status, _shortened(answer, str(self._folder))))


def _shortened(answer: Any, folder: str) -> Any:
    """Without places on this machine, and with the first of many."""
    if isinstance(answer, dict):
        return {name: _shortened(value, folder) for name, value in answer.items()}
    if isinstance(answer, list):
        return [_shortened(value, folder) for value in answer[:3]]
    if isinstance(answer, str):
        return answer.replace(folder, "MODEL").partition("\n\n  File ")[0][:300]
    return answer
