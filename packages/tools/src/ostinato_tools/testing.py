"""Fake tools for tests of whatever uses this package: an echo, a failure, a hang, and a counter with a life.

Each tool class takes a `journal` in its configuration, a list that every instance appends `(event, instance_id)` to.
"""

import asyncio
import contextlib
import json
from typing import Any

from ostinato_tools.base import BaseTool
from ostinato_tools.calls import ToolCall
from ostinato_tools.function import function_tool
from ostinato_tools.registry import ToolRegistry
from ostinato_tools.responses import ToolResponse


def make_schema(name: str, properties: dict | None = None, required: list[str] | None = None) -> dict:
    """Return a tool schema with these properties, all of them required unless said otherwise."""
    properties = {} if properties is None else properties
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The fake tool {name}.",
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties) if required is None else required,
            },
        },
    }


def make_call(name: str, arguments: dict | None = None, *, id: str = "call_0") -> ToolCall:
    """Return a well-formed call, as a parser would."""
    arguments = {} if arguments is None else arguments
    return ToolCall(name=name, arguments=arguments, raw_arguments=json.dumps(arguments), id=id)


@function_tool(schema=make_schema("echo", {"text": {"type": "string"}}))
async def echo(text: str) -> str:
    """Return the text."""
    return text


@function_tool(schema=make_schema("failing"))
async def failing() -> str:
    """Raise RuntimeError."""
    raise RuntimeError("this tool always fails")


@function_tool(schema=make_schema("hanging"))
async def hanging() -> str:
    """Wait until cancelled."""
    await asyncio.Event().wait()
    return "never"


@function_tool(schema=make_schema("stopping"))
async def stopping() -> tuple[str, float, dict]:
    """End the trajectory with reward 1.0."""
    return "done", 1.0, {"terminate": True}


class CounterTool(BaseTool):
    """Counts its calls; `create_kwargs: {start}`, `execute_kwargs: {step}`; the reward is the count."""

    def __init__(self, config: dict | None = None, tool_schema: dict | None = None) -> None:
        """Make the tool; named `counter` unless a schema is given."""
        super().__init__(
            {} if config is None else config, make_schema("counter") if tool_schema is None else tool_schema
        )
        self.journal: list[tuple[str, str | None]] = self.config.get("journal", [])
        self.count = 0

    async def create(self, instance_id: str | None = None, *, start: int = 0, **create_kwargs: Any) -> None:
        """Begin at `start`."""
        self.journal.append(("create", instance_id))
        self.count = start

    async def execute(
        self, instance_id: str, parameters: dict, *, step: int = 1, **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Add `step` and return the count as text and as reward."""
        self.journal.append(("execute", instance_id))
        self.count += step
        return ToolResponse(text=str(self.count)), float(self.count), {"count": self.count}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the count."""
        self.journal.append(("calc_reward", instance_id))
        return float(self.count)

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Write the release down."""
        self.journal.append(("release", instance_id))


class MischievousTool(CounterTool):
    """A counter that fails, hangs or ignores cancellation where its configuration says so.

    `config[method]`, for method in create, execute, calc_reward, release, is one of `"fail"`, `"hang"`, `"ignore"` (goes on for
    50 milliseconds, cancelled or not), `"cancel"` (ends as cancelled by itself), `"exit"` (raises SystemExit) or `"ok"`; a list
    of them is used up call by call, then `"ok"`.
    """

    async def _mischief(self, method: str) -> None:
        plan = self.config.get(method, "ok")
        if isinstance(plan, list):
            plan = plan.pop(0) if plan else "ok"
        if plan == "fail":
            raise RuntimeError(f"{method} always fails")
        if plan == "hang":
            await asyncio.Event().wait()
        if plan == "ignore":
            loop = asyncio.get_running_loop()
            end = loop.time() + 0.05
            while (rest := end - loop.time()) > 0:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(rest)
        if plan == "cancel":
            raise asyncio.CancelledError
        if plan == "exit":
            raise SystemExit(3)

    async def create(self, instance_id: str | None = None, *, start: int = 0, **create_kwargs: Any) -> None:
        """Write it down, then do as configured."""
        await super().create(instance_id, start=start, **create_kwargs)
        await self._mischief("create")

    async def execute(
        self, instance_id: str, parameters: dict, *, step: int = 1, **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Count, then do as configured."""
        result = await super().execute(instance_id, parameters, step=step, **execute_kwargs)
        await self._mischief("execute")
        return result

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Do as configured, or return the count."""
        await self._mischief("calc_reward")
        return await super().calc_reward(instance_id, **kwargs)

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Write it down, then do as configured."""
        await super().release(instance_id, **release_kwargs)
        await self._mischief("release")


def fake_registry(journal: list[tuple[str, str | None]] | None = None) -> ToolRegistry:
    """Return a registry of echo, failing, hanging, stopping and counter."""
    registry = ToolRegistry([echo, failing, hanging, stopping])
    registry.add_class(CounterTool, config={"journal": [] if journal is None else journal})
    return registry
