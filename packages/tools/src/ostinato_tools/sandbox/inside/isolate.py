"""The steps by which a child of the warden gives up, one after the other, everything that a computation does not need.

Each step is tried, and what became of it is a fact; a step that the place does not offer is no error here. The order
matters: mounts need the rights that are dropped after them, and the filter, which comes last, refuses most of the rest.
"""

import contextlib
import importlib
import os
import resource
import signal
import socket
import sys
from typing import Any

from . import filesystem, landlock, seccomp, syscalls
from .facts import Facts

LINUX = sys.platform == "linux"
_LIBRARY = """__future__ abc asyncio bisect calendar cmath collections copy csv dataclasses datetime decimal enum fractions
functools hashlib heapq io itertools json math operator pathlib pickle random re shutil statistics string subprocess tempfile
textwrap threading time typing unicodedata uuid zlib""".split()  # noqa: SIM905 - forty lines say no more
_UID_BASE = 1_900_000_000
"""Far above the ids that systems and containers give out; the warden's process id is added to it."""
_MANY_UIDS = 16384
SHARED_UID = 65534
"""The user `nobody`, where there is no other."""
_MORE_NAMESPACES = (syscalls.CLONE_NEWIPC, syscalls.CLONE_NEWUTS, syscalls.CLONE_NEWCGROUP)


class Isolation:
    """One worker's way into its sandbox; `enter` takes all steps and leaves `facts` and `scratch`."""

    def __init__(self, settings: dict[str, Any], base: str, *, uid: int, own_user: bool, namespaces: bool) -> None:
        """Prepare the steps.

        Args:
            settings: The worker's settings, as `SandboxConfig.as_settings` gives them.
            base: An empty folder, the scratch folder or the place of the new root.
            uid: User to become, and group; the present one where it shall be kept.
            own_user: Whether nothing else runs as that user.
            namespaces: Whether this process is the first of a PID namespace.
        """
        self.facts = Facts()
        self.scratch = base
        self._settings = settings
        self._base = base
        self._uid = uid
        self._gid = os.getgid() if uid == os.getuid() else uid
        self._namespaces = namespaces
        self._own_user = own_user
        self._signals_scoped = False
        self._own_root = False
        self._readable = filesystem.readable_paths(settings["packages"])  # while links can still be followed

    def enter(self) -> None:
        """Take all steps.

        Raises:
            OSError: a step failed without which nothing can run.
        """
        os.setsid()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, this goes before anything of the parent's
        self._leave_namespaces()
        if not self._own_root:
            self._make_scratch()
            self._keep_library_reachable()
        self._limit()
        self._drop_root()
        self._restrict()
        os.chdir(self.scratch)
        os.umask(0o077)
        self._check()

    def _leave_namespaces(self) -> None:
        facts = self.facts
        if not self._namespaces:
            return
        facts.holds("no_leftovers", "PID namespace")
        facts.holds("other_processes", "PID namespace")
        try:
            syscalls.unshare(syscalls.CLONE_NEWNET)
        except OSError as error:
            facts.lacks("network", f"network namespace: {error.strerror}")
        else:
            facts.holds("network", "network namespace")
        for flag in _MORE_NAMESPACES:  # what they would hide, the system call filter refuses as well
            with contextlib.suppress(OSError):
                syscalls.unshare(flag)
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            missing = filesystem.enter(
                self._base,
                packages=self._settings["packages"],
                uid=self._uid,
                gid=self._gid,
                disk_bytes=self._settings["disk_bytes"],
                new_processes=True,
            )
        except OSError as error:
            for name in ("files", "disk_total"):
                facts.lacks(name, f"mount namespace: {error}")
            with contextlib.suppress(OSError):
                syscalls.unmount(self._base, syscalls.MNT_DETACH)
            return
        self._own_root = True
        self.scratch = filesystem.SCRATCH
        facts.holds("files", "mount namespace" + (f" ({missing})" if missing else ""))
        facts.holds("disk_total", "size of the scratch folder's own file system")

    def _make_scratch(self) -> None:
        """A folder inside of the base, so that its owner can neither rename it nor put something else in its place."""
        os.chmod(self._base, 0o711)
        self.scratch = os.path.join(self._base, "scratch")
        os.mkdir(self.scratch, 0o700)
        os.chown(self.scratch, self._uid, self._gid)

    def _keep_library_reachable(self) -> None:
        """Import what is imported most, where the user to become could not read Python's library any more."""
        library = os.path.dirname(os.__file__)
        if self._uid == os.getuid() or _readable_by_others(library):
            return
        for name in _LIBRARY:
            importlib.import_module(name)
        self.facts.note("files", f"modules that are not imported yet are out of reach: {library} is closed to others")

    def _limit(self) -> None:
        settings, facts = self._settings, self.facts
        limits = {
            "cpu_time": ("RLIMIT_CPU", settings["cpu_s"]),
            "memory": ("RLIMIT_AS", settings["memory_bytes"]),
            "file_size": ("RLIMIT_FSIZE", settings["file_bytes"]),
            "processes": ("RLIMIT_NPROC", settings["processes"] + self._shared_processes()),
            "open_files": ("RLIMIT_NOFILE", settings["open_files"]),
        }
        for name, (limit, value) in limits.items():
            try:
                # One second more before the kernel kills: at the lower one the runner may still tell the code.
                _set_limit(limit, value, spare=1 if name == "cpu_time" else 0)
            except (AttributeError, ValueError, OSError) as error:
                facts.lacks(name, f"{limit}: {error}")
            else:
                if name == "memory" and not LINUX:
                    facts.lacks(name, f"{limit} has no effect on {sys.platform}")
                elif name == "processes" and os.getuid() == 0 == self._uid:
                    facts.lacks(name, f"{limit} does not hold for root")
                else:
                    facts.holds(name, limit)
        # A core file of one byte is none, and unlike one of none it is not handed to the host's handler of crashes either.
        for limit, value in (("CORE", 1), ("MEMLOCK", 0), ("MSGQUEUE", 0), ("SIGPENDING", 256), ("STACK", 8 << 20)):
            with contextlib.suppress(AttributeError, ValueError, OSError):
                _set_limit(f"RLIMIT_{limit}", value)

    def _shared_processes(self) -> int:
        """Tasks that count for this user already, where the user is shared with the parent."""
        if self._uid != os.getuid() or self._namespaces or not os.path.isdir("/proc"):
            return 0
        count = 0
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == self._uid:
                    count += len(os.listdir(f"/proc/{entry}/task"))
        return count

    def _drop_root(self) -> None:
        if LINUX:
            with contextlib.suppress(OSError):
                syscalls.drop_bounding_set()
        if self._uid != os.getuid():
            become(self._uid, self._gid)
        if LINUX:
            with contextlib.suppress(OSError):
                syscalls.drop_capabilities()
        if os.getuid() == 0:
            self.facts.lacks("privileges", "still root, by configuration or because no other user exists here")
        else:
            self.facts.holds("privileges", f"runs as user {os.getuid()}")

    def _restrict(self) -> None:
        """no_new_privs, death with the warden, Landlock, and the system call filter; none of them can be undone."""
        facts, without = self.facts, self._settings["without"]
        if not LINUX:
            return
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if "landlock" in without:
            facts.lacks("files", "Landlock: left out by configuration")
        else:
            self._lock_paths()
        if "seccomp" in without:
            for name in ("system_calls", "network"):
                facts.lacks(name, "system call filter: left out by configuration")
            return
        try:
            among_equals = not (self._own_user or (self._namespaces and self._own_root))
            only_own_signals = not (self._own_user or self._namespaces or self._signals_scoped)
            seccomp.install(among_equals=among_equals, only_own_signals=only_own_signals)
        except OSError as error:
            for name in ("system_calls", "network"):
                facts.lacks(name, f"system call filter: {error}")
        else:
            facts.holds("system_calls", "system call filter")
            facts.holds("network", "system call filter")
            facts.holds("other_processes", "system call filter")

    def _lock_paths(self) -> None:
        facts = self.facts
        try:
            offered = landlock.version()
            if self._own_root:
                readable, writable = ["/"], [self.scratch, "/dev/shm", "/dev/null"]
            else:
                readable, writable = self._readable, [self.scratch, "/dev/null"]
            landlock.restrict(readable, writable, offered=offered)
        except OSError as error:
            facts.lacks("files", f"Landlock: {error.strerror}")
            return
        facts.holds("files", f"Landlock {offered}")
        if offered >= 6:
            facts.holds("other_processes", f"Landlock {offered}")
            self._signals_scoped = True

    def _check(self) -> None:
        """Try what must fail now: what was set up without an error may still not hold."""
        facts = self.facts
        if os.getuid() != 0 and _works(lambda: os.setuid(0)):
            facts.refute("privileges", "the way back to root was open")
        if "system call filter" in facts.by["network"] and _works(lambda: socket.socket().close()):
            facts.refute("network", "a socket could be made")
            facts.refute("system_calls", "a socket could be made")
        if self._own_root and os.path.exists(self._base):
            facts.refute("files", "the file system of the host is still in sight")
        if not self._own_root and facts.by["files"] and _works(lambda: os.listdir("/")):
            facts.refute("files", "the root folder could be listed")


