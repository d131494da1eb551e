"""What is enforced, as the code that sets it up found it: one fact for each protection, in terms of its effect."""

import sys
from typing import Any

PROTECTIONS = {
    "wall_time": "a call ends in time",
    "output": "text is limited while it is written",
    "cpu_time": "processor seconds of each process",
    "memory": "address space of each process",
    "memory_total": "memory of all processes and files together",
    "file_size": "bytes of each file",
    "disk_total": "bytes of all files together",
    "processes": "number of processes and threads",
    "open_files": "number of open files of each process",
    "environment": "no variable of the parent's is seen",
    "file_descriptors": "no open file of the parent's is inherited",
    "privileges": "no root, no capabilities, and no way back to them",
    "files": "no file but Python, the system's programs and the scratch folder",
    "network": "no connection to anywhere",
    "other_processes": "no signal to other processes, no look into them",
    "system_calls": "what a computation does not need is refused by the kernel",
    "no_leftovers": "no process outlives the trajectory",
}
"""The protections by name, each with what it means."""

MECHANISMS = ("namespaces", "drop_root", "seccomp", "landlock", "cgroup")
"""What can be left out on purpose; the protections that rest on it say so."""


class Facts:
    """Collects, for each protection, by what it is enforced or why it is not."""

    def __init__(self) -> None:
        self.by: dict[str, list[str]] = {name: [] for name in PROTECTIONS}
        self.reasons: dict[str, list[str]] = {name: [] for name in PROTECTIONS}
        self.notes: dict[str, list[str]] = {name: [] for name in PROTECTIONS}

    def holds(self, name: str, by: str) -> None:
        """Record that `name` is enforced by something."""
        self.by[name].append(by)

    def lacks(self, name: str, why: str) -> None:
        """Record why something does not enforce `name`; something else still may."""
        self.reasons[name].append(why)

    def refute(self, name: str, why: str) -> None:
        """Record that `name` does not hold whatever was set up for it."""
        self.by[name].clear()
        self.reasons[name].append(why)

    def note(self, name: str, text: str) -> None:
        """Record what a user should know about `name`, enforced or not."""
        self.notes[name].append(text)

    def merge(self, other: dict[str, dict[str, list[str]]]) -> None:
        """Add what `as_message` of another process gave."""
        for name in PROTECTIONS:
            self.by[name] += other["by"][name]
            self.reasons[name] += other["reasons"][name]
            self.notes[name] += other["notes"][name]

    def as_message(self) -> dict[str, dict[str, list[str]]]:
        """Return everything as JSON values."""
        return {"by": self.by, "reasons": self.reasons, "notes": self.notes}

    def as_report(self) -> list[dict[str, Any]]:
        """Return one entry for each protection: name, enforced, detail."""
        report = []
        for name in PROTECTIONS:
            by, reasons = self.by[name], self.reasons[name]
            detail = ", ".join(by) if by else "; ".join(reasons) or f"nothing on {sys.platform} offers it"
            detail = "; ".join([detail, *self.notes[name]])
            report.append({"name": name, "enforced": bool(by), "detail": detail})
        return report
