"""What crosses the border of an engine: requests, results, weights and what an engine says about itself.

Plain frozen structs: they pickle, encode with msgspec, and load neither torch nor any engine.
"""

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from ostinato_engines.errors import EngineInputError, ManifestError, SamplingParamsError
from ostinato_engines.weight_blocks import whole_blocks
from ostinato_engines.weight_routes import WeightPlace

_KNOWN_ALIASES = {
    "do_sample": "temperature=0 for greedy decoding",
    "eos_token_id": "stop_token_ids",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n": "one request per sample",
    "stop": "stop_token_ids (engines know no text)",
}


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class PauseMode(StrEnum):
    """What happens to requests in flight when an engine pauses."""

    ABORT = "abort"
    """They end now with what they have."""
    WAIT = "wait"
    """They finish; no other is admitted."""
    KEEP = "keep"
    """They freeze where they are and go on at `resume`."""


class EngineState(StrEnum):
    """What an engine is doing."""

    NEW = "new"
    READY = "ready"
    PAUSED = "paused"
    ASLEEP = "asleep"
    STALE = "stale"
    """Waits for a complete weight update."""
    FAILED = "failed"
    CLOSED = "closed"


_MAX_INT = 2**31 - 1
"""Engines keep ids and counts in 32 bits."""
_MAX_FACTOR = 1e30
"""Logits that are multiplied or divided by more do not fit float32."""
_NUMBERS = (int, float)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


_CONSTRAINTS: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "temperature",
        lambda value: _is_real(value) and 0 <= value <= _MAX_FACTOR,
        f"in [0, {_MAX_FACTOR:g}]",
        "0 is greedy",
    ),
    ("top_p", lambda value: _is_real(value) and 0 < value <= 1, "in (0, 1]", "1 keeps all tokens"),
    ("min_p", lambda value: _is_real(value) and 0 <= value <= 1, "in [0, 1]", "0 keeps all tokens"),
    (
        "repetition_penalty",
        lambda value: _is_real(value) and 1 / _MAX_FACTOR <= value <= _MAX_FACTOR,
        f"in [{1 / _MAX_FACTOR:g}, {_MAX_FACTOR:g}]",
        "1 is no penalty",
    ),
    (
        "top_k",
        lambda value: _is_int(value) and -1 <= value <= _MAX_INT,
        f"an integer in [-1, {_MAX_INT}]",
        "-1 keeps all tokens",
    ),
    (
        "max_tokens",
        lambda value: value is None or (_is_int(value) and value >= 0),
        "None or an integer of at least 0",
        "None takes all the room",
    ),
    (
        "seed",
        lambda value: value is None or (_is_int(value) and 0 <= value < 2**63),
        "None or in [0, 2**63)",
        "leave it out to draw one",
    ),
    (
        "logprobs",
        lambda value: isinstance(value, bool),
        "a bool",
        "an engine returns the sampled token's logprob or none",
    ),
    (
        "stop_token_ids",
        lambda value: all(_is_int(token_id) and 0 <= token_id <= _MAX_INT for token_id in value),
        f"token ids in [0, {_MAX_INT}]",
        "remove the others",
    ),
)
"""What each parameter must be: its name, whether a value is right, and the two in words."""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one request is sampled.

    The order is fixed: repetition_penalty, temperature, top_k, top_p, min_p. A returned logprob is the log-probability
    of the sampled token under what these leave, renormalised. Nothing is filled in from a checkpoint's generation
    config: what is not set here has the neutral value shown here.

    Raises:
        SamplingParamsError: A field is of the wrong type or out of range.
    """

    temperature: float = 1.0
    """At most 1e30. 0 takes the most probable token; its logprob is then that of the distribution at temperature 1."""
    top_p: float = 1.0
    """In (0, 1]: the smallest set of most probable tokens that holds this mass."""
    top_k: int = -1
    """The k most probable tokens; -1 or 0 keeps all."""
    min_p: float = 0.0
    """In [0, 1]: drops tokens less probable than this fraction of the most probable one."""
    repetition_penalty: float = 1.0
    """In [1e-30, 1e30]: divides positive and multiplies negative logits of every token seen in prompt or output."""
    max_tokens: int | None = None
    """At most so many new tokens; None takes all the room there is."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the generation; the token is part of the output."""
    seed: int | None = None
    """In [0, 2**63). Same prompt and seed give the same tokens whatever else the engine serves."""
    logprobs: bool = True

    def __post_init__(self) -> None:
        stops = self.stop_token_ids
        if type(stops) is not tuple:
            if not isinstance(stops, Sequence) or isinstance(stops, str | bytes):
                raise SamplingParamsError(
                    f"stop_token_ids must be a tuple of token ids, got {stops!r}; () stops at none"
                )
            msgspec.structs.force_setattr(self, "stop_token_ids", tuple(stops))
        for name, is_right, constraint, cure in _CONSTRAINTS:
            value = getattr(self, name)
            if value is not _NEUTRAL[name] and not is_right(value):  # most are as they were, turn after turn
                raise SamplingParamsError(f"{name} must be {constraint}, got {value!r}; {cure}")

    @classmethod
    def from_mapping(cls, params: "SamplingParams | Mapping[str, Any]") -> "SamplingParams":
        """Checks a plain mapping; a `SamplingParams` is returned as it is.

        Raises:
            SamplingParamsError: An unknown key, a wrong type or a value out of range; the message names it.
        """
        if isinstance(params, SamplingParams):
            return params
        if not isinstance(params, Mapping):
            raise SamplingParamsError(
                f"sampling_params must be SamplingParams or a mapping, got {type(params).__name__}; pass {{}} for defaults"
            )
        for key in params:
            if key not in cls.__struct_fields__:
                raise SamplingParamsError(
                    f"sampling_params must hold known parameters, got {key!r}; {_cure_for_unknown(str(key))}"
                )
        return cls(**params)


