"""Calls `compute_score`, wherever it must run: on the event loop, in a thread, or in a process.

Invariant: whatever the function does, raise, hang, compute without end or never come back, costs one call and its deadline; it stops
neither the event loop nor, should it never return, the program. An async function runs on the loop, or in the process, and is
trusted not to block the first.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from ostinato_tools.deadline import DeadlineExceeded, Deadlines, ToolGone, run_bounded
from ostinato_tools.threads import DaemonThreads
from ostinato_trainer.config.reward import RewardConfig
from ostinato_trainer.custom_code import is_file, load_object, without_prefix
from ostinato_trainer.errors import RewardError
from ostinato_trainer.home_paths import home_path
from ostinato_trainer.rewards.failures import failing_as, late_text
from ostinato_trainer.rewards.scoring_processes import ScoringProcesses

__all__ = ["ARGUMENTS", "ComputeScore", "RewardFunction", "custom_function", "keywords_of"]

ComputeScore = Callable[..., Any]
"""`f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float | dict`, or a coroutine of it."""

ARGUMENTS: Final = ("data_source", "solution_str", "ground_truth", "extra_info")
_KEY: Final = "reward.custom_reward_function"
_MODULE: Final = "ostinato_custom_reward"
_MAX_HANGING: Final = 64


class RewardFunction(Protocol):
    """A function with a place to run."""

    name: str

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call it by keyword and return its answer as it is; cancelling gives it up.

        Raises:
            RewardError: it raised, or took longer than `reward.timeout_s`.
        """
        ...

    async def aclose(self) -> None:
        """Free what it holds."""
        ...


def custom_function(config: RewardConfig, compute_score: ComputeScore | None) -> RewardFunction | None:
    """The function of the user's own, if there is one, checked and with a place to run.

    Args:
        config: the node `reward`.
        compute_score: a function to use instead of the configured one.

    Raises:
        RewardError: it cannot be loaded, does not take the arguments, or cannot run in a process while that is asked for.
    """
    custom = config.custom_reward_function
    if compute_score is None and custom.path is None:
        return None
    function = compute_score if compute_score is not None else _loaded(config)
    _check_signature(function, custom.reward_kwargs)
    if config.executor == "process":
        return _in_processes(function, config, is_configured=compute_score is None)
    return _InThisProcess(function, custom.reward_kwargs, config.num_workers, config.timeout_s)


