"""Processes for CPU-bound synchronous tools: they do not share this process's interpreter lock, and a hung one is killed.

A process starts when it is first needed, is used again, and ends with this process or when its call is cancelled or runs out
of time; there are as many as cores. Function, arguments and result travel by pickle, between this process and its own
children only: the function is the author's own code, and whoever could forge a result could as well have changed the function.
It is no sandbox.
"""

import contextlib
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, NamedTuple

from ostinato_tools.errors import ToolDefinitionError, ToolInfrastructureError
from ostinato_tools.failures import describe
from ostinato_tools.threads import DaemonThreads

MAX_PROCESSES = os.cpu_count() or 1

_NAME = "ostinato-tool"
_GUARD = "`if __name__ == '__main__':`"
_logger = logging.getLogger(__name__)
_is_serving = False


class FunctionReference(NamedTuple):
    """Where another process finds a function."""

    module: str
    """Dotted name of its module."""
    qualname: str
    """Its name in there."""
    path: str | None
    """The module's file, which is executed where the name alone cannot be imported."""


def reference_to(function: Callable, place: str) -> FunctionReference:
    """Return where another process finds `function`.

    Raises:
        ToolDefinitionError: it has no name that a new process could look up.
    """
    module = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", "<none>")
    if not module or "<" in qualname:
        raise ToolDefinitionError(
            f"function of {place} must be found by its name to run in a process, got {qualname!r}; "
            "write it as a def at the top level of a module"
        )
    return FunctionReference(module, qualname, getattr(sys.modules.get(module), "__file__", None))


async def run_in_process(reference: FunctionReference, arguments: dict) -> Any:
    """Call a function in a process of its own and return what it returns; cancelling kills the process.

    Waiting for a free process, and for a new one to start, counts as part of the call. Context variables are not seen.

    Raises:
        ToolInfrastructureError: the process died, or does not find the function.
        Exception: what the function raised, with its traceback as the cause; RuntimeError where that cannot travel.
    """
    job = _Job(reference, arguments)
    try:
        return await _THREADS.run(job.run)
    finally:
        job.abandon()


def stop_idle_processes() -> None:
    """End the processes that run nothing; the next call starts new ones."""
    for worker in list(_WORKERS):
        worker.stop_if_idle()


class _Job:
    """One call, from the queue to its end; abandoning it kills the process that runs it."""

    def __init__(self, reference: FunctionReference, arguments: dict) -> None:
        # By itself: what it holds may come from the function's module, which the process loads first.
        self._message = (reference, pickle.dumps(arguments))
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._is_over = False

    def run(self) -> Any:
        """Runs in one of the threads, each of which keeps one process."""
        reply = None
        try:
            while reply is None:
                worker = _worker_of_this_thread()
                with self._lock:
                    if self._is_over:
                        return None
                    self._worker = worker
                reply = worker.call(self._message)
        finally:
            with self._lock:
                self._is_over = True
        return reply.unpack()

    def abandon(self) -> None:
        with self._lock:
            if not self._is_over and self._worker is not None:
                self._worker.kill()
            self._is_over = True


class _Reply(NamedTuple):
    """What a process answers."""

    number: int
    """Of the call that it answers."""
    value: Any
    error: BaseException | None
    traceback_text: str

    def unpack(self) -> Any:
        if self.error is not None:
            raise self.error from _RemoteTraceback(self.traceback_text)
        return self.value


