"""calc_gsm8k_reward: a reward for the right number in any spelling, and for nothing else."""

import json
import os
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools import OutcomeKind, ToolExecutor, ToolRegistry
from ostinato_tools.gsm8k import CalcGsm8kReward, normalize_answer
from ostinato_tools.testing import make_call

SHARED = Path(os.environ.get("OSTINATO_SHARED") or Path(__file__).parents[3] / "shared")
GSM8K = SHARED / "data" / "gsm8k"


@pytest.fixture
def registry() -> ToolRegistry:
    registry = ToolRegistry()
    registry.add_class(CalcGsm8kReward, config={"type": "native"})
    return registry


@pytest.mark.parametrize(
    ("truth", "answer", "score"),
    [
        ("18", "18", 1.0),
        ("18", " 18.00 ", 1.0),
        ("18", "$18", 1.0),
        ("1200", "1,200", 1.0),
        ("1,200", "1200.", 1.0),
        ("18", "#### 18", 1.0),
        ("-0.5", "-.5", 1.0),
        (18, "18", 1.0),
        ("18", "$ 18.00", 1.0),
        ("18", "18 $", 1.0),
        ("-5", "-$5", 1.0),
        ("-5", "$-5", 1.0),
        ("-5", "\N{MINUS SIGN}5", 1.0),
        ("1000000", "1,000,000.0", 1.0),
        ("18", "thought #### 17 no #### 18", 1.0),
        ("18", "18,", 1.0),
        ("18", "1,8", 0.0),
        ("18", "1$8", 0.0),
        ("1200", "12,00", 0.0),
        ("1200", "1,,200", 0.0),
        ("18", "--18", 0.0),
        ("18", "18%", 0.0),
        ("18", "18/1", 0.0),
        ("18", "18=18", 0.0),
        ("18", "\u0661\u0668", 0.0),
        ("18", "\uff11\uff18", 0.0),
        ("18", "####", 0.0),
        ("18", "18 ####", 0.0),
        ("18", "1" + "0" * 99 + "e9", 0.0),
        ("18", "\ud800", 0.0),
        ("18", "19", 0.0),
        ("18", "", 0.0),
        ("18", "1 8", 0.0),
        ("18", "18 or 19", 0.0),
        ("18", "eighteen", 0.0),
        ("18", "1e1", 0.0),
        ("18", "nan", 0.0),
        ("18", "9" * 1000, 0.0),
    ],
)
async def test_scores(registry: ToolRegistry, truth, answer: str, score: float) -> None:
    """The reward is positive only for the ground truth's number, and calc_reward repeats it."""
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
    async with ToolExecutor(registry).open("t", kwargs) as tools:
        (outcome,) = await tools.run([make_call("calc_gsm8k_reward", {"answer": answer})])
        assert (outcome.kind, outcome.reward) == (OutcomeKind.OK, score)
        assert await tools.calc_rewards() == {"calc_gsm8k_reward": score}


async def test_the_last_answer_counts(registry: ToolRegistry) -> None:
    """A right answer that is taken back is no longer right."""
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "18"}}}
    async with ToolExecutor(registry).open("t", kwargs) as tools:
        await tools.run([make_call("calc_gsm8k_reward", {"answer": "18"})])
        await tools.run([make_call("calc_gsm8k_reward", {"answer": "19"})])
        assert await tools.calc_rewards() == {"calc_gsm8k_reward": 0.0}


@pytest.mark.parametrize(
    "kwargs", [None, {}, {"ground_truth": None}, {"ground_truth": " "}, {"ground_truth": "1", "x": 1}]
)
async def test_a_row_without_ground_truth_is_no_zero(registry: ToolRegistry, kwargs: dict | None) -> None:
    """Without a ground truth the tool cannot be started, which is classed as infrastructure and gives no reward."""
    async with ToolExecutor(registry).open("t", {"calc_gsm8k_reward": {"create_kwargs": kwargs}}) as tools:
        (outcome,) = await tools.run([make_call("calc_gsm8k_reward", {"answer": "18"})])
        assert outcome.kind is OutcomeKind.INFRASTRUCTURE
        assert await tools.calc_rewards() == {}


async def test_the_text_does_not_give_the_answer_away(registry: ToolRegistry) -> None:
    """A wrong answer is told its score, not the truth."""
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "77"}}}
    async with ToolExecutor(registry).open("t", kwargs) as tools:
        (outcome,) = await tools.run([make_call("calc_gsm8k_reward", {"answer": "18"})])
    assert "77" not in outcome.message["content"]


def test_normal_form() -> None:
    """One number has one spelling."""
    assert {normalize_answer(text) for text in ("0", "-0", "+0.0", "000")} == {"0"}
    assert normalize_answer("007.50") == "7.5"


@pytest.mark.skipif(
    not GSM8K.is_dir(), reason="GSM8K is not beside the repository, and OSTINATO_SHARED does not name its place"
)
def test_every_answer_of_gsm8k_is_a_number() -> None:
    """The truth of every row of the real data set comes out as plain digits, the same with and without commas."""
    for name in ("train", "test"):
        for line in (GSM8K / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            number = answer.rpartition("####")[2].strip().replace(",", "")
            assert re.fullmatch(r"-?\d+(\.\d+)?", number)
            assert normalize_answer(answer) == number


@given(st.decimals(-(10**9), 10**9, places=3), st.booleans(), st.sampled_from(["", "$", "$ "]))
def test_a_number_is_itself_however_it_is_written(number: Decimal, grouped: bool, sign: str) -> None:
    """Grouping, a currency sign and trailing zeros change nothing, and no two different numbers are the same."""
    text = sign + (f"{number:,f}" if grouped else f"{number:f}")
    assert Decimal(normalize_answer(text)) == number
    assert normalize_answer(text) == normalize_answer(str(Decimal(normalize_answer(text))))


@given(st.text(max_size=200))
def test_any_text_has_a_normal_form(text: str) -> None:
    """No text raises, and the normal form is its own normal form."""
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)
