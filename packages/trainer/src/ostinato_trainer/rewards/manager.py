"""From a finished trajectory to a score: `RewardManager`.

A scorer that raises, hangs or answers with no finite number makes an error, which the agent loop records as a failure of that
trajectory; it never makes a zero. Functions and models are asked a few at a time, each answer with a deadline; what a reward is made
of is `rewards.parts`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from ostinato_agent_loop import AgentLoopOutput, RewardResult
from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.config.reward import RewardConfig
from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards.failures import failing_as
from ostinato_trainer.rewards.functions import ComputeScore, custom_function
from ostinato_trainer.rewards.pace import Pace
from ostinato_trainer.rewards.parts import combined, is_score_alone
from ostinato_trainer.rewards.scorers import BuiltInScorers

__all__ = ["ComputeScore", "RewardManager"]

_TURNS_OF_TOOLS = ("turn_scores", "tool_rewards", "tool_state_rewards")


class RewardManager:
    """Scores trajectories; the `RewardFn` that agent loops call as soon as a trajectory ends.

    The function gets the row's `data_source`, the response as text, `reward_model.ground_truth` and the row's
    `extra_info`, to which are added `num_turns`, `turn_scores`, `tool_rewards`, `tool_state_rewards` and `sampled_text`: what the
    policy wrote, without the tools' answers. The response is that of the last segment, special tokens left out. What it gets is a copy.

    Args:
        config: the node `reward`.
        tokenizer: the policy's, to decode.
        compute_score: a function to use instead of the configured one.
        data_sources: those of the rows to come; see `check_data_sources`.
        max_response_length: `data.max_response_length`, which `reward.overlong_buffer` counts from.

    Raises:
        RewardError: the configured function cannot be loaded or does not take the arguments above, or a data source has
            no scorer.
    """

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: ChatTokenizer,
        *,
        compute_score: ComputeScore | None = None,
        data_sources: Iterable[str | None] = (),
        max_response_length: int | None = None,
    ) -> None:
        if config.overlong_buffer.enable and max_response_length is None:
            raise RewardError(
                "max_response_length must be given while reward.overlong_buffer.enable is true, got None; pass it"
            )
        self._config, self._tokenizer, self._max_response_length = config, tokenizer, max_response_length
        self._custom = custom_function(config, compute_score)
        self._built_in = (
            BuiltInScorers(config.custom_reward_function.reward_kwargs, config.num_workers, config.timeout_s)
            if self._custom is None
            else None
        )
        self._pace = Pace(config.max_rpm)
        self._model_pace = Pace(config.max_rpm)
        self._model = None
        if config.reward_model.url is not None:
            # Only here, since httpx takes its time to load.
            from ostinato_trainer.rewards.model import RewardModel

            self._model = RewardModel(
                config.reward_model,
                max_connections=config.num_workers,
                pace=self._model_pace,
                timeout_s=config.timeout_s,
            )
        self._slots = asyncio.Semaphore(config.num_workers)
        self.check_data_sources(data_sources)

    def check_data_sources(self, data_sources: Iterable[str | None]) -> None:
        """Find out before a run whether every kind of row can be scored.

        Raises:
            RewardError: a data source without a scorer, while no function of the user's own is configured.
            MissingExtraError: a scorer needs what is not installed.
        """
        if self._built_in is not None and self._config.combine.score:
            self._built_in.check(data_sources)

    async def __call__(self, row: Mapping[str, Any], outputs: Sequence[AgentLoopOutput]) -> RewardResult:
        """Score one trajectory.

        Args:
            row: the dataset's item.
            outputs: the segments of the trajectory, at least one.

        Raises:
            RewardError: no scorer, or it raised, took longer than `reward.timeout_s`, or answered with no finite number.
        """
        if not outputs:
            raise RewardError("outputs must hold at least one segment, got none; a trajectory without any has no score")
        arguments = self._arguments(row, outputs)
        parts: dict[str, Any] = {name: arguments["extra_info"][name] for name in _TURNS_OF_TOOLS}
        extra: dict[str, Any] = {}
        if self._config.combine.score:
            parts["score"], extra = await self._outcome(arguments)
        if self._config.combine.reward_model:
            parts["reward_model"] = await self._of_model(row, arguments, outputs[-1])
        if is_score_alone(self._config):
            return RewardResult(score=parts["score"], extra=extra)
        total, named = combined(
            self._config,
            parts,
            num_tokens=sum(len(output.response_ids) for output in outputs),
            max_tokens=self._max_response_length,
        )
        if taken := named.keys() & extra.keys():
            raise RewardError(
                f"a reward function must not return the key {min(taken)}, the name of a part of the reward; rename it"
            )
        return RewardResult(score=total, extra={**extra, **named})

    async def aclose(self) -> None:
        """End processes and connections."""
        for part in (self._custom, self._built_in, self._model):
            if part is not None:
                await part.aclose()

    async def _outcome(self, arguments: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """The function's or scorer's answer: the score and the rest."""
        if self._custom is None:
            assert self._built_in is not None
            with failing_as(self._built_in.name):
                return _result(await self._built_in(arguments), self._built_in.name)
        function = self._custom
        with failing_as(function.name):
            return _result(await self._in_turn(lambda: function(arguments), self._pace), function.name)

    async def _of_model(self, row: Mapping[str, Any], arguments: Mapping[str, Any], last: AgentLoopOutput) -> float:
        from ostinato_trainer.rewards.model import conversation, template_values

        model, prompt = self._model, row.get("raw_prompt")
        if model is None:
            raise RewardError(
                "reward.reward_model.url must be given while reward.combine.reward_model is not 0, got null; write it"
            )
        messages = last.extra_fields.get("messages") or conversation(prompt, arguments["solution_str"])
        values = template_values(arguments, prompt)
        with failing_as(model.name):
            return await self._in_turn(lambda: model(messages, values), self._model_pace)

    def _arguments(self, row: Mapping[str, Any], outputs: Sequence[AgentLoopOutput]) -> dict[str, Any]:
        last = outputs[-1]
        response = self._tokenizer.decode(last.response_ids, skip_special_tokens=True)
        extra_info = {
            **(row.get("extra_info") or {}),
            "num_turns": last.num_turns,
            "turn_scores": last.extra_fields.get("turn_scores", []),
            "tool_rewards": last.extra_fields.get("tool_rewards", []),
            "tool_state_rewards": last.extra_fields.get("tool_state_rewards", {}),
            "sampled_text": response if all(last.response_mask) else self._sampled_text(last),
        }
        return {
            "data_source": row.get("data_source"),
            "solution_str": response,
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "extra_info": extra_info,
        }

    def _sampled_text(self, output: AgentLoopOutput) -> str:
        """The policy's turns, a line break between them."""
        pairs = zip(output.response_mask, output.response_ids, strict=True)
        runs = itertools.groupby(pairs, key=lambda pair: pair[0])
        turns = [[token_id for _, token_id in run] for sampled, run in runs if sampled]
        return "\n".join(self._tokenizer.decode(turn, skip_special_tokens=True) for turn in turns)

    async def _in_turn(self, call: Callable[[], Coroutine[Any, Any, Any]], pace: Pace) -> Any:
        """Await `call()` when there is a place and it is its turn; its deadline is its own, and counts from then on."""
        async with self._slots:
            await pace.turn()
            return await call()


def _result(answer: Any, name: str) -> tuple[float, dict[str, Any]]:
    """The score and what else is in an answer.

    Raises:
        RewardError: there is no finite score.
    """
    extra: dict[str, Any] = {}
    value = answer
    if isinstance(answer, Mapping):
        if "score" not in answer:
            keys = ", ".join(map(str, answer)) or "nothing"
            raise RewardError(f"{name} must return a mapping with the key score, got {keys}; add it")
        extra = {str(key): item for key, item in answer.items() if key != "score"}
        value = answer["score"]
    try:
        if value is None or isinstance(value, str | bytes | bytearray):
            raise TypeError
        score = float(value)
    except Exception as error:  # whatever the conversion of a foreign object raises, it is no number
        raise RewardError(
            f"{name} must return a number or a mapping with score, got {value!r:.200}; return a float"
        ) from error
    if not math.isfinite(score):
        raise RewardError(f"{name} must return a finite score, got {score}; raise an error where there is no score")
    return score, extra
