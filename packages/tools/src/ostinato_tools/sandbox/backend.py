"""What stands between the tool and the place where code runs: a backend makes sessions, a session runs code.

`ProcessBackend` is the one that comes with this package. A stronger one, of containers or virtual machines, has the same
three methods and is named in the configuration.
"""

from enum import StrEnum
from typing import Protocol

import msgspec


class Enforcement(msgspec.Struct, frozen=True):
    """Whether one protection is in force."""

    name: str
    """Name of the protection."""
    enforced: bool
    """Whether it is."""
    detail: str
    """By what, or why not."""


class RunEnd(StrEnum):
    """Why a run of code ended."""

    FINISHED = "finished"
    RAISED = "raised"
    """The code raised an exception; the interpreter goes on."""
    TIMED_OUT = "timed_out"
    DIED = "died"
    """The interpreter ended, or had to be ended, for another reason than time."""


class CodeResult(msgspec.Struct, frozen=True):
    """What became of one piece of code. All text is the code's own: nothing in it can be trusted."""

    end: RunEnd
    """Why it ended."""
    output: str = ""
    """What was printed, cut to the limit."""
    value: str | None = None
    """`repr` of the last expression; None where there is none."""
    error: str | None = None
    """Traceback of the code's own lines."""
    num_dropped: int = 0
    """Bytes of output beyond the limit."""
    state_lost: bool = False
    """Whether variables and files are gone; the session is then of no further use."""
    detail: str = ""
    """Why it died, for the model."""


class SandboxSession(Protocol):
    """One interpreter, for one trajectory."""

    async def run(self, code: str) -> CodeResult:
        """Run code in the namespace that earlier runs left behind; never raises for what the code does.

        Cancelling makes the session useless; it still wants to be closed.

        Raises:
            ToolInfrastructureError: it cannot be run at all.
        """
        ...

    async def close(self) -> None:
        """End everything that the session started, and remove its files.

        Raises:
            ToolInfrastructureError: something is left; the message says what.
        """
        ...


class SandboxBackend(Protocol):
    """Makes sessions; the class is called with a `SandboxConfig`."""

    async def start(self) -> SandboxSession:
        """Return a session that is ready.

        Raises:
            ToolInfrastructureError: none can be had.
        """
        ...

    def enforcement(self) -> tuple[Enforcement, ...]:
        """Find out, by starting a session if need be, what is enforced here.

        Raises:
            ToolInfrastructureError: no session can be started.
        """
        ...

    def close(self) -> None:
        """End every session, also those in use."""
        ...


def describe(report: tuple[Enforcement, ...]) -> str:
    """Return a report as lines of text, what is not enforced last."""
    ordered = sorted(report, key=lambda entry: not entry.enforced)
    width = max((len(entry.name) for entry in ordered), default=0)
    return "\n".join(
        f"{entry.name:{width}}  {'enforced' if entry.enforced else 'NOT enforced'}: {entry.detail}" for entry in ordered
    )
