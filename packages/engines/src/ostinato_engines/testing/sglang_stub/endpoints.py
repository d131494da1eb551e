"""SGLang's endpoints: the forms of its requests, answers and errors. Knows no sampling."""

import argparse
import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

from ostinato_engines.testing.sglang_stub.arguments import VERSION
from ostinato_engines.testing.sglang_stub.model import Model, RefusedError, SchedulerError, finish_of
from ostinato_engines.testing.sglang_stub.web import Handler, Request, Response
from ostinato_engines.types import TokenOutput

CHAT_FIELDS = (
    *("messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop_token_ids", "ignore_eos", "repetition_penalty", "stream", "n", "tools", "rid", "user"),
)
_DONE = {"success": True, "message": "Succeeded to update model weights."}


def _guarded(handler: Handler) -> Handler:
    """An error of the scheduler ends the server, as it does there."""

    @wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except SchedulerError as error:
            print(f"Scheduler hit an exception: AssertionError: {error}", file=sys.stderr, flush=True)  # noqa: T201  its log
            os._exit(1)

    return answer


class Endpoints:
    """All routes of one server."""

    def __init__(self, model: Model, arguments: argparse.Namespace) -> None:
        self._model = model
        self._arguments = arguments
        self._tokenizer: Any = None if arguments.skip_tokenizer_init else _tokenizer_of(arguments.model_path)
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/update_weights_from_disk": self._update_from_disk,
            "/v1/chat/completions": self._chat,
        }
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self._health,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/openapi.json": self._openapi,
        }
        self.routes: Mapping[tuple[str, str], Handler] = {
            **{("POST", path): _guarded(handler) for path, handler in posts.items()},
            **{("GET", path): _guarded(handler) for path, handler in gets.items()},
        }

    async def _generate(self, request: Request) -> Response:
        body, began = request.body, time.perf_counter()
        rid = str(body.get("rid") or uuid.uuid4().hex)
        try:
            output = await self._model.generate(rid, body["input_ids"], body.get("sampling_params") or {})
        except (RefusedError, ValueError) as error:
            return Response({"error": {"message": str(error)}}, 400)
        meta: dict[str, Any] = {"id": rid, "finish_reason": finish_of(output)}
        meta["weight_version"] = self._model.weight_version
        if meta["finish_reason"].get("message") != "Abort in waiting queue":
            meta |= {
                "prompt_tokens": len(body["input_ids"]),
                "num_retractions": output.num_preempted,
                "reasoning_tokens": 0,
                "cached_tokens": output.num_cached_tokens or 0,
            }
        meta |= {"completion_tokens": len(output.token_ids), "e2e_latency": time.perf_counter() - began}
        if body.get("return_logprob"):
            meta |= _logprobs_of(output)
        answer: dict[str, Any] = {"output_ids": output.token_ids, "meta_info": meta}
        return Response(answer if self._tokenizer is None else {"text": self._text(output.token_ids), **answer})

    async def _abort(self, request: Request) -> Response:
        await self._model.abort(str(request.body.get("rid") or ""), everything=bool(request.body.get("abort_all")))
        return Response("")

    async def _pause(self, request: Request) -> Response:
        mode = request.body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _invalid(f"Input should be 'abort', 'retract' or 'in_place', got {mode!r}")
        await self._model.pause(mode)
        return Response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        await self._model.go_on()
        return Response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: Request) -> Response:
        timeout_s = float(request.query.get("timeout", 0))
        if await self._model.flush(timeout_s):
            return Response(
                "Cache flushed.\nPlease check backend logs for more details. "
                "(When there are running or waiting requests, the operation will not be performed.)\n"
            )
        return Response("Timed out waiting for idle state." if timeout_s else "Flush cache failed.\n", 400)

    async def _release(self, request: Request) -> Response:
        await self._model.release(request.body.get("tags") or ("kv_cache", "weights"))
        return Response(None)

    async def _resume(self, request: Request) -> Response:
        await self._model.resume(request.body.get("tags") or ("kv_cache", "weights"))
        return Response(None)

    async def _update_from_disk(self, request: Request) -> Response:
        if "model_path" not in request.body:
            return _invalid("Field required: model_path")
        try:
            await self._model.update_from_disk(request.body["model_path"], request.body.get("weight_version"))
        except RefusedError as error:
            return Response({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        version = request.body.get("weight_version")
        told = f"{_DONE['message']} Weight version updated to {version}." if version else _DONE["message"]
        return Response({"success": True, "message": told, "num_paused_requests": 0})

    async def _health(self, request: Request) -> Response:
        return Response("")

    async def _model_info(self, request: Request) -> Response:
        return Response(
            {
                "model_path": self._arguments.model_path,
                "tokenizer_path": self._arguments.model_path,
                "is_generation": True,
                "weight_version": self._model.weight_version,
            }
        )

    async def _server_info(self, request: Request) -> Response:
        told = {name: value for name, value in vars(self._arguments).items() if name not in ("config", "api_key")}
        return Response(
            {
                **told,
                "page_size": 1,
                "version": VERSION,
                "status": "ready",
                "max_total_num_tokens": self._arguments.max_running_requests * self._model.context_length,
                "max_req_input_len": self._model.max_req_input_len,
            }
        )

    async def _openapi(self, request: Request) -> Response:
        paths: dict[str, dict[str, Any]] = {}
        for method, path in self.routes.keys() - {("GET", "/openapi.json")}:
            paths.setdefault(path, {})[method.lower()] = {}
        chat = {"properties": {name: {} for name in CHAT_FIELDS}}
        return Response({"paths": paths, "components": {"schemas": {"ChatCompletionRequest": chat}}})

    async def _chat(self, request: Request) -> Response:
        body = request.body
        if self._tokenizer is None or not body.get("messages"):
            return _invalid("messages must be given, and a tokenizer be loaded")
        prompt = self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
        sampling = {name: body[name] for name in names if body.get(name) is not None}
        sampling |= {"sampling_seed": body.get("seed")} | ({} if limit is None else {"max_new_tokens": limit})
        try:
            output = await self._model.generate(uuid.uuid4().hex, prompt, sampling)
        except (RefusedError, ValueError) as error:
            return _invalid(str(error))
        finish = finish_of(output)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self._text(output.token_ids)},
            "finish_reason": finish["type"],
            "matched_stop": finish.get("matched"),
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(output.token_ids)}
        return Response(
            {
                "id": uuid.uuid4().hex,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.get("model"),
                "choices": [choice],
                "usage": {**usage, "total_tokens": sum(usage.values())},
            }
        )

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _logprobs_of(output: TokenOutput) -> dict[str, Any]:
    told = [
        [logprob, token_id, None] for logprob, token_id in zip(output.logprobs or (), output.token_ids, strict=True)
    ]
    return {
        "input_token_logprobs": [],
        "output_token_logprobs": told,
        "output_token_logprobs_length": len(told),
    }


def _invalid(message: str) -> Response:
    return Response({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}, 400)


def _tokenizer_of(path: str) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(path)
