"""Processes for scores: bounded in number, memory and time, killed and replaced when they hang.

Invariant: a call that meets its deadline or is cancelled kills the process that runs it with all that this one has started; nothing of
it is left, and the next call gets another. The deadline counts from when a process has the call: neither the start of a process nor
waiting for one that another call has makes a call late. A process is started when it is first needed and serves one call at a time; its
start goes on when the call that began it is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ostinato_trainer.errors import RewardError
from ostinato_trainer.rewards.failures import late_text
from ostinato_trainer.rewards.scoring_process import LENGTH, MAX_ANSWER_BYTES

__all__ = ["ScoringProcesses"]

_PROGRAM: Final = Path(__file__).with_name("scoring_process.py")
_STARTING_S: Final = 300.0
_CLOSING_S: Final = 10.0


class ScoringProcesses:
    """Calls one function in processes of its own, at most `num_processes` at a time; others wait.

    Args:
        name: what messages call it.
        module: the name of the function's module.
        file: the file that is executed under that name; None imports it.
        function: its name there.
        num_processes: most of them.
        timeout_s: seconds for one call (`reward.timeout_s`).
        max_memory_bytes: most address space of each; None: no limit.
    """

    def __init__(
        self,
        name: str,
        *,
        module: str,
        file: str | None,
        function: str,
        num_processes: int,
        timeout_s: float,
        max_memory_bytes: int | None = None,
    ) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._setup = {"module": module, "file": file, "name": function, "max_memory_bytes": max_memory_bytes}
        self._slots = asyncio.Semaphore(num_processes)
        self._idle: deque[_Process] = deque()
        self._all: set[_Process] = set()
        self._starts: set[asyncio.Task[_Process]] = set()
        self._given_up: deque[asyncio.Task[_Process]] = deque()
        self._ends: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def num_alive(self) -> int:
        """Processes that have been started and not killed."""
        return len(self._all)

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function by keyword; cancelling kills its process.

        Returns:
            Its answer as plain data: what JSON has, NaN included.

        Raises:
            RewardError: the function raised, is late, cannot be loaded there, ended its process or gave what is no plain data,
                or the arguments cannot be pickled.
        """
        try:
            message = pickle.dumps({"arguments": pickle.dumps(dict(arguments))})
        except Exception as error:  # the row's own objects: whatever they raise, they cannot travel
            raise RewardError(
                f"the arguments of {self._name} must be picklable to reach a process, got {type(error).__name__}: {error}; "
                "keep plain values in the rows, or write reward.executor=thread"
            ) from error
        async with self._slots:
            self._check_open()
            process = await self._take()
            is_done = False
            try:
                async with asyncio.timeout(self._timeout_s):
                    reply = await process.exchange(message)
                is_done = True
            except TimeoutError:
                raise RewardError(late_text(self._name, self._timeout_s)) from None
            except _Ended as error:
                raise RewardError(
                    f"the process of {self._name} must live until it answers, got {error}; see what it wrote, and raise "
                    "reward.max_memory_mb where there is too little"
                ) from None
            finally:
                if is_done and not self._is_closed:
                    self._idle.append(process)
                else:
                    self._kill(process)
        return _unpacked(reply, self._name)

    async def aclose(self) -> None:
        """Kill all processes and wait until they are gone."""
        self._is_closed = True
        self._idle.clear()
        for process in list(self._all):
            self._kill(process)
        if waiting := {*self._starts, *self._ends}:
            await asyncio.wait(waiting, timeout=_CLOSING_S)
        if self._ends:  # of processes that were just starting
            await asyncio.wait(self._ends, timeout=_CLOSING_S)

    async def _take(self) -> _Process:
        """A process that is ready. One whose call is given up while it starts goes on to start, for the next call."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            self._kill(process)
        start = self._given_up.popleft() if self._given_up else self._begin_start()
        is_taken = False
        try:
            process = await asyncio.shield(start)
            is_taken = True
            return process
        finally:
            if not is_taken and not _has_failed(start):
                self._given_up.append(start)

    def _begin_start(self) -> asyncio.Task[_Process]:
        start = asyncio.create_task(self._start())
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)
        start.add_done_callback(_has_failed)  # looks at its error, which nobody may be left to do
        return start

    async def _start(self) -> _Process:
        process = await _Process.start()
        self._all.add(process)
        is_ready = False
        try:
            self._check_open()
            async with asyncio.timeout(_STARTING_S):
                reply = await process.exchange(pickle.dumps({**self._setup, "sys_path": sys.path}))
            _unpacked(reply, f"the process of {self._name}")
            is_ready = True
        except TimeoutError:
            raise RewardError(
                f"the process of {self._name} must load the function within {_STARTING_S:g} s, got no answer; see what its "
                "module does when it is imported"
            ) from None
        except _Ended as error:
            raise RewardError(
                f"the process of {self._name} must load the function, got {error}; see what it wrote, and raise "
                "reward.max_memory_mb where there is too little"
            ) from None
        finally:
            if not is_ready:
                self._kill(process)
        return process

    def _check_open(self) -> None:
        if self._is_closed:
            raise RewardError(
                f"{self._name} must be called before the run ends, got a call after; await the scores first"
            )

    def _kill(self, process: _Process) -> None:
        if process in self._all:
            self._all.discard(process)
            process.kill()
            end = asyncio.create_task(process.gone())
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)


class _Ended(Exception):
    """A process is gone, or says what no process of ours says."""


class _Process:
    """A process, as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._requests, self._answers = process, process.stdin, process.stdout

    @classmethod
    async def start(cls) -> _Process:
        """Start the program in a session of its own: neither Ctrl-C nor a signal to our group ends it."""
        # -P: else the program's folder, ours, would hide other modules of the same names.
        starting = asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(_PROGRAM)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(await starting)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def exchange(self, message: bytes) -> Any:
        """Send a message and return the answer.

        Raises:
            _Ended: there is none.
        """
        try:
            self._requests.write(LENGTH.pack(len(message)) + message)
            await self._requests.drain()
            size = LENGTH.unpack(await self._answers.readexactly(LENGTH.size))[0]
            if size > MAX_ANSWER_BYTES:
                raise _Ended(f"an answer of {size} bytes, more than {MAX_ANSWER_BYTES}")
            return json.loads(await self._answers.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # it has closed its pipe; its status follows at once
                    await self._process.wait()
            raise _Ended(f"its end with status {self._process.returncode}") from None
        except (ValueError, RecursionError) as error:
            raise _Ended(f"an answer that is no JSON ({error})") from None

    def kill(self) -> None:
        """Kill it with all that it has started."""
        # Not by asyncio, which may collect the dead child before its own watcher does and then complain.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._requests.close()

    async def gone(self) -> None:
        """Wait until it is."""
        await self._process.wait()


def _has_failed(start: asyncio.Task[_Process]) -> bool:
    return start.done() and (start.cancelled() or start.exception() is not None)


def _unpacked(reply: Any, name: str) -> Any:
    if isinstance(reply, dict) and "error" in reply:
        error = RewardError(f"{name} must return a score, got {reply['error']}; mend the function or the row")
        error.add_note(str(reply.get("traceback", "")))
        raise error
    return reply.get("answer") if isinstance(reply, dict) else None
