"""A system call filter (seccomp BPF): what a computation never needs is refused with EPERM, what is unknown with ENOSYS.

The filter is inherited by every process that the code starts and cannot be taken off. It refuses every way to make a
socket, whatever the family: network namespaces do not hold AF_VSOCK back, for one.
"""

import ctypes
import errno
import os
import struct
import sys

from .syscalls import prctl

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEWEST = 451
"""The newest system call that the table below takes into account; those after it do not exist for the sandbox."""

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Network, and the ring by which sockets could be made past a filter.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Other processes: their memory, their descriptors, their signals.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Memory that outlives its process or is counted nowhere.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    # Corners of the kernel with a history of holes.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "vmsplice": (278, 75),
    # The machine itself.
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
    "syslog": (103, 116),
}
"""System calls that are refused whatever their arguments: numbers on x86_64 and on aarch64."""

REFUSED_AMONG_EQUALS: dict[str, tuple[int | None, int | None]] = {
    # What may be done to any process of one's own user, and is no signal.
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "ioprio_set": (251, 30),
    "process_mrelease": (448, 448),
    # What may be done to any file of one's own user, and Landlock does not see (the first two: before Linux 6.2).
    "truncate": (76, 45),
    "openat2": (437, 437),  # its flags are out of a filter's reach
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
"""System calls that are refused where the parent's processes and files are of the same user and in sight."""

_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_FCNTL = {"x86_64": 72, "aarch64": 25}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_KILL = {"x86_64": (62, 234), "aarch64": (129, 131)}
_OPEN = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
"""The calls that open files, and which of their arguments holds the flags."""
_PRCTL = {"x86_64": 157, "aarch64": 167}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_SETRLIMIT = {"x86_64": 160, "aarch64": 164}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_NEW_NAMESPACES = 0x7E020000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_F_SETOWN, _F_SETOWN_EX = 8, 15
_O_TRUNC, _O_ACCMODE = 0o1000, 0o3
_AF_UNIX = 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_SOCK_STREAM = 1
_RLIMIT_CORE = 4

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050000 | 1, 0x00050000 | 38
_NUMBER_AT, _ARCH_AT, _ARGUMENT_AT = 0, 4, 16


def install(*, among_equals: bool, only_own_signals: bool) -> None:
    """Put the filter on this process; no_new_privs must be set.

    Args:
        among_equals: Whether the parent's processes and files are of the same user and in sight.
        only_own_signals: Also refuse signals to any process but this one, for places where nothing else does.

    Raises:
        OSError: the kernel or the machine does not offer it.
    """
    machine = os.uname().machine
    if machine not in _ARCH or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, f"no system call numbers are known for {machine}")
    target = os.getpid() if only_own_signals else None
    program = compile_filter(machine, among_equals=among_equals, only_signals_to=target)
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(header))


def compile_filter(machine: str, *, among_equals: bool, only_signals_to: int | None) -> bytes:
    """Return the filter's program, eight bytes a line.

    Args:
        machine: `x86_64` or `aarch64`.
        among_equals: See `install`.
        only_signals_to: The one process that may be signalled; any if None.
    """
    refused = REFUSED | (REFUSED_AMONG_EQUALS if among_equals else {})
    column = 0 if machine == "x86_64" else 1
    lines = [
        _line(_LOAD, _ARCH_AT),
        _line(_EQUAL, _ARCH[machine], yes=1),
        _line(_RETURN, _KILL_PROCESS),
        _line(_LOAD, _NUMBER_AT),
        _line(_GREATER, _NEWEST, no=1),  # with the bit of the x32 numbers it is greater, too
        _line(_RETURN, _ENOSYS),
        *_when(_CLONE3, [_line(_RETURN, _ENOSYS)]),  # its flags are out of a filter's reach; libc goes back to clone
        *_when(_CLONE[machine], _refuse_if(0, _ANY_BIT, _NEW_NAMESPACES)),
        # Streams stay with their pair; a datagram could be sent from one to any other socket.
        *_when(_SOCKETPAIR[machine], [*_refuse_unless(0, _AF_UNIX), *_allow_only(1, _SOCK_STREAM, of_bits=0xF)]),
        *_when(_PRCTL[machine], _refuse_if(0, _EQUAL, _PR_SET_PDEATHSIG, _PR_SET_DUMPABLE)),
        *_when(_SETRLIMIT[machine], _refuse_if(0, _EQUAL, _RLIMIT_CORE)),
        *_when(_PRLIMIT[machine], [*_refuse_unless(0, 0), *_refuse_if(1, _EQUAL, _RLIMIT_CORE)]),
        *_when(_IOCTL[machine], _refuse_if(1, _EQUAL, _TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP)),
    ]
    if only_signals_to is not None:
        for number in _KILL[machine]:
            lines += _when(number, _allow_only(0, only_signals_to))
        # The owner of a descriptor gets a signal, of any kind, when the descriptor becomes readable.
        lines += _when(_FCNTL[machine], _refuse_if(1, _EQUAL, _F_SETOWN, _F_SETOWN_EX))
    if among_equals:  # before Linux 6.2, who may only read a file may still empty it
        for number, flags in _OPEN[machine]:
            emptying = _refuse_if(flags, _EQUAL, _O_TRUNC, _O_TRUNC | _O_ACCMODE, of_bits=_O_TRUNC | _O_ACCMODE)
            lines += _when(number, emptying)
    for numbers in refused.values():
        number = numbers[column]
        if number is not None:
            lines += _when(number, [_line(_RETURN, _EPERM)])
    lines.append(_line(_RETURN, _ALLOW))
    return b"".join(lines)


def _line(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _when(number: int, then: list[bytes]) -> list[bytes]:
    return [_line(_EQUAL, number, no=len(then)), *then]


def _refuse_if(argument: int, test: int, *values: int, of_bits: int = 0xFFFFFFFF) -> list[bytes]:
    lines = [_line(_LOAD, _ARGUMENT_AT + 8 * argument), _line(_AND, of_bits)]
    for value in values:
        lines += [_line(test, value, no=1), _line(_RETURN, _EPERM)]
    return [*lines, _line(_RETURN, _ALLOW)]


def _refuse_unless(argument: int, value: int, *, of_bits: int = 0xFFFFFFFF) -> list[bytes]:
    return [
        _line(_LOAD, _ARGUMENT_AT + 8 * argument),
        _line(_AND, of_bits),
        _line(_EQUAL, value, yes=1),
        _line(_RETURN, _EPERM),
    ]


def _allow_only(argument: int, value: int, *, of_bits: int = 0xFFFFFFFF) -> list[bytes]:
    return [*_refuse_unless(argument, value, of_bits=of_bits), _line(_RETURN, _ALLOW)]
