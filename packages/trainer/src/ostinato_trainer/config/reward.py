"""The node `reward`: who scores finished trajectories, within which limits, and what the score is made of.

Pure data: nothing here loads a function or opens a connection. The docstring below a field is what `ostinato config` prints as its
meaning.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "PLACEHOLDERS",
    "CombineConfig",
    "CustomRewardConfig",
    "OverlongBufferConfig",
    "RewardConfig",
    "RewardModelConfig",
]

PLACEHOLDERS: Final = ("prompt", "response", "ground_truth", "data_source")
"""What a template may name in braces."""

_PLACEHOLDER: Final = re.compile(r"\{([a-z_]+)\}")


class CustomRewardConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A reward function of the user's own, found by file and name."""

    path: str | None = None
    """Python file, or dotted module, that holds the function; null chooses a built-in scorer by data_source."""
    name: str = "compute_score"
    """Name of the function: `f(data_source, solution_str, ground_truth, extra_info) -> float | dict`, sync or async."""
    reward_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further keyword arguments for the function; a built-in scorer gets those that it takes."""


class CombineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the reward is made of: the sum of these parts, each times its weight (`reward.combine`)."""

    score: float = 1.0
    """Weight of the function's or built-in scorer's answer; at 0 it is not asked, and rows need no data_source."""
    reward_model: float = 0.0
    """Weight of the score that `reward.reward_model.url` gives."""
    tool_rewards: float = 0.0
    """Weight of what the tools gave for the trajectory's calls."""
    turn_scores: float = 0.0
    """Weight of the scores of the trajectory's turns."""
    tool_state_rewards: float = 0.0
    """Weight of what tools say of their state at the end (`calc_reward`)."""
    reduction: Literal["sum", "mean"] = "sum"
    """How the several values of one part become one; of none it is 0."""

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in self.__struct_fields__ if name != "reduction"}
        for name, weight in weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"{name} must be finite, got {weight}; write a number")
        if not any(weights.values()):
            raise ValueError("one weight at least must not be 0, got only zeros; write score: 1.0")


class OverlongBufferConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Soft punishment of answers that come close to the length limit (`reward.overlong_buffer`; DAPO, arXiv:2503.14476)."""

    enable: bool = False
    """Punish the last `len` tokens before `data.max_response_length`, from 0 at the first to `penalty_factor` at the last."""
    len: Annotated[int, Meta(ge=0)] = 0
    """Tokens of the buffer."""
    penalty_factor: Annotated[float, Meta(ge=0)] = 1.0
    """Largest punishment."""

    def __post_init__(self) -> None:
        if self.enable and not self.len:
            raise ValueError("len must be at least 1 while enable is true, got 0; give the number of tokens")
        if not math.isfinite(self.penalty_factor):
            raise ValueError(f"penalty_factor must be finite, got {self.penalty_factor}; write a number")


class RewardModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that scores, behind HTTP (`reward.reward_model`)."""

    url: str | None = None
    """Address of the endpoint itself, such as `http://127.0.0.1:8000/classify` or `https://HOST/v1/chat/completions`; null: none."""
    api: Literal["classify", "pooling", "chat"] = "classify"
    """What it speaks: vLLM's `/classify` or `/pooling` with a reward model (SGLang's `/v1/classify` is the former, and needs a
    template), or chat completions with a model that judges."""
    model: str | None = None
    """Name of the model in requests; null leaves it out, which vLLM's `/classify` and `/pooling` allow."""
    api_key_env: str | None = None
    """Environment variable that holds the key; null sends none."""
    template: str | None = None
    """Text to send, in which {prompt}, {response}, {ground_truth} and {data_source} are filled in; null sends the conversation as
    messages, which the server renders by the reward model's own chat template. `chat` needs one."""
    pattern: str = r"(?i)score[\s*]*[:=][\s*]*(-?\d+(?:\.\d+)?)"
    """`chat`: regular expression with one group, the score; the last match in the last 16384 letters of the answer counts. No match is
    a failure."""
    class_index: Annotated[int, Meta(ge=0)] | None = None
    """`classify`, `pooling`: which of several numbers is the score; null allows one only, of `pooling` for each token the last."""
    extra_body: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further fields of each request, such as `temperature` and `max_tokens` of the judge, which are 0 and 1024 otherwise; null
    leaves a field out."""
    request_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds for one request; all attempts together must end within `reward.timeout_s`."""
    max_retries: Annotated[int, Meta(ge=0, le=100)] = 4
    """Further attempts after status 429 or 5xx, a lost connection or a request out of time; other refusals are final."""
    backoff_s: Annotated[float, Meta(gt=0)] = 0.5
    """Seconds before the second attempt; doubled each time up to 30, unless the server says when to come back."""

    def __post_init__(self) -> None:
        if self.url is not None and not re.match(r"https?://[^/\s]", self.url):
            raise ValueError(f"url must begin with http:// or https:// and a host, got {self.url!r}; write it in full")
        if self.api == "chat" and self.url is not None and (self.template is None or self.model is None):
            raise ValueError("template and model must be given for api chat, got none; say what the judge is asked")
        for name in _PLACEHOLDER.findall(self.template or ""):
            if name not in PLACEHOLDERS:
                known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
                raise ValueError(f"template must name {known} only, got {{{name}}}; mend it")
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern must be a regular expression, got {self.pattern!r}: {error}; mend it") from None
        if num_groups != 1:
            raise ValueError(f"pattern must have one group, the score, got {num_groups}; write (?:...) for the others")

    def filled_template(self, values: dict[str, str]) -> str | None:
        """The template with `values` in it, each taken as it is; None where there is no template."""
        return None if self.template is None else _PLACEHOLDER.sub(lambda found: values[found[1]], self.template)


class RewardConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scoring of finished trajectories (`reward`)."""

    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    """A reward function of your own."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A reward model, or a model that judges, behind HTTP."""
    combine: CombineConfig = CombineConfig()
    """What the reward is made of."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    """Soft punishment of too long answers."""
    timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds that one score may take, from when its computation begins; then the trajectory carries a recorded failure, not a zero."""
    num_workers: Annotated[int, Meta(ge=1)] = 8
    """Scores computed at the same time."""
    executor: Literal["thread", "process"] = "thread"
    """Where a function of your own runs. In a thread one that hangs stays behind, and one that computes slows sampling; a process is
    killed at the deadline, costs its start and memory, and an async function runs in it too."""
    max_memory_mb: Annotated[int, Meta(ge=64)] | None = None
    """Most address space of each process of `executor: process`, in MiB; null: no limit."""
    max_rpm: Annotated[float, Meta(gt=0)] | None = None
    """Most calls of the function, and most requests to the reward model, in a minute, evenly spread; null: no limit. Waiting for a turn
    must end within `actor_rollout_ref.rollout.agent.reward_timeout_s`."""