def _cure_for_unknown(key: str) -> str:
    if key in _KNOWN_ALIASES:
        return f"use {_KNOWN_ALIASES[key]}"
    close = difflib.get_close_matches(key, SamplingParams.__struct_fields__, n=1)
    known = ", ".join(SamplingParams.__struct_fields__)
    return f"did you mean {close[0]!r}?" if close else f"known are {known}"


_NEUTRAL = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))
"""What each parameter is where nothing is set."""


class PolicySpan(msgspec.Struct, frozen=True):
    """From output token `start` on, tokens came from policy `version`."""

    start: int
    version: int
    exact: bool = True
    """False where the engine cannot place the switch: the span then counts as its oldest version."""


class TokenOutput(msgspec.Struct, frozen=True):
    """What one request sampled.

    A stop token is in `token_ids`, with its logprob: it was sampled like any other.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    """One per token, natural logarithm, finite; None where absent, never approximate."""
    stop_reason: StopReason
    stop_token_id: int | None = None
    policy_versions: tuple[PolicySpan, ...] = (PolicySpan(0, 0),)
    """Sorted by start, the first at 0."""
    num_cached_tokens: int | None = None
    """Prompt tokens whose state was reused; None where the engine does not say."""
    num_preempted: int = 0
    """How often the request lost its state in flight and was computed anew."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise EngineInputError(
                f"logprobs must have one entry per token, got {len(self.logprobs)} for {len(self.token_ids)} tokens; "
                "return None where they are absent"
            )


