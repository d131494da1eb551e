"""The node `actor_rollout_ref.rollout`: what agent loops read of it, and in addition the engine's keys."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ostinato_agent_loop import (
    AgentConfig,
    CustomServerConfig,
    MultiTurnConfig,
    ValidationSamplingConfig,
)
from ostinato_agent_loop import RolloutConfig as AgentRolloutConfig

__all__ = ["AgentConfig", "CustomServerConfig", "MultiTurnConfig", "RolloutConfig", "ValidationSamplingConfig"]


class RolloutConfig(AgentRolloutConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Generation of trajectories (`actor_rollout_ref.rollout`)."""

    name: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Inference engine."""
    mode: Literal["async"] = "async"
    """Agents run concurrently on an asynchronous server; only async exists."""
    seed: int | None = None
    """Seed of sampling; null takes `trainer.seed`."""
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens that the engine holds for one conversation; null takes what the model allows."""
    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    """Conversations that one engine replica generates at the same time."""
    full_determinism: bool = False
    """Make a run repeat exactly: batches in the engine are formed in request order, whatever comes first."""
    tensor_model_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Devices over which one engine replica is split."""
