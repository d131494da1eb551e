"""What the engine core's process keeps of one request until it ends, and how it comes over in one piece. Knows no vLLM."""

from array import array
from collections.abc import Sequence

import msgspec

HOLD_KEY = "ostinato_hold"
"""In vLLM's extra_args: the request's name in our process; its outputs are kept until it ends."""
ANSWER_KEY = "ostinato_answer"
"""In the last output's kv_transfer_params: an encoded `HeldAnswer`."""
TAKE = "take"
"""Tells the scheduler to end requests, all or those of some names, and to return what they have: names to encoded answers."""
SERVE_VERSION = "serve_version"
"""Tells it that what is sampled from now on comes from the weights of this version."""
_TOKENS, _LOGPROBS = "i", "f"


class HeldAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one request sampled."""

    token_ids: bytes
    """int32"""
    logprobs: bytes | None
    """float32, one per token; None if they were not asked for."""
    versions: tuple[tuple[int, int], ...]
    """Spans: (first token, policy version)."""
    num_cached_tokens: int | None

    def to_lists(self) -> tuple[list[int], list[float] | None]:
        """Token ids and logprobs."""
        token_ids = array(_TOKENS)
        token_ids.frombytes(self.token_ids)
        if self.logprobs is None:
            return token_ids.tolist(), None
        logprobs = array(_LOGPROBS)
        logprobs.frombytes(self.logprobs)
        return token_ids.tolist(), logprobs.tolist()


class Held:
    """One request's tokens so far.

    Args:
        name: The request's name in the server's process.
        logprobs: Whether it asked for them.
    """

    __slots__ = ("_logprobs", "_token_ids", "_versions", "name", "prefill_stats")

    def __init__(self, name: str, *, logprobs: bool) -> None:
        self.name = name
        self.prefill_stats = None
        """vLLM's account of the prompt, which comes with the first token."""
        self._token_ids = array(_TOKENS)
        self._logprobs = array(_LOGPROBS) if logprobs else None
        self._versions: list[tuple[int, int]] = []

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """What one step sampled under the weights of `version`; without logprobs where none were asked for."""
        if token_ids and (not self._versions or self._versions[-1][1] != version):
            self._versions.append((len(self._token_ids), version))
        self._token_ids.extend(token_ids)
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)

    def encode(self) -> bytes:
        """A `HeldAnswer` in MessagePack."""
        return msgspec.msgpack.encode(
            HeldAnswer(
                self._token_ids.tobytes(),
                None if self._logprobs is None else self._logprobs.tobytes(),
                tuple(self._versions),
                getattr(self.prefill_stats, "num_cached_tokens", None),
            )
        )


def decode_answer(encoded: bytes) -> HeldAnswer:
    """The inverse of `Held.encode`."""
    return msgspec.msgpack.decode(encoded, type=HeldAnswer)
