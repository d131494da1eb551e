"""What engines that run in processes of their own are all started with. Knows no engine."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ostinato_engines.errors import EngineInputError


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a server's constructor that vLLM and SGLang have in common; None leaves a value to the engine.

    Raises:
        EngineInputError: A number below 1.
    """

    model: str
    dtype: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    tensor_parallel_size: int
    gpu_memory_utilization: float | None
    enforce_eager: bool
    seed: int
    cast_weights: bool
    more: Mapping[str, Any]
    """The engine's own arguments."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise EngineInputError(f"{name} must be an integer of at least 1, got {value!r}; leave it out")
