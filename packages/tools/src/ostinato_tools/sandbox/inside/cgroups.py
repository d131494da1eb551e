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
            places = _places()
        except OSError as error:
            places, why = {}, f"control groups cannot be read ({error.strerror})"
        else:
            why = "the system offers no such controller"
        for controller in _WANTED:
            if controller not in places:
                self.reasons[controller] = why
                continue
            parent, version = places[controller]
            folder = os.path.join(parent, name)
            try:
                self._make_one(folder, controller, version, limits[controller])
            except OSError as error:
                self.reasons[controller] = f"{folder}: {error.strerror}"
                if folder not in self.folders.values():
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)

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


def _places() -> dict[str, tuple[str, int]]:
    """Return, by controller, the folder of the group in which this process is, and the hierarchy's version."""
    own: dict[str, str] = {}
    with open("/proc/self/cgroup") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            own.update(dict.fromkeys(controllers.split(","), path))
    places: dict[str, tuple[str, int]] = {}
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()[:3]
            root, mount_point = before.split()[3:5]
            if kind == "cgroup":
                for controller in set(_WANTED) & set(options.split(",")):
                    places[controller] = (_joined(mount_point, root, own.get(controller, "/")), 1)
            elif kind == "cgroup2":
                folder = _joined(mount_point, root, own.get("", "/"))
                for controller in _WANTED:
                    places.setdefault(controller, (folder, 2))
    return places


def _joined(mount_point: str, root: str, path: str) -> str:
    inner = path[len(root) :] if root != "/" and path.startswith(root) else path
    folder = os.path.join(mount_point, inner.strip("/"))
    return folder if os.path.isdir(folder) else mount_point
