"""Agents that bring their own conversations, LangGraph graphs and programs behind the gateway, are told as all others."""

import sys

import pytest

from ostinato_agent_loop import GatewayConfig
from ostinato_rollout.tracing import SpanKind, Tracer
from ostinato_rollout.tracing.testing import MemorySink

DEADLINE_S = 30
ROW = {"raw_prompt": [{"role": "user", "content": "Please."}]}


async def trace_of(world):
    """Run one trajectory; return it, the root, and the spans of its conversations and its calls."""
    batch = await world.manager.generate_sequences([ROW], n=1, step=0)
    (trajectory,) = batch.trajectories
    assert trajectory.failure is None, trajectory.failure
    await world.manager.close()
    spans = sorted(world.memory.spans, key=lambda span: span.start_ns)
    conversations: dict[tuple, list[int]] = {}
    for span in spans:
        if span.kind is SpanKind.GENERATION:
            whole = conversations.setdefault((span.attributes["request_id"], span.attributes["segment"]), [])
            assert span.attributes["prompt_offset"] == len(whole)
            whole += span.inputs["prompt_ids"] + span.outputs["token_ids"]
    (root,) = [span for span in spans if span.kind is SpanKind.LOOP]
    assert {span.parent_id for span in spans} == {None, root.span_id}
    return trajectory, root, conversations, [span for span in spans if span.kind is SpanKind.TOOL]


@pytest.fixture
def traced(world):
    """Builds the world with a tracer that keeps spans."""

    def build(replies, **options):
        world.memory = MemorySink()
        world.build(replies, tracer=Tracer(world.memory), **options)
        return world

    return build


async def test_a_graph_is_told(traced, call):
    """The turns of `react_agent` are its segments, its calls are told with their answers, and the root has its reward."""
    pytest.importorskip("langgraph")
    world = traced([call(("echo", '{"text": "hello"}')), "It says hello.<|im_end|>"], agent="react_agent")
    trajectory, root, conversations, calls = await trace_of(world)
    assert list(conversations.values()) == [each.prompt_ids + each.response_ids for each in trajectory.segments]
    ((span),) = calls
    assert (span.inputs["arguments"], span.outputs["answer"]) == ({"text": "hello"}, "hello")
    assert (root.labels.agent, root.outputs["reward"]) == ("react_agent", 1.0)


async def test_a_program_is_told(traced):
    """The turns of a program that speaks OpenAI's API, each of its conversations, are told by the sessions behind the gateway."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    program = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
ask("one"); ask("two")
"""
    world = traced(
        ["One.<|im_end|>", "Two.<|im_end|>"],
        agent="gateway_agent",
        agent_options={"gateway": GatewayConfig(command=[sys.executable, "-c", program])},
    )
    trajectory, root, conversations, calls = await trace_of(world)
    assert len(conversations) == 2
    assert list(conversations.values()) == [each.prompt_ids + each.response_ids for each in trajectory.segments]
    assert calls == []
    assert len(root.outputs["segments"]) == 2
