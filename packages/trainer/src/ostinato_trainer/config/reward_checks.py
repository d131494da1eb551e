"""What a well-formed node `reward` may still get wrong: weights of parts that are not there, and keys that nothing reads."""

from __future__ import annotations

from typing import Final

from ostinato_trainer.config.reward import RewardConfig, RewardModelConfig

__all__ = ["reward_problems", "unread_reward_keys"]

_MODEL: Final = "reward.reward_model"
_CUSTOM: Final = "reward.custom_reward_function"

UnreadRule = tuple[bool, str, tuple[str, ...]]
"""Whether it applies, why, and the keys that are then not read."""


def reward_problems(config: RewardConfig, *, max_response_length: int) -> list[str]:
    """Sentences about keys that contradict each other; empty where none do.

    Args:
        config: the node `reward`.
        max_response_length: `data.max_response_length`.
    """
    problems = []
    weight, url, buffer = config.combine.reward_model, config.reward_model.url, config.overlong_buffer
    if weight and url is None:
        problems.append(
            f"{_MODEL}.url must be given while reward.combine.reward_model is {weight:g}, got null; write the endpoint's address"
        )
    if url is not None and not weight:
        problems.append(
            f"reward.combine.reward_model must not be 0 while {_MODEL}.url is given, got 0; write reward.combine.reward_model=1, "
            "and reward.combine.score=0 where the model alone is to score"
        )
    if buffer.enable and buffer.len > max_response_length:
        problems.append(
            f"reward.overlong_buffer.len must be at most data.max_response_length, got {buffer.len} > {max_response_length}; "
            "write a smaller one"
        )
    return problems


def unread_reward_keys(config: RewardConfig) -> tuple[UnreadRule, ...]:
    """Which keys of the node have no effect for what other keys of it say."""
    combine, model, custom = config.combine, config.reward_model, config.custom_reward_function
    several = ("tool_rewards", "turn_scores", "tool_state_rewards")
    has_function = custom.path is not None and combine.score != 0
    return (
        (custom.path is None, f"{_CUSTOM}.path is null", (f"{_CUSTOM}.name", "reward.executor")),
        (
            combine.score == 0,
            "reward.combine.score is 0",
            (f"{_CUSTOM}.path", f"{_CUSTOM}.name", f"{_CUSTOM}.reward_kwargs", "reward.executor"),
        ),
        (
            not has_function or config.executor != "process",
            "no function runs in a process (reward.executor)",
            ("reward.max_memory_mb",),
        ),
        (
            not has_function and model.url is None,
            "there is neither a function of your own nor a reward model",
            ("reward.max_rpm",),
        ),
        (
            model.url is None,
            f"{_MODEL}.url is null",
            tuple(f"{_MODEL}.{name}" for name in RewardModelConfig.__struct_fields__ if name != "url"),
        ),
        (model.url is not None and model.api != "chat", f"{_MODEL}.api is {model.api}", (f"{_MODEL}.pattern",)),
        (model.url is not None and model.api == "chat", f"{_MODEL}.api is chat", (f"{_MODEL}.class_index",)),
        (model.url is not None and model.max_retries == 0, f"{_MODEL}.max_retries is 0", (f"{_MODEL}.backoff_s",)),
        (
            not config.overlong_buffer.enable,
            "reward.overlong_buffer.enable is false",
            ("reward.overlong_buffer.len", "reward.overlong_buffer.penalty_factor"),
        ),
        (
            not any(getattr(combine, name) for name in several),
            "no part of several values has a weight",
            ("reward.combine.reduction",),
        ),
    )
