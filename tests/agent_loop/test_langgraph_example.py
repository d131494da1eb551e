"""The example of a LangGraph agent runs as it is written, found by its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato_agent_loop import TrajectoryEnd

pytest.importorskip("langgraph", reason="needs the extra langgraph")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "langgraph_agent.py"
README = ROOT / "packages" / "agent_loop" / "README.md"

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="needs the repository's examples")


async def test_it_solves_checks_and_corrects(world, call):
    """A wrong answer is checked in a conversation of its own, corrected in the first one, and checked again: three segments."""
    replies = [
        call(("counter", "{}")),
        "It is two.<|im_end|>",
        "No.<|im_end|>",
        "It is one.<|im_end|>",
        "Yes.<|im_end|>",
    ]
    options = {"agent_loop_config_path": str(EXAMPLE)}
    trajectory = await world.run_one(replies, agent="solve_and_check", agent_options=options)
    assert trajectory.failure is None, trajectory.failure
    sampled = [
        [token for token, mask in zip(each.response_ids, each.response_mask, strict=True) if mask]
        for each in trajectory.segments
    ]
    turns = [world.encode(reply) for reply in replies]
    assert sampled == [turns[0] + turns[1] + turns[3], turns[2], turns[4]]
    assert {each.stop_reason for each in trajectory.segments} == {TrajectoryEnd.GRAPH_END}
    assert trajectory.segments[0].extra_fields["tool_rewards"] == [1.0]


def test_it_is_forty_lines():
    """From the first import to the end the example has forty lines at most, as it says."""
    text = EXAMPLE.read_text()
    assert len(text[text.index("from langchain_core") :].splitlines()) <= 40


def test_the_readme_shows_the_example():
    """What the README shows of it stands in the example."""
    shown = README.read_text().split("```py\n")[1:]
    assert any("class SolveAndCheck" in each for each in shown)
    example = EXAMPLE.read_text()
    for each in shown:
        if "SolveAndCheck" in each:
            assert each.partition("```")[0] in example
