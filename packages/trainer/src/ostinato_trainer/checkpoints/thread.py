"""`CheckpointThread`: one checkpoint at a time is written in a thread, while the run goes on.

Invariant: no error is lost. What a job failed with is raised by the next `check`, `start` or `finish`, once. Knows nothing of
what is written.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from ostinato_trainer.errors import CheckpointError

__all__ = ["CheckpointThread"]

_DEADLINE_S: Final = 1800.0
"""How long a checkpoint may take to be written before the run says that the disk does not answer."""


@dataclass
class _Job:
    name: str
    run: Callable[[], object]
    ended: Future[None] = field(default_factory=Future)
    error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self.run()
        except BaseException as error:  # the boundary of the thread: whoever waits for the job gets it
            self.error = error
        finally:
            self.ended.set_result(None)


class CheckpointThread:
    """Runs jobs, each in a thread that does not keep the process from ending."""

    def __init__(self, *, deadline_s: float = _DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._job: _Job | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None and not self._job.ended.done()

    async def start(self, name: str, run: Callable[[], object]) -> None:
        """Run a job, after the one before has ended.

        Raises:
            CheckpointError: The one before has failed, or takes longer than any checkpoint should.
        """
        await self.finish()
        self._job = _Job(name, run)
        self._job.ended.set_running_or_notify_cancel()
        threading.Thread(target=self._job, name=f"ostinato {name}", daemon=True).start()

    def check(self) -> None:
        """Raise what the last job has failed with, if it has; never waits.

        Raises:
            CheckpointError: As the job raised it.
        """
        job = self._job
        if job is None or not job.ended.done():
            return
        self._job = None
        if job.error is not None:
            raise job.error

    async def finish(self, deadline_s: float | None = None) -> None:
        """Wait for the job under way.

        Raises:
            CheckpointError: It has failed, or does not end before the deadline; then it is still under way.
        """
        if self._job is None:
            return
        allowed_s = self._deadline_s if deadline_s is None else deadline_s
        ended, _ = await asyncio.wait([asyncio.wrap_future(self._job.ended)], timeout=allowed_s)
        if not ended:
            raise CheckpointError(
                f"{self._job.name} must be written within {allowed_s:g} s, got no end of it; "
                "find out why the disk of trainer.default_local_dir does not answer"
            )
        self.check()
