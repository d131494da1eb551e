"""Real LangGraph graphs: each of their conversations is an exact segment, however the graph walks."""

from __future__ import annotations

import json
import operator
import sys
from pathlib import Path
from typing import Annotated, TypedDict

import pytest

from ostinato_agent_loop import TrajectoryEnd

pytest.importorskip("langgraph", reason="needs the extra langgraph")

from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send, interrupt

MCP_SERVER = Path(__file__).parents[1] / "tools" / "mcp_server.py"


def end(text):
    return text + "<|im_end|>"


def sampled(world, segment):
    """The texts that the mask marks as sampled, one for each turn."""
    texts, ids = [], []
    for token_id, mask in zip([*segment.response_ids, 0], [*segment.response_mask, 0], strict=True):
        if mask:
            ids.append(token_id)
        elif ids:
            texts.append(world.tokenizer.decode(ids))
            ids = []
    return texts


def check_exact(world, segments):
    """All that the server returned stands in the segments, each token once, behind the very prompt that was asked."""
    served = [tuple(request.prompt_ids) for request in world.server.requests]
    found = []
    for segment in segments:
        ids, mask = segment.prompt_ids + segment.response_ids, [0] * len(segment.prompt_ids) + segment.response_mask
        starts = [place for place in range(1, len(mask)) if mask[place] and not mask[place - 1]]
        found += [tuple(ids[:start]) for start in starts]
    assert sorted(found) == sorted(served)


async def run(world, replies, agent, row=None, **options):
    """Run one trajectory that must not fail and must be exact; return its segments."""
    trajectory = await world.run_one(replies, row, agent=agent, **{"prompt": 700, "response": 500, **options})
    assert trajectory.failure is None, trajectory.failure
    check_exact(world, trajectory.segments)
    indices = [segment.segment_index for segment in trajectory.segments]
    assert indices == list(range(len(indices)))
    assert {segment.trajectory_id for segment in trajectory.segments} == {trajectory.trajectory_id}
    return trajectory.segments


def by_text(world, answers):
    """A policy that answers by what it is asked last: `answers` maps a part of the last message to a reply."""

    def reply(request):
        text = world.tokenizer.decode(request.prompt_ids)
        last = text.rsplit("<|im_start|>", 2)[1]
        return next(answer for key, answer in answers.items() if key in last)

    return reply


async def test_a_prebuilt_agent(world, call, graph_agent):
    """langchain.agents.create_agent runs on the policy and the run's tools: one segment, with the tool's rewards."""
    agents = pytest.importorskip("langchain.agents", reason="needs langchain")

    def build(model, tools):
        return agents.create_agent(model, tools, system_prompt="Count.", name="counting")

    replies = [call(("counter", "{}")), call(("counter", "{}"), ("echo", '{"text": "a"}')), end("Two.")]
    (segment,) = await run(world, replies, graph_agent(build), max_parallel_calls=2)
    assert sampled(world, segment) == replies
    assert segment.stop_reason is TrajectoryEnd.GRAPH_END
    assert segment.extra_fields["tool_rewards"] == [1.0, 2.0, 0.0]
    assert segment.extra_fields["turn_scores"] == [1.0, 2.0]
    assert segment.extra_fields["tool_state_rewards"] == {"counter": 2.0}
    assert segment.metrics.tool_outcomes == {"ok": 3}
    assert (segment.metrics.num_continuations, segment.metrics.num_exact_continuations) == (2, 2)
    assert segment.extra_fields["messages"][0] == {"role": "system", "content": "Count."}


async def test_a_tool_node_and_the_tools_of_the_run(world, call, graph_agent):
    """In a graph with LangGraph's ToolNode calls beyond the limit are refused, a failing tool and an unknown one are
    answered, and a tool that ends the trajectory ends it."""

    def build(model, tools):
        graph = StateGraph(MessagesState)
        calling = model.bind_tools(tools)

        async def agent(state):
            return {"messages": [await calling.ainvoke(state["messages"])]}

        graph.add_node("agent", agent)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", tools_condition)
        graph.add_edge("tools", "agent")
        return graph.compile()

    replies = [
        call(("echo", '{"text": "a"}'), ("echo", '{"text": "b"}')),
        call(("failing", "{}")),
        call(("nothing", "{}")),
        call(("stopping", "{}")),
    ]
    (segment,) = await run(world, replies, graph_agent(build), response=900)
    assert segment.stop_reason is TrajectoryEnd.TOOL_TERMINATED
    assert segment.metrics.tool_outcomes == {"ok": 2, "not_run": 1, "tool_error": 1}
    answers = [m["content"] for m in segment.extra_fields["messages"] if m["role"] == "tool"]
    assert answers[0] == "a"
    assert answers[1].startswith("Not run: at most 1 tool call")
    assert "always fails" in answers[2]
    assert "nothing" in answers[3]


