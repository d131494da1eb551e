"""The warden: stays outside, starts the runner in its sandbox, and leaves nothing behind when either side ends.

It holds no secret, reads nothing that the code writes, and lives as long as the parent does and holds the connection.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from . import scratch, syscalls
from .cgroups import ControlGroup
from .facts import Facts
from .frames import receive, send
from .isolate import LINUX, SHARED_UID, Isolation, become, choose_uid
from .runner import Runner

_CLEANUP_S = 5.0
"""Seconds for which processes that do not want to end are hunted."""
_REMOVAL_S = 2.0
"""Seconds for which files are removed that one of them still writes."""


def main(control_fd: int) -> None:
    """Run one worker; the first message on the connection brings its settings and two more descriptors."""
    control = socket.socket(fileno=control_fd)
    settings = receive(control)
    if settings is not None:
        try:
            warden = Warden(control, settings)
        except OSError as error:
            send(control, {"failed": f"{type(error).__name__}: {error}"})
        else:
            warden.run()
    os._exit(0)


class Warden:
    """One worker's life, from its settings to its last process."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        """Prepare what is outside of the sandbox: signals, the base folder, the control group, the PID namespace."""
        self._control = control
        self._settings = settings
        self._facts = Facts()
        self._child = 0
        self._status: int | None = None
        self._wake = self._catch_signals()
        self._parent = self._watch_parent(settings["parent"])
        self._group = ControlGroup()
        self._out_of_memory = False
        sys.executable = os.path.realpath(sys.executable)  # inside, only this one is there, and no link to it
        self._outer_ids = os.getuid(), os.getgid()
        self._uid, self._why_root = choose_uid(settings["without"])
        self._make_group()
        self._namespaces = self._unshare()
        self._base = os.path.join(settings["folder"], f"ostinato-sandbox-{os.getpid()}-{os.urandom(6).hex()}")
        try:
            os.mkdir(self._base, 0o700)
        except OSError:
            self._group.remove()
            raise

    def run(self) -> None:
        """Start the runner, tell the parent, wait for an end, clean up."""
        try:
            failure = self._start()
            if failure is None:
                self._tell(
                    {
                        "ready": True,
                        "report": self._facts.as_report(),
                        "base": self._base,
                        "groups": [*set(self._group.folders.values())],
                    }
                )
                self._watch()
            else:
                self._tell({"failed": failure})
        except Exception as error:  # the warden's boundary: the parent is told, and everything is removed all the same
            self._tell({"failed": f"{type(error).__name__}: {error}"})
        finally:
            status = self._status  # that of an end of its own; none, if it is killed now
            left = self._clean()
            self._tell({"ended": True, "status": status, "out_of_memory": self._out_of_memory, "left": left})

    def _catch_signals(self) -> int:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(write, False)
        os.set_blocking(read, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._stopped = False
        if LINUX:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        return read

    def _on_signal(self, number: int, _: object) -> None:
        self._stopped = self._stopped or number != signal.SIGCHLD

    def _watch_parent(self, expected: int) -> int | None:
        descriptor = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(expected)
        if os.getppid() != expected:
            os._exit(0)
        return descriptor

    def _make_group(self) -> None:
        if "cgroup" in self._settings["without"] or not LINUX:
            self._facts.lacks("memory_total", "control group: left out by configuration" if LINUX else "Linux only")
            return
        total = self._settings["memory_bytes"] + self._settings["disk_bytes"]
        limits = {"memory": total, "pids": self._settings["processes"]}
        self._group.make(f"ostinato-sandbox-{os.getpid()}", limits)

    def _unshare(self) -> bool:
        without = "namespaces" in self._settings["without"]
        if without or not LINUX:
            why = "namespaces: left out by configuration" if without else "namespaces: Linux only"
            self._no_namespaces(why)
            return False
        number = 0 if os.geteuid() == 0 else _number_of_error(self._enter_namespaces)
        if number:
            self._no_namespaces(f"namespaces: {os.strerror(number)}")
            return False
        try:
            self._enter_namespaces()
        except OSError as error:
            self._no_namespaces(f"namespaces: {error.strerror}")
            return False
        return True

    def _enter_namespaces(self) -> None:
        if os.geteuid() == 0:
            syscalls.unshare(syscalls.CLONE_NEWPID)
        else:
            syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWPID)
            self._map_user()

    def _no_namespaces(self, why: str) -> None:
        for name in ("files", "disk_total", "network", "other_processes", "no_leftovers"):
            self._facts.lacks(name, why)

    def _map_user(self) -> None:
        user, group = self._outer_ids
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as target:
                target.write(text)

    def _start(self) -> str | None:
        """Fork the runner and see it through its isolation; returns what failed, None if nothing did."""
        report_read, report_write = socket.socketpair()
        go_read, go_write = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(go_write)
            report_read.close()
            self._become_runner(report_write, go_read)
        for descriptor in (go_read, self._settings["channel_fd"], self._settings["output_fd"]):
            os.close(descriptor)
        report_write.close()
        self._group.add(self._child)
        with contextlib.suppress(OSError):
            os.write(go_write, b"g")
        os.close(go_write)
        message = receive(report_read)
        report_read.close()
        if message is None:
            return "the runner ended while it was isolating itself"
        if "failed" in message:
            return message["failed"]
        self._facts.merge(message)
        self._add_own_facts()
        return None

    def _become_runner(self, report: socket.socket, go: int) -> None:
        """Never returns: this process is the runner from here on."""
        try:
            self._control.close()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            isolation = Isolation(
                self._settings,
                self._base,
                uid=self._uid,
                own_user=self._has_own_user(),
                namespaces=self._namespaces,
            )
            isolation.enter()
            channel = self._settings["channel_fd"]
            for descriptor in (1, 2):
                os.dup2(self._settings["output_fd"], descriptor)
            _close_all_but({0, 1, 2, channel, report.fileno(), go})
            _set_environment(isolation.scratch)
            runner = Runner(socket.socket(fileno=channel), self._settings)
            send(report, isolation.facts.as_message())
        except BaseException as error:  # whatever failed, the warden tells it to the parent
            with contextlib.suppress(OSError):
                send(report, {"failed": f"{type(error).__name__}: {error}"})
            os._exit(1)
        report.close()
        started = os.read(go, 1) == b"g"
        os.close(go)
        if started:
            with contextlib.suppress(BaseException):
                runner.serve()
        os._exit(0)

    def _has_own_user(self) -> bool:
        return self._uid not in (self._outer_ids[0], SHARED_UID)

    def _add_own_facts(self) -> None:
        facts = self._facts
        if self._why_root:
            facts.lacks("privileges", self._why_root)
        if self._has_own_user():
            facts.holds("other_processes", "user of its own")
            facts.holds("no_leftovers", "user of its own")
        for controller, name in (("memory", "memory_total"), ("pids", "processes")):
            if controller in self._group.folders:
                facts.holds(name, "control group")
            elif controller in self._group.reasons:
                facts.lacks(name, f"control group: {self._group.reasons[controller]}")
        if self._group.folders:
            facts.holds("no_leftovers", "control group")
        elif LINUX:
            facts.lacks("no_leftovers", "only what can be found among the descendants is killed")
        for name in ("environment", "file_descriptors", "wall_time", "output"):
            facts.holds(name, "the parent" if name in ("wall_time", "output") else "the way the worker is started")

    def _watch(self) -> None:
        watched = [self._control, self._wake] + ([] if self._parent is None else [self._parent])
        while self._status is None and not self._stopped:
            ready, _, _ = select.select(watched, [], [], 2.0 if self._parent is None else None)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 512)
                self._reap()
            if self._control in ready or self._parent in ready or os.getppid() != self._settings["parent"]:
                return  # the parent has closed the connection, or is gone

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    self._status = os.waitstatus_to_exitcode(ended[1])

    def _clean(self) -> list[str]:
        """Kill all that is left of the runner and remove its folder and group; returns what resists."""
        deadline = time.monotonic() + _CLEANUP_S
        while True:
            self._hunt()
            if not self._members() or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        left = [f"process {pid}" for pid in self._members()]
        self._out_of_memory = self._group.ran_out_of_memory()
        error = scratch.remove_from_under(self._base, _REMOVAL_S, self._hunt)
        if error is not None:
            left.append(f"{self._base} ({error.strerror or error})")
        while (folders := self._group.remove()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return left + folders

    def _hunt(self) -> None:
        self._kill_all()
        self._reap()

    def _kill_all(self) -> None:
        for pid in self._members():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self._child and not self._namespaces:
            with contextlib.suppress(OSError):
                os.killpg(self._child, signal.SIGKILL)
            if self._has_own_user():
                self._kill_user()

    def _members(self) -> set[int]:
        """Everything that runs for this worker, as far as it can be seen from here."""
        found = self._group.members()
        if not self._namespaces:
            found |= _children_of(os.getpid())
        if self._child and self._status is None:
            found.add(self._child)
        return found

    def _kill_user(self) -> None:
        """Kill whatever runs as the worker's user, at one stroke: what forks faster than it is found dies, too."""
        helper = os.fork()
        if helper == 0:
            try:
                become(self._uid, self._uid)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(helper, 0)

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            send(self._control, message)


def _number_of_error(attempt: Callable[[], None]) -> int:
    """Try in a process of its own what may leave one halfway, and return the number of its error, 0 if there is none."""
    child = os.fork()
    if child == 0:
        number = errno.ECANCELED
        try:
            attempt()
            number = 0
        except OSError as error:
            number = error.errno or number
        finally:
            os._exit(number)
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _children_of(parent: int) -> set[int]:
    found: set[int] = set()
    if not LINUX:
        return found
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    found.add(int(entry))
    return found


def _close_all_but(kept: set[int]) -> None:
    limit = max(256, *kept) + 1
    for descriptor in range(limit):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    os.closerange(limit, 65536)


def _set_environment(scratch_folder: str) -> None:
    os.environ.clear()
    os.environ.update(PATH="/usr/local/bin:/usr/bin:/bin", HOME=scratch_folder, TMPDIR=scratch_folder, LANG="C.UTF-8")
    # Libraries that start a thread for each processor would use up the number of processes.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
