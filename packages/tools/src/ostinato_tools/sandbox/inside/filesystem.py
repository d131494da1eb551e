"""A file system of the sandbox's own: Python and the system's libraries read-only, an empty scratch folder, nothing else.

Paths are the same as outside, so that the interpreter finds its library. It all lives in a mount namespace and is gone with it.
"""

import os
import sys

from .syscalls import (
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    bind_read_only,
    mount,
    pivot_root,
    unmount,
)

SCRATCH = "/scratch"
"""Where the scratch folder lies in a file system of the sandbox's own; /tmp leads there where nothing else is below it."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKER_CACHE = "/etc/ld.so.cache"


def python_paths(packages: list[str]) -> list[str]:
    """Return the folders in which this interpreter and `packages` live, none of them twice or inside of another."""
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__), *packages]
    wanted = sorted({os.path.abspath(path) for path in paths} | {os.path.realpath(path) for path in paths})
    kept: list[str] = []
    for path in wanted:
        inside = any(path == known or path.startswith(known + "/") for known in (*kept, *_SYSTEM))
        if path != "/" and os.path.isdir(path) and not inside:
            kept.append(path)
    return kept


def readable_paths(packages: list[str]) -> list[str]:
    """Return what code needs to read where the file system is that of the host."""
    devices = [f"/dev/{name}" for name in _DEVICES]
    return [*python_paths(packages), *_SYSTEM, _LINKER_CACHE, "/proc/self", *devices]


def enter(base: str, *, packages: list[str], uid: int, gid: int, disk_bytes: int, new_processes: bool) -> str:
    """Leave the host's file system for one of the sandbox's own.

    Args:
        base: An empty folder, used as mount point.
        packages: Further folders of Python packages.
        uid: Owner of the scratch folder.
        gid: Its group.
        disk_bytes: Bytes that all files together may have.
        new_processes: Whether this process lives in a PID namespace of its own, whose /proc it may then see.

    Returns:
        What is missing, empty if nothing is.

    Raises:
        OSError: it cannot be made here; nothing has changed but mounts that only this process sees.
    """
    os.umask(0o022)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=4m,nr_inodes=4096")
    for path in _SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), base + path)
        elif os.path.isdir(path):
            _show(path, base)
    for path in python_paths(packages):
        _show(path, base)
    _make_etc(base, uid, gid)
    _make_dev(base)
    _make_scratch(base, uid, gid, disk_bytes)
    missing = _make_proc(base) if new_processes else "no /proc"
    pivot_root(base)
    mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    return missing


def _show(path: str, base: str) -> None:
    os.makedirs(base + path, exist_ok=True)
    bind_read_only(path, base + path)


def _make_etc(base: str, uid: int, gid: int) -> None:
    os.mkdir(f"{base}/etc")
    texts = {"passwd": f"sandbox:x:{uid}:{gid}::{SCRATCH}:/bin/sh\n", "group": f"sandbox:x:{gid}:\n"}
    for name, text in texts.items():
        with open(f"{base}/etc/{name}", "w") as file:
            file.write(text)
    if os.path.isfile(_LINKER_CACHE):
        with open(_LINKER_CACHE, "rb") as source, open(base + _LINKER_CACHE, "wb") as copy:
            copy.write(source.read(2_000_000))


def _make_dev(base: str) -> None:
    os.mkdir(f"{base}/dev")
    for name in _DEVICES:
        target = f"{base}/dev/{name}"
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
        mount(f"/dev/{name}", target, None, MS_BIND)
    os.symlink("/proc/self/fd", f"{base}/dev/fd")


def _make_scratch(base: str, uid: int, gid: int, disk_bytes: int) -> None:
    """One limited file system for the scratch folder and for the shared memory of processes, each of which a folder of it."""
    room = f"{base}/room"
    os.mkdir(room)
    options = f"mode=0755,size={disk_bytes},nr_inodes={max(1024, disk_bytes >> 14)}"
    mount("tmpfs", room, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, place in (("scratch", base + SCRATCH), ("shared", f"{base}/dev/shm")):
        os.mkdir(f"{room}/{name}", 0o700)
        os.chown(f"{room}/{name}", uid, gid)
        os.mkdir(place)
        mount(f"{room}/{name}", place, None, MS_BIND)
    unmount(room, MNT_DETACH)
    os.rmdir(room)
    if not os.path.lexists(f"{base}/tmp"):
        os.symlink(SCRATCH, f"{base}/tmp")


def _make_proc(base: str) -> str:
    os.mkdir(f"{base}/proc")
    why = ""
    for options in ("subset=pid", None):  # first without what it tells about the machine, on kernels from 5.8 on
        try:
            mount("proc", f"{base}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
        except OSError as error:  # inside many containers /proc is covered in part, and then may not be mounted anew
            why = f"no /proc ({error.strerror})"
        else:
            return ""
    return why
