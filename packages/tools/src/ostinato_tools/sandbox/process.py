"""`ProcessBackend`: keeps warm workers, hands each to one trajectory, and ends them all with the program."""

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import Future

from ostinato_tools.errors import ToolInfrastructureError
from ostinato_tools.sandbox.backend import CodeResult, Enforcement, describe
from ostinato_tools.sandbox.config import SandboxConfig
from ostinato_tools.sandbox.worker import Worker

_logger = logging.getLogger(__name__)


class ProcessBackend:
    """Sessions that are processes of this host, shut in by what the operating system offers."""

    def __init__(self, config: SandboxConfig) -> None:
        """Prepare; nothing is started yet."""
        self._config = config
        self._lock = threading.Lock()
        self._spares: deque[Worker] = deque()
        self._used: set[Worker] = set()
        self._waiting: deque[Future[None]] = deque()
        self._report: tuple[Enforcement, ...] | None = None
        self._closed = False
        _BACKENDS.add(self)

    async def start(self) -> "ProcessSession":
        """Return a session on a warm worker, or on a new one.

        Raises:
            ToolInfrastructureError: none became ready in time, or a protection that is required is not enforced.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._config.start_s):
                while True:
                    worker, is_new = await self._take()
                    try:
                        await worker.ready()
                        self._check(worker.report)
                    except BaseException as error:
                        with contextlib.suppress(ToolInfrastructureError):
                            await self.end(worker)
                        if is_new or not isinstance(error, ToolInfrastructureError):
                            raise
                        continue  # a spare that died while it waited says nothing about the next one
                    self._refill()
                    return ProcessSession(self, worker)
        except TimeoutError:
            waited = time.monotonic() - started
            raise ToolInfrastructureError(
                f"a sandbox must be ready within {waited:.0f} s, got none, {len(self._used)} of at most "
                f"{self._config.max_workers} in use; raise max_workers or start_s"
            ) from None

    def enforcement(self) -> tuple[Enforcement, ...]:
        """Return what is enforced, as the first worker found it; starts one and waits for it if there was none."""
        if self._report is None:
            worker = Worker(self._config)
            try:
                worker.wait_ready(self._config.start_s)
                self._remember(worker.report)
            finally:
                worker.wait_ended(self._config.start_s)
        assert self._report is not None
        return self._report

    def close(self) -> None:
        """End every worker, also those in use, and wait until they are gone."""
        with self._lock:
            self._closed = True
            workers = [*self._spares, *self._used]
            self._spares.clear()
            self._used.clear()
        for worker in workers:
            worker.abandon()
        for worker in workers:
            worker.wait_ended(self._config.start_s)
        _BACKENDS.discard(self)

    def forget(self) -> None:
        """Close this process's ends of all connections, in a fork of the process that owns them."""
        for worker in (*self._spares, *self._used):
            worker.forget()
        self.__init__(self._config)

    async def end(self, worker: Worker) -> None:
        """End a worker that was used and let the next trajectory have its place."""
        try:
            await worker.close()
        finally:
            self._give_back(worker)

    async def _take(self) -> tuple[Worker, bool]:
        """Return a worker and whether it is new."""
        while True:
            with self._lock:
                if self._closed:
                    raise ToolInfrastructureError("the sandbox was shut down; make another")
                if self._spares:
                    worker = self._spares.popleft()
                    self._used.add(worker)
                    return worker, False
                if len(self._used) < self._config.max_workers:
                    worker = Worker(self._config)
                    self._used.add(worker)
                    return worker, True
                turn: Future[None] = Future()
                self._waiting.append(turn)
            try:
                await asyncio.wrap_future(turn)
            except asyncio.CancelledError:
                if not turn.cancel():  # its turn came at the same moment
                    self._call_next()
                raise

    def _give_back(self, worker: Worker) -> None:
        with self._lock:
            self._used.discard(worker)
        self._call_next()

    def _call_next(self) -> None:
        with self._lock:
            while self._waiting:
                if self._waiting[0].set_running_or_notify_cancel():
                    self._waiting.popleft().set_result(None)
                    return
                self._waiting.popleft()

    def _refill(self) -> None:
        with self._lock:
            room = self._config.max_workers - len(self._used)
            while not self._closed and len(self._spares) < min(self._config.warm_workers, room):
                try:
                    self._spares.append(Worker(self._config))
                except (
                    ToolInfrastructureError
                ) as error:  # this trajectory has its worker; one that lacks it is told then
                    _logger.warning("no worker could be kept warm: %s", error)
                    return

    def _check(self, report: tuple[Enforcement, ...]) -> None:
        self._remember(report)
        missing = [entry for entry in report if entry.name in self._config.require and not entry.enforced]
        if missing:
            why = "; ".join(f"{entry.name} ({entry.detail})" for entry in missing)
            raise ToolInfrastructureError(
                f"require must name what can be enforced here, got also {why}; give the process the rights, or leave it out"
            )

    def _remember(self, report: tuple[Enforcement, ...]) -> None:
        if self._report is None:
            self._report = report
            complete = all(entry.enforced for entry in report)
            level = logging.INFO if complete else logging.WARNING
            _logger.log(level, "sandboxed Python on this machine:\n%s", describe(report))


class ProcessSession:
    """One trajectory's worker."""

    def __init__(self, backend: ProcessBackend, worker: Worker) -> None:
        self._backend = backend
        self._worker = worker

    async def run(self, code: str) -> CodeResult:
        """Run code; see `SandboxSession.run`."""
        return await self._worker.run(code)

    async def close(self) -> None:
        """End the worker; see `SandboxSession.close`."""
        await self._backend.end(self._worker)


_BACKENDS: set[ProcessBackend] = set()


def _close_all() -> None:
    for backend in list(_BACKENDS):
        backend.close()


def _forget_all() -> None:
    for backend in list(_BACKENDS):
        backend.forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
