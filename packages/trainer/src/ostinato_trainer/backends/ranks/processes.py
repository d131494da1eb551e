"""`RankProcesses`: ranks as processes of this machine, one a device.

Invariants: a rank's death ends the call that needs it within a second and takes the others along; no rank outlives this process, however it ends;
and nothing that a rank does can make a call wait beyond its deadline.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_trainer.backends.ranks.base import RankAddress, RankFactory
from ostinato_trainer.backends.ranks.handover import HandedOver, taken_over
from ostinato_trainer.backends.ranks.messages import (
    Answer,
    Failure,
    LogLine,
    Progress,
    error_of,
    named_ranks,
    replay,
    request_of,
)
from ostinato_trainer.backends.ranks.store import listening_store
from ostinato_trainer.backends.ranks.workers import RankDiedError, RankTimeoutError
from ostinato_trainer.errors import BackendError
from ostinato_trainer.heartbeat import beat

_HOST: Final = "127.0.0.1"
_POLL_S: Final = 0.25
_LATE_ERRORS_S: Final = 10.0
"""How long the others may take to raise what one rank has raised, before they count as waiting for it in vain."""
_CLOSING_S: Final = 5.0
_LOG_TAIL_BYTES: Final = 4000


class RankProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the processes are run."""

    num_ranks: int
    device: str = "cpu"
    """`cpu`, or `cuda`: rank n then has device n."""
    collective_timeout_s: float = 600.0
    """How long a rank may wait for the others inside a collective."""
    call_timeout_s: float = 3600.0
    """How long one call may take, from its start to the last rank's answer."""
    log_folder: str | None = None
    """Where each rank's output is added to `rank_N.log`; a folder that is removed at the end where None."""


class _Rank:
    """One process and the pipe to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], pipe: Connection, life: int, log: Path, log_start: int
    ) -> None:
        self.process, self.pipe, self.log, self._log_start = process, pipe, log, log_start
        self._life: int | None = life

    def exchange(self, request: bytes) -> Answer | Failure:
        """Sends a request and waits for the answer; log lines that come before it are shown, and whatever comes counts as a heartbeat of this
        process. Ends where the process does."""
        self.pipe.send_bytes(request)
        while True:
            message = pickle.loads(self.pipe.recv_bytes())  # from a process that this one started
            beat()
            if isinstance(message, LogLine):
                replay(message)
            elif not isinstance(message, Progress):
                return message

    def end_of_output(self) -> str:
        """The last that the process has printed."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, self.log.stat().st_size - _LOG_TAIL_BYTES))
                return file.read().decode(errors="replace").strip() or "(nothing)"
        except OSError as error:
            return f"(unreadable: {error})"

    def let_go(self) -> None:
        """Closes the pipe on which the process sees that it is no longer needed."""
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def end(self, deadline: float) -> None:
        """Waits until the deadline for the process to end, then kills it, and frees the pipe."""
        self.let_go()
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pipe.close()


