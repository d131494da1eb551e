"""The official client and LangChain against the app, with scripted answers and with the embedded engine."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the app needs the extra serve")
pytest.importorskip("uvicorn", reason="the app needs the extra serve")
openai = pytest.importorskip("openai", reason="the official client is not installed")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call><|im_end|>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
USER = {"role": "user", "content": "How much is 12 + 30?"}


def asynchronous(url, **options):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, **options)


async def test_an_agent_with_a_tool_is_one_conversation(openai_app, sampled):
    """The loop that every user of the client writes: its messages, sent back as they came, continue one conversation."""
    async with openai_app([CALL, "It is 42.<|im_end|>"], api_key="secret") as (url, app, server):
        async with asynchronous(url, default_headers={"X-Session-ID": "agent-1"}) as client:
            messages = [USER]
            while True:
                answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[ADD])
                message = answer.choices[0].message
                messages.append(message)
                if answer.choices[0].finish_reason != "tool_calls":
                    break
                for call in message.tool_calls:
                    total = sum(json.loads(call.function.arguments).values())
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        assert message.content == "It is 42."
        (chat,) = await app.sessions.take("agent-1")
    (ledger,) = chat.segments
    chosen = [i for i, mask in zip(ledger.response_ids, ledger.response_mask, strict=True) if mask]
    assert chosen == sampled(CALL) + sampled("It is 42.<|im_end|>")
    assert server.requests[1].prompt_ids[: len(server.requests[0].prompt_ids)] == server.requests[0].prompt_ids


async def test_the_synchronous_client(openai_app):
    """The client of a program without an event loop works alike, models and errors too."""
    async with openai_app(["Hello!<|im_end|>"], api_key="secret") as (url, _, _):

        def program():
            with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
                answer = client.chat.completions.create(model="tiny", messages=[USER], temperature=0.2, seed=1)
                names = [model.id for model in client.models.list()]
                with pytest.raises(openai.NotFoundError, match="must be 'tiny'"):
                    client.chat.completions.create(model="other", messages=[USER])
                with pytest.raises(openai.BadRequestError, match="stop_token_ids"):
                    client.chat.completions.create(model="tiny", messages=[USER], stop=["\n"])
                with pytest.raises(openai.AuthenticationError):
                    client.with_options(api_key="wrong").models.retrieve("tiny")
            return answer.choices[0].message.content, names

        assert await asyncio.to_thread(program) == ("Hello!", ["tiny"])


async def test_streams_logprobs_and_token_ids(openai_app, sampled):
    """The client's own way to put a stream together gives the message, its calls, logprobs and the usage."""
    async with (
        openai_app(["<think>Hm.</think>So: " + CALL], api_key="secret") as (url, _, server),
        asynchronous(url) as client,
    ):
        stream = client.chat.completions.stream(
            model="tiny",
            messages=[USER],
            tools=[ADD],
            logprobs=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        async with stream as events:
            seen = [event async for event in events]
            final = await events.get_final_completion()
    [choice] = final.choices
    assert {"content.delta", "content.done", "tool_calls.function.arguments.done"} <= {event.type for event in seen}
    chunks = [event.chunk for event in seen if event.type == "chunk"]
    token_ids = [i for chunk in chunks for one in chunk.choices for i in getattr(one, "token_ids", ())]
    assert token_ids == sampled("<think>Hm.</think>So: " + CALL)
    assert chunks[0].prompt_token_ids == server.requests[0].prompt_ids
    assert choice.message.content.strip() == "So:"
    assert choice.message.reasoning_content == "Hm."
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 12, "b": 30}
    assert choice.finish_reason == "tool_calls"
    assert len(choice.logprobs.content) == final.usage.completion_tokens == len(token_ids)
    assert final.usage.prompt_tokens == len(server.requests[0].prompt_ids)


async def test_sessions_by_path(openai_app):
    """A base URL that names the session does what the header does."""
    async with openai_app(["Hello!<|im_end|>"], api_key="secret") as (url, app, _):
        async with asynchronous(f"{url}/sessions/s-1") as client:
            await client.chat.completions.create(model="tiny", messages=[USER])
        assert "s-1" in app.sessions


