"""The interpreter in which untrusted code lives: it takes one piece of code after the other, in one namespace.

Nothing here protects anything: the code can change all of it. What it can reach through it is an answer about itself.
"""

import ast
import builtins
import importlib
import io
import linecache
import os
import signal
import socket
import sys
import traceback
from types import CodeType, FrameType, ModuleType
from typing import Any, cast

from .frames import receive, send, write_all

_MARK = "...(truncated)..."


class TimeIsUp(BaseException):
    """Raised in the code when its time is up; no `except Exception` catches it."""

    __module__ = "builtins"  # so that a traceback names it by its name alone


class LimitedOutput(io.RawIOBase):
    """Passes a number of bytes to a file descriptor for each call and drops the rest, so that code may print without end."""

    def __init__(self, descriptor: int, limit: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._room = limit
        self.num_dropped = 0

    def writable(self) -> bool:
        """Bytes may be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, for programs that are started with it."""
        return self._descriptor

    def write(self, data: Any) -> int:
        """Write as much of `data` as there is room for; none of it is an error."""
        view = memoryview(data).cast("B")
        passed = view[: self._room]
        self._room -= len(passed)
        self.num_dropped += len(view) - len(passed)
        write_all(self._descriptor, passed)
        return len(view)

    def close(self) -> None:
        """Do nothing: the next call wants to print, too."""


class Runner:
    """Executes code; variables, imports and files of one call are there in the next."""

    def __init__(self, connection: socket.socket, settings: dict[str, Any]) -> None:
        """Make the namespace and put the limited streams in place."""
        self._connection = connection
        self._limit = settings["output_bytes"]
        self._number = 0
        self._is_running = False
        self._process = os.getpid()
        self._module = ModuleType("__main__")
        sys.modules["__main__"] = self._module
        sys.argv = [""]
        sys.path[:] = ["", *sys.path[1:], *settings["packages"]]
        builtins.exit = builtins.quit = sys.exit
        self._answer({"id": "", "code": "None.warm", "seconds": 60.0})  # loads what describing an exception takes
        self._number = 0
        for name in settings["preload"]:
            importlib.import_module(name)

    def serve(self) -> None:
        """Answer until the parent closes the connection."""
        while (request := receive(self._connection)) is not None:
            answer = self._answer(request)
            if os.getpid() != self._process:
                os._exit(0)  # a fork of the code's that ran to the end of it: the answer is its parent's
            send(self._connection, answer)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        output = LimitedOutput(1, self._limit)
        sys.stdout = sys.stderr = io.TextIOWrapper(
            cast(Any, output), encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True
        )
        for number in (signal.SIGALRM, signal.SIGXCPU):
            signal.signal(number, self._on_time_up)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        answer = {"id": request["id"], "value": None, "error": None, "name": None, "timed_out": False}
        try:
            try:
                self._is_running = True
                signal.setitimer(signal.ITIMER_REAL, request["seconds"])
                answer["value"] = self._run(request["code"])
            finally:  # in two steps, so that an alarm that comes just now is still caught below
                self._is_running = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # whatever the code raises is its result
            answer["timed_out"] = isinstance(error, TimeIsUp)
            answer["name"], answer["error"] = self._described(error)
        answer["dropped"] = output.num_dropped
        return answer

    def _run(self, code: str) -> str | None:
        name = f"<call {self._number}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        namespace = self._module.__dict__
        body, last = _compiled(code, name)
        exec(body, namespace)
        if last is None:
            return None
        value = eval(last, namespace)
        if value is None:
            return None
        namespace["_"] = value
        return self._cut(repr(value))

    def _on_time_up(self, number: int, _: FrameType | None) -> None:
        if self._is_running:
            whose = "this trajectory's processor time" if number == signal.SIGXCPU else "this call's time"
            raise TimeIsUp(f"{whose} is used up")

    def _described(self, error: BaseException) -> tuple[str, str]:
        name = type(error).__name__
        try:
            described = traceback.TracebackException.from_exception(error, max_group_width=5, max_group_depth=3)
            _keep_own_frames(described)
            return name[:200], self._cut("".join(described.format()).rstrip("\n"))
        except BaseException:  # a __str__ of the code's may raise anything, also what ends interpreters
            return name[:200], name[:200]

    def _cut(self, text: str) -> str:
        if len(text) > self._limit:
            half = self._limit // 2
            text = text[:half] + _MARK + text[-half:]
        return text.encode("utf-8", "backslashreplace").decode()


def _compiled(code: str, name: str) -> tuple[CodeType, CodeType | None]:
    """Compile `code` as a module and, where it ends with an expression, that one for itself."""
    tree = ast.parse(code, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = compile(ast.Expression(tree.body.pop().value), name, "eval")  # type: ignore[attr-defined]
    return compile(tree, name, "exec"), last


def _keep_own_frames(described: traceback.TracebackException) -> None:
    """Leave only lines of the code itself in a traceback and in those that it hangs on."""
    seen: set[int] = set()
    waiting: list[traceback.TracebackException | None] = [described]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.stack[:] = [frame for frame in one.stack if frame.filename.startswith("<call ")]
            waiting += [one.__cause__, one.__context__, *(one.exceptions or ())]
