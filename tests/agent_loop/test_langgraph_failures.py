"""Graphs that end badly, late or never: what was sampled is kept or the failure recorded, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ostinato_agent_loop import TrajectoryEnd
from ostinato_rollout import FailureKind

pytest.importorskip("langgraph", reason="needs the extra langgraph")

from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import RetryPolicy

from ostinato_agent_loop.errors import GraphStateError

ROW = {"raw_prompt": [{"role": "user", "content": "Please."}]}


def end(text):
    return text + "<|im_end|>"


def one_node(node, **options):
    """A graph of one node, which gets the model, the tools and the state."""

    def build(model, tools):
        graph = StateGraph(MessagesState)

        async def walk(state):
            return await node(model, tools, state)

        graph.add_node("walk", walk, **options)
        graph.add_edge(START, "walk")
        graph.add_edge("walk", END)
        return graph.compile()

    return build


def forever(model, tools):
    """A graph that never ends by itself."""
    graph = StateGraph(MessagesState)

    async def agent(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph.add_node("agent", agent)
    graph.add_node("more", lambda state: {"messages": [HumanMessage("More.")]})
    graph.add_edge(START, "agent")
    graph.add_edge("agent", "more")
    graph.add_edge("more", "agent")
    return graph.compile()


def segments_of(trajectory):
    assert trajectory.failure is None, trajectory.failure
    return trajectory.segments


async def test_a_graph_that_raises_is_a_recorded_failure(world, graph_agent):
    """An error of the graph's own is the trajectory's failure, with its words; siblings go on."""

    async def node(model, tools, state):
        answer = await model.ainvoke(state["messages"])
        if "bad" in answer.content:
            raise KeyError("what the graph forgot")
        return {"messages": [answer]}

    manager = world.build([end("good"), end("bad"), end("good")], agent=graph_agent(one_node(node)), num_workers=1)
    trajectories = (await manager.generate_sequences([ROW] * 3, n=1, step=0)).trajectories
    assert [each.failure is None for each in trajectories] == [True, False, True]
    assert trajectories[1].failure.kind is FailureKind.AGENT
    assert "what the graph forgot" in trajectories[1].failure.message
    assert trajectories[1].reward is None
    assert world.client.num_sticky == 0


async def test_a_failing_engine_is_the_engines_failure(world, graph_agent):
    """What the engine raises in a node is recorded as the engine's, not as the agent's."""

    async def node(model, tools, state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    trajectory = await world.run_one([RuntimeError("broken")], agent=graph_agent(one_node(node)))
    assert trajectory.failure.kind is FailureKind.ENGINE


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda model, tools: {}["nothing"], "nothing"),
        (lambda model, tools: None, "must return a compiled graph, got NoneType"),
        (lambda model, tools: StateGraph(MessagesState), "must return a compiled graph, got StateGraph"),
    ],
    ids=["raises", "none", "not compiled"],
)
async def test_a_graph_that_cannot_be_built_is_a_recorded_failure(world, graph_agent, build, what):
    """An error in build_graph, or something that is no compiled graph, is a failure that says so."""
    trajectory = await world.run_one([], agent=graph_agent(build))
    assert what in trajectory.failure.message


async def test_a_graph_that_never_asks_its_model_is_a_failure(world, graph_agent):
    """Without a turn there is nothing to train, and the failure says it."""

    async def node(model, tools, state):
        return {}

    trajectory = await world.run_one([], agent=graph_agent(one_node(node)))
    assert "must call its model at least once" in trajectory.failure.message


async def test_the_step_limit_is_an_end(world, graph_agent):
    """A graph that takes too many steps ends there, and what was sampled until then is kept."""
    agent = graph_agent(forever, max_steps=5)
    (segment,) = segments_of(await world.run_one([end(f"r{at}") for at in range(9)], agent=agent))
    assert segment.stop_reason is TrajectoryEnd.RECURSION_LIMIT
    assert sum(segment.response_mask) == sum(len(world.encode(end(f"r{at}"))) for at in range(3))


async def test_a_full_response_is_an_end(world, graph_agent):
    """A graph that never ends by itself ends where its response is full, within the budget."""
    agent = graph_agent(forever, max_steps=1000)
    (segment,) = segments_of(await world.run_one(lambda request: end("again"), agent=agent, response=60))
    assert segment.stop_reason is TrajectoryEnd.TOOL_RESPONSE_LENGTH
    assert len(segment.response_ids) <= 60


async def test_conversations_that_take_turns_share_the_budget(world, graph_agent):
    """A conversation that goes on after another one has used tokens has only what is left of the trajectory's response."""

    async def node(model, tools, state):
        histories = [[HumanMessage("One.")], [HumanMessage("Two.")]]
        while True:
            for history in histories:
                history += [await model.ainvoke(history), HumanMessage("More.")]

    agent = graph_agent(one_node(node))
    trajectory = await world.run_one(lambda request: end("once again"), agent=agent, response=100)
    segments = segments_of(trajectory)
    assert len(segments) == 2
    assert sum(len(segment.response_ids) for segment in segments) <= 100


