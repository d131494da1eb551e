"""The agent that asks once."""

from __future__ import annotations

import pytest

from ostinato_agent_loop import TrajectoryEnd
from ostinato_rollout import FailureKind


@pytest.mark.parametrize(
    ("reply", "response", "end", "turns"),
    [
        ("Hello.<|im_end|>", 100, TrajectoryEnd.STOP, 2),
        ("Hello, this is long.<|im_end|>", 4, TrajectoryEnd.RESPONSE_LENGTH, 2),
        ("", 100, TrajectoryEnd.NOTHING_GENERATED, 1),
    ],
)
async def test_one_turn_is_one_segment(world, reply, response, end, turns):
    """The prompt is the chat template without tools, the response what was sampled, cut at the budget; the end is recorded."""
    segment = await world.run_ok([world.encode(reply)], agent="single_turn_agent", response=response, enable=False)
    assert segment.prompt_ids == world.tokenizer.encode_chat([{"role": "user", "content": "Please."}])
    assert segment.response_ids == world.encode(reply)[:response]
    assert segment.response_mask == [1] * len(segment.response_ids)
    assert (segment.stop_reason, segment.num_turns) == (end, turns)
    assert segment.extra_fields["messages"][0]["content"] == "Please."


async def test_a_turn_cut_at_its_own_limit_says_so(world):
    """max_tokens below the budget is another reason than a full response."""
    manager = world.build([list(range(30))], agent="single_turn_agent")
    rows = [{"prompt": [{"role": "user", "content": "x"}]}]
    batch = await manager.generate_sequences(rows, n=1, step=0, sampling_params={"max_tokens": 5})
    assert batch.trajectories[0].segments[0].stop_reason is TrajectoryEnd.TURN_LENGTH


async def test_bare_ids_of_a_third_party_leave_log_probabilities_out(world):
    """A server that returns ids only gives an output without log-probabilities."""
    ids = world.encode("Hi.<|im_end|>")

    class Bare(type(world.build([]) and world.server)):
        async def generate(self, prompt_ids, sampling_params, request_id, media=()):
            return list(ids)

    segment = await world.run_ok([], agent="single_turn_agent", server=Bare([]))
    assert (segment.response_ids, segment.response_logprobs) == (ids, None)


async def test_a_row_without_a_prompt_is_a_recorded_failure(world):
    """The failure names the fields that the row has."""
    manager = world.build([], agent="single_turn_agent")
    (trajectory,) = (await manager.generate_sequences([{"question": "x"}], n=1, step=0)).trajectories
    assert trajectory.failure.kind is FailureKind.AGENT
    assert "must have raw_prompt or prompt, got ['question']" in trajectory.failure.message
