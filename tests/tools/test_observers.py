"""Whoever watches a trajectory's calls sees each, and what became of it."""

import asyncio

import pytest

from ostinato_tools import ToolCall, ToolExecutor, ToolRegistry, function_tool
from ostinato_tools.testing import echo, make_schema


def call(name, call_id, **arguments):
    return ToolCall(name, arguments, "{}", call_id)


async def test_an_observer_sees_the_calls_of_its_trajectory_only():
    """One call or several at a time, of one trajectory and of no other; outcomes are what `run` returns."""
    seen = []

    async def observe(made, run):
        outcome = await run(made)
        seen.append(outcome)
        return outcome

    async with ToolExecutor(ToolRegistry([echo])) as executor:
        executor.observers["watched"] = observe
        async with executor.open("watched") as tools, executor.open("other") as others:
            (one,) = await tools.run([call("echo", "a", text="1")])
            two = await tools.run([call("echo", "b", text="2"), call("missing", "c")])
            await others.run([call("echo", "d", text="3")])
    assert sorted(seen, key=lambda outcome: outcome.call.id) == [one, *two]


async def test_an_observer_sees_what_ends_a_call_without_an_outcome():
    """A call that is cancelled with its trajectory passes its cancellation through the observer."""
    begun, seen = asyncio.Event(), []

    @function_tool(schema=make_schema("endless"))
    async def endless() -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    async def observe(made, run):
        try:
            return await run(made)
        except asyncio.CancelledError:
            seen.append(made.id)
            raise

    async with ToolExecutor(ToolRegistry([endless])) as executor:
        executor.observers["t"] = observe
        async with executor.open("t") as tools:
            running = asyncio.ensure_future(tools.run([call("endless", "a"), call("endless", "b")]))
            await begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    assert sorted(seen) == ["a", "b"]