async def test_langchain_with_tools(openai_app):
    """LangChain's model with bound tools makes the call, and its messages continue the conversation."""
    langchain = pytest.importorskip("langchain_openai", reason="LangChain is not installed")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async with openai_app([CALL, "It is 42.<|im_end|>", CALL], api_key="secret") as (url, app, _):
        options = {"base_url": f"{url}/v1", "api_key": "secret", "max_retries": 0, "stream_usage": True}
        model = langchain.ChatOpenAI(model="tiny", **options)
        with_tools = model.bind_tools([add])
        messages = [HumanMessage("How much is 12 + 30?")]
        messages.append(await with_tools.ainvoke(messages))
        [call] = messages[-1].tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 12, "b": 30})
        messages.append(await add.ainvoke(call))
        assert isinstance(messages[-1], ToolMessage)
        assert (await with_tools.ainvoke(messages)).content == "It is 42."
        assert (app.sessions.num_begun, app.sessions.num_continued) == (1, 1)
        chunks = [chunk async for chunk in with_tools.astream([HumanMessage("Again?")])]
        whole = sum(chunks[1:], start=chunks[0])
        assert whole.tool_calls[0]["args"] == {"a": 12, "b": 30}
        assert whole.usage_metadata["output_tokens"] > 0


def test_the_example_of_the_readme_runs():
    """The README's program with the app runs as it is written, its assertion included."""
    file = Path(__file__).parents[2] / "packages" / "rollout" / "README.md"
    text = file.read_text() if file.exists() else str(metadata("ostinato-rollout").get_payload())
    [example] = [block for block in re.findall(r"```py\n(.*?)```", text, re.DOTALL) if "OpenAIApp" in block]
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


def embedded_model(tokenizer):
    """A random model over the tiny tokenizer, which writes noise."""
    torch = pytest.importorskip("torch", reason="the embedded engine is not installed")
    transformers = pytest.importorskip("transformers", reason="the embedded engine is not installed")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


async def test_the_embedded_engine(openai_app, tokenizer):
    """With a real engine: two turns over the client are one conversation whose record has the engine's own logprobs, the
    second one computes only what is new, and a seed repeats a turn."""
    pytest.importorskip("torch", reason="the embedded engine is not installed")
    from ostinato_engines.transformers_server import TransformersServer

    server = TransformersServer(embedded_model(tokenizer), device="cpu")
    async with openai_app(server=server, api_key="secret") as (url, app, _):
        async with asynchronous(url, default_headers={"X-Session-ID": "s"}) as client:
            create = client.chat.completions.create
            options = {"model": "tiny", "max_tokens": 12, "logprobs": True, "extra_body": {"return_token_ids": True}}
            first = await create(messages=[USER], seed=5, **options)
            again = await create(messages=[USER], seed=5, extra_headers={"X-Session-ID": "t"}, **options)
            history = [USER, first.choices[0].message, {"role": "user", "content": "And?"}]
            second = await create(messages=history, **options)
        (chat,) = await app.sessions.take("s")
        assert (app.num_in_flight, app.sessions.num_busy) == (0, 0)
    assert first.choices[0].token_ids == again.choices[0].token_ids
    (ledger,) = chat.segments
    known = len(first.prompt_token_ids) + len(first.choices[0].token_ids)
    assert second.prompt_token_ids[:known] == first.prompt_token_ids + first.choices[0].token_ids
    assert ledger.token_ids == second.prompt_token_ids + second.choices[0].token_ids
    told = [entry.logprob for answer in (first, second) for entry in answer.choices[0].logprobs.content]
    kept = [value for value, mask in zip(ledger.response_logprobs, ledger.response_mask, strict=True) if mask]
    assert told == kept
    assert second.usage.prompt_tokens_details.cached_tokens >= known - 1


async def test_a_client_that_gives_up_leaves_the_engine_free(openai_app, tokenizer):
    """The client's timeout cancels what the engine computes for it."""
    pytest.importorskip("torch", reason="the embedded engine is not installed")
    from ostinato_engines.transformers_server import TransformersServer

    server = TransformersServer(embedded_model(tokenizer), device="cpu")
    async with openai_app(server=server, api_key="secret") as (url, app, _):
        async with asynchronous(url, timeout=0.2) as client:
            many = [
                client.chat.completions.create(model="tiny", messages=[USER], n=8, max_tokens=400) for _ in range(8)
            ]
            results = await asyncio.gather(*many, return_exceptions=True)
        assert any(isinstance(result, openai.APITimeoutError) for result in results)
        async with asyncio.timeout(30):
            while app.num_in_flight:  # noqa: ASYNC110  (the app has no event for a client's leaving)
                await asyncio.sleep(0.01)
        assert app.sessions.num_busy == 0
        async with asyncio.timeout(30):
            while (await server.health()).num_running:  # noqa: ASYNC110  (engines have no event for that)
                await asyncio.sleep(0.01)
