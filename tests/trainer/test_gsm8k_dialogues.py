"""GSM8K's annotations become conversations in which the real tools answered."""

import pytest

from ostinato_trainer.data.gsm8k_dialogues import Gsm8kDialogues

PROMPT = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


def create_kwargs(truth: str) -> dict:
    return {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}


def call(name: str, **arguments: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


async def test_each_calculation_is_a_call_and_what_was_said_follows_its_answer() -> None:
    """Every annotation is a calculator call that the calculator answered; text without annotations follows; the last call checks in."""
    solution = "In May 48/2 = <<48/2=24>>24.\nSo far so good.\nTogether 48+24 = <<48+24=72>>72 clips.\n#### 72"
    messages = await Gsm8kDialogues().make(PROMPT, solution, "72", create_kwargs("72"))
    assert messages == [
        *PROMPT,
        {"role": "assistant", "content": "", "tool_calls": [call("calculator", expression="48/2")]},
        {"role": "tool", "content": "24"},
        {
            "role": "assistant",
            "content": "In May 48/2 = 24.\nSo far so good.",
            "tool_calls": [call("calculator", expression="48+24")],
        },
        {"role": "tool", "content": "72"},
        {
            "role": "assistant",
            "content": "Together 48+24 = 72 clips.",
            "tool_calls": [call("calc_gsm8k_reward", answer="72")],
        },
        {"role": "tool", "content": "Answer 72 has score 1.0."},
        {"role": "assistant", "content": "#### 72"},
    ]


async def test_several_calculations_in_a_line_are_several_turns() -> None:
    """Two annotations in one line are two calls, in order, before the line is said."""
    messages = await Gsm8kDialogues().make(PROMPT, "2*3=<<2*3=6>>6 and 6+1=<<6+1=7>>7\n#### 7", "7", create_kwargs("7"))
    assert messages is not None
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    assert said == ["", "", "2*3=6 and 6+1=7", "#### 7"]


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        ("1+1 is 2.\n#### 2", "2"),
        ("<<1+1=3>>3\n#### 3", "3"),
        ("<<20%*50=10>>10\n#### 10", "10"),
        ("<<x+1=3>>3\n#### 3", "3"),
    ],
    ids=["no annotation", "wrong result", "no value", "no arithmetic"],
)
async def test_what_the_tools_do_not_confirm_is_left_out(solution: str, truth: str) -> None:
    """A solution without annotation, or one that the calculator contradicts or cannot read, gives no dialogue."""
    assert await Gsm8kDialogues().make(PROMPT, solution, truth, create_kwargs(truth)) is None


async def test_an_answer_that_the_row_contradicts_is_left_out() -> None:
    """The checking tool must accept the final answer."""
    assert await Gsm8kDialogues().make(PROMPT, "<<1+1=2>>2\n#### 2", "2", create_kwargs("3")) is None


async def test_prompt_messages_are_not_changed() -> None:
    """The prompt that was passed in stays as it was, and dialogues do not share state."""
    dialogues, prompt = Gsm8kDialogues(), [dict(message) for message in PROMPT]
    first = await dialogues.make(prompt, "<<1+1=2>>2\n#### 2", "2", create_kwargs("2"))
    second = await dialogues.make(prompt, "<<1+1=2>>2\n#### 2", "2", create_kwargs("2"))
    assert prompt == PROMPT
    assert first == second
