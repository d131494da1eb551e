"""Rewards: what a function gets, and what becomes of one that fails."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato_agent_loop import AgentLoopOutput, RewardResult
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config_reward import CustomRewardConfig, RewardConfig
from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards import RewardManager

TOKENIZER = tiny_chat_tokenizer()
ROW = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "42"}, "extra_info": {"index": 3}}


def output(*turns: tuple[str, int], **more: Any) -> AgentLoopOutput:
    ids, mask = [], []
    for text, sampled in turns:
        token_ids = TOKENIZER.encode_text(text)
        ids += token_ids
        mask += [sampled] * len(token_ids)
    return AgentLoopOutput(prompt_ids=[1], response_ids=ids, response_mask=mask, num_turns=len(turns) + 1, **more)


def manager(function: Callable[..., Any] | None = None, **keys: Any) -> RewardManager:
    return RewardManager(RewardConfig(**keys), TOKENIZER, compute_score=function)


ANSWER = [output(("so #### 42", 1))]


async def test_the_built_in_scorer_scores_gsm8k() -> None:
    """A row of GSM8K is scored by its data source."""
    result = await manager()(ROW, ANSWER)
    assert result == RewardResult(score=1.0, extra={"acc": 1.0, "pred": "42"})


async def test_a_function_gets_the_field_s_arguments() -> None:
    """The function gets data source, response text, ground truth, and extra_info with what happened in the trajectory."""
    seen: dict[str, Any] = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        seen.update(locals())
        return 0.5

    segments = [
        output(("first", 1)),
        output(("call", 1), ("tool", 0), ("end", 1), extra_fields={"tool_rewards": [1.0], "turn_scores": [0.0]}),
    ]
    assert (await manager(compute_score)(ROW, segments)).score == 0.5
    assert seen["data_source"] == "openai/gsm8k"
    assert seen["solution_str"] == "calltoolend"
    assert seen["ground_truth"] == "42"
    assert seen["extra_info"] == {
        "index": 3,
        "num_turns": 4,
        "tool_rewards": [1.0],
        "turn_scores": [0.0],
        "tool_state_rewards": {},
        "sampled_text": "call\nend",
    }
    assert ROW["extra_info"] == {"index": 3}


async def test_a_number_in_a_tool_s_answer_earns_nothing() -> None:
    """A trajectory whose tool wrote the right answer, and whose policy did not, scores 0."""
    assert (await manager()(ROW, [output(("calling", 1), ("#### 42", 0), ("hm", 1))])).score == 0.0


async def test_async_functions_run_on_the_loop_and_sync_ones_beside_it() -> None:
    """A coroutine function runs in the loop's thread, a plain function in one of its own."""
    threads: list[int] = []

    def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> int:
        threads.append(threading.get_ident())
        return 1

    async def coroutine(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> int:
        threads.append(threading.get_ident())
        return 2

    assert (await manager(plain)(ROW, ANSWER)).score == 1.0
    assert (await manager(coroutine)(ROW, ANSWER)).score == 2.0
    assert threads[0] != threading.get_ident()
    assert threads[1] == threading.get_ident()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (float("nan"), "finite"),
        (float("-inf"), "finite"),
        (None, "number or a mapping"),
        ("1.0", "number or a mapping"),
        ([1.0], "number or a mapping"),
        ({"reward": 1.0}, "key score, got reward"),
        ({"score": float("nan")}, "finite"),
    ],
)
async def test_an_answer_that_is_no_score_is_an_error(answer: Any, expected: str) -> None:
    """NaN, text, nothing, or a mapping without score is an error that names the function, never a zero."""

    def odd(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> Any:
        return answer

    with pytest.raises(RewardError, match=f"odd must .*{expected}"):
        await manager(odd)(ROW, ANSWER)


@pytest.mark.parametrize("error", [ValueError("boom"), StopIteration("boom"), SystemExit("boom"), TimeoutError("boom")])
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_exception_is_an_error_with_its_name(error: BaseException, is_async: bool) -> None:
    """Whatever the function raises becomes one error that says what it was."""

    def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        raise error

    async def coroutine(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        raise error

    with pytest.raises(RewardError, match=rf"must return a score, got .*{type(error).__name__}"):
        await manager(coroutine if is_async else plain)(ROW, ANSWER)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_that_hangs_meets_its_deadline(is_async: bool) -> None:
    """A function that does not answer is an error that names the key, and does not use up a place for others."""
    release = threading.Event()

    def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        if data_source == "hang":
            release.wait()
        return 1.0

    async def coroutine(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        if data_source == "hang":
            await asyncio.Event().wait()
        return 1.0

    rewards = manager(coroutine if is_async else plain, timeout_s=0.1, num_workers=1)
    for _ in range(3):
        with pytest.raises(RewardError, match=r"reward.timeout_s=0.1"):
            await rewards({**ROW, "data_source": "hang"}, ANSWER)
    patient = manager(coroutine if is_async else plain, num_workers=1)
    assert (await patient(ROW, ANSWER)).score == 1.0
    release.set()


async def test_at_most_num_workers_scores_run_at_once() -> None:
    """Concurrency is bounded by reward.num_workers, and every row gets its own score."""
    running = [0, 0]

    async def count(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0)
        running[0] -= 1
        return float(ground_truth)

    rewards = manager(count, num_workers=2)
    rows = [{"reward_model": {"ground_truth": str(number)}} for number in range(6)]
    results = await asyncio.gather(*(rewards(row, ANSWER) for row in rows))
    assert [result.score for result in results] == [0, 1, 2, 3, 4, 5]
    assert running == [0, 2]


async def test_cancelling_goes_through() -> None:
    """A cancelled score raises CancelledError and frees its place."""
    started = asyncio.Event()

    async def wait(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        if data_source == "fast":
            return 1.0
        started.set()
        await asyncio.Event().wait()
        return 0.0

    rewards = manager(wait, num_workers=1)
    task = asyncio.create_task(rewards(ROW, ANSWER))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await rewards({"data_source": "fast"}, ANSWER)).score == 1.0


async def test_a_function_is_loaded_from_a_file_with_its_arguments(tmp_path: Path) -> None:
    """reward.custom_reward_function names file, function and further arguments."""
    (tmp_path / "own.py").write_text(
        "def grade(data_source, solution_str, ground_truth, extra_info, bonus):\n"
        "    return {'score': bonus, 'text': solution_str}\n"
        "def narrow(solution_str): return 1.0\n"
    )
    custom = CustomRewardConfig(path=str(tmp_path / "own.py"), name="grade", reward_kwargs={"bonus": 2.5})
    result = await manager(custom_reward_function=custom)({}, [output(("hi", 1))])
    assert result == RewardResult(score=2.5, extra={"text": "hi"})
    for name, expected in (("missing", "got 'missing'"), ("narrow", "must take the arguments data_source")):
        with pytest.raises(RewardError, match=expected):
            manager(custom_reward_function=CustomRewardConfig(path=str(tmp_path / "own.py"), name=name))


async def test_arguments_reach_built_in_scorers_too() -> None:
    """reward_kwargs without a path are for the built-in scorer, and unknown ones are refused at the start."""
    flexible = CustomRewardConfig(reward_kwargs={"method": "flexible"})
    assert (await manager(custom_reward_function=flexible)(ROW, [output(("it is 42", 1))])).score == 1.0
    with pytest.raises(RewardError, match="speed"):
        manager(custom_reward_function=CustomRewardConfig(reward_kwargs={"speed": 1}))


def test_unknown_data_sources_are_refused_at_the_start() -> None:
    """Rows that nobody can score are an error before the run, unless a function of one's own scores everything."""
    with pytest.raises(RewardError, match="'x'"):
        RewardManager(RewardConfig(), TOKENIZER, data_sources=["openai/gsm8k", "x"])
    manager(lambda data_source, solution_str, ground_truth, extra_info: 1.0).check_data_sources(["x", None])


async def test_no_segments_are_an_error() -> None:
    """A trajectory without a segment has no score."""
    with pytest.raises(RewardError, match="at least one segment"):
        await manager()(ROW, [])
