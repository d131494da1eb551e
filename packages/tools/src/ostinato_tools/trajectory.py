"""The tools of one trajectory: instances made on first use, state kept across turns, each instance released exactly once.

Nothing that a tool or a model does comes out of `run` as an exception; it becomes the outcome of that one call.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ostinato_tools.base import BaseTool
from ostinato_tools.calls import OutcomeKind, ToolCall, ToolOutcome
from ostinato_tools.deadline import DeadlineExceeded, run_bounded, stop
from ostinato_tools.errors import (
    ToolArgumentError,
    ToolClosedError,
    ToolFailedError,
    ToolInfrastructureError,
    ToolRateLimitedError,
    ToolRewardError,
    ToolTimeoutError,
)
from ostinato_tools.registry import ToolDefinition
from ostinato_tools.responses import ToolResponse, normalize_result, truncate

if TYPE_CHECKING:
    from ostinato_tools.executor import ToolExecutor

_logger = logging.getLogger(__name__)
_NO_KWARGS: Mapping[str, Any] = {}
_SPOKEN = {
    ToolArgumentError: OutcomeKind.BAD_ARGUMENTS,
    ToolFailedError: OutcomeKind.TOOL_ERROR,
    ToolTimeoutError: OutcomeKind.TIMEOUT,
    ToolRateLimitedError: OutcomeKind.RATE_LIMITED,
}
"""Errors by which a tool speaks to the model: their text is for it, and nothing is logged."""


class _Slot:
    """The place of one tool class in a trajectory: its instance, if there is one, and whose turn it is."""

    __slots__ = ("instance_id", "lock", "num_attempts", "tool")

    def __init__(self) -> None:
        self.tool: BaseTool | None = None
        self.instance_id = ""
        self.num_attempts = 0
        self.lock = asyncio.Lock()


class _Failed(Exception):
    """A call that ends here, with its class and the text for the model."""

    def __init__(self, kind: OutcomeKind, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text


class TrajectoryTools:
    """What one trajectory may call. Made by `ToolExecutor.open`, used as an asynchronous context manager."""

    def __init__(
        self,
        executor: "ToolExecutor",
        trajectory_id: str,
        definitions: Mapping[str, ToolDefinition],
        schemas: list[dict],
        tools_kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.trajectory_id = trajectory_id
        self.schemas = schemas
        """Schemas of these tools; shared between trajectories, not to be changed."""
        self.release_failures: list[str] = []
        """What went wrong while releasing; filled when the context is left."""
        self._executor = executor
        self._definitions = definitions
        self._tools_kwargs = tools_kwargs
        self._slots: dict[str, _Slot] = {}
        self._begun: list[tuple[str, BaseTool, str]] = []
        self._running: set[asyncio.Task] = set()
        self._scope: dict = {}
        self._open: bool | None = None

    async def __aenter__(self) -> "TrajectoryTools":
        if self._open is not None:
            raise ToolClosedError("tools of a trajectory must be opened once, got a second time; call open() again")
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        if not self._begun and not self._running:
            return
        interrupted: asyncio.CancelledError | None = None
        while self._begun or self._running:
            # A task of its own, so that cancelling the trajectory does not cut the release short.
            task = asyncio.ensure_future(self._release_all())
            while not task.done():
                try:
                    await asyncio.shield(task)
                except asyncio.CancelledError as error:
                    if not task.cancelled():
                        interrupted = error
            if not task.cancelled():
                task.result()
        if interrupted is not None:
            raise interrupted

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        """Run calls: those of one stateful tool in order, everything else at the same time.

        Args:
            calls: As parsed; a call with an error is answered with that error.

        Returns:
            One outcome per call, in the order of the calls. Never raises for a call.

        Raises:
            ToolClosedError: the tools are not open.
        """
        self._require_open()
        if len(calls) == 1:
            return [await self._run_one(calls[0])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run_one(call)) for call in calls]
        return [task.result() for task in tasks]

    async def calc_rewards(self) -> dict[str, float]:
        """Ask every stateful tool that was used for the reward of its state.

        Returns:
            Tool name to reward; a tool that was never called is absent.

        Raises:
            ToolClosedError: the tools are not open.
            ToolRewardError: a tool raised, took too long, or gave no finite number.
        """
        self._require_open()
        rewards: dict[str, float] = {}
        for name, slot in self._slots.items():
            async with slot.lock:
                if slot.tool is not None:
                    rewards[name] = await self._calc_reward(name, slot.tool, slot.instance_id)
        return rewards

    async def _calc_reward(self, name: str, tool: BaseTool, instance_id: str) -> float:
        timeout_s = self._executor.timeout_s
        cure = "; correct calc_reward of the tool"
        try:
            coroutine = tool.calc_reward(instance_id, **self._kwargs(name, "calc_reward_kwargs"))
            value = await run_bounded(coroutine, timeout_s, f"calc_reward of {name}", self._running)
        except DeadlineExceeded:
            raise ToolRewardError(f"calc_reward of {name} must end within {timeout_s} s, got no end{cure}") from None
        except Exception as error:  # the tool's code; whatever it raises, there is no reward
            raise ToolRewardError(f"calc_reward of {name} must give a number, got {_describe(error)}{cure}") from error
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        raise ToolRewardError(f"calc_reward of {name} must give a finite number, got {value!r:.80}{cure}")

    async def _run_one(self, call: ToolCall) -> ToolOutcome:
        started = time.perf_counter()
        response, reward, metrics = None, 0.0, {}
        try:
            definition, arguments = self._checked(call)
            if definition.function is not None:
                result = await self._bounded(definition, definition.function.invoke(arguments))
            else:
                result = await self._execute(definition, arguments)
            response, reward, metrics = self._normalized(definition, result)
            kind, text = OutcomeKind.OK, response.text or ""
        except _Failed as failed:
            kind, text = failed.kind, failed.text
        text = truncate(text, self._executor.max_response_length, self._executor.truncate_side)
        seconds = time.perf_counter() - started
        self._executor.count(call.name if call.name in self._definitions else "", kind, seconds)
        return ToolOutcome(
            call=call,
            kind=kind,
            message={"role": "tool", "content": _content(text, response), "tool_call_id": call.id, "name": call.name},
            reward=reward,
            metrics=metrics,
            seconds=seconds,
            terminate=metrics.get("terminate") is True,
        )

    def _checked(self, call: ToolCall) -> tuple[ToolDefinition, dict]:
        if call.error is not None:
            raise _Failed(OutcomeKind.BAD_ARGUMENTS, f"Error: {call.error}")
        definition = self._definitions.get(call.name)
        if definition is None:
            known = ", ".join(self._definitions) or "none"
            raise _Failed(
                OutcomeKind.UNKNOWN_TOOL, f"Error: there is no tool {call.name!r:.80}; available tools: {known}."
            )
        arguments = call.arguments
        if not isinstance(arguments, dict):
            raise _Failed(OutcomeKind.BAD_ARGUMENTS, f"Error: the arguments of {call.name} must be a JSON object.")
        problems = definition.problems(arguments)
        if not problems and definition.function is not None:
            problems = definition.function.argument_problems(arguments)
        if problems:
            raise _Failed(
                OutcomeKind.BAD_ARGUMENTS, f"Error: the arguments of {call.name} are not valid: {'; '.join(problems)}."
            )
        try:
            return definition, _own(arguments)
        except RecursionError:
            raise _Failed(
                OutcomeKind.BAD_ARGUMENTS, f"Error: the arguments of {call.name} are nested too deeply."
            ) from None

    async def _execute(self, definition: ToolDefinition, arguments: dict) -> Any:
        name = definition.name
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = _Slot()
        async with slot.lock:
            tool = slot.tool or await self._create(definition, slot)
            kwargs = self._kwargs(name, "execute_kwargs")
            return await self._bounded(definition, _execute(tool, slot.instance_id, arguments, kwargs))

    async def _create(self, definition: ToolDefinition, slot: _Slot) -> BaseTool:
        name = definition.name
        slot.num_attempts += 1
        suffix = "" if slot.num_attempts == 1 else f"/{slot.num_attempts}"
        instance_id = f"{self.trajectory_id}/{name}{suffix}"
        try:
            self._require_open()
            tool = definition.make()
            tool.trajectory_scope = self._scope
            self._begun.append((name, tool, instance_id))
            coroutine = _create(tool, instance_id, self._kwargs(name, "create_kwargs"))
            await run_bounded(coroutine, self._executor.timeout_s, f"create of {name}", self._running)
        except DeadlineExceeded:
            text = f"Error: {name} could not be started within {self._executor.timeout_s} s."
            raise _Failed(OutcomeKind.INFRASTRUCTURE, text) from None
        except Exception as error:  # the tool's code: its failure belongs to this call alone
            self._log("create", name, error)
            raise _Failed(
                OutcomeKind.INFRASTRUCTURE, f"Error: {name} could not be started: {_describe(error)}"
            ) from None
        slot.tool, slot.instance_id = tool, instance_id
        return tool

    async def _bounded(self, definition: ToolDefinition, coroutine: Any) -> Any:
        name, timeout_s = definition.name, self._executor.timeout_s
        try:
            return await run_bounded(coroutine, timeout_s, f"tool {name}", self._running)
        except DeadlineExceeded:
            raise _Failed(OutcomeKind.TIMEOUT, f"Error: {name} did not finish within {timeout_s} s.") from None
        except Exception as error:  # the tool's code: its failure belongs to this call alone
            for spoken, kind in _SPOKEN.items():
                if isinstance(error, spoken):
                    raise _Failed(kind, f"Error: {error}") from None
            self._log("execute", name, error)
            broken = isinstance(error, ToolInfrastructureError)
            kind = OutcomeKind.INFRASTRUCTURE if broken else OutcomeKind.TOOL_ERROR
            raise _Failed(kind, f"Error: {name} failed: {_describe(error)}") from None

    def _normalized(self, definition: ToolDefinition, result: Any) -> tuple[ToolResponse, float, dict]:
        try:
            return normalize_result(result)
        except Exception as error:  # also what a foreign __repr__ or __float__ raises
            self._log("result", definition.name, error)
            raise _Failed(OutcomeKind.TOOL_ERROR, f"Error: {definition.name} failed: {_describe(error)}") from None

    async def _release_all(self) -> None:
        if self._running:
            await stop(set(self._running), f"tools of trajectory {self.trajectory_id}")
            self._running.clear()
        while self._begun:
            name, tool, instance_id = self._begun.pop()
            try:
                coroutine = _release(tool, instance_id, self._kwargs(name, "release_kwargs"))
                await run_bounded(coroutine, self._executor.timeout_s, f"release of {name}", set())
            except DeadlineExceeded:
                self.release_failures.append(f"{name}: release did not end within {self._executor.timeout_s} s")
            except asyncio.CancelledError:  # the loop is being closed: the other instances still want their release
                self.release_failures.append(f"{name}: release was cancelled")
            except Exception as error:  # recorded: a trajectory is not lost because its tool cannot say goodbye
                self._log("release", name, error)
                self.release_failures.append(f"{name}: {_describe(error)}")

    def _kwargs(self, name: str, key: str) -> dict:
        kwargs = self._tools_kwargs.get(name, _NO_KWARGS).get(key)
        return _own(kwargs) if kwargs else {}

    def _require_open(self) -> None:
        if not self._open:
            state = "not opened yet" if self._open is None else "already released"
            raise ToolClosedError(
                f"tools of {self.trajectory_id} must be open, got {state}; use them inside `async with`"
            )

    def _log(self, what: str, name: str, error: BaseException) -> None:
        _logger.warning("%s of tool %s failed in trajectory %s", what, name, self.trajectory_id, exc_info=error)


# Coroutines around the tool's methods: a method that is no coroutine function fails inside the deadline, as any other.
async def _create(tool: BaseTool, instance_id: str, kwargs: dict) -> Any:
    return await tool.create(instance_id, **kwargs)


async def _execute(tool: BaseTool, instance_id: str, arguments: dict, kwargs: dict) -> Any:
    return await tool.execute(instance_id, arguments, **kwargs)


async def _release(tool: BaseTool, instance_id: str, kwargs: dict) -> Any:
    return await tool.release(instance_id, **kwargs)


def _own(value: Any) -> Any:
    """Copy containers, so that a tool that changes its arguments changes nobody else's; leaves are shared."""
    if type(value) is dict:
        return {key: _own(item) if type(item) in (dict, list) else item for key, item in value.items()}
    if type(value) is list:
        return [_own(item) if type(item) in (dict, list) else item for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _content(text: str, response: ToolResponse | None) -> str | list[dict]:
    if response is None or not (response.image or response.video):
        return text
    content = [{"type": "image", "image": image} for image in response.image or ()]
    content += [{"type": "video", "video": video} for video in response.video or ()]
    if text:
        content.append({"type": "text", "text": text})
    return content


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
        text.encode()
    except Exception:  # a foreign __str__ may raise, or give what is no text; the name of the class remains
        return name
    return f"{name}: {text}" if text else name
