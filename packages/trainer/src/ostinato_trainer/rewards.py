"""From a finished trajectory to a score: `RewardManager`.

A scorer that raises, hangs or answers with no finite number makes an error, which the agent loop records as a failure of
that trajectory; it never makes a zero. Synchronous functions run in a thread of their own, so that they stop neither the
event loop nor, should they never return, the program; built-in scorers cost microseconds and run where they are called.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from ostinato_agent_loop import AgentLoopOutput, RewardResult
from ostinato_tokenization import ChatTokenizer
from ostinato_trainer.config_reward import RewardConfig
from ostinato_trainer.custom_code import load_object
from ostinato_trainer.errors import RewardError
from ostinato_trainer.scorers import SCORERS, scorer_for

__all__ = ["ComputeScore", "RewardManager"]

logger = logging.getLogger(__name__)

ComputeScore = Callable[..., Any]
"""`f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float | dict`, or a coroutine of it."""

_ARGUMENTS: Final = ("data_source", "solution_str", "ground_truth", "extra_info")
_CUSTOM: Final = "reward.custom_reward_function"
_thread_numbers = itertools.count(1)


class RewardManager:
    """Scores trajectories; the `RewardFn` that agent loops call as soon as a trajectory ends.

    The function gets the row's `data_source`, the response as text, `reward_model.ground_truth` and the row's
    `extra_info`, to which are added `num_turns`, `turn_scores`, `tool_rewards` and `sampled_text`: what the policy wrote,
    without the tools' answers. The response is that of the last segment, special tokens left out.

    Args:
        config: the node `reward`.
        tokenizer: the policy's, to decode.
        compute_score: a function to use instead of the configured one.
        data_sources: those of the rows to come; see `check_data_sources`.

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
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._kwargs = dict(config.custom_reward_function.reward_kwargs)
        self._custom = compute_score if compute_score is not None else _load_custom(config)
        self._slots = asyncio.Semaphore(config.num_workers)
        for function in [self._custom] if self._custom is not None else dict.fromkeys(SCORERS.values()):
            _check_signature(function, self._kwargs)
        self.check_data_sources(data_sources)

    def check_data_sources(self, data_sources: Iterable[str | None]) -> None:
        """Find out before a run whether every kind of row can be scored.

        Raises:
            RewardError: a data source without a scorer, while no function of the user's own is configured.
        """
        if self._custom is None:
            for data_source in data_sources:
                scorer_for(data_source)

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
        data_source = row.get("data_source")
        function = self._custom if self._custom is not None else scorer_for(data_source)
        call = partial(function, **self._arguments(row, outputs), **self._kwargs)
        name = getattr(function, "__name__", type(function).__name__)
        if function in SCORERS.values():
            answer = _called(call, name)
        else:
            answer = await self._with_deadline(call, function, name)
        return _result(answer, name)

    def _arguments(self, row: Mapping[str, Any], outputs: Sequence[AgentLoopOutput]) -> dict[str, Any]:
        last = outputs[-1]
        response = self._tokenizer.decode(last.response_ids, skip_special_tokens=True)
        sampled = response if all(last.response_mask) else self._sampled_text(last)
        extra_info = {
            **(row.get("extra_info") or {}),
            "num_turns": last.num_turns,
            "turn_scores": last.extra_fields.get("turn_scores", []),
            "tool_rewards": last.extra_fields.get("tool_rewards", []),
            "sampled_text": sampled,
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

    async def _with_deadline(self, call: Callable[[], Any], function: ComputeScore, name: str) -> Any:
        timeout_s = self._config.timeout_s
        async with self._slots:
            deadline = asyncio.timeout(timeout_s)
            try:
                async with deadline:
                    answer = await (call() if _is_async(function) else _in_own_thread(call, name))
                    return await answer if inspect.isawaitable(answer) else answer
            except TimeoutError as error:
                if not deadline.expired():
                    raise RewardError(_raised_text(name, error)) from error
                raise RewardError(
                    f"{name} must answer within reward.timeout_s={timeout_s:g} s, got no answer; raise it or mend the function"
                ) from None
            except (Exception, SystemExit) as error:
                raise RewardError(_raised_text(name, error)) from error


def _load_custom(config: RewardConfig) -> ComputeScore | None:
    custom = config.custom_reward_function
    if custom.path is None:
        return None
    function = load_object(custom.path, custom.name, key=_CUSTOM, error=RewardError)
    if not callable(function):
        raise RewardError(f"{_CUSTOM}.name must be a function, got {custom.name} = {function!r}; name a function")
    return function


def _check_signature(function: ComputeScore, kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys((*_ARGUMENTS, *kwargs)))
    except TypeError as error:
        name = getattr(function, "__name__", function)
        wanted = ", ".join((*_ARGUMENTS, *kwargs))
        raise RewardError(
            f"{name} must take the arguments {wanted} by name, got {error}; mend its parameters or reward_kwargs"
        ) from None
    except ValueError:  # a callable without a readable signature, written in C: its first call will tell
        return


def _is_async(function: ComputeScore) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _called(call: Callable[[], Any], name: str) -> Any:
    try:
        return call()
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(_raised_text(name, error)) from error


def _raised_text(name: str, error: BaseException) -> str:
    return f"{name} must return a score, got {type(error).__name__}: {error}; mend the function or the row"


async def _in_own_thread(call: Callable[[], Any], name: str) -> Any:
    """Run `call` in a daemon thread: one that never returns is left behind and does not keep the program alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(answer: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)

    def work() -> None:
        answer, error = None, None
        try:
            answer = context.run(call)
        except StopIteration as cause:  # a future cannot carry it
            error = RuntimeError(f"StopIteration: {cause}")
        except BaseException as cause:
            error = cause
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(settle, answer, error)
            except RuntimeError:
                logger.warning("%s answered after the event loop had closed", name)

    threading.Thread(target=work, name=f"reward-{next(_thread_numbers)}-{name}", daemon=True).start()
    return await future


def _result(answer: Any, name: str) -> RewardResult:
    extra: dict[str, Any] = {}
    value = answer
    if isinstance(answer, Mapping):
        if "score" not in answer:
            keys = ", ".join(map(str, answer)) or "nothing"
            raise RewardError(f"{name} must return a mapping with the key score, got {keys}; add it")
        extra = {str(key): item for key, item in answer.items() if key != "score"}
        value = answer["score"]
    if value is None or isinstance(value, str | bytes):
        raise RewardError(f"{name} must return a number or a mapping with score, got {value!r}; return a float")
    try:
        score = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{name} must return a number or a mapping with score, got {value!r}; return a float"
        ) from error
    if not math.isfinite(score):
        raise RewardError(f"{name} must return a finite score, got {score}; raise an error where there is no score")
    return RewardResult(score=score, extra=extra)
