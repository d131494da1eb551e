"""Ends SGLang with the process that started it, whatever way that goes: its end of our standard input closes then."""

import os
import signal
import threading

VARIABLE = "OSTINATO_LIFELINE"
"""Set for the first of SGLang's processes only: those that it starts end with it."""


def watch_parent() -> None:
    """Kills the process group once standard input ends; does nothing where nobody asked for it."""
    if os.environ.pop(VARIABLE, None) is not None:
        threading.Thread(target=_wait_and_kill, name="lifeline", daemon=True).start()


def _wait_and_kill() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)
