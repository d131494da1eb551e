"""The configuration nodes of agent loops: `actor_rollout_ref.rollout` as far as trajectories read it.

The trainer composes them into its tree. Values are checked where they enter; the messages name the key.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ostinato_engines import SamplingParams
from ostinato_rollout import AdmissionConfig, PoolConfig, RoutingConfig, SessionConfig
from ostinato_rollout.tracing import TraceConfig
from ostinato_tools import TruncateSide, TruncateUnit


def _check_at_least(node: Any, minimum: int, *names: str) -> None:
    """Raise a ValueError (which msgspec reports with the path) where a number is set and smaller than `minimum`."""
    for name in names:
        value = getattr(node, name)
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}; leave it out for its default")


class MultiTurnConfig(SessionConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.multi_turn`: conversations with tools."""

    enable: bool = False
    """Allow agents that use tools; a row whose agent needs tools is refused at start while this is false."""
    max_assistant_turns: int | None = None
    """Most generations in a trajectory; null: no limit but the response's length."""
    max_user_turns: int | None = None
    """Most times that tools (or a user) answer in a trajectory; null: no limit but the response's length."""
    max_turn_tokens: int | None = None
    """Most tokens sampled in one turn; null: as many as the response has room for."""
    max_parallel_calls: int = 1
    """Most tool calls that run in one turn; further ones are answered with a message that says so. Malformed calls, which run
    nothing, do not count."""
    max_consecutive_malformed: int = 3
    """Turns in a row that may hold only unreadable tool calls; each is answered with what was wrong, the next one
    ends the trajectory. 0 ends it at the first."""
    max_tool_response_length: int = 256
    """Longest text of a tool's answer; more is cut."""
    tool_response_truncate_unit: TruncateUnit = TruncateUnit.CHARACTERS
    """What `max_tool_response_length` counts: `characters` or `tokens`."""
    tool_response_truncate_side: TruncateSide = TruncateSide.MIDDLE
    """Which part of a too long answer is cut out: `left`, `right` or `middle`."""
    tool_config_path: str | None = None
    """YAML file that lists tool classes with their configuration and schema."""
    function_tool_path: str | None = None
    """Python file with functions decorated by `@function_tool`."""
    tool_timeout_s: float = 60.0
    """Seconds that one tool call may take before the model is told that it timed out."""

    def __post_init__(self) -> None:
        _check_at_least(
            self,
            1,
            "max_assistant_turns",
            "max_user_turns",
            "max_turn_tokens",
            "max_parallel_calls",
            "max_tool_response_length",
        )
        _check_at_least(self, 0, "max_consecutive_malformed")
        if not self.tool_timeout_s > 0:
            raise ValueError(f"tool_timeout_s must be positive, got {self.tool_timeout_s}; give seconds")


class CustomServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`agent.custom_async_server`: a server class of your own."""

    path: str | None = None
    """Python file or dotted module that defines the class."""
    name: str | None = None
    """Name of the class, a subclass of `ostinato_engines.AsyncServerBase`. It is made with the model's path and those of
    device, dtype, max_model_len, max_num_seqs, full_determinism, cast_weights and seed that its `__init__` names, and with what
    is set of the keys for engines, which it must name: tensor_parallel_size, gpu_memory_utilization and so on."""

    def __post_init__(self) -> None:
        if (self.path is None) != (self.name is None):
            raise ValueError(
                f"path and name must be given together, got path={self.path!r}, name={self.name!r}; give both"
            )


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`agent.gateway`: the program that `gateway_agent` runs, one for each trajectory. It gets an address that speaks OpenAI's API."""

    command: list[str] = []
    """Program and arguments. It finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment, and the row as JSON on its standard
    input; it ends with status 0, or the trajectory has failed."""
    function: str | None = None
    """A coroutine function instead: `module:name` or `file.py:name`, called with base_url, api_key and row."""
    env: dict[str, str] = {}
    """Further variables of the program's environment."""
    pass_env: list[str] = []
    """Variables that it gets from this process beside those that every program needs; others are kept from it."""
    cwd: str | None = None
    """Folder that it runs in; null: an empty one, removed afterwards."""
    max_segments: int = 16
    """Most conversations of a trajectory: those that its histories do not continue begin a new one."""
    own_reward: bool = False
    """The program gives the reward: it posts {"reward": NUMBER}, with "extra" for named values beside it, to
    OPENAI_BASE_URL/rl/set_reward, once. One that ends without has failed. The run's reward function is not asked."""

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "max_segments")
        if self.command and self.function is not None:
            raise ValueError("command and function must not be given together, got both; keep one")
        if self.function is not None and not all(self.function.rpartition(":")[::2]):
            raise ValueError(f"function must be module:name or file.py:name, got {self.function!r}; write it so")
        if self.function is not None and (self.env or self.pass_env or self.cwd is not None):
            raise ValueError("env, pass_env and cwd must be left out for a function, got some; it runs in this process")


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.agent`: who runs the trajectories."""

    num_workers: int = 8
    """Workers that the rows of a batch are split over."""
    default_agent_loop: str = "single_turn_agent"
    """Agent of rows that have no `agent_name`."""
    agent_loop_config_path: str | None = None
    """Further agents: a Python file with `@register`ed classes, or a YAML list, each with `name` and `_target_` (the class's dotted path)."""
    custom_async_server: CustomServerConfig = CustomServerConfig()
    """A server class of your own instead of the engines that come with the project."""
    gateway: GatewayConfig = GatewayConfig()
    """The program that `gateway_agent` runs."""
    agent_loop_manager_class: str | None = None
    """Dotted path of a manager class to use instead of `AgentLoopManager`."""
    max_concurrency: int = 256
    """Most trajectories that one worker has under way."""
    trajectory_timeout_s: float = 3600.0
    """Seconds after which a trajectory is given up and recorded as failed; its wait for a place on a replica does not count."""
    reward_timeout_s: float = 600.0
    """Seconds after which a reward is given up and recorded as failed."""
    cancel_grace_s: float = 30.0
    """Seconds that an agent or a reward gets to tidy up when it is cancelled; then it is cancelled again, and after the third time
    left to itself."""

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "num_workers", "max_concurrency")
        for name in ("trajectory_timeout_s", "reward_timeout_s", "cancel_grace_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}; give seconds")
        if not self.default_agent_loop:
            raise ValueError("default_agent_loop must name an agent, got ''; use single_turn_agent or tool_agent")


class ValidationSamplingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout.val_kwargs`: sampling of validation rows."""

    n: int = 1
    """Trajectories per row."""
    do_sample: bool = False
    """Sample with the values below; false takes the most likely token each time."""
    temperature: float = 1.0
    """Divides the logits before sampling."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities add up to this."""
    top_k: int = -1
    """Keep only this many of the most likely tokens; -1 keeps all."""

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "n")


class RolloutConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`actor_rollout_ref.rollout` as far as trajectories read it; the trainer adds the engine's keys."""

    n: int = 1
    """Trajectories per row: the size of a group."""
    temperature: float = 1.0
    """Divides the logits before sampling."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities add up to this."""
    top_k: int = -1
    """Keep only this many of the most likely tokens; -1 keeps all."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens that occurred before; 1 changes nothing."""
    val_kwargs: ValidationSamplingConfig = ValidationSamplingConfig()
    """Sampling of validation rows."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    """Conversations with tools."""
    agent: AgentConfig = AgentConfig()
    """Who runs the trajectories."""
    routing: RoutingConfig = RoutingConfig()
    """Which replica serves a turn."""
    admission: AdmissionConfig = AdmissionConfig()
    """How many conversations are under way at a time."""
    trace: TraceConfig = TraceConfig()
    """What trajectories did, kept to be looked at."""
    pool: PoolConfig = PoolConfig()
    """The life of replicas."""
    generate_timeout_s: float = 600.0
    """Seconds that one turn may take, with what becomes of it when the engine aborts it, before the trajectory fails."""

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "n")
        if not self.generate_timeout_s > 0:
            raise ValueError(f"generate_timeout_s must be positive, got {self.generate_timeout_s}; give seconds")
        self.sampling_params()
        self.sampling_params(validate=True)

    def sampling_params(self, *, validate: bool = False) -> SamplingParams:
        """Return how trajectories sample; what is not set here is off, whatever a checkpoint's files recommend."""
        if not validate:
            return SamplingParams.from_mapping(
                {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
            )
        values = self.val_kwargs
        if not values.do_sample:
            return SamplingParams(temperature=0.0)
        return SamplingParams.from_mapping(
            {"temperature": values.temperature, "top_p": values.top_p, "top_k": values.top_k}
        )