async def test_a_limit_that_the_graph_ignores_still_holds(world, graph_agent):
    """A graph that swallows the error of a limit, or tries again and again, gets no further turn; the limit is the reason."""

    async def node(model, tools, state):
        history = list(state["messages"])
        for _ in range(10):
            try:
                history += [await model.ainvoke(history), HumanMessage("More.")]
            except Exception:
                continue
        return {"messages": history[-1:]}

    agent = graph_agent(one_node(node))
    (segment,) = segments_of(await world.run_one([end("a")] * 9, agent=agent, max_assistant_turns=2))
    assert segment.stop_reason is TrajectoryEnd.MAX_ASSISTANT_TURNS
    assert len(world.server.requests) == 2


async def test_a_node_that_is_tried_again(world, graph_agent):
    """A node that LangGraph retries after an error of its own asks anew: both turns are kept, each in a segment."""
    tries = []

    async def node(model, tools, state):
        answer = await model.ainvoke(state["messages"])
        tries.append(answer)
        if len(tries) == 1:
            raise ConnectionError("try again")
        return {"messages": [answer]}

    policy = RetryPolicy(initial_interval=0.001, max_attempts=3, retry_on=ConnectionError)
    agent = graph_agent(one_node(node, retry_policy=policy))
    segments = segments_of(await world.run_one([end("a"), end("b")], agent=agent))
    assert len(segments) == 2
    assert segments[0].prompt_ids == segments[1].prompt_ids


async def test_a_prompt_that_is_too_long_is_a_failure_and_a_later_one_an_end(world, graph_agent):
    """The row's prompt must fit, as with any agent; a later conversation that does not fit ends the trajectory, and one that
    is longer than a first prompt may be, by no more than was said before, is led."""

    async def node(model, tools, state):
        first = await model.ainvoke(state["messages"])
        await model.ainvoke([HumanMessage("long " * 20)])
        await model.ainvoke([HumanMessage("long " * 900)])
        return {"messages": [first]}

    agent = graph_agent(one_node(node))
    row = {"raw_prompt": [{"role": "user", "content": "long " * 900}]}
    trajectory = await world.run_one([end("a")], row, agent=agent)
    assert "max_prompt_tokens" in trajectory.failure.message
    segments = segments_of(await world.run_one([end("long " * 40), end("b")], agent=agent, prompt=40, response=400))
    assert [segment.stop_reason for segment in segments] == [TrajectoryEnd.RESPONSE_LENGTH] * 2
    assert 40 < len(segments[1].prompt_ids) < 40 + len(segments[0].response_ids)


