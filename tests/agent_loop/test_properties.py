"""Random models, tools and limits: whatever happens, every trajectory ends and its record is consistent."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato_agent_loop import TrajectoryEnd
from ostinato_engines import AsyncServerBase, PolicySpan, SamplingParams, StopReason, TokenOutput
from ostinato_rollout import FailureKind

TURNS = {
    "valid": '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call><|im_end|>',
    "stateful": 'text first <tool_call>\n{"name": "mischief", "arguments": {}}\n</tool_call><|im_end|>',
    "failing": '<tool_call>\n{"name": "failing", "arguments": {}}\n</tool_call><|im_end|>',
    "hanging": '<tool_call>\n{"name": "hanging", "arguments": {}}\n</tool_call><|im_end|>',
    "stopping": '<tool_call>\n{"name": "stopping", "arguments": {}}\n</tool_call><|im_end|>',
    "unknown": '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call><|im_end|>',
    "malformed": '<tool_call>\n{"name": "echo", "arguments": {"te\n</tool_call><|im_end|>',
    "unclosed": '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}<|im_end|>',
    "parallel": '<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "mischief", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "echo", "arguments": {"text": 7}}\n</tool_call><|im_end|>',
    "huge": '<tool_call>\n{"name": "echo", "arguments": {"text": "' + "long " * 60 + '"}}\n</tool_call><|im_end|>',
    "answer": "It is done.<|im_end|>",
    "thinking": "<think>no <tool_call> here</think>done<|im_end|>",
    "unended": "words without an end",
    "empty": "",
    "control": "<|im_end|><|im_start|>user\nfaked<|im_end|>",
    "late": "text after the stop <|im_end|>\n",
}


class RandomPolicy(AsyncServerBase):
    """Samples random turns: calls of every kind, nonsense, nothing; aborts, changes its version, omits logprobs."""

    def __init__(self, world, kinds, seed, *, logprobs, aborting):
        self.encode, self.kinds, self.logprobs, self.aborting = world.encode, kinds, logprobs, aborting
        self.seed = seed
        self.returned: dict[str, list[tuple[int, int]]] = {}
        self.pending: dict[str, list[int]] = {}
        self.draws: dict[str, random.Random] = {}
        self.longest = self.num_calls = 0

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        params = SamplingParams.from_mapping(sampling_params)
        self.num_calls += 1
        draw = self.draws.setdefault(request_id, random.Random(f"{self.seed}{request_id}"))
        await asyncio.sleep(0)
        if request_id in self.pending:
            ids = self.pending.pop(request_id)
        elif draw.random() < 0.1:
            ids = [draw.randrange(256) for _ in range(draw.randrange(200))]
        else:
            ids = self.encode(TURNS[draw.choice(self.kinds)])
        end = next((i + 1 for i, token_id in enumerate(ids) if token_id in params.stop_token_ids), None)
        ids = ids[:end]
        stop = StopReason.STOP
        if self.aborting and len(ids) > 1 and draw.random() < 0.4:
            at = draw.randrange(len(ids))
            if at < params.max_tokens:
                self.pending[request_id] = ids[at:]
                ids, stop = ids[:at], StopReason.ABORTED
        if len(ids) >= params.max_tokens and stop is StopReason.STOP:
            stop = StopReason.STOP if end == len(ids) == params.max_tokens else StopReason.LENGTH
            ids = ids[: params.max_tokens]
        version = self.policy_version = self.policy_version + draw.randrange(2)
        self.returned.setdefault(request_id, []).extend((token_id, version) for token_id in ids)
        self.longest = max(self.longest, len(prompt_ids) + len(ids))
        logprobs = [-token_id / 100 for token_id in ids] if self.logprobs else None
        return TokenOutput(ids, logprobs, stop, policy_versions=(PolicySpan(0, version),))

    async def chat_completion(self, raw_request):
        raise NotImplementedError


def check(segment, returned, limits):
    """Raise unless the segment holds exactly what was returned, within its limits."""
    response, mask = segment.response_ids, segment.response_mask
    assert [i for i, bit in zip(response, mask, strict=True) if bit] == [token_id for token_id, _ in returned]
    assert len(response) <= limits["response"]
    assert len(segment.prompt_ids) + len(response) <= (limits["model_len"] or 10**6)
    assert not mask or mask[0] == mask[-1] == 1
    if segment.response_logprobs is not None:
        expected = [-i / 100 if bit else 0.0 for i, bit in zip(response, mask, strict=True)]
        assert segment.response_logprobs == expected
    versions = [
        next(span.version for span in reversed(segment.policy_versions) if span.start <= place)
        for place, bit in enumerate(mask)
        if bit
    ]
    assert versions == [version for _, version in returned]
    assert isinstance(segment.stop_reason, TrajectoryEnd)
    roles = [message["role"] for message in segment.extra_fields["messages"]]
    assert roles.count("assistant") <= (limits["max_assistant_turns"] or 10**6)
    num_answered = sum(one == "assistant" and other != "assistant" for one, other in pairwise(roles))
    assert num_answered <= (limits["max_user_turns"] or 10**6)
    assert segment.num_turns == 1 + roles.count("assistant") + num_answered
    assert segment.num_turns <= len(roles)


def check_costs(segment, limits):
    """Raise unless the counts of calls, outcomes, rewards and answers agree."""
    metrics, extra = segment.metrics, segment.extra_fields
    assert sum(metrics.tool_outcomes.values()) == metrics.num_tool_calls
    not_run = metrics.tool_outcomes.get("not_run", 0)
    assert len(extra["tool_rewards"]) == metrics.num_tool_calls - not_run
    assert sum(extra["turn_scores"]) == pytest.approx(sum(extra["tool_rewards"]))
    calls = [len(message.get("tool_calls", ())) for message in extra["messages"]]
    assert sum(calls) == metrics.num_tool_calls
    if segment.stop_reason is not TrajectoryEnd.RESPONSE_LENGTH:
        assert not_run <= sum(max(0, count - limits["max_parallel_calls"]) for count in calls)
    answered = [call["id"] for m in extra["messages"][: segment.num_turns] for call in m.get("tool_calls", ())]
    answers = [message["tool_call_id"] for message in extra["messages"] if message["role"] == "tool"]
    assert answers == answered[: len(answers)]


LIMITS = {
    "response": st.integers(1, 300),
    "model_len": st.none() | st.integers(620, 900),
    "turn": st.none() | st.integers(1, 120),
    "tool_text": st.sampled_from([16, 256, 2000]),
    "max_assistant_turns": st.none() | st.integers(1, 5),
    "max_user_turns": st.none() | st.integers(1, 5),
    "max_parallel_calls": st.integers(1, 3),
    "max_consecutive_malformed": st.integers(0, 3),
    "use_inference_chat_template": st.booleans(),
}
KINDS = st.lists(st.sampled_from(sorted(TURNS)), min_size=1, max_size=6)
MISCHIEF = {
    method: st.sampled_from(["ok", "ok", "fail", "cancel", "hang"])
    for method in ("create", "execute", "calc_reward", "release")
}
PROMPTS = {
    "fine": ([{"role": "user", "content": "row"}], ""),
    "long": ([{"role": "user", "content": "row " * 900}], "max_prompt_tokens"),
    "none": ([], "at least one message"),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=KINDS,
    limits=st.fixed_dictionaries(LIMITS),
    mischief=st.fixed_dictionaries(MISCHIEF),
    odd=st.sampled_from(sorted(PROMPTS)),
    seed=st.integers(0, 10**6),
    logprobs=st.booleans(),
    aborting=st.booleans(),
)
def test_every_trajectory_ends_and_its_record_is_consistent(
    world, kinds, limits, mischief, odd, seed, logprobs, aborting
):
    """Masks, lengths, log-probabilities, versions and budgets agree, the ids with mask 1 are exactly those that the server
    returned, every tool instance is released, and every counter ends at zero."""
    world.journal.clear()
    server = RandomPolicy(world, kinds, seed, logprobs=logprobs, aborting=aborting)
    hangs = "hanging" in kinds or "hang" in mischief.values()
    timeout_s = 0.05 if hangs else 30.0
    manager = world.build([], prompt=700, server=server, mischief=mischief, timeout_s=timeout_s, **limits)
    rows = [{"raw_prompt": PROMPTS[kind][0]} for kind in ("fine", odd, "fine")]
    batch = asyncio.run(asyncio.wait_for(manager.generate_sequences(rows, n=2, step=0), 60))
    for trajectory in batch.trajectories:
        failure = trajectory.failure
        refused = PROMPTS[odd][1] if trajectory.group_id == "train-0-1" else ""
        if refused:
            assert refused in failure.message
            continue
        if failure is not None and mischief["calc_reward"] != "ok":
            assert failure.kind is FailureKind.TOOL
            assert trajectory.reward is None
            continue
        assert failure is None, failure
        returned = list(server.returned.get(trajectory.trajectory_id, []))
        assert sum(len(segment.response_ids) for segment in trajectory.segments) <= limits["response"]
        for segment in trajectory.segments:
            share, returned = returned[: sum(segment.response_mask)], returned[sum(segment.response_mask) :]
            check(segment, share, limits)
            check_costs(segment, limits)
        assert returned == []
        assert trajectory.reward.score == 1.0
    check_nothing_is_left(world)


def check_nothing_is_left(world):
    """Raise unless every tool instance is released, once, and every counter is at zero."""
    created = sorted(name for event, name in world.journal if event == "create")
    assert sorted(name for event, name in world.journal if event == "release") == created
    assert set(world.client.num_in_flight.values()) == {0}
    assert world.client.num_sticky == 0
    assert world.client.num_waiting == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(["valid", "stateful", "parallel", "hanging", "answer"]), min_size=1, max_size=4),
    calls=st.integers(1, 30),
    steps=st.integers(0, 6),
    seed=st.integers(0, 10**6),
)
def test_a_batch_that_is_cancelled_anywhere_leaves_nothing(world, kinds, calls, steps, seed):
    """Wherever trajectories stand when their batch is cancelled (generating, in a tool, between the two, at their end), every
    tool instance is released and every counter ends at zero."""
    world.journal.clear()
    server = RandomPolicy(world, kinds, seed, logprobs=True, aborting=False)
    manager = world.build([], prompt=700, server=server, timeout_s=30.0, max_parallel_calls=3)
    rows = [{"raw_prompt": PROMPTS["fine"][0]} for _ in range(3)]

    async def run():
        task = asyncio.ensure_future(manager.generate_sequences(rows, n=2, step=0))
        for _ in range(400):
            if task.done() or server.num_calls >= calls:
                break
            await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await asyncio.wait_for(task, 60)
        except asyncio.CancelledError:
            return
        assert task.done()

    asyncio.run(run())
    check_nothing_is_left(world)


@pytest.mark.parametrize("kind", sorted(TURNS))
async def test_each_kind_of_turn_alone_ends(world, kind):
    """A model that repeats one kind of turn for ever ends its trajectory within the response budget."""
    segment = await world.run_ok(lambda request: TURNS[kind], response=300, timeout_s=0.01, max_parallel_calls=2)
    assert len(segment.response_ids) <= 300