class RankProcesses:
    """See `RankWorkers`.

    Args:
        options: See `RankProcessOptions`.
    """

    def __init__(self, options: RankProcessOptions) -> None:
        self.options = options
        self._ranks: list[_Rank] = []
        self._threads: ThreadPoolExecutor | None = None
        self._store: TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._closing = threading.Lock()
        self._is_closed = False

    @property
    def num_ranks(self) -> int:
        """See `RankWorkers.num_ranks`."""
        return self.options.num_ranks

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks, in order; none before the start and after the end."""
        return [rank.process.pid for rank in self._ranks]

    def address_for(self, beyond_host: bool) -> tuple[str, str | None]:
        """See `RankWorkers.address_for`."""
        return (socket.gethostbyname(socket.gethostname()), None) if beyond_host else (_HOST, loopback())

    def start(self, factory: RankFactory) -> None:
        """See `RankWorkers.start`.

        Raises:
            BackendError: they were started before, the factory cannot travel, or it raised.
            RankDiedError, RankTimeoutError: see there.
        """
        if self._ranks or self._is_closed:
            raise BackendError("ranks must be started once, got a second start; make new ones")
        options = self.options
        try:
            self._store = listening_store(_HOST, options.collective_timeout_s)
            folder = self._log_folder()
            self._threads = ThreadPoolExecutor(options.num_ranks, thread_name_prefix="rank")
            for rank in range(options.num_ranks):
                self._ranks.append(_started(folder / f"rank_{rank}.log", self._environment()))
            addresses = [self._address(rank) for rank in range(options.num_ranks)]
            self._exchange("start", [request_of("start", (address, factory)) for address in addresses])
        except BaseException:
            self.close()
            raise

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See `RankWorkers.call`."""
        if not self._ranks or self._is_closed:
            raise BackendError(f"ranks must be running to be asked for {method}, got closed ones; start a new group")
        requests = [request_of(method, each) for each in arguments]
        try:
            values = self._exchange(method, requests)
        except Exception as error:
            if not getattr(error, "ranks_in_step", False):
                self.close()
            raise
        except BaseException:  # an interrupt: where the ranks stand is unknown
            self.close()
            raise
        return [taken_over(value) if isinstance(value, HandedOver) else value for value in values]

    def close(self) -> None:
        """See `RankWorkers.close`."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        deadline = time.monotonic() + _CLOSING_S
        for rank in self._ranks:
            rank.let_go()
        for rank in self._ranks:
            rank.end(deadline)
        self._ranks = []
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()

    def _log_folder(self) -> Path:
        if self.options.log_folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ostinato_ranks_", ignore_cleanup_errors=True)
            return Path(self._folder.name)
        folder = Path(self.options.log_folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _environment(self) -> dict[str, str]:
        """This process's, with what it can import, and on the CPU each rank's part of the cores."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if self.options.device == "cpu":
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.options.num_ranks)))
        return environment

    def _address(self, rank: int) -> RankAddress:
        assert self._store is not None
        return RankAddress(
            rank=rank,
            world_size=self.options.num_ranks,
            store_host=_HOST,
            store_port=self._store.port,
            device="cpu" if self.options.device == "cpu" else f"{self.options.device}:{rank}",
            timeout_s=self.options.collective_timeout_s,
            interface=loopback(),
        )

    def _exchange(self, method: str, requests: Sequence[bytes]) -> list[Any]:
        """One call on every rank; raises where one fails, dies or is late, and says by `ranks_in_step` whether all failed alike."""
        ranks, threads = self._ranks, self._threads
        assert threads is not None
        answers: list[Future[Any]] = [
            threads.submit(rank.exchange, request) for rank, request in zip(ranks, requests, strict=True)
        ]
        deadline = time.monotonic() + self.options.call_timeout_s
        while True:
            waiting = [rank for rank, answer in enumerate(answers) if not answer.done()]
            self._raise_if_died(method, ranks, answers)
            failures = _failures(answers)
            if not waiting or time.monotonic() > deadline:
                break
            if failures:
                deadline = min(deadline, time.monotonic() + _LATE_ERRORS_S)
            wait([answers[rank] for rank in waiting], timeout=_POLL_S, return_when=FIRST_COMPLETED)
        if failures:
            raise error_of(failures, len(answers))
        if waiting:
            raise RankTimeoutError(
                f"{method} must be answered by all ranks within {self.options.call_timeout_s:g} s, but {named_ranks(waiting)} had not; "
                f"{self._end_of_output(ranks[waiting[0]])}"
            )
        return [answer.result().value for answer in answers]

    def _raise_if_died(self, method: str, ranks: Sequence[_Rank], answers: Sequence[Future[Any]]) -> None:
        for number, (rank, answer) in enumerate(zip(ranks, answers, strict=True)):
            lost = answer.exception() if answer.done() else None
            if lost is None and (answer.done() or rank.process.poll() is None):
                continue
            if lost is not None and not isinstance(lost, EOFError | OSError):
                raise BackendError(
                    f"the answer of rank {number} to {method} must be readable, got {lost!r}; {self._end_of_output(rank)}"
                ) from lost
            raise RankDiedError(
                f"rank {number} of {len(ranks)} must live to answer {method}, but its process {_status(rank.process)}; "
                f"{self._end_of_output(rank)}"
            )

    def _end_of_output(self, rank: _Rank) -> str:
        where = "its output" if self.options.log_folder is None else f"its output, {rank.log},"
        return f"{where} ends with:\n{rank.end_of_output()}"


def _started(log: Path, environment: dict[str, str]) -> _Rank:
    """Starts the process of a rank, which waits for its first request."""
    ours, theirs = Pipe()
    life_end, life = os.pipe()
    try:
        with log.open("ab") as output:  # what a lost run has printed stays, for the one that goes on
            log_start = output.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "ostinato_trainer.backends.ranks.process", str(theirs.fileno()), str(life_end)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), life_end),
                env=environment,
            )
    except BaseException:
        ours.close()
        os.close(life)
        raise
    finally:
        theirs.close()
        os.close(life_end)
    ours.send_bytes(bytes(current_process().authkey))
    return _Rank(process, ours, life, log, log_start)


def _failures(answers: Sequence[Future[Any]]) -> dict[int, Failure]:
    """What was raised, by rank."""
    results = {
        rank: answer.result() for rank, answer in enumerate(answers) if answer.done() and answer.exception() is None
    }
    return {rank: result for rank, result in results.items() if isinstance(result, Failure)}


def _status(process: subprocess.Popen[bytes]) -> str:
    """How a process ended; one whose pipe broke is about to end, or is ended by what follows."""
    try:
        code = process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"


def loopback() -> str | None:
    """The interface that leads back to this machine, where the system can name it."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    return next((name for name in ("lo", "lo0") if name in names), None)