def keywords_of(function: ComputeScore, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `kwargs` that the function takes by name."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in names and name not in ARGUMENTS}


class _InThisProcess:
    """An async function on the loop, another in a thread; calls that never return are left behind, up to a number."""

    def __init__(self, function: ComputeScore, kwargs: Mapping[str, Any], num_workers: int, timeout_s: float) -> None:
        self.name = _name_of(function)
        self._function, self._kwargs, self._timeout_s = function, dict(kwargs), timeout_s
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self._threads = DaemonThreads(num_workers + _MAX_HANGING)
        self._hanging = _Count()
        self._deadlines: Deadlines | None = None

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        if (num_hanging := self._hanging.value) >= _MAX_HANGING:
            raise RewardError(
                f"{self.name} must return, got {num_hanging} calls that run on beyond their deadline; mend the function, or "
                "write reward.executor=process, which kills what hangs"
            )
        loop = asyncio.get_running_loop()
        if self._deadlines is None or self._deadlines.loop is not loop:
            self._deadlines = Deadlines(self._timeout_s, loop)
        try:
            return await run_bounded(self._called(arguments), self._deadlines, self.name, {})
        except DeadlineExceeded as late:
            if not late.task.done():  # it ignores its cancellation
                self._hanging.add(1)
                late.task.add_done_callback(lambda _: self._hanging.add(-1))
            raise RewardError(late_text(self.name, self._timeout_s)) from None
        except ToolGone as gone:
            raise RewardError(
                f"{self.name} must return a score, got none, for {gone}; mend the function or the row"
            ) from gone

    async def aclose(self) -> None:
        """Let the threads end; one that hangs is a daemon and stays behind."""
        self._threads.close()

    async def _called(self, arguments: Mapping[str, Any]) -> Any:
        with failing_as(self.name):
            # Siblings share the row; what the function does to its arguments is its own.
            call = partial(self._function, **copy.deepcopy({**arguments, **self._kwargs}))
            answer = await (call() if self._is_async else self._in_thread(call))
            return await answer if inspect.isawaitable(answer) else answer

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        running = _Running(call, self._hanging)
        try:
            return await self._threads.run(running)
        except asyncio.CancelledError:
            running.give_up()
            raise


class _Count:
    """A number that threads change."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.value += number


class _Running:
    """One call in a thread, counted as hanging from when it was given up to when it returns."""

    def __init__(self, call: Callable[[], Any], hanging: _Count) -> None:
        self._call, self._hanging, self._lock = call, hanging, threading.Lock()
        self._has_begun = self._is_over = self._is_given_up = False

    def __call__(self) -> Any:
        with self._lock:
            self._has_begun = True
        try:
            return self._call()
        finally:
            with self._lock:
                self._is_over = True
                if self._is_given_up:
                    self._hanging.add(-1)

    def give_up(self) -> None:
        with self._lock:
            if self._has_begun and not self._is_over:
                self._is_given_up = True
                self._hanging.add(1)


class _InProcesses:
    """A function in processes, which are killed at the deadline."""

    def __init__(self, name: str, processes: ScoringProcesses, kwargs: Mapping[str, Any]) -> None:
        self.name = name
        self._processes, self._kwargs = processes, dict(kwargs)

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        return await self._processes.call({**arguments, **self._kwargs})

    async def aclose(self) -> None:
        await self._processes.aclose()


def _in_processes(function: ComputeScore, config: RewardConfig, *, is_configured: bool) -> _InProcesses:
    custom, name = config.custom_reward_function, _name_of(function)
    module, file, place = _MODULE, None, custom.name
    if not is_configured:
        place = getattr(function, "__qualname__", "<none>")
        if not place.isidentifier() or (file := inspect.getsourcefile(function)) is None:
            raise RewardError(
                f"{name} must be found by its name to run in a process (reward.executor=process), got {place!r}; write it as "
                "a def at the top level of a file, or write reward.executor=thread"
            )
    elif custom.path is not None and is_file(custom.path):
        file = str(home_path(without_prefix(custom.path), name, RewardError).resolve())
    else:
        module = without_prefix(str(custom.path))
    processes = ScoringProcesses(
        name,
        module=module,
        file=file,
        function=place,
        num_processes=config.num_workers,
        timeout_s=config.timeout_s,
        max_memory_bytes=None if config.max_memory_mb is None else config.max_memory_mb * 2**20,
    )
    return _InProcesses(name, processes, custom.reward_kwargs)


def _loaded(config: RewardConfig) -> ComputeScore:
    custom = config.custom_reward_function
    assert custom.path is not None
    function = load_object(custom.path, custom.name, key=_KEY, error=RewardError)
    if not callable(function):
        raise RewardError(f"{_KEY}.name must be a function, got {custom.name} = {function!r}; name a function")
    return function


def _check_signature(function: ComputeScore, kwargs: Mapping[str, Any]) -> None:
    if overlapping := [name for name in ARGUMENTS if name in kwargs]:
        raise RewardError(
            f"{_KEY}.reward_kwargs must not hold what comes from the row, got {overlapping[0]}; give it another name, or mend the rows"
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys((*ARGUMENTS, *kwargs)))
    except TypeError as error:
        wanted = ", ".join((*ARGUMENTS, *kwargs))
        raise RewardError(
            f"{_name_of(function)} must take the arguments {wanted} by name: {error}; mend its parameters or reward_kwargs"
        ) from None
    except ValueError:  # a callable without a readable signature, written in C: its first call will tell
        return


def _name_of(function: ComputeScore) -> str:
    return getattr(function, "__name__", type(function).__name__)
