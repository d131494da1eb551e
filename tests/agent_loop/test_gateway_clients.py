"""The official client, LangChain, and an agent with tools of an MCP server, each as a program of its own kind behind the gateway."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ostinato_agent_loop import GatewayConfig, TrajectoryEnd, register

pytest.importorskip("starlette", reason="the gateway needs the extra gateway")
pytest.importorskip("uvicorn", reason="the gateway needs the extra gateway")
openai = pytest.importorskip("openai", reason="the official client is not installed")

from ostinato_agent_loop.gateway import GatewayAgentLoop  # noqa: E402  (behind the extra)

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent.py"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def sampled_ids(segment) -> list[int]:
    """What was sampled."""
    return [token for token, mask in zip(segment.response_ids, segment.response_mask, strict=True) if mask]


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not here")
@pytest.mark.parametrize("kind", ["command", "function"])
async def test_the_example_of_forty_lines(world, call, kind):
    """The example agent, as a program and as a function, computes with its tool; what it was answered is one exact segment."""
    turns = [call(("calculator", '{"expression": "6*7"}')), "The answer is 42.<|im_end|>"]
    where = {"command": [sys.executable, str(EXAMPLE)]} if kind == "command" else {"function": f"{EXAMPLE}:agent"}
    segment = await world.run_ok(turns, agent="gateway_agent", agent_options={"gateway": GatewayConfig(**where)})
    assert sampled_ids(segment) == world.encode("".join(turns))
    assert segment.extra_fields["program_output"].strip() == "The answer is 42."
    assert [message["content"] for message in segment.extra_fields["messages"] if message["role"] == "tool"] == ["42"]
    assert world.metrics["agent_loop/exact_continuations"] == 1.0


async def test_streams_and_responses(world, call):
    """A client that streams, and one of the Responses API, are recorded like any other, in one conversation where their words agree."""

    @register("test_streaming_gateway")
    class Streaming(GatewayAgentLoop):
        async def act(self, address, row):
            async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as client:
                messages = list(row["raw_prompt"])
                async with client.chat.completions.stream(model="any", messages=messages) as stream:
                    said = (await stream.get_final_completion()).choices[0].message.content
                items = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Again."}]
                response = await client.responses.create(model="any", input=items)
                return response.output_text

    segment = await world.run_ok(["One.<|im_end|>", "Two.<|im_end|>"], agent="test_streaming_gateway")
    assert sampled_ids(segment) == world.encode("One.<|im_end|>Two.<|im_end|>")
    assert segment.extra_fields["program_output"] == "Two."


async def test_a_langchain_agent(world, call):
    """LangChain's own agent over ChatOpenAI runs its tool and answers, token-exact."""
    pytest.importorskip("langchain_openai")
    agents = pytest.importorskip("langchain.agents")
    from langchain_openai import ChatOpenAI

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @register("test_langchain_gateway")
    class LangChainAgent(GatewayAgentLoop):
        async def act(self, address, row):
            model = ChatOpenAI(model="policy", base_url=address.base_url, api_key=address.api_key, max_retries=0)
            agent = agents.create_agent(model, [add])
            state = await agent.ainvoke({"messages": row["raw_prompt"]})
            return state["messages"][-1].content

    turns = [call(("add", '{"a": 12, "b": 30}')), "It is 42.<|im_end|>"]
    segment = await world.run_ok(turns, agent="test_langchain_gateway")
    assert sampled_ids(segment) == world.encode("".join(turns))
    assert segment.extra_fields["program_output"] == "It is 42."
    assert segment.stop_reason is TrajectoryEnd.PROGRAM_ENDED


async def test_an_agent_with_tools_of_an_mcp_server(world, call, tmp_path):
    """A program that brings an MCP server along shows its tools to the model and runs them there."""
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text("""
import json, sys

def reply(message, result):
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)

for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        reply(message, {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}},
                        "serverInfo": {"name": "adder", "version": "1"}})
    elif message.get("method") == "tools/list":
        schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
        reply(message, {"tools": [{"name": "add", "description": "Add.", "inputSchema": schema}]})
    elif message.get("method") == "tools/call":
        total = sum(message["params"]["arguments"].values())
        reply(message, {"content": [{"type": "text", "text": str(total)}]})
    elif "id" in message:
        reply(message, {})
""")
    (tmp_path / "agent.py").write_text("""
import asyncio, json, os, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from openai import AsyncOpenAI

async def main(row, server):
    parameters = StdioServerParameters(command=sys.executable, args=[server])
    async with stdio_client(parameters) as pipes, ClientSession(*pipes) as session, AsyncOpenAI(max_retries=0) as client:
        await session.initialize()
        listed = (await session.list_tools()).model_dump(by_alias=True)["tools"]
        tools = [{"type": "function", "function": {"name": each["name"], "description": each["description"],
                  "parameters": each["inputSchema"]}} for each in listed]
        messages = row["raw_prompt"]
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for made in message.tool_calls:
                result = await session.call_tool(made.function.name, json.loads(made.function.arguments))
                text = result.content[0].text
                messages.append({"role": "tool", "tool_call_id": made.id, "content": text})

print(asyncio.run(main(json.load(sys.stdin), sys.argv[1])))
""")
    turns = [call(("add", '{"a": 12, "b": 30}')), "It is 42.<|im_end|>"]
    command = [sys.executable, str(tmp_path / "agent.py"), str(tmp_path / "server.py")]
    segment = await world.run_ok(
        turns, agent="gateway_agent", agent_options={"gateway": GatewayConfig(command=command)}
    )
    assert sampled_ids(segment) == world.encode("".join(turns))
    assert segment.extra_fields["program_output"] == "It is 42.\n"
    answers = [message for message in segment.extra_fields["messages"] if message["role"] == "tool"]
    assert json.loads(answers[0]["content"]) == 42
