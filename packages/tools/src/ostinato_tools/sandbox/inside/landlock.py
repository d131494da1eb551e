"""Landlock: the process and its children may only touch the paths that they are given, on kernels from 5.13 on."""

import ctypes
import os
from collections.abc import Iterable

from .syscalls import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 0x1, 0x2, 0x4, 0x8
_ALL_OF_FIRST = (1 << 13) - 1
_MAKE_DEVICES = 1 << 6 | 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NET_BIND_AND_CONNECT = 0x3
_SCOPE_SOCKETS_AND_SIGNALS = 0x3


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Return the version that the kernel offers.

    Raises:
        OSError: it offers none.
    """
    return syscall("landlock", _CREATE_RULESET, 0, 0, _VERSION)


def restrict(readable: Iterable[str], writable: Iterable[str], *, offered: int) -> None:
    """Leave this process nothing but these paths; no_new_privs must be set.

    From version 4 on TCP is refused as well, from version 6 on signals to processes that were not restricted by this call.

    Args:
        readable: Files and folders that may be read and executed; those that do not exist are left out.
        writable: Files and folders in which anything may be done but make devices.
        offered: What `version` returned.

    Raises:
        OSError: the kernel refuses.
    """
    handled = _ALL_OF_FIRST
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if offered >= since:
            handled |= right
    rules = _Ruleset(
        handled,
        _NET_BIND_AND_CONNECT if offered >= 4 else 0,
        _SCOPE_SOCKETS_AND_SIGNALS if offered >= 6 else 0,
    )
    size = 24 if offered >= 6 else 16 if offered >= 4 else 8
    ruleset = syscall("landlock_create_ruleset", _CREATE_RULESET, ctypes.byref(rules), size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ & handled)
        for path in writable:
            _allow(ruleset, path, handled & ~(_MAKE_DEVICES | _IOCTL_DEV))
        syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            access &= _ON_FILES
        rule = _PathBeneath(access, descriptor)
        syscall("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)
