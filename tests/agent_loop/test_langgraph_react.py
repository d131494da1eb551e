"""`react_agent` is `tool_agent` as a graph: the same tokens, ends, rewards and failures for the same policy."""

from __future__ import annotations

import asyncio
import inspect

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato_agent_loop import AgentConfigError, TrajectoryEnd, agent_loop_class

pytest.importorskip("langgraph", reason="needs the extra langgraph")

DONE = "done<|im_end|>"
MALFORMED = '<tool_call>\n{"name": "echo", "arguments": {"text": \n</tool_call><|im_end|>'
UNCLOSED = '<tool_call>\n{"name": "echo"<|im_end|>'


def sampled_ids(segments):
    """The ids that the masks mark as sampled."""
    pairs = [pair for each in segments for pair in zip(each.response_ids, each.response_mask, strict=True)]
    return [token_id for token_id, mask in pairs if mask]


def without_times(output):
    """An output as plain data, without what a clock measured."""
    data = msgspec.to_builtins(output, builtin_types=(float,))
    for name in ("generate_sequences", "admission", "tool_calls", "compute_score"):
        del data["metrics"][name]
    for name in ("num_continuations", "num_exact_continuations"):
        del data["metrics"][name]
    return data


def one_call(arguments="{}", name="counter"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TURNS = [
    DONE,
    one_call() + "<|im_end|>",
    "Let me see. " + one_call('{"text": "a"}', "echo") + "<|im_end|>",
    one_call('{"text": "a"}', "echo") + "\n" + one_call() + "\n" + one_call('{"text": 3}', "echo") + "<|im_end|>",
    one_call("{}", "failing") + "<|im_end|>",
    one_call("{}", "stopping") + "<|im_end|>",
    one_call("{}", "nothing") + "<|im_end|>",
    MALFORMED,
    MALFORMED.removesuffix("<|im_end|>") + one_call() + "<|im_end|>",
    UNCLOSED,
    one_call() + "\n" + UNCLOSED,
    "<think>maybe " + one_call() + "</think>" + one_call() + "<|im_end|>",
    one_call(),  # no stop token: goes on until the server's script ends the turn
    "word " * 80 + "<|im_end|>",
    [],
]

LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_assistant_turns": st.integers(1, 4),
        "max_user_turns": st.integers(1, 3),
        "max_parallel_calls": st.integers(1, 3),
        "max_consecutive_malformed": st.integers(0, 2),
        "response": st.sampled_from([30, 60, 120, 200]),
        "turn": st.sampled_from([8, 20, 60]),
        "tool_text": st.sampled_from([8, 256]),
        "model_len": st.sampled_from([650, 700]),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.sampled_from(TURNS), min_size=1, max_size=5), limits=LIMITS)
async def test_both_agents_give_the_same(world_class, turns, limits):
    """Whatever the policy says and whatever the limits are, the graph's trajectory is that of tool_agent: ids, masks,
    logprobs, versions, end, rewards, messages and outcomes; and nothing is left behind by either."""
    found = []
    for agent in ("tool_agent", "react_agent"):
        world = world_class()
        trajectory = await world.run_one([*turns, *[DONE] * 6], agent=agent, timeout_s=30.0, **limits)
        failure = trajectory.failure
        found.append(([without_times(each) for each in trajectory.segments], failure and failure.message))
        if failure is None:
            asked = [token_id for request in world.server.requests for token_id in request.prompt_ids]
            assert asked
    assert found[0] == found[1]


@pytest.fixture
def world_class(world):
    """The class of `world`, for tests that need several."""
    return type(world)


async def test_trained_ids_are_sampled_ids(world):
    """What the policy returned, spelled as no tokenizer would, stands in the output id by id."""
    spelled = [
        [*(world.tokenizer.encode_text(letter)[0] for letter in one_call()), world.tokenizer.stop_token_ids[0]],
        [*(world.tokenizer.encode_text(letter)[0] for letter in "bye"), world.tokenizer.stop_token_ids[0]],
    ]
    with_control = [
        *world.encode("<tool_call>"),
        *(world.tokenizer.encode_text(letter)[0] for letter in '{"name": "counter", "arguments": {}}'),
        *world.encode("</tool_call><|im_end|>"),
    ]
    segment = await world.run_ok([with_control, spelled[1]], agent="react_agent")
    assert sampled_ids([segment]) == with_control + spelled[1]
    assert segment.metrics.tool_outcomes == {"ok": 1}
    assert segment.stop_reason is TrajectoryEnd.NO_TOOL_CALL


async def test_it_needs_tools_to_be_on(world):
    """With multi_turn.enable=false it is refused before anything starts."""
    with pytest.raises(AgentConfigError, match=r"multi_turn\.enable"):
        world.build([DONE], agent="react_agent", enable=False)


async def test_a_hundred_at_once_stay_apart(world, call):
    """Trajectories that run at the same time have each their own tokens and their own tools."""

    def reply(request):
        text = world.tokenizer.decode(request.prompt_ids)
        number = text.split("Number ")[1].split(".")[0]
        return DONE if "<tool_response>" in text else call(("echo", f'{{"text": "n{number}"}}'))

    manager = world.build(reply, agent="react_agent", prompt=800)
    rows = [{"raw_prompt": [{"role": "user", "content": f"Number {number}."}]} for number in range(100)]
    batch = await manager.generate_sequences(rows, n=1, step=0)
    for number, trajectory in enumerate(batch.trajectories):
        assert trajectory.failure is None
        answers = [m["content"] for m in trajectory.segments[0].extra_fields["messages"] if m["role"] == "tool"]
        assert answers == [f"n{number}"]
    assert batch.metrics["agent_loop/exact_continuations"] == 1.0
    assert set(world.client.num_in_flight.values()) == {0}


async def test_a_cancelled_batch_frees_everything(world, call):
    """Cancelling while a tool hangs leaves no conversation, no tool and no task behind."""
    before = len(asyncio.all_tasks())
    manager = world.build([call(("counter", "{}"), ("hanging", "{}")), DONE], agent="react_agent", max_parallel_calls=2)
    row = {"raw_prompt": [{"role": "user", "content": "Please."}]}
    task = asyncio.ensure_future(manager.generate_sequences([row], n=1, step=0))
    async with asyncio.timeout(10):
        while not world.journal:  # noqa: ASYNC110  (the tool's journal has no event)
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [event for event, _ in world.journal][-1] == "release"
    assert set(world.client.num_in_flight.values()) == {0}
    assert world.client.num_sticky == 0
    assert len(asyncio.all_tasks()) == before


def test_it_is_registered_without_being_imported():
    """The name is known although the module is imported only when somebody asks for it."""
    cls = agent_loop_class("react_agent")
    assert cls.__module__ == "ostinato_agent_loop.langgraph_agent.react"
    assert not inspect.isabstract(cls)
