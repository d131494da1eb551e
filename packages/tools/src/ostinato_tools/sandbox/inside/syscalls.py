"""System calls that Python's standard library does not offer, through ctypes. Every failure is an OSError."""

import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY_NOSUID_NODEV = 0x1 | 0x2 | 0x4


def checked(result: int, what: str) -> int:
    """Return what a C function returned.

    Raises:
        OSError: it is negative; the message starts with `what`.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """Make a system call by its number.

    Raises:
        OSError: it failed.
    """
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return checked(_libc.syscall(ctypes.c_long(number), *values), what)


def prctl(option: int, *arguments: int) -> int:
    """Call prctl(2).

    Raises:
        OSError: it failed.
    """
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return checked(_libc.prctl(ctypes.c_int(option), *values), f"prctl({option})")


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` names for new ones.

    Raises:
        OSError: it is not allowed here.
    """
    checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2).

    Raises:
        OSError: it failed.
    """
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    checked(result, f"mount {kind or 'bind'} on {target}")


def unmount(target: str, flags: int = 0) -> None:
    """Call umount2(2).

    Raises:
        OSError: it failed.
    """
    checked(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), f"unmount {target}")


def bind_read_only(source: str, target: str) -> None:
    """Show `source` and what is mounted below it at `target`, read-only, without devices and set-user-id programs.

    Kernels before 5.12 do that to `source` itself only; what is mounted below it then stays as it is.

    Raises:
        OSError: it failed.
    """
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    where = ctypes.c_char_p(os.fsencode(target))
    size = ctypes.sizeof(attributes)
    try:
        syscall("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, where, _AT_RECURSIVE, ctypes.byref(attributes), size)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        kept = MS_NOEXEC if os.statvfs(target).f_flag & os.ST_NOEXEC else 0
        mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def pivot_root(new_root: str) -> None:
    """Make `new_root`, a mount point, the root and let go of the old one.

    Raises:
        OSError: it failed, or the machine is not known.
    """
    os.chdir(new_root)
    syscall("pivot_root", _of_machine(_PIVOT_ROOT, "pivot_root"), ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    unmount(".", MNT_DETACH)
    os.chdir("/")


def drop_bounding_set() -> None:
    """Take every capability out of the bounding set, and the ambient ones with it.

    Raises:
        OSError: the process may not.
    """
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this kernel has no capability of this number
                raise
            break
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)


def drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets.

    Raises:
        OSError: it failed, or the machine is not known.
    """
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    syscall("capset", _of_machine(_CAPSET, "capset"), ctypes.byref(header), ctypes.byref(data))


def _of_machine(numbers: dict[str, int], what: str) -> int:
    machine = os.uname().machine
    if machine not in numbers:
        raise OSError(errno.ENOSYS, f"{what}: no number is known for {machine}")
    return numbers[machine]
