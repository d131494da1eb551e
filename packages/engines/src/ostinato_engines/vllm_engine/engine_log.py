"""A folder for what vLLM's processes write: their log, beside what they print, so that an error can quote it, and their sockets."""

import json
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
"""Where vLLM's processes look for their logging configuration."""
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where they make their sockets, which vLLM leaves behind."""
_LONGEST_FOLDER = 107 - len("/00000000-0000-0000-0000-000000000000")
_TAIL_BYTES = 256 << 10


class EngineLog:
    """One folder for one engine; where the user configures vLLM's logging, theirs counts and nothing is kept here."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def _open(self) -> Path:
        """Makes the folder, with the configuration in it."""
        self._folder = Path(tempfile.mkdtemp(prefix="ostinato-vllm-"))
        level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
        stream = os.environ.get("VLLM_LOGGING_STREAM", "ext://sys.stdout")
        config = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "(%(processName)s %(process)d) %(levelname)s %(asctime)s %(message)s"}},
            "handlers": {
                "stream": {"class": "logging.StreamHandler", "formatter": "plain", "level": level, "stream": stream},
                "file": {
                    "class": "logging.FileHandler",
                    "formatter": "plain",
                    "level": "INFO",
                    "filename": str(self._file),
                    "delay": True,
                },
            },
            "loggers": {"vllm": {"handlers": ["stream", "file"], "level": level, "propagate": False}},
        }
        (self._folder / "logging.json").write_text(json.dumps(config))
        return self._folder

    @property
    def environment(self) -> dict[str, str]:
        """What vLLM's processes must find when they start."""
        if self._folder is None and os.environ.get(VARIABLE):
            return {}
        folder = self._folder or self._open()
        sockets = {SOCKETS: str(folder)} if len(str(folder)) <= _LONGEST_FOLDER else {}
        return {VARIABLE: str(folder / "logging.json"), **sockets}

    @property
    def _file(self) -> Path:
        assert self._folder is not None
        return self._folder / "vllm.log"

    def tail(self) -> str:
        """The end of what was logged; empty if there is nothing."""
        if self._folder is None or not self._file.is_file():
            return ""
        with self._file.open("rb") as file:
            file.seek(max(0, self._file.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """Removes the folder; processes that still write do so into nothing."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
