"""Processes of this host, as Linux tells of them: who has started whom, and who is still there."""

import time
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Processes that `pid` has started, and those that they have started."""
    children: dict[int, list[int]] = {}
    for child, (parent, _) in _processes().items():
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    new = [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        found.update(new)
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there; one that has ended, though nobody has asked for its result yet, is not."""
    found = _parent_and_state(pid)
    return found is not None and found[1] not in "ZX"


def wait_until_gone(pids: set[int], timeout_s: float = 20.0) -> set[int]:
    """Waits until processes have ended; those that have not within the deadline."""
    deadline = time.monotonic() + timeout_s
    while left := {pid for pid, (_, state) in _processes().items() if pid in pids and state not in "ZX"}:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return set()


def _processes() -> dict[int, tuple[int, str]]:
    """Parent and state of all processes."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return {pid: found for pid in pids if (found := _parent_and_state(pid)) is not None}


def _parent_and_state(pid: int) -> tuple[int, str] | None:
    """None of a process that is not there."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(parent), state
