"""Processes that count prompts side by side; see `count_worker` for what they do.

They are started as programs, not forked and not by `multiprocessing`: nothing of this process is copied into them and the
user's main module is not run again. One that dies, or does not answer in time, is an error; none outlives `close`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from ostinato_trainer.data.prompt_length import PromptLength
from ostinato_trainer.errors import DatasetError

__all__ = ["CountWorkers", "Prompt"]

Prompt = tuple[Sequence[dict], Sequence[dict] | None]
"""Messages and tools."""

_STDERR_SHOWN = 2000
"""Characters of what a process that died wrote last."""
_LAST_WORDS_S = 5.0
"""Seconds that a process which closed its pipes, or wrote nonsense, has to end by itself."""
_CURE = "write data.filter_overlong_prompts_workers=1 to count without further processes"


class CountWorkers:
    """A fixed number of processes.

    Args:
        length: what they count with.
        num_workers: processes.
        deadline_s: seconds that one request may take, waiting for a free process included.
    """

    def __init__(self, length: PromptLength, num_workers: int, *, deadline_s: float = 600.0) -> None:
        self._deadline_s = deadline_s
        setup = pickle.dumps(length)
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="count-prompts")
        try:
            for _ in range(num_workers):
                self._workers.append(_Worker(setup))
                self._idle.put(self._workers[-1])
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise DatasetError(f"a process that counts prompts must start, got {error}; {_CURE}") from error

    def submit(self, prompts: Sequence[Prompt]) -> Future[list[int | str]]:
        """Begin to count; one number, or the reason why there is none, for each prompt. Take it by `result`."""
        return self._threads.submit(self._ask, prompts)

    def result(self, future: Future[list[int | str]]) -> list[int | str]:
        """What a request gave.

        Raises:
            DatasetError: A process died, or did not answer in time.
        """
        try:
            return future.result(self._deadline_s)
        except TimeoutError:
            raise DatasetError(
                f"a process that counts prompts must answer within {self._deadline_s:g} s, got nothing; look for a "
                f"prompt of extreme length, or {_CURE}"
            ) from None

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.release()

    def _ask(self, prompts: Sequence[Prompt]) -> list[int | str]:
        worker = self._idle.get()
        try:
            return worker.ask(prompts)
        finally:
            self._idle.put(worker)


class _Worker:
    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `release` closes it
        self._process = subprocess.Popen(
            # -P: else modules of the present folder would hide others of the same names.
            [sys.executable, "-P", "-m", "ostinato_trainer.data.count_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # a Ctrl-C is for us, who end it then
        )

    def ask(self, prompts: Sequence[Prompt]) -> list[int | str]:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            requests.write(self._setup)
            self._setup = b""
            pickle.dump(prompts, requests)
            requests.flush()
            return pickle.load(replies)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise DatasetError(f"a process that counts prompts must answer, got {self._end()}; {_CURE}") from error

    def _end(self) -> str:
        try:
            status = self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-_STDERR_SHOWN:]
        return f"exit status {status}" + (f" and: {said}" if said else " and no word")

    def kill(self) -> None:
        self._process.kill()

    def release(self) -> None:
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not yet sent to it
                    stream.close()
