"""The node `actor_rollout_ref.rollout`: what agent loops read of it, and in addition the engine's keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ostinato_agent_loop import (
    AgentConfig,
    CustomServerConfig,
    MultiTurnConfig,
    ValidationSamplingConfig,
)
from ostinato_agent_loop import RolloutConfig as AgentRolloutConfig
from ostinato_rollout.tracing import TraceConfig

__all__ = [
    "AgentConfig",
    "CustomServerConfig",
    "EngineKwargsConfig",
    "LogProbCheckConfig",
    "MultiTurnConfig",
    "RolloutConfig",
    "TraceConfig",
    "ValidationSamplingConfig",
]


class EngineKwargsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What engines take beyond the keys of `actor_rollout_ref.rollout`, each under its own names (`engine_kwargs`)."""

    vllm: dict[str, Any] = msgspec.field(default_factory=dict)
    """vLLM's engine arguments by their own names, such as `block_size`; one that it does not know is refused at start."""
    sglang: dict[str, Any] = msgspec.field(default_factory=dict)
    """SGLang's server arguments by their own names; one that it does not know is refused at start."""


class LogProbCheckConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whether engine and trainer still compute the same policy, asked in every step after a sync of weights (`log_prob_check`)."""

    max_mean_diff: Annotated[float, Meta(gt=0)] | None = None
    """Most by which their log-probabilities may differ on average, on tokens that were sampled from the very weights that are trained.
    null: what rounding explains, which is 0.05 where `actor.dtype` is bfloat16, and otherwise 0.005."""
    action: Literal["warn", "stop"] = "warn"
    """What happens beyond it: warn, with both numbers and the likely cause; or stop, which ends the run before it learns from these tokens."""


class RolloutConfig(AgentRolloutConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Generation of trajectories (`actor_rollout_ref.rollout`)."""

    name: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Inference engine."""
    engine_python: str | None = None
    """Interpreter of the environment that the engine lives in, so that its pins need not be the trainer's; vLLM's also holds
    ostinato-engines, SGLang's need not. null: the engine is in the trainer's environment."""
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
    nnodes: Annotated[int, Meta(ge=0)] = 0
    """Machines whose devices belong to engines alone, with `trainer.executor=ray`; 0: engines share the devices of training, and sleep while
    it uses them unless `trainer.max_staleness` lets them sample meanwhile."""
    n_gpus_per_node: Annotated[int, Meta(ge=1)] | None = None
    """Devices on each of these machines; null takes `trainer.n_gpus_per_node`."""
    tensor_model_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Devices over which one engine replica is split."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Part of a device's memory that the engine takes for weights and cache; where the trainer uses the same device, leave it
    the rest. null: the engine's own choice, which for vLLM is nearly all."""
    free_cache_engine: bool | None = None
    """Let engines give their memory back while training computes: they sleep after a step's trajectories, and wake for the next. It costs
    the time to fall asleep and to wake, and lets training have nearly the whole device. Not with `trainer.max_staleness` above 0. null: with
    `trainer.executor=ray` they do, unless they have machines of their own; in one process they keep it."""
    enforce_eager: bool = False
    """Let the engine start faster and run slower: no graphs are captured."""
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that one step of the engine computes for all conversations; null: the engine's own choice."""
    log_prob_check: LogProbCheckConfig = LogProbCheckConfig()
    """Whether engine and trainer still compute the same policy."""
    engine_kwargs: EngineKwargsConfig = EngineKwargsConfig()
    """What engines take beyond these keys."""
