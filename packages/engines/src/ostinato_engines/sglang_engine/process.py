"""SGLang's process: its start, its log, its end with all that it started. Knows nothing of what it serves."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ostinato_engines.errors import EngineStartError

_TAIL_BYTES = 256 << 10
_END_S = 10.0


class ServerProcess:
    """One process group with a folder of its own. The group ends with this process: it watches its standard input."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ostinato-sglang-"))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it; the log is its output.

        Raises:
            EngineStartError: The command cannot be run.
        """
        try:
            with self._log_file.open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=dict(environment),
                    cwd=self.folder,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineStartError(
                f"python must be an interpreter that runs here, got {command[0]} ({error}); check the path"
            ) from error

    @property
    def is_running(self) -> bool:
        """Whether it was started and lives."""
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> None:
        """Returns once it is gone."""
        if self._process is not None:
            await self._process.wait()

    def log_tail(self) -> str:
        """The end of what it printed."""
        if not self._log_file.is_file():
            return ""
        with self._log_file.open("rb") as file:
            file.seek(max(0, self._log_file.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    async def end(self, *, gently: bool = True) -> None:
        """Ends it and its children, and removes the folder; may be called twice."""
        process, self._process = self._process, None
        if process is not None:
            if gently:
                with suppress(ProcessLookupError):
                    process.terminate()
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _END_S)
            # Its children are of its group, and of no other.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _log_file(self) -> Path:
        return self.folder / "log"
