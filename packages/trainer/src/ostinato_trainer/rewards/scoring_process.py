"""The program of a process that scores: loads one function, then calls it, once for each message, until its parent is gone.

Invariant: it answers every message once, whatever the function does or prints, short of ending the process. It is run as a script and
imports nothing of ours: a process costs what an interpreter and the function's own imports cost. Messages from the parent are pickles
after their length; answers are JSON after theirs, so that the parent never unpickles what a process says that reads strangers' text.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import select
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

LENGTH = struct.Struct("!Q")
MAX_ANSWER_BYTES = 16 * 2**20
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the parent at standard input and output, which the function does not get to see."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints goes where the parent's errors go
    _end_with_parent(requests.fileno())
    setup = _received(requests)
    if setup is None:
        return
    function: Callable[..., Any] | None = None
    reply: dict[str, Any] = {"ready": True}
    try:
        sys.path[:] = setup["sys_path"]
        _limit_memory(setup["max_memory_bytes"])
        function = _load(setup["module"], setup["file"], setup["name"])
    except BaseException as error:  # the author's module: whatever it raises, the function is not to be had
        reply = _failed(error)
    _send(answers, reply)
    own_pid = os.getpid()
    runner = (
        asyncio.Runner()
    )  # one loop for all calls: what an async function keeps, such as connections, belongs to it
    while function is not None and (message := _received(requests)) is not None:
        try:
            answer = function(**pickle.loads(message["arguments"]))
            reply = {"answer": runner.run(_awaited(answer)) if inspect.isawaitable(answer) else answer}
        except BaseException as error:  # also SystemExit: it ends the call, not the process
            reply = _failed(error)
        if os.getpid() != own_pid:
            os._exit(0)  # a fork of the function's that ran to the end of it: the answer is its parent's
        _send(answers, reply)


async def _awaited(answer: Any) -> Any:
    return await answer


def _load(module: str, file: str | None, name: str) -> Callable[..., Any]:
    if file is None:
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None  # the parent has imported the same file
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def _received(requests: BinaryIO) -> Any:
    """The next message, or None where the parent has closed its side."""
    head = requests.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    body = requests.read(LENGTH.unpack(head)[0])
    return pickle.loads(body)


def _send(answers: BinaryIO, reply: dict[str, Any]) -> None:
    try:
        body = json.dumps(reply, default=_plain, check_circular=True).encode()
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"{len(body)} bytes of JSON, more than {MAX_ANSWER_BYTES}")
    except Exception as error:
        text = f"the answer of a function in a process must be numbers, text, lists and mappings, got {error}"
        body = json.dumps({"error": f"TypeError: {text}", "traceback": ""}).encode()
    answers.write(LENGTH.pack(len(body)) + body)
    answers.flush()


def _plain(value: Any) -> Any:
    """Numbers of other libraries as Python's."""
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"a {type(value).__name__}")


def _failed(error: BaseException) -> dict[str, Any]:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an error that cannot even be shown
        text = type(error).__name__
    return {"error": text, "traceback": traceback.format_exc()}


def _limit_memory(max_bytes: int | None) -> None:
    if max_bytes is not None:
        import resource  # not on every system; without a limit nothing needs it

        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _end_with_parent(requests: int) -> None:
    """Die when the parent does, also while the function computes."""
    if sys.platform == "linux":  # by the kernel, whoever holds the interpreter's lock
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        hangup = select.poll()
        hangup.register(requests, 0)  # nothing but the end of the pipe
        hangup.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
