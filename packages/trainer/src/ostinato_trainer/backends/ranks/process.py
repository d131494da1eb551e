"""The program of a rank's process: serves calls until its controller closes the pipe or is gone.

Started by `ostinato_trainer.backends.ranks.processes` with the numbers of two inherited descriptors: the connection that calls come on, and
a pipe that ends with the controller.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time
from multiprocessing import current_process
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from typing import Any, Final

from ostinato_trainer.backends.ranks.handover import dumped
from ostinato_trainer.backends.ranks.host import RankHost
from ostinato_trainer.backends.ranks.messages import Answer, LogLine, Progress, failure_of
from ostinato_trainer.heartbeat import tell

_PARENT_CHECK_S: Final = 1.0
_BEAT_S: Final = 0.2
"""Least time between two messages of progress."""
HANDING_OVER: Final = frozenset({"next_weights"})
"""Methods whose tensors are handed over in memory that both processes see, instead of being copied into the answer."""


class _Forward(logging.Handler):
    """Sends what is logged while a call is served to the controller, ahead of the answer."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the thread that serves may write to the connection
        try:
            self._connection.send_bytes(pickle.dumps(LogLine(record.name, record.levelno, record.getMessage())))
        except (OSError, ValueError, TypeError):
            self.handleError(record)


class _Beats:
    """Tells the controller of progress within a call, not more often than it looks.

    Beats come from the thread that serves, which alone may write to the connection; others are not told.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._next = connection, 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._next or threading.current_thread() is not threading.main_thread():
            return
        self._next = now + _BEAT_S
        with contextlib.suppress(OSError):  # the controller has gone, and this process ends
            self._connection.send_bytes(pickle.dumps(Progress()))


def serve(connection: Connection) -> None:
    """Answers calls, the first of which must be `start`, until the connection ends."""
    host: RankHost | None = None
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())  # from the process that started this one
        except EOFError:
            return
        except Exception as error:  # a call whose classes cannot be imported here
            connection.send_bytes(pickle.dumps(failure_of(error)))
            continue
        try:
            if method == "start":
                host, value = _started(connection, *arguments), None
            else:
                value = getattr(host, method)(*arguments)
            answer = _dumped(method, value)
            del value  # weights that are handed over are not kept until the next call
        except Exception as error:  # whatever a call raises is its answer
            logging.getLogger(__name__).debug("%s failed", method, exc_info=True)
            answer = pickle.dumps(failure_of(error))
        connection.send_bytes(answer)
        del answer


def _started(connection: Connection, address: Any, factory: Any) -> RankHost:
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    if address.rank == 0:
        root.addHandler(_Forward(connection))
    tell(_Beats(connection))
    return RankHost(address, factory)


def _dumped(method: str, value: Any) -> Any:
    return dumped(Answer, value) if method in HANDING_OVER and value is not None else pickle.dumps(Answer(value))


def _end_with_controller(life: int) -> None:
    """Ends this process when the controller lets go or is gone, also while the main thread computes or waits for other ranks."""
    parent, sockets = os.getppid(), get_temp_dir()  # by which shared memory is handed out

    def watch() -> None:
        while os.getppid() == parent:
            readable, _, _ = select.select([life], [], [], _PARENT_CHECK_S)
            if readable:
                break
        shutil.rmtree(sockets, ignore_errors=True)  # as multiprocessing does at an end that waits for the main thread
        os._exit(0)

    threading.Thread(target=watch, name="life", daemon=True).start()


def main() -> None:
    """Runs the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's affair, which ends this process
    faulthandler.enable()
    connection_fd, life = (int(argument) for argument in sys.argv[1:3])
    for descriptor in (connection_fd, life):
        os.set_inheritable(descriptor, False)
    connection = Connection(connection_fd)
    _end_with_controller(life)
    current_process().authkey = connection.recv_bytes()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    serve(connection)


if __name__ == "__main__":
    main()
