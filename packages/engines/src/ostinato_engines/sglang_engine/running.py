"""A started SGLang server: every call of an endpoint is here. Knows no conversation and no state.

Invariant: what would make SGLang's scheduler fail an assertion (memory released or a cache dropped while it is busy, a part
woken that is awake) is not asked of it.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec

from ostinato_engines.errors import EngineCrashedError, EngineInputError, UnsupportedError, WeightUpdateError
from ostinato_engines.sglang_engine.device_weights import DeviceWeights, payload
from ostinato_engines.sglang_engine.http import LocalClient, Reply
from ostinato_engines.sglang_engine.launch import BACKEND
from ostinato_engines.sglang_engine.protocol import Generated, ModelInfo, ServerInfo, Updated
from ostinato_engines.weight_routes import LOADING_S

T = TypeVar("T")
REQUIRED = (
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/update_weights_from_disk",
)
MEMORY = ("/release_memory_occupation", "/resume_memory_occupation")
CHAT = "/v1/chat/completions"
_CALL_S = 60.0
_IDLE_S = 60.0
"""Longest wait until SGLang has cleared up after what it answered."""
_LOAD_S = LOADING_S - 60.0
"""Longest wait for an answer of SGLang that loads weights; whoever waits for this engine waits for longer."""
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RunningEngine:
    """One server that answers."""

    client: LocalClient
    info: ServerInfo
    endpoints: Collection[str]
    """Paths that it has."""
    chat_fields: frozenset[str]
    """Fields that its chat endpoint knows; empty where it does not say."""

    @classmethod
    async def of(cls, client: LocalClient) -> Self:
        """Looks at a server that has come up.

        Raises:
            UnsupportedError: It lacks an endpoint, or did not take our plugin.
        """
        info = _decoded(await client.get("/server_info", timeout_s=_CALL_S), ServerInfo)
        schema = await client.get("/openapi.json", timeout_s=_CALL_S)
        if not schema.is_success:
            raise UnsupportedError(f"sglang must describe its endpoints, got {schema.text}; unset DISABLE_OPENAPI_DOC")
        described: dict[str, Any] = msgspec.json.decode(schema.body)
        endpoints = frozenset(described.get("paths", ()))
        if missing := [path for path in REQUIRED if path not in endpoints]:
            raise UnsupportedError(
                f"sglang must have {', '.join(missing)}, got version {info.version} without; install 0.5.17 or newer"
            )
        if info.sampling_backend != BACKEND:
            raise UnsupportedError(
                f"sglang must sample through our plugin, got {info.sampling_backend}; leave its sampling to SGLangServer"
            )
        chat = described.get("components", {}).get("schemas", {}).get("ChatCompletionRequest", {})
        return cls(client=client, info=info, endpoints=endpoints, chat_fields=frozenset(chat.get("properties", ())))

    @property
    def can_sleep(self) -> bool:
        """Whether it can free its memory."""
        return self.info.enable_memory_saver and all(path in self.endpoints for path in MEMORY)

    @property
    def reuses_prefixes(self) -> bool:
        """Whether a later turn computes nothing but its new tokens."""
        return self.info.page_size == 1 and not self.info.disable_radix_cache

    # Requests

    async def generate(self, body: dict[str, Any]) -> Generated:
        """The whole answer to one request, however long it takes: SGLang's watchdog ends a server that stands still.

        Raises:
            EngineInputError: SGLang refuses it.
            EngineCrashedError: It could not be served.
            OSError: The connection broke off, or could not be made.
        """
        reply = await self.client.post("/generate", body, timeout_s=None)
        if reply.status == 400:
            raise EngineInputError(
                f"request {body['rid']!r} must be one that sglang serves, got {reply.text}; mend the request"
            )
        return _decoded(reply, Generated)

    def check_chat(self, request: Mapping[str, Any]) -> None:
        """Raises `EngineInputError` for what SGLang would leave alone, or would answer in parts."""
        if unknown := [key for key in request if self.chat_fields and key not in self.chat_fields]:
            raise EngineInputError(
                f"chat request must hold fields that sglang knows, got {unknown[0]!r}; remove it, or mend its name"
            )
        if request.get("stream"):
            raise EngineInputError("stream must be false, got true; ask for whole answers")

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """SGLang's answer to an OpenAI-style request."""
        reply = await self.client.post(CHAT, body, timeout_s=None)
        if 400 <= reply.status < 500:
            raise EngineInputError(f"chat request must be one that sglang serves, got {reply.text}; mend the request")
        return _decoded(reply, dict[str, Any])

    async def abort(self, rids: Iterable[str]) -> None:
        """Ends requests: what they have so far is their answer. One that SGLang does not know yet is not ended."""
        for rid in rids:
            await self._call("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """Ends everything that SGLang knows."""
        await self._call("/abort_request", {"abort_all": True})

    async def freeze(self) -> None:
        """Computes nothing more until `thaw`; requests keep their state."""
        await self._call("/pause_generation", {"mode": "in_place"})
        # The scheduler answers in the order in which it is asked: it has read the one before.
        await self.client.get("/server_info", timeout_s=_CALL_S)

    async def thaw(self) -> None:
        """Computes again."""
        await self._call("/continue_generation", {})

    # Memory and weights, all of them for an idle server

    async def drop_cache(self) -> None:
        """Forgets all state, once nothing is computed.

        Raises:
            EngineCrashedError: It did not become idle in time.
        """
        async with asyncio.timeout(_IDLE_S):
            while True:
                reply = await self.client.post(f"/flush_cache?timeout={_IDLE_S / 2:g}", timeout_s=_IDLE_S)
                if reply.is_success:
                    return
                await asyncio.sleep(_POLL_S)

    async def release_memory(self, tags: Collection[str]) -> None:
        """Frees parts that hold memory."""
        await self._call(MEMORY[0], {"tags": sorted(tags)})

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Takes memory for parts that hold none."""
        await self._call(MEMORY[1], {"tags": sorted(tags)})

    async def load_weights(self, folder: str, version: int) -> None:
        """New weights from the safetensors files of a folder.

        Raises:
            WeightUpdateError: SGLang did not take them.
        """
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
        reply = await self.client.post("/update_weights_from_disk", body, timeout_s=_LOAD_S)
        if not reply.is_success or not _decoded(reply, Updated).success:
            raise WeightUpdateError(f"sglang must take the weights, got {reply.text}; send a complete update")

    async def take_weights(self, weights: DeviceWeights, version: int, *, num_ranks: int) -> None:
        """New weights out of the memory of a device that SGLang sees, too.

        Raises:
            WeightUpdateError: The stream failed, or SGLang did not take it.
        """
        bucket = await weights.next_bucket()
        while bucket is not None:
            body: dict[str, Any] = {
                # Each rank counts for itself that it has let go of the memory.
                "serialized_named_tensors": [payload(bucket) for _ in range(num_ranks)],
                "weight_version": str(version),
                "flush_cache": False,
            }
            reply = await self.client.post("/update_weights_from_tensor", body, timeout_s=_LOAD_S)
            if not reply.is_success or not _decoded(reply, Updated).success:
                raise WeightUpdateError(f"sglang must take the weights, got {reply.text}; send a complete update")
            bucket = await weights.next_bucket()
        await self.drop_cache()

    async def _call(self, path: str, body: dict[str, Any]) -> None:
        reply = await self.client.post(path, body, timeout_s=_CALL_S)
        if not reply.is_success:
            raise EngineCrashedError(f"sglang must answer {path}, got {reply.status}: {reply.text}; see its log")


async def until_up(client: LocalClient) -> None:
    """Returns once the server answers; the caller sets the deadline."""
    while True:
        try:
            reply = await client.get("/model_info", timeout_s=_CALL_S)
        except OSError:
            await asyncio.sleep(_POLL_S)
            continue
        if reply.is_success:
            _decoded(reply, ModelInfo)
            return
        await asyncio.sleep(_POLL_S)


def _decoded(reply: Reply, kind: type[T]) -> T:
    if not reply.is_success:
        raise EngineCrashedError(f"sglang must answer, got {reply.status}: {reply.text}; see its log")
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineCrashedError(
            f"sglang must answer as its protocol says, got {error}; a logprob that is no number comes from broken weights"
        ) from error
