"""A control group around one worker, in whichever hierarchies (version 1 or 2) this process may make one.

Limits of a group hold for all its processes together, which no rlimit does, and killing it leaves none of them.
"""

import contextlib
import os

_WANTED = ("memory", "pids")
_LIMITS = {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
    ("pids", 1): "pids.max",
    ("pids", 2): "pids.max",
}


class ControlGroup:
    """Folders made for one worker, by controller; absent controllers are in `reasons`."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def make(self, name: str, limits: dict[str, int]) -> None:
        """Make the group and set its limits.

        Args:
            name: Name of the folder to make.
            limits: Controller, `memory` (bytes) or `pids`, to its limit.
        """
        try:
            with open("/proc/self/cgroup") as own, open("/proc/self/mountinfo") as mounts:
                places = find_places(own.read(), mounts.read())
        except OSError as error:
            places = {}
            self.reasons = dict.fromkeys(_WANTED, f"control groups cannot be read ({error.strerror})")
        for controller in _WANTED:
            version, parents = places.get(controller, (0, []))
            for parent in parents:
                folder = os.path.join(parent, name)
                try:
                    self._make_one(folder, controller, version, limits[controller])
                    break
                except OSError as error:
                    self.reasons[controller] = f"{folder}: {error.strerror}"
                    if folder not in self.folders.values():
                        with contextlib.suppress(OSError):
                            os.rmdir(folder)
            self.reasons.setdefault(controller, "the system offers no such controller")

    def _make_one(self, folder: str, controller: str, version: int, limit: int) -> None:
        os.makedirs(folder, exist_ok=True)
        _write(os.path.join(folder, _LIMITS[controller, version]), limit)
        self.folders[controller] = folder
        if controller == "memory":
            optional = (("memory.swap.max", 0), ("memory.oom.group", 1), ("memory.memsw.limit_in_bytes", limit))
            for file, value in optional:
                with contextlib.suppress(OSError):
                    _write(os.path.join(folder, file), value)

    def add(self, pid: int) -> None:
        """Put a process, and so what it will start, into the group."""
        for controller, folder in list(self.folders.items()):
            try:
                _write(os.path.join(folder, "cgroup.procs"), pid)
            except OSError as error:
                self.reasons[controller] = f"{folder}: {error.strerror}"
                self.remove(controller)

    def members(self) -> set[int]:
        """Return the processes that are in it."""
        found: set[int] = set()
        for folder in self.folders.values():
            with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.procs")) as file:
                found.update(int(line) for line in file)
        return found - {0}

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed in this group for want of memory."""
        folder = self.folders.get("memory")
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError), open(os.path.join(folder or "", file)) as lines:
                counts = dict(line.split() for line in lines if len(line.split()) == 2)
                return int(counts.get("oom_kill", 0)) > 0
        return False

    def remove(self, controller: str | None = None) -> list[str]:
        """Remove the group, or one controller's; returns the folders that are still there."""
        left: list[str] = []
        for name in [controller] if controller else list(self.folders):
            folder = self.folders.pop(name)
            if folder in self.folders.values():
                continue
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                continue
            except OSError:
                left.append(folder)
                self.folders[name] = folder
        return left


def _write(path: str, value: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def find_places(own_groups: str, mounts: str) -> dict[str, tuple[int, list[str]]]:
    """Return, by controller, the hierarchy's version and the folders in which a group may be made, the best first.

    In version 2 a group that holds processes gives its children no memory limit; one beside it may have one.

    Args:
        own_groups: Text of /proc/self/cgroup.
        mounts: Text of /proc/self/mountinfo.
    """
    own: dict[str, str] = {}
    for line in own_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    places: dict[str, tuple[int, list[str]]] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()[:3]
        root, mount_point = before.split()[3:5]
        if kind == "cgroup":
            for controller in set(_WANTED) & set(options.split(",")):
                places[controller] = (1, [_joined(mount_point, root, own.get(controller, "/"))])
        elif kind == "cgroup2":
            folder = _joined(mount_point, root, own.get("", "/"))
            beside = [] if folder == mount_point else [os.path.dirname(folder)]
            for controller in _WANTED:
                places.setdefault(controller, (2, [folder, *beside]))
    return places


def _joined(mount_point: str, root: str, path: str) -> str:
    inner = path[len(root) :] if root != "/" and path.startswith(root) else path
    folder = os.path.join(mount_point, inner.strip("/")).rstrip("/")
    return folder if os.path.isdir(folder) else mount_point