async def test_a_cycle(world, graph_agent):
    """A graph that goes round until the model is content is one conversation, cut by the limit of turns."""

    def build(model, tools):
        graph = StateGraph(MessagesState)

        async def draft(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        def criticize(state):
            return {"messages": [HumanMessage("Better, please.")]}

        graph.add_node("draft", draft)
        graph.add_node("criticize", criticize)
        graph.add_edge(START, "draft")
        graph.add_conditional_edges("draft", lambda s: END if "final" in s["messages"][-1].content else "criticize")
        graph.add_edge("criticize", "draft")
        return graph.compile()

    agent = graph_agent(build)
    replies = [end("one"), end("two"), end("final")]
    (segment,) = await run(world, replies, agent)
    assert sampled(world, segment) == replies
    assert segment.num_turns == 1 + 3 + 2
    (segment,) = await run(world, replies, agent, max_assistant_turns=2)
    assert (sampled(world, segment), segment.stop_reason) == (replies[:2], TrajectoryEnd.MAX_ASSISTANT_TURNS)
    (segment,) = await run(world, replies, agent, max_user_turns=1)
    assert (sampled(world, segment), segment.stop_reason) == (replies[:2], TrajectoryEnd.MAX_USER_TURNS)


async def test_branches_of_one_history(world, graph_agent):
    """Three answers to one history, sampled side by side, are three segments with the same prompt; the one that is chosen
    goes on, in its own tokens."""

    class State(TypedDict):
        messages: list
        drafts: Annotated[list, operator.add]

    def build(model, tools):
        graph = StateGraph(State)

        async def draft(state):
            return {"drafts": [await model.ainvoke(state["messages"])]}

        async def choose(state):
            best = next(each for each in state["drafts"] if "good" in each.content)
            return {"messages": [await model.ainvoke([*state["messages"], best, HumanMessage("Go on.")])]}

        for name in ("draft", "choose"):
            graph.add_node(name, {"draft": draft, "choose": choose}[name])
        graph.add_conditional_edges(START, lambda state: [Send("draft", {**state, "drafts": []})] * 3, ["draft"])
        graph.add_edge("draft", "choose")
        graph.add_edge("choose", END)
        return graph.compile()

    drafts = iter([end("bad"), end("good"), end("ugly"), end("more")])
    segments = await run(world, lambda request: next(drafts), graph_agent(build))
    assert [sampled(world, segment) for segment in segments] == [
        ["bad<|im_end|>"],
        [end("good"), end("more")],
        [end("ugly")],
    ]
    assert len({tuple(segment.prompt_ids) for segment in segments}) == 1


async def test_samples_of_one_history_differ_by_their_seeds(world, graph_agent):
    """Branches of one history are sampled with seeds of their own, the same ones in every run."""

    def build(model, tools):
        graph = StateGraph(MessagesState)

        async def thrice(state):
            for _ in range(3):
                answer = await model.ainvoke(state["messages"])
            return {"messages": [answer]}

        graph.add_node("thrice", thrice)
        graph.add_edge(START, "thrice")
        return graph.compile()

    seeds = []
    for _ in range(2):
        segments = await run(world, [end("a"), end("b"), end("c")], graph_agent(build))
        assert len(segments) == 3
        seeds.append([request.params.seed for request in world.server.requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


async def test_an_interrupt_and_its_resumption(world, call, graph_agent):
    """A graph that stops to ask a human and goes on from its checkpoint is one conversation: its messages come back out of
    the checkpoint and still find their tokens."""
    questions = []

    def build(model, tools):
        graph = StateGraph(MessagesState)
        calling = model.bind_tools(tools)

        async def agent(state):
            return {"messages": [await calling.ainvoke(state["messages"])]}

        async def ask(state):
            made = state["messages"][-1].tool_calls[0]
            answer = interrupt({"question": made["args"]["text"]})
            return {"messages": [ToolMessage(answer, tool_call_id=made["id"], name=made["name"])]}

        graph.add_node("agent", agent)
        graph.add_node("ask", ask)
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", lambda state: "ask" if state["messages"][-1].tool_calls else END)
        graph.add_edge("ask", "agent")
        return graph.compile(checkpointer=InMemorySaver())

    async def run_graph(self, graph, graph_input, config):
        state = await graph.ainvoke(graph_input, config)
        while "__interrupt__" in state:
            questions.append(state["__interrupt__"][0].value["question"])
            state = await graph.ainvoke(Command(resume="Yes."), config)
        return state

    replies = [call(("echo", '{"text": "Really?"}')), call(("echo", '{"text": "Sure?"}')), end("Fine.")]
    (segment,) = await run(world, replies, graph_agent(build, run_graph=run_graph))
    assert questions == ["Really?", "Sure?"]
    assert sampled(world, segment) == replies
    assert segment.metrics.num_exact_continuations == 2

    trajectory = await world.run_one(replies, agent=graph_agent(build, name="graph_without_a_human"))
    assert "got an interrupt that nobody answered" in trajectory.failure.message


async def test_a_replay_from_a_checkpoint(world, graph_agent):
    """Going back to an earlier checkpoint and on from there again begins a segment whose prompt holds what was said before."""

    def build(model, tools):
        graph = StateGraph(MessagesState)

        async def agent(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph.add_node("first", agent)
        graph.add_node("ask", lambda state: {"messages": [HumanMessage("And then?")]})
        graph.add_node("second", agent)
        for edge in ((START, "first"), ("first", "ask"), ("ask", "second")):
            graph.add_edge(*edge)
        return graph.compile(checkpointer=InMemorySaver())

    async def run_graph(self, graph, graph_input, config):
        await graph.ainvoke(graph_input, config)
        earlier = next(each for each in graph.get_state_history(config) if each.next == ("second",))
        return await graph.ainvoke(None, {**earlier.config, "recursion_limit": 10})

    replies = [end("One."), end("Two."), end("Other.")]
    first, second = await run(world, replies, graph_agent(build, run_graph=run_graph))
    assert (sampled(world, first), sampled(world, second)) == (replies[:2], replies[2:])
    assert "One." in world.tokenizer.decode(second.prompt_ids)


async def test_a_sub_agent(world, call, graph_agent):
    """An agent that is a tool of another one has a conversation, and a segment, of its own; both have the run's tools."""
    from langchain_core.tools import tool

    def react(model, tools, system):
        graph = StateGraph(MessagesState)
        calling = model.bind_tools(tools)

        async def agent(state):
            return {"messages": [await calling.ainvoke([SystemMessage(system), *state["messages"]])]}

        graph.add_node("agent", agent)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", tools_condition)
        graph.add_edge("tools", "agent")
        return graph.compile()

    def build(model, tools):
        helper = react(model, tools, "You help.")

        @tool
        async def ask_helper(question: str) -> str:
            """Ask the helper."""
            state = await helper.ainvoke({"messages": [HumanMessage(question)]})
            return state["messages"][-1].content

        return react(model, [ask_helper], "You lead.")

    replies = [
        call(("ask_helper", '{"question": "Count."}')),
        call(("counter", "{}")),
        end("It is one."),
        call(("ask_helper", '{"question": "Again."}')),
        call(("counter", "{}")),
        end("It is two."),
        end("Two."),
    ]
    lead, first, second = await run(world, replies, graph_agent(build))
    assert sampled(world, lead) == [replies[0], replies[3], replies[6]]
    assert sampled(world, first) == replies[1:3]
    assert sampled(world, second) == replies[4:6]
    assert lead.extra_fields["tool_rewards"] == [1.0, 2.0]
    assert lead.extra_fields["messages"][-1]["content"] == "Two."
    assert lead.extra_fields["messages"][3]["content"] == "It is one."
    ids = [c["id"] for m in lead.extra_fields["messages"] for c in m.get("tool_calls", ())]
    assert len(set(ids)) == 2


async def test_parallel_subgraphs(world, graph_agent):
    """Subgraphs that run side by side, each a conversation of several turns, give each its own segment."""

    class Topic(MessagesState):
        topic: str

    class State(TypedDict):
        answers: Annotated[list, operator.add]
        messages: list

    def build(model, tools):
        inner = StateGraph(Topic)

        async def agent(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        inner.add_node("first", agent)
        inner.add_node("ask", lambda state: {"messages": [HumanMessage(f"More of {state['topic']}.")]})
        inner.add_node("second", agent)
        for edge in ((START, "first"), ("first", "ask"), ("ask", "second")):
            inner.add_edge(*edge)
        compiled = inner.compile()

        async def research(state):
            final = await compiled.ainvoke(state)
            return {"answers": [final["messages"][-1].content]}

        async def conclude(state):
            return {"messages": [await model.ainvoke([HumanMessage("Sum up: " + " ".join(sorted(state["answers"])))])]}

        outer = StateGraph(State)
        outer.add_node("research", research)
        outer.add_node("conclude", conclude)
        outer.add_conditional_edges(
            START,
            lambda _: [
                Send("research", {"topic": t, "messages": [HumanMessage(f"Tell {t}.")]}) for t in ("a", "b", "c")
            ],
            ["research"],
        )
        outer.add_edge("research", "conclude")
        return outer.compile()

    answers = {f"Tell {t}.": end(f"first {t}") for t in "abc"} | {f"More of {t}.": end(f"second {t}") for t in "abc"}
    answers["Sum up"] = end("All.")
    segments = await run(world, by_text(world, answers), graph_agent(build))
    assert [sampled(world, each) for each in segments] == [
        *([end(f"first {t}"), end(f"second {t}")] for t in "abc"),
        [end("All.")],
    ]
    assert segments[0].num_turns == 1 + 7 + 3


async def test_histories_that_are_cut_edited_and_summed_up(world, graph_agent):
    """A shortened, an edited and a summarized history begin segments, whose earlier turns are context; the history as it was
    goes on in its own tokens afterwards."""

    def build(model, tools):
        graph = StateGraph(MessagesState)

        async def walk(state):
            history = list(state["messages"])
            for text in ("Second.", "Third."):
                history += [await model.ainvoke(history), HumanMessage(text)]
            last = await model.ainvoke(history)
            await model.ainvoke(history[2:])  # the first exchange is gone
            await model.ainvoke([history[0], AIMessage("Edited."), *history[2:]])
            await model.ainvoke([SystemMessage("Summary: all is well."), *history[-1:]])
            final = await model.ainvoke([*history, last, HumanMessage("Fourth.")])
            return {"messages": [RemoveMessage(id=m.id) for m in state["messages"]] + [final]}

        graph.add_node("walk", walk)
        graph.add_edge(START, "walk")
        return graph.compile()

    replies = [end(text) for text in ("one", "two", "three", "cut", "edited", "summed", "four")]
    segments = await run(world, replies, graph_agent(build), response=100, prompt=100)
    assert [sampled(world, each) for each in segments] == [
        [end("one"), end("two"), end("three"), end("four")],
        [end("cut")],
        [end("edited")],
        [end("summed")],
    ]
    assert "Edited." in world.tokenizer.decode(segments[2].prompt_ids)
    assert not any(segments[2].response_mask[len(world.encode(end("edited"))) :])


async def test_a_turn_of_somebody_else_is_context(world, graph_agent):
    """An AIMessage that the policy did not say is shown to it, in the middle of a conversation as well, with mask 0."""

    def build(model, tools):
        graph = StateGraph(MessagesState)

        async def walk(state):
            history = [*state["messages"], AIMessage("By another."), HumanMessage("So?")]
            said = await model.ainvoke(history)
            await model.ainvoke([*history, said, HumanMessage("Hm."), AIMessage("Other."), HumanMessage("And?")])
            return {}

        graph.add_node("walk", walk)
        graph.add_edge(START, "walk")
        return graph.compile()

    replies = [end("mine"), end("mine again")]
    segments = await run(world, replies, graph_agent(build))
    assert [text for each in segments for text in sampled(world, each)] == replies
    shown = world.tokenizer.decode(segments[-1].prompt_ids + segments[-1].response_ids)
    assert "By another." in shown
    assert "Other." in shown


async def test_a_human_who_edits_a_call(world, call, graph_agent):
    """With LangChain's middleware a human edits a call before it runs: what is trained stays as it was sampled, and the tool gets
    what the human wrote, whether or not the middleware rewrites the turn (which makes a segment)."""
    agents = pytest.importorskip("langchain.agents", reason="needs langchain")
    from langchain.agents.middleware import HumanInTheLoopMiddleware

    def build(model, tools):
        asking = HumanInTheLoopMiddleware(interrupt_on={"echo": True})
        return agents.create_agent(model, tools, middleware=[asking], checkpointer=InMemorySaver())

    async def run_graph(self, graph, graph_input, config):
        await graph.ainvoke(graph_input, config)
        edited = {"type": "edit", "edited_action": {"name": "echo", "args": {"text": "by a human"}}}
        return await graph.ainvoke(Command(resume={"decisions": [edited]}), config)

    replies = [call(("echo", '{"text": "by the model"}')), end("Done.")]
    segments = await run(world, replies, graph_agent(build, run_graph=run_graph), response=900)
    assert [text for each in segments for text in sampled(world, each)] == replies
    (answer,) = [m["content"] for m in segments[-1].extra_fields["messages"] if m["role"] == "tool"]
    assert answer.endswith("by a human")
    assert segments[0].metrics.num_continuations == 1


async def test_a_history_that_middleware_sums_up(world, call, graph_agent):
    """With LangChain's summarization the summary is a turn of the policy, and what follows it a segment of its own."""
    agents = pytest.importorskip("langchain.agents", reason="needs langchain")
    from langchain.agents.middleware import SummarizationMiddleware

    def build(model, tools):
        summing = SummarizationMiddleware(model=model, trigger=("messages", 5), keep=("messages", 2))
        return agents.create_agent(model, tools, middleware=[summing])

    counting = call(("counter", "{}"))
    replies = [counting, counting, end("In short: two."), counting, end("In short: three."), end("Done.")]
    segments = await run(world, replies, graph_agent(build), prompt=3000, response=1000)
    texts = [text for each in segments for text in sampled(world, each)]
    assert sorted(texts) == sorted(replies)
    assert len(segments) == 5
    assert "In short: three." in world.tokenizer.decode(segments[-1].prompt_ids)
    assert segments[0].extra_fields["tool_rewards"] == [1.0, 2.0, 3.0]


async def test_a_graph_that_is_streamed(world, call, graph_agent):
    """A graph whose messages are streamed, which makes LangChain stream the model, is the same trajectory."""
    agents = pytest.importorskip("langchain.agents", reason="needs langchain")
    shown = []

    async def run_graph(self, graph, graph_input, config):
        async for mode, part in graph.astream(graph_input, config, stream_mode=["messages", "values"]):
            if mode == "messages":
                shown.append(part[0].content)
            else:
                state = part
        return state

    agent = graph_agent(lambda model, tools: agents.create_agent(model, tools), run_graph=run_graph)
    replies = [call(("counter", "{}"), content="Let me count."), end("One.")]
    (segment,) = await run(world, replies, agent)
    assert sampled(world, segment) == replies
    assert segment.extra_fields["tool_rewards"] == [1.0]
    assert "One." in shown
    assert segment.metrics.num_exact_continuations == 1


async def test_tools_of_an_mcp_server(world, call, graph_agent, tmp_path):
    """A prebuilt agent calls a tool of a real MCP server, which the run's executor runs."""
    pytest.importorskip("mcp", reason="needs the extra mcp")
    agents = pytest.importorskip("langchain.agents", reason="needs langchain")
    from ostinato_tools import load_tools
    from ostinato_tools.mcp import close_mcp_servers

    (tmp_path / "servers.json").write_text(
        json.dumps({"mcpServers": {"odd": {"command": sys.executable, "args": [str(MCP_SERVER)]}}})
    )
    entry = {"config": {"type": "mcp"}, "mcp": {"mcp_servers_config_path": "servers.json"}}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    registry = load_tools(tmp_path / "tools.yaml")
    world.registry = lambda **_: registry
    row = {"extra_info": {"tool_selection": ["echo"]}}
    try:
        agent = graph_agent(lambda model, tools: agents.create_agent(model, tools))
        replies = [call(("echo", '{"text": "hello"}')), end("Said.")]
        (segment,) = await run(world, replies, agent, row, prompt=2000)
    finally:
        close_mcp_servers()
    answers = [m["content"] for m in segment.extra_fields["messages"] if m["role"] == "tool"]
    assert len(answers) == 1
    assert "hello" in answers[0]
    assert segment.metrics.tool_outcomes == {"ok": 1}


async def test_what_a_graph_found_reaches_the_reward(world, graph_agent):
    """`graph_input` makes the state from any fields of the row, `extra_fields` gives what the graph found to the reward."""

    class State(TypedDict):
        question: str
        verdict: str

    def build(model, tools):
        graph = StateGraph(State)

        async def judge(state):
            return {"verdict": (await model.ainvoke(state["question"])).content}

        graph.add_node("judge", judge)
        graph.add_edge(START, "judge")
        return graph.compile()

    agent = graph_agent(
        build,
        graph_input=lambda self, row: {"question": row["text"]},
        extra_fields=lambda self, state: {"verdict": state["verdict"]},
    )
    (segment,) = await run(world, [end("Guilty.")], agent, {"text": "Well?"})
    (_, outputs) = world.rewarded[0]
    assert outputs[0].extra_fields["verdict"] == "Guilty."
    assert segment.reward_score == 1.0