class _RemoteTraceback(Exception):
    """The traceback of an error that was raised in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Worker:
    """A process, as seen from the thread that keeps it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=_NAME, daemon=True)
        self._lock = threading.Lock()  # held while a call runs
        self._num_calls = 0
        self._process.start()
        theirs.close()
        _WORKERS.add(self)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def call(self, message: Any) -> _Reply | None:
        """Return the answer; None where the process was stopped, or has ended by itself, before the call began.

        Raises:
            ToolInfrastructureError: it ended without an answer.
            TypeError: its answer cannot be read.
        """
        with self._lock:
            if self not in _WORKERS:
                return None
            self._num_calls += 1
            try:
                self._connection.send((self._num_calls, message))
            except OSError as error:
                if self._num_calls == 1:
                    raise self._ended() from error
                self.kill()
                return None
            try:
                reply = self._connection.recv()
                if not isinstance(reply, _Reply) or reply.number != self._num_calls:
                    raise ValueError("it is not that of this call")
                return reply
            except (EOFError, OSError) as error:
                raise self._ended() from error
            except Exception as error:  # what cannot be read may have left half an answer to the next call behind
                self.kill()
                raise TypeError(
                    "the answer of a tool that runs in a process must be readable by its parent, got one that is not "
                    f"({describe(error)}); return plain values, and leave the process's own connection alone"
                ) from error

    def _ended(self) -> ToolInfrastructureError:
        self._process.join(5)
        code = self._process.exitcode
        self.kill()
        return ToolInfrastructureError(
            f"the process of the tool must live until it answers, got its end with code {code}; "
            f"see what it wrote, and put what a script does under {_GUARD}"
        )

    def kill(self) -> None:
        _WORKERS.discard(self)
        if self._process.pid is not None and hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # what it started goes with it
        self._process.kill()

    def stop_if_idle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self.kill()
                self._process.join(5)
            finally:
                self._lock.release()


_WORKERS: set[_Worker] = set()
_OWN = threading.local()
_THREADS = DaemonThreads(MAX_PROCESSES)


def _worker_of_this_thread() -> _Worker:
    if multiprocessing.current_process().name == _NAME and not _is_serving:
        # This process was started for a call and, before that, executes the script that made the call: once more.
        _logger.critical("a script that runs tools in processes must be guarded; put it under %s", _GUARD)
        os._exit(1)
    worker: _Worker | None = getattr(_OWN, "worker", None)
    if worker is None or worker not in _WORKERS or not worker.is_alive:
        worker = _OWN.worker = _Worker()
    return worker


def _start_anew() -> None:
    global _THREADS
    _WORKERS.clear()
    _THREADS = DaemonThreads(MAX_PROCESSES)


if hasattr(os, "register_at_fork"):  # threads do not survive a fork, and the processes belong to the parent
    os.register_at_fork(after_in_child=_start_anew)


def _serve(connection: Connection) -> None:
    """The life of a process: calls, one after the other, until its parent is gone."""
    global _is_serving
    _is_serving = True
    if hasattr(os, "setsid"):
        os.setsid()  # neither Ctrl-C nor a signal to the group ends it; its parent kills it with all that it started
    threading.Thread(target=_end_with_parent, daemon=True).start()
    own_pid = os.getpid()
    while True:
        try:
            number, (reference, arguments) = connection.recv()
        except EOFError:
            return
        try:
            function = _resolve(reference)
            reply = _Reply(number, function(**pickle.loads(arguments)), None, "")
        except BaseException as error:  # also SystemExit: it ends the call, not the process
            reply = _Reply(number, None, _portable(error), traceback.format_exc())
        if os.getpid() != own_pid:
            os._exit(0)  # a fork of the function's that ran to the end of it: the answer is its parent's
        try:
            connection.send(reply)
        except Exception as error:  # the result cannot be pickled
            text = f"the result of a tool that runs in a process must be picklable, got one that is not ({describe(error)})"
            connection.send(_Reply(number, None, TypeError(text), ""))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        if hasattr(os, "killpg"):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _resolve(reference: FunctionReference) -> Callable:
    from ostinato_tools.function import FunctionTool
    from ostinato_tools.loading import execute_file

    try:
        try:
            found: Any = importlib.import_module(reference.module)
        except ImportError:
            if reference.path is None:
                raise
            # Under the parent's name, by which it finds the classes of what the function returns or raises. Pickle asks
            # for the packages above it, which cannot be imported either.
            *above, _ = accumulate(reference.module.split("."), "{}.{}".format)
            for package in above:
                sys.modules.setdefault(package, ModuleType(package))
            found = execute_file(reference.path, reference.module)
        for part in reference.qualname.split("."):
            found = getattr(found, part)
    except Exception as error:  # the author's module: whatever it raises, the function is not to be had
        raise ToolInfrastructureError(
            f"{reference.qualname} of {reference.module} must be found by a new process, got {type(error).__name__}: "
            f"{error}; put it in a file that can be imported"
        ) from error
    return found.function if isinstance(found, FunctionTool) else found


def _portable(error: BaseException) -> BaseException:
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # a foreign class: whatever it raises, the error itself cannot travel
        pass
    return RuntimeError(describe(error))