def choose_uid(without: list[str]) -> tuple[int, str]:
    """Return the user that a worker becomes, and why it stays root if it does.

    Where this process is root, each worker gets a user of its own, so that none can touch another, and so that the
    number of processes is counted for it alone.
    """
    current = os.getuid()
    if current != 0:
        return current, ""
    if "drop_root" in without:
        return 0, "left out by configuration"
    try:
        with open("/proc/self/uid_map") as lines:
            uids = find_uids(lines.read(), os.getpid())
    except OSError:
        uids = [SHARED_UID]
    return (uids[0], "") if uids else (0, "no other user is known in this user namespace")


def find_uids(uid_map: str, pid: int) -> list[int]:
    """Return users that a worker may become, the best first.

    Args:
        uid_map: Text of /proc/self/uid_map: the users that exist in this namespace.
        pid: Of the warden; users that are derived from it are used by no other worker at the same time.
    """
    ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in uid_map.splitlines())]
    found = [_UID_BASE + pid] if any(first <= _UID_BASE + pid < first + count for first, count in ranges) else []
    found += [first + count - 3 - pid % (count // 2) for first, count in ranges if count >= _MANY_UIDS]
    found += [SHARED_UID] if any(first <= SHARED_UID < first + count for first, count in ranges) else []
    return found


def become(uid: int, gid: int) -> None:
    """Become another user for good, with one group and no other ones.

    Raises:
        OSError: this process may not.
    """
    os.setgroups([])
    if hasattr(os, "setresuid"):
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    else:  # macOS; for root these set all ids as well
        os.setgid(gid)
        os.setuid(uid)


def _set_limit(name: str, value: int, *, spare: int = 0) -> None:
    limit = getattr(resource, name)
    highest = resource.getrlimit(limit)[1]
    if highest != resource.RLIM_INFINITY:
        value, spare = min(value, highest), min(spare, highest - min(value, highest))
    resource.setrlimit(limit, (value, value + spare))


def _readable_by_others(path: str) -> bool:
    while True:
        if os.stat(path).st_mode & 0o005 != 0o005:
            return False
        if path == os.path.dirname(path):
            return True
        path = os.path.dirname(path)


def _works(attempt: Any) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True