async def test_conversations_share_the_length_of_the_response(world, graph_agent):
    """One conversation after another, each has what those before it have left; where nothing is left the trajectory ends."""

    async def node(model, tools, state):
        while True:
            await model.ainvoke(state["messages"])

    agent = graph_agent(one_node(node))
    segments = segments_of(await world.run_one(lambda request: end("x " * 20), agent=agent, response=100))
    assert sum(len(segment.response_ids) for segment in segments) == 100
    assert {segment.stop_reason for segment in segments} == {TrajectoryEnd.RESPONSE_LENGTH}


async def test_nodes_that_are_ordinary_functions(world, call, graph_agent):
    """Functions that LangGraph runs in threads use model and tools there, in order."""

    def build(model, tools):
        graph = StateGraph(MessagesState)
        calling = model.bind_tools(tools)
        echo = next(each for each in tools if each.name == "counter")

        def agent(state):
            assert threading.current_thread() is not threading.main_thread()
            return {"messages": [calling.invoke(state["messages"])]}

        def run_tool(state):
            made = state["messages"][-1].tool_calls[0]
            return {"messages": [echo.invoke({**made, "type": "tool_call"})]}

        graph.add_node("agent", agent)
        graph.add_node("tool", run_tool)
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", lambda state: "tool" if state["messages"][-1].tool_calls else END)
        graph.add_edge("tool", "agent")
        return graph.compile()

    agent = graph_agent(build)
    (segment,) = segments_of(await world.run_one([call(("counter", "{}")), end("done")], agent=agent))
    assert segment.extra_fields["tool_rewards"] == [1.0]
    assert segment.num_turns == 1 + 2 + 1


@pytest.mark.parametrize("way", ["async", "sync"])
async def test_a_deadline_in_the_middle_of_a_turn(world, graph_agent, way):
    """A trajectory that passes its deadline while the engine is silent is a recorded failure; the thread that waited for the
    turn goes on and ends, and the replica's place is free."""
    left = threading.Event()

    def build(model, tools):
        graph = StateGraph(MessagesState)

        def waits(state):
            try:
                return {"messages": [model.invoke(state["messages"])]}
            finally:
                left.set()

        async def awaits(state):
            try:
                return {"messages": [await model.ainvoke(state["messages"])]}
            finally:
                left.set()

        graph.add_node("wait", waits if way == "sync" else awaits)
        graph.add_edge(START, "wait")
        return graph.compile()

    from ostinato_engines.testing import ScriptedServer

    server = ScriptedServer([[1]], gate=asyncio.Event())
    agent = graph_agent(build)
    options = {"trajectory_timeout_s": 0.2}
    trajectory = await world.run_one([], agent=agent, server=server, agent_options=options)
    assert trajectory.failure.kind is FailureKind.TIMEOUT
    assert await asyncio.to_thread(left.wait, 10)


async def test_cancelling_frees_parallel_conversations(world, graph_agent):
    """A batch that is cancelled while many conversations of a graph are sampled leaves none of them, and no task."""
    from ostinato_engines.testing import ScriptedServer

    async def node(model, tools, state):
        calls = (model.ainvoke([HumanMessage(f"Number {at}.")]) for at in range(20))
        return {"messages": await asyncio.gather(*calls)}

    before = len(asyncio.all_tasks())
    server = ScriptedServer(lambda request: [1], gate=asyncio.Event())
    manager = world.build([], agent=graph_agent(one_node(node)), server=server)
    task = asyncio.ensure_future(manager.generate_sequences([ROW], n=2, step=0))
    async with asyncio.timeout(10):
        while len(server.requests) < 40:  # noqa: ASYNC110  (the server has no event for an arrival)
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(world.client.num_in_flight.values()) == {0}
    assert world.client.num_sticky == 0
    assert len(asyncio.all_tasks()) == before


