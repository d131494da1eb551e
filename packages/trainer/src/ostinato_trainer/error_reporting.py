"""The boundary at which a command's errors become one message and an exit status.

What the six packages raise on purpose, wrong usage, Ctrl-C, a closed pipe, and what the machine refuses (a full disk, missing permissions) are
messages; anything else is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Final

import typer
from rich.console import Console
from rich.text import Text

from ostinato_trainer.interrupts import TERMINATED
from ostinato_trainer.terminal_log import logging_to_terminal

__all__ = ["expected_errors", "run_reporting_errors"]

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells have it."""

_UsageError: Final[type[Exception]] = typer.BadParameter.__bases__[0]
"""Root of wrong options and arguments; typer gives it no public name of its own."""

_REFUSALS: Final = {
    errno.ENOSPC: "make room there or choose another folder",
    errno.EDQUOT: "make room there or choose another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "fix its permissions or choose another path",
    errno.EPERM: "fix its permissions or choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
"""What the machine may refuse to any program, and the cure."""


def run_reporting_errors(command: Callable[[], object]) -> int:
    """Run `command` and return its exit status: 0, 1 for an expected error, 2 for wrong usage, 130 for Ctrl-C, 143
    for SIGTERM."""
    try:
        with logging_to_terminal():
            status = command()
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except typer.Exit as request:
        status = request.exit_code
    except SystemExit as request:
        if request.code != TERMINATED:
            raise
        status = TERMINATED
    except _UsageError as error:
        return _report_usage(error)
    except BrokenPipeError:
        return _leave_quietly()
    except expected_errors() as error:
        notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]  # longer ones are tracebacks
        _say("error", "\n  ".join([str(error), *notes]))
        return 1
    except OSError as error:
        cure = _REFUSALS.get(error.errno or 0)
        if cure is None:
            raise
        _say("error", f"{error.filename or 'a file'} must be accessible, got {error.strerror}; {cure}")
        return 1
    status = status if isinstance(status, int) else 0
    if status in (INTERRUPTED, TERMINATED):
        if sys.stderr.isatty():
            sys.stderr.write("\n")  # below the ^C of the terminal
        _say("interrupted", "nothing is left half-written; checkpoints that are there are complete")
    return status


def expected_errors() -> tuple[type[Exception], ...]:
    """The roots of the six packages' error trees: what they raise on purpose, with a message for the user."""
    from ostinato_agent_loop import AgentLoopError
    from ostinato_engines import EngineError
    from ostinato_rollout import RolloutError
    from ostinato_tokenization import TokenizationError
    from ostinato_tools import ToolError
    from ostinato_trainer.errors import TrainerError

    return (AgentLoopError, EngineError, RolloutError, TokenizationError, ToolError, TrainerError)


def _report_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    message = getattr(error, "format_message", error.__str__)()
    if context is None or not message.strip() or type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(message.rstrip() + "\n")
    else:
        cure = "" if ";" in message else f"; `{context.command_path} --help` shows what there is"
        _say("error", message.rstrip(".") + cure)
    return 2


def _leave_quietly() -> int:
    """Whoever read our output has gone; there is nobody to tell."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _say(kind: str, message: str) -> None:
    """One message on the standard error, with nothing of it read as markup or broken into lines."""
    style = "bold red" if kind == "error" else "bold"
    Console(stderr=True).print(Text.assemble((kind, style), ": ", message), soft_wrap=True, highlight=False)
