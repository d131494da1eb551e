"""The node `actor_rollout_ref.rollout`: who generates, how it samples, and what an agent may do in a trajectory."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["AgentConfig", "CustomServerConfig", "MultiTurnConfig", "RolloutConfig", "ValConfig"]

TopP = Annotated[float, Meta(gt=0, le=1)]
Temperature = Annotated[float, Meta(ge=0)]
TopK = Annotated[int, Meta(ge=-1)]


class CustomServerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine adapter of the user's own."""

    path: str | None = None
    """Python file, or dotted module, that holds the server class; null uses `actor_rollout_ref.rollout.name`."""
    name: str | None = None
    """Name of the class, a subclass of AsyncServerBase."""


class AgentConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which agent programs run, and who runs them (`actor_rollout_ref.rollout.agent`)."""

    num_workers: Annotated[int, Meta(ge=1)] = 8
    """Workers among which the rows of a batch are divided."""
    default_agent_loop: str = "single_turn_agent"
    """Agent program of rows without `agent_name`."""
    agent_loop_config_path: str | None = None
    """YAML list of further agent programs: `name` and `_target_`."""
    custom_async_server: CustomServerConfig = CustomServerConfig()
    """An engine adapter of your own."""
    agent_loop_manager_class: str | None = None
    """Dotted name of a manager class of your own."""


class MultiTurnConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Conversations of more than one turn (`actor_rollout_ref.rollout.multi_turn`)."""

    enable: bool = False
    """Allow agent programs that use tools."""
    format: str = "hermes"
    """Form in which the model writes tool calls."""
    max_assistant_turns: Annotated[int, Meta(ge=1)] | None = None
    """Most assistant turns in a trajectory; null sets no limit."""
    max_user_turns: Annotated[int, Meta(ge=1)] | None = None
    """Most turns of tools or users after the prompt; null sets no limit."""
    max_parallel_calls: Annotated[int, Meta(ge=1)] = 1
    """Tool calls that run in one turn."""
    max_tool_response_length: Annotated[int, Meta(ge=1)] = 256
    """Longest tool answer in characters."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """Which part of a longer tool answer is cut."""
    tool_config_path: str | None = None
    """YAML file of tool classes."""
    function_tool_path: str | None = None
    """Python file of function tools."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """How a finished trajectory's ids are compared with a rendering of the whole conversation."""
    use_inference_chat_template: bool = False
    """Render the whole conversation anew for every turn, each a segment of its own."""


class ValConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling while validating (`actor_rollout_ref.rollout.val_kwargs`)."""

    n: Annotated[int, Meta(ge=1)] = 1
    """Samples of each validation prompt."""
    do_sample: bool = False
    """Sample; false decodes greedily, whatever the temperature."""
    temperature: Temperature = 0.0
    """Sampling temperature while do_sample is true."""
    top_p: TopP = 1.0
    """Nucleus while do_sample is true."""
    top_k: TopK = -1
    """Most likely tokens to sample from while do_sample is true; -1 means all."""


class RolloutConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Generation of trajectories (`actor_rollout_ref.rollout`)."""

    name: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Inference engine."""
    mode: Literal["async"] = "async"
    """Agents run concurrently on an asynchronous server; only async exists."""
    n: Annotated[int, Meta(ge=1)] = 1
    """Trajectories sampled for each training prompt; they form a group."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Sampling temperature; log-probabilities are recorded at this temperature."""
    top_p: TopP = 1.0
    """Nucleus: the smallest set of tokens with this probability is sampled from."""
    top_k: TopK = -1
    """Most likely tokens to sample from; -1 means all."""
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
    val_kwargs: ValConfig = ValConfig()
    """Sampling while validating."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """Conversations of more than one turn."""
    agent: AgentConfig = AgentConfig()
    """Agent programs."""
