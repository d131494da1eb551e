"""Rewards: what a function gets, and what becomes of one that fails."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato_agent_loop import AgentLoopOutput, RewardResult
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config.reward import CombineConfig, CustomRewardConfig, OverlongBufferConfig, RewardConfig
from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards.manager import RewardManager

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
        ({}, "key score, got nothing"),
        ({"score": None}, "number or a mapping"),
        ({"score": {"score": 1.0}}, "number or a mapping"),
        (10**400, "number or a mapping"),
        (1j, "number or a mapping"),
        (object(), "number or a mapping"),
    ],
)
async def test_an_answer_that_is_no_score_is_an_error(answer: Any, expected: str) -> None:
    """NaN, text, nothing, or a mapping without score is an error that names the function, never a zero."""

    def odd(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> Any:
        return answer

    with pytest.raises(RewardError, match=f"odd must .*{expected}"):
        await manager(odd)(ROW, ANSWER)


class NoException(BaseException):
    """What foreign code may raise."""


@pytest.mark.parametrize(
    "error",
    [ValueError("boom"), StopIteration("boom"), SystemExit("boom"), TimeoutError("boom"), NoException("boom")],
)
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


async def test_a_function_that_ignores_its_cancellation_meets_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """An async function that swallows every cancellation is left behind; its place is free for the next call."""
    monkeypatch.setattr("ostinato_tools.deadline.GRACE_S", 0.05)
    release = asyncio.Event()

    async def stubborn(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        while data_source == "hang" and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    asyncio.get_running_loop().call_later(20.0, release.set)  # else a deadline that does not hold would hang this test
    rewards = manager(stubborn, timeout_s=0.2, num_workers=1)
    try:
        for _ in range(2):
            with pytest.raises(RewardError, match=r"stubborn must answer within reward.timeout_s=0.2"):
                await rewards({**ROW, "data_source": "hang"}, ANSWER)
        assert (await rewards(ROW, ANSWER)).score == 1.0
    finally:
        release.set()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_that_cancels_itself_is_an_error(is_async: bool) -> None:
    """A cancellation that the function made up ends its call, not the task that asked for the score."""

    def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        raise asyncio.CancelledError

    async def coroutine(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match="must return a score, got none, for it was cancelled from within"):
        await manager(coroutine if is_async else plain)(ROW, ANSWER)


async def test_what_cannot_even_be_shown_is_an_error() -> None:
    """An answer, or an exception, whose description raises is an error like any other."""

    class Odd:
        def __repr__(self) -> str:
            raise ValueError("unspeakable")

    def odd(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> Any:
        return Odd()

    with pytest.raises(RewardError, match="odd must return a score, got ValueError: unspeakable"):
        await manager(odd)(ROW, ANSWER)

    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError("unspeakable")

    def fail(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> Any:
        raise OddError

    with pytest.raises(RewardError, match="fail must return a score, got OddError;"):
        await manager(fail)(ROW, ANSWER)


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


@pytest.mark.parametrize("name", ["data_source", "solution_str", "ground_truth", "extra_info"])
def test_arguments_of_the_row_are_not_for_reward_kwargs(name: str) -> None:
    """A keyword argument that would take the place of the row's own value is refused at the start."""
    custom = CustomRewardConfig(reward_kwargs={name: "x"})
    with pytest.raises(RewardError, match=f"reward_kwargs must not hold what comes from the row, got {name}"):
        manager(lambda data_source, solution_str, ground_truth, extra_info: 1.0, custom_reward_function=custom)


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


async def test_an_empty_response_is_a_wrong_answer() -> None:
    """A trajectory in which nothing was sampled is scored as the empty text that it is."""
    result = await manager()(ROW, [output()])
    assert result == RewardResult(score=0.0, extra={"acc": 0.0, "pred": ""})


async def test_no_segments_are_an_error() -> None:
    """A trajectory without a segment has no score."""
    with pytest.raises(RewardError, match="at least one segment"):
        await manager()(ROW, [])


