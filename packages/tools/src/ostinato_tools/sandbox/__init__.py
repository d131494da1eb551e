"""Sandboxed Python as a ready tool: `PythonTool`, its limits, and a report of what is really enforced where it runs.

What it is: an interpreter for each trajectory in a process that has given up what a computation does not need.
What it is not: a wall against holes in the kernel; docs/decisions/0006 says what it does not protect against, and
`SandboxBackend` is where a stronger one is plugged in.
"""

from ostinato_tools.sandbox.backend import (
    CodeResult,
    Enforcement,
    RunEnd,
    SandboxBackend,
    SandboxSession,
    describe,
)
from ostinato_tools.sandbox.config import SandboxConfig
from ostinato_tools.sandbox.process import ProcessBackend
from ostinato_tools.sandbox.tool import PythonTool, enforcement, shut_down

__all__ = [
    "CodeResult",
    "Enforcement",
    "ProcessBackend",
    "PythonTool",
    "RunEnd",
    "SandboxBackend",
    "SandboxConfig",
    "SandboxSession",
    "describe",
    "enforcement",
    "shut_down",
]