def as_token_output(raw: TokenOutput | Sequence[int]) -> TokenOutput:
    """Accepts what a third party's `generate` may return: a `TokenOutput`, or bare ids, whose logprobs are then absent.

    Raises:
        EngineInputError: Neither of the two.
    """
    if isinstance(raw, TokenOutput):
        return raw
    if isinstance(raw, Sequence) and not isinstance(raw, str | bytes):
        token_ids = list(raw)
        if all(_is_int(token_id) and token_id >= 0 for token_id in token_ids):
            return TokenOutput(token_ids, None, StopReason.STOP)
    raise EngineInputError(
        f"generate must return a TokenOutput or a list of token ids, got {raw!r:.200}; return TokenOutput(token_ids, logprobs, stop_reason)"
    )


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a weight update, before its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch prints it without its module: "float32", "bfloat16"."""


class WeightManifest(msgspec.Struct, frozen=True):
    """What a weight update will stream: checked in full before the first byte."""

    version: int
    tensors: tuple[TensorSpec, ...]
    changing: tuple[str, ...] = ()
    """Names of the tensors that may change from version to version, where the others cannot; empty: all may."""
    base: str = ""
    """Names the others' values, and which they are. An engine that took a whole update with this base has them as long as its memory stays."""
    is_partial: bool = False
    """Only the tensors of `changing` come: for an engine that has the others of this `base`."""

    def __post_init__(self) -> None:
        if bool(self.changing) != bool(self.base) or (self.is_partial and not self.base):
            raise ManifestError(
                f"base must be given together with changing, and both for an update in part, got base {self.base!r} and "
                f"{len(self.changing)} changing tensors; use WeightManifest.resting_on"
            )
        if not _is_int(self.version) or self.version < 0:
            raise ManifestError(
                f"version must be an integer of at least 0, got {self.version!r}; number updates from 1"
            )

    @classmethod
    def from_tensors(cls, version: int, tensors: Iterable[tuple[str, Any]]) -> "WeightManifest":
        """Describes named torch tensors (or anything with `shape` and `dtype`) without holding on to them."""
        return cls(
            version,
            tuple(
                TensorSpec(name, tuple(int(size) for size in tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in tensors
            ),
        )

    def resting_on(self, fingerprint: str, changing: Iterable[str]) -> "WeightManifest":
        """The same update of a model of which only some tensors change.

        Args:
            fingerprint: Of the model that does not change.
            changing: Tensors whose values may differ from it, and from version to version; with them all that an engine may keep together
                with one of them.
        """
        names = whole_blocks(changing, [spec.name for spec in self.tensors])
        kinds = (f"{spec.name} {spec.dtype}" for spec in self.tensors)
        digest = hashlib.blake2b("\n".join((fingerprint, *names, *kinds)).encode(), digest_size=16).hexdigest()
        return msgspec.structs.replace(self, changing=names, base=digest) if names else self

    def partial(self) -> "WeightManifest | None":
        """The update for an engine that has what does not change; None where everything may."""
        if not self.base or len(self.changing) == len(self.tensors):
            return None
        chosen = set(self.changing)
        tensors = tuple(spec for spec in self.tensors if spec.name in chosen)
        return msgspec.structs.replace(self, tensors=tensors, is_partial=True)


class Health(msgspec.Struct, frozen=True):
    """An engine's state at one moment."""

    state: EngineState
    policy_version: int
    num_running: int = 0
    num_waiting: int = 0
    detail: str = ""
    """Why it is not ready, and the cure."""

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        return self.state is EngineState.READY


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do; the defaults claim nothing."""

    engine: str = "unknown"
    logprobs: bool = False
    """Returns the sampled token's logprob under the distribution that it was sampled from."""
    seeds: bool = False
    """A seed gives the same tokens whatever else runs."""
    full_determinism: bool = False
    """The same program gives bitwise the same results."""
    prefix_reuse: bool = False
    """A later turn of a request_id computes only its new tokens."""
    abort: bool = False
    pause_modes: tuple[PauseMode, ...] = ()
    sleep_levels: tuple[int, ...] = ()
    weight_update: bool = False
    partial_updates: bool = False
    """Takes an update in part (`WeightManifest.is_partial`) where it has the rest, and refuses it with `ManifestError` where not."""
    weight_workers: tuple[WeightPlace, ...] = ()
    """Processes that fetch weights along a route (`AsyncServerBase.receive_weights`), by their rank in the engine; empty where none does, or
    none yet: known once it has started."""
    exact_policy_spans: bool = False
    media: bool = False
    chat_completion: bool = False
    kv_capacity_tokens: int | None = None
    """Tokens whose state fits into the key-value memory, over all conversations together; None where the engine does not
    say, or not yet: known once it has started."""
    kv_capacity_sessions: int | None = None
    """Conversations whose state can be kept at a time; None where only their tokens count."""
