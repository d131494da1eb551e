"""Scores of mathematical answers: plainly, and by math-verify in processes of its own."""

import asyncio
import os
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import pytest

from ostinato_agent_loop import AgentLoopOutput, RewardResult
from ostinato_tokenization.testing import tiny_chat_tokenizer
from ostinato_trainer.config.reward import CustomRewardConfig, RewardConfig
from ostinato_trainer.errors import MissingExtraError, RewardError
from ostinato_trainer.rewards.manager import RewardManager
from ostinato_trainer.rewards.math_scorer import MathEquivalence, check_math_verify, score_math, score_math_dapo

TOKENIZER = tiny_chat_tokenizer()


# Not imported here: sympy takes its time, and only the processes need it.
needs_math_verify = pytest.mark.skipif(
    find_spec("math_verify") is None, reason="math-verify is not installed (extra math)"
)


async def unasked(answer: str, truth: str) -> bool:
    """An equivalence that must not be needed."""
    raise AssertionError(f"asked whether {answer} is {truth}")


async def math_score(text: str, truth: Any = r"\frac{1}{2}", **keys: Any) -> dict[str, Any]:
    return await score_math("HuggingFaceH4/MATH-500", text, truth, {}, **{"equivalent": unasked, **keys})


async def dapo_score(text: str, truth: str = "42", **keys: Any) -> dict[str, Any]:
    return await score_math_dapo("math_dapo", text, truth, {}, **{"equivalent": unasked, **keys})


async def test_plainly_right_answers_ask_nobody() -> None:
    """An answer that differs from the truth in spelling only scores without a computer algebra system."""
    assert await math_score(r"so \boxed{0.5}") == {"score": 1.0, "acc": 1.0, "pred": "0.5"}
    assert await math_score("so \\boxed{7}", r"it is \boxed{7}") == {"score": 1.0, "acc": 1.0, "pred": "7"}
    assert await dapo_score("hm\nAnswer: 42") == {"score": 1.0, "acc": 1.0, "pred": "42"}
    assert await dapo_score(r"hm \boxed{42}") == {"score": 1.0, "acc": 1.0, "pred": "42"}


async def test_no_answer_is_wrong_and_asks_nobody() -> None:
    """A response without an answer, or with one as long as an essay, is wrong at once."""
    assert await math_score("it is 1/2") == {"score": 0.0, "acc": 0.0, "pred": ""}
    assert (await math_score("\\boxed{" + "1+" * 600 + "1}"))["acc"] == 0.0
    assert await dapo_score("it is 42") == {"score": -1.0, "acc": 0.0, "pred": ""}


async def test_the_others_are_asked_about() -> None:
    """Where a plain comparison says no, the equivalence decides; `math_verify: false` leaves it at no."""
    asked: list[tuple[str, str]] = []

    async def yes(answer: str, truth: str) -> bool:
        asked.append((answer, truth))
        return True

    assert (await math_score(r"\boxed{2^{-1}}", equivalent=yes))["score"] == 1.0
    assert (await dapo_score("Answer: 6*7", equivalent=yes, score=2.0))["score"] == 2.0
    assert asked == [("2^{-1}", r"\frac{1}{2}"), ("6*7", "42")]
    assert (await math_score(r"\boxed{2^{-1}}", math_verify=False, wrong_score=-0.5))["score"] == -0.5


async def test_only_what_the_policy_wrote_counts() -> None:
    """An answer in a tool's text earns nothing."""
    scored = await score_math("x", r"\boxed{5}", "5", {"sampled_text": "hm"}, equivalent=unasked)
    assert scored["acc"] == 0.0


@pytest.mark.parametrize("truth", [None, "", "  ", r"\boxed{}"])
async def test_a_row_without_truth_is_an_error(truth: Any) -> None:
    """Nothing can be right where the row has no answer: an error, not a zero."""
    with pytest.raises(RewardError, match="ground_truth must be an answer"):
        await math_score(r"\boxed{5}", truth)


@pytest.fixture
async def equivalence() -> AsyncIterator[MathEquivalence]:
    """The real math-verify, in one process."""
    asked = MathEquivalence(1, 60.0)
    yield asked
    await asked.aclose()


CASES = [
    ("(x+1)^2", "x^2+2x+1", True),
    (r"\{2,1\}", r"\{1,2\}", True),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
    ("x>3", "3<x", True),
    ("10^6", "1000000", True),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", True),
    ("(1,2)", "(2,1)", False),
    ("(1,2]", "[1,2)", False),
    (r"\text{even}", r"\text{odd}", False),
    ("6,7", "6", False),
    ("x", "y", False),
    (r"3\mathrm{i}", "3", False),
    (r"3\mathrm{i}", "3i", True),
    (r"\frac{", "5", False),
    ("5", r"\text{}", False),
    ("__import__('os')", "1", False),
    ("100000!", "7", False),
]


@needs_math_verify
async def test_math_verify_knows_more_than_spelling(equivalence: MathEquivalence) -> None:
    """Equal mathematics in another form is right, other mathematics and nonsense are wrong, in one process that lives through all."""
    assert [await equivalence(answer, truth) for answer, truth, _ in CASES] == [right for _, _, right in CASES]


@needs_math_verify
async def test_an_answer_that_takes_for_ever_is_a_failure_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer on which sympy would compute for ever fails at the deadline, is no zero, and makes no answer late that waits for the
    same process, nor for its start."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    kwargs = CustomRewardConfig(reward_kwargs={"score": 3.0})
    rewards = RewardManager(RewardConfig(timeout_s=1.0, num_workers=8, custom_reward_function=kwargs), TOKENIZER)
    row = {"data_source": "HuggingFaceH4/MATH-500", "reward_model": {"ground_truth": "x^2+2x+1"}}
    texts = (r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(x+1)^2}", r"\boxed{1+2x+x^2}")
    try:
        tower, *others = await asyncio.gather(*(rewards(row, [output(text)]) for text in texts), return_exceptions=True)
    finally:
        await rewards.aclose()
    assert isinstance(tower, RewardError)
    assert "math-verify must answer within reward.timeout_s=1 s" in str(tower)
    assert others == [RewardResult(score=3.0, extra={"acc": 1.0, "pred": answer}) for answer in ("(x+1)^2", "1+2x+x^2")]


def output(text: str) -> AgentLoopOutput:
    ids = TOKENIZER.encode_text(text)
    return AgentLoopOutput(prompt_ids=[1], response_ids=ids, response_mask=[1] * len(ids), num_turns=2)


def test_without_math_verify_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that need the extra are refused before the run, naming its install line and the key that does without."""
    monkeypatch.setattr("ostinato_trainer.rewards.math_scorer.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"ostinato-trainer\[math\].*math_verify=false"):
        check_math_verify()
    with pytest.raises(MissingExtraError):
        RewardManager(RewardConfig(), TOKENIZER, data_sources=["aime2024"])
    plain = CustomRewardConfig(reward_kwargs={"math_verify": False})
    RewardManager(RewardConfig(custom_reward_function=plain), TOKENIZER, data_sources=["aime2024"])
    RewardManager(RewardConfig(), TOKENIZER, data_sources=["openai/gsm8k"])