async def test_further_keys_may_differ_from_one_answer_to_the_next() -> None:
    """Each trajectory keeps the keys that its own answer had, none, some or others, and no key is a score."""
    answers = iter([{"score": 1, "acc": True}, {"score": 0, "pred": "x", "acc": False}, 0.5, {"score": 0, 7: [1, 2]}])

    def ragged(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> Any:
        return next(answers)

    rewards = manager(ragged)
    results = [await rewards(ROW, ANSWER) for _ in range(4)]
    assert [result.score for result in results] == [1.0, 0.0, 0.5, 0.0]
    assert [result.extra for result in results] == [{"acc": True}, {"pred": "x", "acc": False}, {}, {"7": [1, 2]}]


@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_function_does_to_its_arguments_is_its_own(is_async: bool) -> None:
    """A function that changes the row or what tools gave changes neither for the siblings that share them."""
    row = {"extra_info": {"steps": [1]}, "reward_model": {"ground_truth": ["a"]}}
    rewarded = [output(("x", 1), extra_fields={"tool_rewards": [1.0]})]

    def plain(data_source: str, solution_str: str, ground_truth: list, extra_info: dict) -> float:
        extra_info["steps"].append(2)
        extra_info["tool_rewards"].clear()
        ground_truth.clear()
        return 1.0

    async def coroutine(data_source: str, solution_str: str, ground_truth: list, extra_info: dict) -> float:
        return plain(data_source, solution_str, ground_truth, extra_info)

    await manager(coroutine if is_async else plain)(row, rewarded)
    assert row == {"extra_info": {"steps": [1]}, "reward_model": {"ground_truth": ["a"]}}
    assert rewarded[0].extra_fields == {"tool_rewards": [1.0]}


async def test_threads_that_hang_are_bounded() -> None:
    """Calls that never return are left behind up to a number; then the function is refused, until they return."""
    release = threading.Event()

    def hang(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        if data_source == "hang":
            release.wait()
        return 1.0

    rewards = manager(hang, timeout_s=0.05, num_workers=64)
    row = {**ROW, "data_source": "hang"}
    first = await asyncio.gather(*(rewards(row, ANSWER) for _ in range(64)), return_exceptions=True)
    assert all("reward.timeout_s=0.05" in str(error) for error in first)
    for _ in range(3):
        with pytest.raises(RewardError, match=r"64 calls that run on beyond their deadline.*reward.executor=process"):
            await rewards(row, ANSWER)
    release.set()
    while True:
        try:
            assert (await rewards(ROW, ANSWER)).score == 1.0
            break
        except RewardError:  # the threads are on their way
            await asyncio.sleep(0.01)


OWN = """
import math, time

def grade(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "hold":
        math.factorial(2**24)  # in C, and never lets another thread run
    if solution_str == "nan":
        return float("nan")
    if solution_str == "raise":
        raise KeyError("boom")
    return {"score": bonus, "text": solution_str, "index": extra_info.get("index")}

async def later(data_source, solution_str, ground_truth, extra_info):
    return 0.25
"""


async def test_a_function_leaves_no_thread_behind() -> None:
    """The threads in which a plain function is computed end when the rewards are closed."""
    threads: list[threading.Thread] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        threads.append(threading.current_thread())
        return 1.0

    rewards = manager(compute_score)
    assert (await rewards(ROW, ANSWER)).score == 1.0
    await rewards.aclose()
    await asyncio.to_thread(threads[0].join, 60.0)
    assert not threads[0].is_alive()


async def test_a_function_in_a_process_cannot_stop_the_loop(tmp_path: Path) -> None:
    """With `executor: process` a function that keeps the interpreter's lock stops neither loop nor deadline, and leaves nothing."""
    (tmp_path / "own.py").write_text(OWN)
    custom = CustomRewardConfig(path=str(tmp_path / "own.py"), name="grade", reward_kwargs={"bonus": 2.5})
    rewards = manager(custom_reward_function=custom, executor="process", num_workers=2, timeout_s=5.0)
    try:
        assert await rewards(ROW, [output(("hi", 1))]) == RewardResult(score=2.5, extra={"text": "hi", "index": 3})
        for text, expected in (("nan", "finite score"), ("raise", "KeyError: 'boom'")):
            with pytest.raises(RewardError, match=expected):
                await rewards(ROW, [output((text, 1))])
        holding = asyncio.create_task(rewards(ROW, [output(("hold", 1))]))
        assert (await rewards(ROW, [output(("hi", 1))])).score == 2.5
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        assert (await rewards(ROW, [output(("hi", 1))])).score == 2.5
    finally:
        await rewards.aclose()


async def test_a_deadline_kills_what_runs_in_a_process(tmp_path: Path) -> None:
    """A function that hangs in a process meets its deadline, and an async one is awaited there."""
    (tmp_path / "own.py").write_text(OWN)

    def own(name: str, timeout_s: float) -> RewardManager:
        custom = CustomRewardConfig(path=str(tmp_path / "own.py"), name=name)
        return manager(custom_reward_function=custom, executor="process", num_workers=1, timeout_s=timeout_s)

    hasty, patient = own("grade", 0.2), own("later", 60.0)
    try:
        with pytest.raises(RewardError, match=r"grade must answer within reward.timeout_s=0.2"):
            await hasty(ROW, [output(("hold", 1))])
        assert (await patient(ROW, ANSWER)).score == 0.25
    finally:
        await asyncio.gather(hasty.aclose(), patient.aclose())


def module_level(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    return 0.75


async def test_a_function_that_is_passed_runs_in_a_process_if_it_can_be_found() -> None:
    """A function of a module's top level is found by its name; one inside a function is refused at the start."""
    rewards = manager(module_level, executor="process")
    try:
        assert (await rewards(ROW, ANSWER)).score == 0.75
    finally:
        await rewards.aclose()
    with pytest.raises(RewardError, match="must be found by its name to run in a process"):
        manager(lambda data_source, solution_str, ground_truth, extra_info: 1.0, executor="process")


async def test_parts_are_combined_by_configuration() -> None:
    """Score, tools and length make one reward, each recorded under its own name beside the function's keys."""

    def grade(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> dict:
        return {"score": 1.0, "acc": 1.0}

    rewards = RewardManager(
        RewardConfig(
            combine=CombineConfig(tool_rewards=0.5, turn_scores=1.0, reduction="mean"),
            overlong_buffer=OverlongBufferConfig(enable=True, len=4),
        ),
        TOKENIZER,
        compute_score=grade,
        max_response_length=8,
    )
    fields = {"tool_rewards": [1.0, 0.0], "turn_scores": [2.0]}
    result = await rewards(ROW, [output(("abc", 1)), output(("def", 1), extra_fields=fields)])
    assert result.extra == {
        "acc": 1.0,
        "outcome_reward": 1.0,
        "tool_reward": 0.5,
        "turn_reward": 2.0,
        "overlong_reward": -0.5,  # both segments are 6 of 8 tokens long
    }
    assert result.score == 1.0 + 0.25 + 2.0 - 0.5


async def test_a_key_that_names_a_part_is_refused() -> None:
    """A function's own key must not be overwritten by a part of the reward of the same name."""

    def grade(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> dict:
        return {"score": 1.0, "tool_reward": 5.0}

    assert (await manager(grade)(ROW, ANSWER)).extra == {"tool_reward": 5.0}
    with pytest.raises(RewardError, match="must not return the key tool_reward"):
        await manager(grade, combine=CombineConfig(tool_rewards=1.0))(ROW, ANSWER)


async def test_without_weight_the_score_is_not_asked_for() -> None:
    """Tools alone can be the reward; then rows need no scorer and a function is not called."""
    rewards = manager(combine=CombineConfig(score=0.0, tool_rewards=1.0))
    rewards.check_data_sources(["nobody's"])
    result = await rewards({"data_source": "nobody's"}, [output(("x", 1), extra_fields={"tool_rewards": [0.5, 0.5]})])
    assert result == RewardResult(score=1.0, extra={"tool_reward": 1.0})


async def test_calls_keep_to_the_rate() -> None:
    """With `max_rpm` the second call waits for its turn, which does not count as the function's time."""

    async def one(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        return 1.0

    loop = asyncio.get_running_loop()
    rewards = manager(one, max_rpm=60 / 1.0, timeout_s=0.9)
    began = loop.time()
    results = await asyncio.gather(*(rewards(ROW, ANSWER) for _ in range(3)))
    assert [result.score for result in results] == [1.0, 1.0, 1.0]
    assert loop.time() - began >= 1.99  # a lower bound: no machine is too slow for it
    waiting = asyncio.create_task(manager(one, max_rpm=1e-3)(ROW, ANSWER))
    assert (await waiting).score == 1.0
