"""The tools of one trajectory: instances made on first use, state kept across turns, each instance released exactly once.

Nothing that a tool or a model does comes out of `run` as an exception; it becomes the outcome of that one call.
"""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ostinato_tools.base import BaseTool
from ostinato_tools.calls import CallFailed, OutcomeKind, ToolCall, ToolOutcome, check_calls
from ostinato_tools.deadline import DeadlineExceeded, run_bounded, stop
from ostinato_tools.errors import ToolClosedError, ToolRewardError
from ostinato_tools.failures import describe, spoken_failure, unspoken_failure
from ostinato_tools.responses import ToolResponse, message_content, normalize_result, short_repr

if TYPE_CHECKING:
    from ostinato_tools.executor import BoundTool, ToolExecutor

_logger = logging.getLogger(__name__)
_NO_KWARGS: Mapping[str, Any] = {}


class _Slot:
    """The place of one tool class in a trajectory: its instance, if there is one, and whose turn it is."""

    __slots__ = ("instance_id", "lock", "num_attempts", "stubborn", "tool")

    def __init__(self) -> None:
        self.tool: BaseTool | None = None
        self.instance_id = ""
        self.num_attempts = 0
        self.lock = asyncio.Lock()
        self.stubborn: asyncio.Task | None = None
        """A call that ignored its deadline and may still be running."""


