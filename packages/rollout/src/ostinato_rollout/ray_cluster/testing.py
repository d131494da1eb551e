"""A Ray cluster on this host for tests, and the proof that nothing of it is left."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

_STORE_BYTES = 80 << 20
_END_S = 20.0
_MAX_PATH = 40
"""Of the folder: the names of Ray's sockets in it are long, and a socket's path has at most 107 bytes."""


@contextmanager
def local_cluster(*, num_cpus: int = 16, num_gpus: int = 0) -> Iterator[None]:
    """A cluster of one node, or the one that this process has already.

    The amounts are what actors may ask for; nobody looks whether the host has them. Where TMPDIR is too long for sockets,
    its folder is in /tmp.

    Raises:
        AssertionError: A process of the cluster was left at the end; it has been killed.
    """
    if ray.is_initialized():
        yield
        return
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="ray", dir=parent if len(parent) <= _MAX_PATH else "/tmp")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before = descendants(os.getpid())
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            _temp_dir=folder,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
        )
        yield
    finally:
        started = descendants(os.getpid()) - before
        ray.shutdown()
        left = wait_until_gone(started)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, f"no process must be left of the cluster, got {left}"


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
    return _processes().get(pid, (0, "Z"))[1] not in "ZX"


def wait_until_gone(pids: set[int], timeout_s: float = _END_S) -> set[int]:
    """Waits until processes have ended; those that have not within the deadline."""
    deadline = time.monotonic() + timeout_s
    while left := {pid for pid, (_, state) in _processes().items() if pid in pids and state not in "ZX"}:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return set()


def _processes() -> dict[int, tuple[int, str]]:
    """Parent and state of all processes."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        found[int(folder.name)] = (int(parent), state)
    return found
