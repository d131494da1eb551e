"""The node `actor_rollout_ref.actor.megatron`: how ranks share a model that Megatron-core trains.

Pure data: knows no torch. The docstring below a field is what `ostinato config` prints as its meaning.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["MegatronConfig"]


class MegatronConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ranks of one model; what is left of trainer.nnodes x trainer.n_gpus_per_node multiplies the data (`actor_rollout_ref.actor.megatron`)."""

    tensor_model_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Ranks over which each layer's matrices, heads and the vocabulary are split. Read by strategy=megatron."""
    pipeline_model_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Ranks over which the layers are spread, one stage each. Read by strategy=megatron."""
    sequence_parallel: bool = True
    """Between the matrices, where a layer norms and adds, split the tokens over the ranks of tensor_model_parallel_size: less memory for the same
    numbers. Read by strategy=megatron where there are several."""
