"""The system call filter's program, read as the kernel reads it, for both machines whatever this one is; and the choice of a user."""

import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato_tools.sandbox.inside.isolate import find_uids
from ostinato_tools.sandbox.inside.seccomp import REFUSED, REFUSED_AMONG_EQUALS, compile_filter

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
# read, write, openat, mmap, futex, exit_group, execve, wait4, pipe2, getrandom
HARMLESS = {
    "x86_64": (0, 1, 257, 9, 202, 231, 59, 61, 293, 318),
    "aarch64": (63, 64, 56, 222, 98, 94, 221, 260, 59, 278),
}
CLONE, PRCTL, SOCKETPAIR = (
    {"x86_64": 56, "aarch64": 220},
    {"x86_64": 157, "aarch64": 167},
    {"x86_64": 53, "aarch64": 199},
)
PRLIMIT, IOCTL, KILL_CALL = (
    {"x86_64": 302, "aarch64": 261},
    {"x86_64": 16, "aarch64": 29},
    {"x86_64": 62, "aarch64": 129},
)


def verdict(program: bytes, arch: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the program returns for a system call."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *(arguments + (0,) * 6)[:6])
    lines = list(struct.iter_unpack("HBBI", program))
    at = value = 0
    while True:
        code, yes, no, operand = lines[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            value &= operand
        else:
            holds = {0x15: value == operand, 0x25: value > operand, 0x45: bool(value & operand)}[code]
            at += yes if holds else no


@pytest.fixture(params=ARCH)
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def test_what_is_refused_is_refused_and_nothing_else(machine: str) -> None:
    """Every number of the table is refused, those of daily work are allowed, and the second table only among equals."""
    apart, among = (compile_filter(machine, among_equals=flag, only_signals_to=None) for flag in (False, True))
    for numbers in REFUSED.values():
        if (number := numbers[COLUMN[machine]]) is not None:
            assert verdict(apart, ARCH[machine], number) == verdict(among, ARCH[machine], number) == EPERM
    for numbers in REFUSED_AMONG_EQUALS.values():
        if (number := numbers[COLUMN[machine]]) is not None:
            assert (verdict(apart, ARCH[machine], number), verdict(among, ARCH[machine], number)) == (ALLOW, EPERM)
    assert {verdict(among, ARCH[machine], number) for number in HARMLESS[machine]} == {ALLOW}


def test_no_number_is_twice_in_the_tables(machine: str) -> None:
    """A number that stood under two names would be a mistake in one of them."""
    tables = [*REFUSED.values(), *REFUSED_AMONG_EQUALS.values()]
    numbers = [pair[COLUMN[machine]] for pair in tables if pair[COLUMN[machine]] is not None]
    assert len(set(numbers)) == len(numbers)
    assert not set(numbers) & set(HARMLESS[machine])


@given(st.integers(452, 2**32 - 1))
def test_numbers_of_the_future_do_not_exist(number: int) -> None:
    """What is newer than the table, or has the bit of another way of calling, is unknown."""
    for machine, arch in ARCH.items():
        assert verdict(compile_filter(machine, among_equals=False, only_signals_to=None), arch, number) == ENOSYS


@given(st.integers(0, 2**32 - 1).filter(lambda arch: arch not in ARCH.values()), st.integers(0, 451))
def test_other_machines_numbers_are_deadly(arch: int, number: int) -> None:
    """A call by another machine's convention ends the process, whatever its number."""
    for machine in ARCH:
        assert verdict(compile_filter(machine, among_equals=False, only_signals_to=None), arch, number) == KILL


def test_arguments_decide_where_the_number_does_not(machine: str) -> None:
    """Threads and forks, stream pairs and one's own limits are allowed; namespaces, datagrams and others' limits are not."""
    arch = ARCH[machine]
    program = compile_filter(machine, among_equals=False, only_signals_to=None)

    def of(number: int, *arguments: int) -> int:
        return verdict(program, arch, number, arguments)

    assert of(CLONE[machine], 0x3D0F00) == of(CLONE[machine], 17) == ALLOW
    assert {of(CLONE[machine], 1 << bit | 17) for bit in (17, 25, 26, 27, 28, 29, 30)} == {EPERM}
    assert of(435) == ENOSYS
    assert of(SOCKETPAIR[machine], 1, 1) == of(SOCKETPAIR[machine], 1, 1 | 0o2004000) == ALLOW
    assert {of(SOCKETPAIR[machine], 1, kind) for kind in (2, 3, 5, 2 | 0o2000000)} == {EPERM}
    assert {of(SOCKETPAIR[machine], family, 1) for family in (0, 2, 10, 16, 30, 40)} == {EPERM}
    assert [of(PRCTL[machine], option) for option in (1, 4, 15, 38)] == [EPERM, EPERM, ALLOW, ALLOW]
    assert [of(PRLIMIT[machine], pid, limit) for pid, limit in ((0, 7), (0, 4), (1, 7))] == [ALLOW, EPERM, EPERM]
    assert [of(IOCTL[machine], 1, request) for request in (0x5401, 0x5412, 0x541C)] == [ALLOW, EPERM, EPERM]
    assert {of(IOCTL[machine], 1, request) for request in (0x8901, 0x8902)} == {EPERM}
    assert of(KILL_CALL[machine], 1, 9) == ALLOW
    own = compile_filter(machine, among_equals=True, only_signals_to=77)
    assert [verdict(own, arch, KILL_CALL[machine], (pid, 9)) for pid in (77, 76, 2**32 - 1, 0)] == [
        ALLOW,
        EPERM,
        EPERM,
        EPERM,
    ]


def test_signals_take_no_way_around(machine: str) -> None:
    """Where only one process may be signalled, no descriptor gets another owner, to be signalled when something can be read."""
    number = {"x86_64": 72, "aarch64": 25}[machine]
    own = compile_filter(machine, among_equals=True, only_signals_to=77)
    commands = (0, 1, 2, 3, 4, 8, 15, 1030)
    assert [verdict(own, ARCH[machine], number, (5, command, 1)) for command in commands] == [
        *[ALLOW] * 5,
        EPERM,
        EPERM,
        ALLOW,
    ]


def test_what_may_only_be_read_cannot_be_emptied(machine: str) -> None:
    """Among equals no file is emptied by opening it for reading, which kernels let pass that know no right to truncate."""
    program = compile_filter(machine, among_equals=True, only_signals_to=None)
    read, write, both, neither, empty = 0, 1, 2, 3, 0o1000
    calls = {"x86_64": ((2, (0,)), (257, (0, 0))), "aarch64": ((56, (0, 0)),)}[machine]
    for number, before in calls:
        for flags in (read, write, both, neither, write | empty | 0o100, both | empty, read | 0o2000000):
            assert verdict(program, ARCH[machine], number, (*before, flags)) == ALLOW
        for flags in (read | empty, neither | empty, read | empty | 0o2000000):
            assert verdict(program, ARCH[machine], number, (*before, flags)) == EPERM


@pytest.mark.parametrize(
    ("uid_map", "uids"),
    [
        ("         0          0 4294967295\n", [1_900_001_234, 4294967295 - 3 - 1234, 65534]),
        ("0 100000 65536\n", [65536 - 3 - 1234, 65534]),
        ("0 1000 1\n1 100000 65536\n", [65537 - 3 - 1234, 65534]),
        ("0 1000 1\n", []),
        ("", []),
    ],
)
def test_a_user_is_found_in_every_namespace(uid_map: str, uids: list[int]) -> None:
    """Each worker gets a user of its own where the namespace has enough of them, and none that does not exist there."""
    assert find_uids(uid_map, 1234) == uids


@pytest.mark.skipif(not os.path.exists("/proc/self/uid_map"), reason="a file of Linux")
@given(st.integers(1, 1 << 22), st.integers(1, 1 << 22))
def test_no_two_workers_share_a_user(first: int, second: int) -> None:
    """On a whole system two wardens never choose the same user."""
    with open("/proc/self/uid_map") as lines:
        text = lines.read()
    if first != second and "4294967295" in text:
        assert find_uids(text, first)[0] != find_uids(text, second)[0]