async def test_what_a_graph_leaves_running_ends_with_it(world, graph_agent):
    """A task that a node started and nobody awaits is cancelled within its turn, and gets no further one."""
    stray = []

    async def node(model, tools, state):
        async def later():
            while True:
                await model.ainvoke([HumanMessage("Stray.")])

        answer = await model.ainvoke(state["messages"])
        stray.append(asyncio.ensure_future(later()))
        await asyncio.sleep(0)
        return {"messages": [answer]}

    trajectory = await world.run_one(lambda request: end("x"), agent=graph_agent(one_node(node)))
    assert trajectory.failure is None
    await asyncio.wait(stray, timeout=10)
    assert stray[0].cancelled() or isinstance(stray[0].exception(), GraphStateError)


async def test_a_task_that_will_not_end_holds_nobody(world, graph_agent):
    """A stray task that goes on after being cancelled gets no further turn, and the trajectory ends without it."""
    refused, gave_up = [], asyncio.Event()

    async def node(model, tools, state):
        async def stubborn():
            while not any(isinstance(error, GraphStateError) for error in refused):
                try:
                    await model.ainvoke([HumanMessage("Stray.")])
                except BaseException as error:
                    refused.append(error)
            gave_up.set()
            await asyncio.Event().wait()

        stray.append(asyncio.ensure_future(stubborn()))
        return {"messages": [await model.ainvoke(state["messages"])]}

    stray = []
    try:
        trajectory = await world.run_one(lambda request: end("x"), agent=graph_agent(one_node(node)))
        assert trajectory.failure is None
        async with asyncio.timeout(10):
            await gave_up.wait()
        assert not stray[0].done()
    finally:
        stray[0].cancel()
        await asyncio.wait(stray)


async def test_a_limit_is_the_reason_though_another_turn_ends_after_it(world, graph_agent):
    """Where one of two parallel calls meets the limit of turns while the other one is sampled, the limit is why the
    trajectory ended, and the sampled turn is kept."""

    async def node(model, tools, state):
        results = await asyncio.gather(*(model.ainvoke(state["messages"]) for _ in range(2)), return_exceptions=True)
        raise next(result for result in results if isinstance(result, Exception))

    agent = graph_agent(one_node(node))
    (segment,) = segments_of(await world.run_one([end("x")] * 2, agent=agent, max_assistant_turns=1))
    assert segment.stop_reason is TrajectoryEnd.MAX_ASSISTANT_TURNS


async def test_extra_fields_are_not_asked_where_a_limit_ended_the_graph(world, graph_agent):
    """There is no last state then, and nothing is made of it."""
    agent = graph_agent(forever, max_steps=3, extra_fields=lambda self, state: {"last": state["messages"][-1].content})
    (segment,) = segments_of(await world.run_one([end("x")] * 9, agent=agent))
    assert segment.stop_reason is TrajectoryEnd.RECURSION_LIMIT
    assert "last" not in segment.extra_fields


async def test_more_conversations_than_stay_open(world, graph_agent):
    """A graph that leads a hundred conversations has a hundred segments; the oldest ones hold no place any more."""

    async def node(model, tools, state):
        for at in range(100):
            answer = await model.ainvoke([HumanMessage(f"Number {at}.")])
        assert world.client.num_sticky <= 65
        return {"messages": [answer]}

    segments = segments_of(await world.run_one(lambda request: end("x"), agent=graph_agent(one_node(node))))
    assert len(segments) == 100


async def test_tools_outside_of_turns(world, graph_agent):
    """A tool that a node calls by itself, with arguments alone, answers with text, and is counted."""

    async def node(model, tools, state):
        echo = next(each for each in tools if each.name == "echo")
        text = await echo.ainvoke({"text": "hello"})
        return {"messages": [await model.ainvoke([*state["messages"], HumanMessage(text)])]}

    (segment,) = segments_of(await world.run_one([end("x")], agent=graph_agent(one_node(node))))
    assert segment.extra_fields["messages"][1]["content"] == "hello"
    assert segment.metrics.tool_outcomes == {"ok": 1}
    assert segment.extra_fields["turn_scores"] == []