class TrajectoryTools:
    """What one trajectory may call. Made by `ToolExecutor.open`, used as an asynchronous context manager."""

    __slots__ = (
        "__weakref__",
        "_begun",
        "_bound",
        "_executor",
        "_num_calls",
        "_observer",
        "_open",
        "_releasing",
        "_running",
        "_scope",
        "_slots",
        "_tools_kwargs",
        "release_failures",
        "schemas",
        "trajectory_id",
    )

    def __init__(
        self,
        executor: "ToolExecutor",
        trajectory_id: str,
        bound: "Mapping[str, BoundTool]",
        schemas: list[dict],
        tools_kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.trajectory_id = trajectory_id
        self.schemas = schemas
        """Schemas of these tools; shared between trajectories, not to be changed."""
        self.release_failures: list[str] = []
        """What went wrong while releasing; filled when the context is left."""
        self._executor = executor
        self._bound = bound
        self._tools_kwargs = tools_kwargs
        self._slots: dict[str, _Slot] = {}
        self._begun: dict[str, tuple[BoundTool, BaseTool]] = {}
        self._running: dict[asyncio.Task, asyncio.Future] = {}
        self._num_calls: dict[str, int] = {}
        self._scope: dict = {}
        self._observer = executor.observers.get(trajectory_id)
        self._releasing: asyncio.Task | None = None
        self._open: bool | None = None

    async def __aenter__(self) -> "TrajectoryTools":
        if self._open is not None:
            raise ToolClosedError("tools of a trajectory must be opened once, got a second time; call open() again")
        self._executor.enter(self)
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop what runs and release every instance; leaving the context does this. Closing again does nothing more.

        Raises:
            asyncio.CancelledError: the caller was cancelled meanwhile; everything has been released all the same.
        """
        self._open = False
        interrupted: asyncio.CancelledError | None = None
        while self._begun or self._running or self._releasing is not None:
            # A task of its own, so that cancelling the trajectory does not cut the release short; one for all who close.
            if self._releasing is None:
                self._releasing = asyncio.ensure_future(self._release_all())
            task = self._releasing
            while not task.done():
                try:
                    await asyncio.shield(task)
                except asyncio.CancelledError as error:
                    if not task.cancelled():
                        interrupted = error
            if self._releasing is task:
                self._releasing = None
            if not task.cancelled():
                task.result()
        self._executor.leave(self)
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
            ToolConfigError: `calls` is no list or tuple of calls.
        """
        self._require_open()
        check_calls(calls)
        if len(calls) != 1:
            return await self._run_many(calls)
        outcome = await self._observed(calls[0])  # not inside of a list, which would wait with it
        return [outcome]

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
        for name, slot in tuple(self._slots.items()):  # a call that runs meanwhile may add one
            async with slot.lock:
                self._require_open()
                if slot.tool is not None:
                    rewards[name] = await self._calc_reward(self._bound[name], slot.tool, slot.instance_id)
        return rewards

    async def _calc_reward(self, bound: "BoundTool", tool: BaseTool, instance_id: str) -> float:
        name = bound.name
        cure = "; correct calc_reward of the tool"
        try:
            coroutine = _call(tool.calc_reward, instance_id, kwargs=self._kwargs(name, "calc_reward_kwargs"))
            value = await run_bounded(coroutine, bound.deadlines(), f"calc_reward of {name}", self._running)
        except DeadlineExceeded:
            raise ToolRewardError(
                f"calc_reward of {name} must end within {bound.timeout_s} s, got no end{cure}"
            ) from None
        except Exception as error:  # the tool's code; whatever it raises, there is no reward
            raise ToolRewardError(f"calc_reward of {name} must give a number, got {describe(error)}{cure}") from error
        try:
            reward = float(value) if isinstance(value, int | float) else math.nan
        except OverflowError:
            reward = math.nan
        if math.isfinite(reward):
            return reward
        raise ToolRewardError(f"calc_reward of {name} must give a finite number, got {short_repr(value)}{cure}")

    async def _run_many(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._observed(call)) for call in calls]
        return [task.result() for task in tasks]

    def _observed(self, call: ToolCall) -> Coroutine[Any, Any, ToolOutcome]:
        return self._run_one(call) if self._observer is None else self._observer(call, self._run_one)

    async def _run_one(self, call: ToolCall) -> ToolOutcome:
        started = time.perf_counter()
        response, reward, metrics = None, 0.0, {}
        bound = self._bound.get(call.name)
        try:
            arguments = await self._checked(call, bound)
            assert bound is not None
            if bound.guard is None and bound.definition.function is not None:
                response, reward, metrics = await self._attempt_function(bound, arguments)
            else:
                response, reward, metrics = await self._run_guarded(bound, arguments, call.id)
            kind, text = OutcomeKind.OK, response.text or ""
        except CallFailed as failed:
            kind, text = failed.kind, failed.text
        text = self._executor.shorten(text)
        seconds = time.perf_counter() - started
        self._executor.count("" if bound is None else call.name, kind, seconds)
        return ToolOutcome(
            call=call,
            kind=kind,
            message={
                "role": "tool",
                "content": message_content(text, response),
                "tool_call_id": call.id,
                "name": call.name,
            },
            reward=reward,
            metrics=metrics,
            seconds=seconds,
            terminate=metrics.get("terminate") is True,
        )

    async def _checked(self, call: ToolCall, bound: "BoundTool | None") -> dict:
        if call.error is not None:
            raise CallFailed(OutcomeKind.BAD_ARGUMENTS, f"Error: {call.error}")
        if bound is None:
            known = ", ".join(self._bound) or "none"
            raise CallFailed(
                OutcomeKind.UNKNOWN_TOOL, f"Error: there is no tool {call.name!r:.80}; available tools: {known}."
            )
        arguments = call.arguments
        if not isinstance(arguments, dict):
            raise CallFailed(OutcomeKind.BAD_ARGUMENTS, f"Error: the arguments of {call.name} must be a JSON object.")
        problems = await bound.definition.problems(arguments)
        if problems:
            raise CallFailed(
                OutcomeKind.BAD_ARGUMENTS, f"Error: the arguments of {call.name} are not valid: {'; '.join(problems)}."
            )
        return arguments

    async def _run_guarded(self, bound: "BoundTool", arguments: dict, call_id: str) -> tuple[ToolResponse, float, dict]:
        name = bound.name
        if bound.definition.function is not None:
            return await self._keep_policy(
                bound, arguments, call_id, functools.partial(self._attempt_function, bound, arguments)
            )
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = _Slot()
        attempt = functools.partial(self._attempt_method, bound, slot, arguments)
        async with slot.lock:  # through all attempts, so that later calls do not overtake
            return await self._keep_policy(bound, arguments, call_id, attempt)

    async def _keep_policy(self, bound: "BoundTool", arguments: dict, call_id: str, attempt: Any) -> Any:
        if bound.guard is None:
            return await attempt()
        num_earlier = self._num_calls.get(bound.name, 0)
        self._num_calls[bound.name] = num_earlier + 1
        return await bound.guard.run(arguments, f"{self.trajectory_id}/{call_id}", num_earlier, attempt)

    async def _attempt_function(self, bound: "BoundTool", arguments: dict) -> tuple[ToolResponse, float, dict]:
        function = bound.definition.function
        assert function is not None
        self._require_open_for(bound)
        own_arguments = _owned(bound, arguments)
        try:
            result = await run_bounded(function.invoke(own_arguments), bound.deadlines(), bound.name, self._running)
        except Exception as error:  # the tool's code: its failure belongs to this call alone
            raise self._failed(bound, error) from None
        return self._normalized(bound, result)

    async def _attempt_method(
        self, bound: "BoundTool", slot: _Slot, arguments: dict
    ) -> tuple[ToolResponse, float, dict]:
        self._require_open_for(bound)
        if slot.stubborn is not None and not slot.stubborn.done():
            text = f"Error: {bound.name} still runs an earlier call that ignored its deadline."
            raise CallFailed(OutcomeKind.INFRASTRUCTURE, text)
        tool = slot.tool or await self._create(bound, slot)
        kwargs = self._kwargs(bound.name, "execute_kwargs")
        coroutine = _call(tool.execute, slot.instance_id, _owned(bound, arguments), kwargs=kwargs)
        try:
            result = await run_bounded(coroutine, bound.deadlines(), bound.name, self._running)
        except Exception as error:  # as above
            if isinstance(error, DeadlineExceeded):
                slot.stubborn = error.task
            raise self._failed(bound, error) from None
        return self._normalized(bound, result)

    async def _create(self, bound: "BoundTool", slot: _Slot) -> BaseTool:
        name = bound.name
        slot.num_attempts += 1
        suffix = "" if slot.num_attempts == 1 else f"/{slot.num_attempts}"
        instance_id = f"{self.trajectory_id}/{name}{suffix}"
        try:
            tool = bound.definition.make()
            tool.trajectory_scope = self._scope
            coroutine = self._begin(bound, tool, instance_id)
            await run_bounded(coroutine, bound.deadlines(), f"create of {name}", self._running)
        except DeadlineExceeded:
            text = f"Error: {name} could not be started within {bound.timeout_s} s."
            raise CallFailed(OutcomeKind.INFRASTRUCTURE, text) from None
        except Exception as error:  # the tool's code: its failure belongs to this call alone
            self._log("create", name, error)
            raise CallFailed(
                OutcomeKind.INFRASTRUCTURE, f"Error: {name} could not be started: {describe(error)}"
            ) from None
        slot.tool, slot.instance_id = tool, instance_id
        return tool

    async def _begin(self, bound: "BoundTool", tool: BaseTool, instance_id: str) -> None:
        # Here rather than by the caller: a create that is cancelled before its first step asks for no release.
        self._begun[instance_id] = (bound, tool)
        await _call(tool.create, instance_id, kwargs=self._kwargs(bound.name, "create_kwargs"))

    def _failed(self, bound: "BoundTool", error: Exception) -> CallFailed:
        """How a call ends whose coroutine ended with `error`."""
        if not self._open:
            return _closed(bound)
        if isinstance(error, DeadlineExceeded):
            return CallFailed(OutcomeKind.TIMEOUT, f"Error: {bound.name} did not finish within {bound.timeout_s} s.")
        spoken = spoken_failure(error)
        if spoken is None:
            self._log("execute", bound.name, error)
        return spoken or unspoken_failure(bound.name, error)

    def _normalized(self, bound: "BoundTool", result: Any) -> tuple[ToolResponse, float, dict]:
        try:
            return normalize_result(result)
        except Exception as error:  # also what a foreign __repr__ or __float__ raises
            self._log("result", bound.name, error)
            raise unspoken_failure(bound.name, error) from None

    async def _release_all(self) -> None:
        if self._running:
            await stop(dict(self._running), f"tools of trajectory {self.trajectory_id}")
            self._running.clear()
        while self._begun:
            instance_id, (bound, tool) = self._begun.popitem()
            name = bound.name
            try:
                coroutine = _call(tool.release, instance_id, kwargs=self._kwargs(name, "release_kwargs"))
                await run_bounded(coroutine, bound.deadlines(), f"release of {name}", {})
            except DeadlineExceeded:
                self.release_failures.append(f"{name}: release did not end within {bound.timeout_s} s")
            except asyncio.CancelledError:  # the loop is being closed: the other instances still want their release
                self.release_failures.append(f"{name}: release was cancelled")
            except Exception as error:  # recorded: a trajectory is not lost because its tool cannot say goodbye
                self._log("release", name, error)
                self.release_failures.append(f"{name}: {describe(error)}")

    def _kwargs(self, name: str, key: str) -> dict:
        kwargs = self._tools_kwargs.get(name, _NO_KWARGS).get(key)
        return _own(kwargs) if kwargs else {}

    def _require_open(self) -> None:
        if not self._open:
            state = "not opened yet" if self._open is None else "already released"
            raise ToolClosedError(
                f"tools of {self.trajectory_id} must be open, got {state}; use them inside `async with`"
            )

    def _require_open_for(self, bound: "BoundTool") -> None:
        if not self._open:
            raise _closed(bound)

    def _log(self, what: str, name: str, error: BaseException) -> None:
        _logger.warning("%s of tool %s failed in trajectory %s", what, name, self.trajectory_id, exc_info=error)


async def _call(method: Callable[..., Any], *args: Any, kwargs: dict) -> Any:
    # A method that is no coroutine function fails inside the deadline, as any other.
    result = method(*args, **kwargs)
    if not hasattr(result, "__await__"):
        raise TypeError(f"{method.__qualname__} must be asynchronous, got {type(result).__name__}; write `async def`")
    return await result


def _closed(bound: "BoundTool") -> CallFailed:
    text = f"Error: {bound.name} was not run to its end, because the tools were closed."
    return CallFailed(OutcomeKind.INFRASTRUCTURE, text)


def _owned(bound: "BoundTool", arguments: dict) -> dict:
    try:
        return _own(arguments)
    except RecursionError:
        raise CallFailed(
            OutcomeKind.BAD_ARGUMENTS, f"Error: the arguments of {bound.name} are nested too deeply."
        ) from None


def _own(value: Any) -> Any:
    """Copy containers, so that a tool that changes its arguments changes nobody else's; leaves are shared."""
    if type(value) is dict:
        return {key: _own(item) if type(item) in (dict, list) else item for key, item in value.items()}
    if type(value) is list:
        return [_own(item) if type(item) in (dict, list) else item for item in value]
    return dict(value) if isinstance(value, Mapping) else value
