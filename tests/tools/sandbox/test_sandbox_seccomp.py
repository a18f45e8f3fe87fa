"""The filter of system calls: what the program answers to any call, by an interpreter of classic BPF of its own."""

from __future__ import annotations

import errno
import functools
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.sandbox import seccomp
from tools.sandbox.seccomp import ALLOW, DENIED, KILL

ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
COLUMN = {"x86_64": 0, "aarch64": 1}
BY_ARGUMENTS = {
    "clone": seccomp.CLONE,
    "clone3": seccomp.CLONE3,
    "prctl": seccomp.PRCTL,
    "ioctl": seccomp.IOCTL,
    "socketpair": seccomp.SOCKETPAIR,
}
machines = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


program = functools.cache(seccomp.program)


def answer(rules: bytes, number: int, arguments: tuple[int, ...] = (), arch: int = ARCH["x86_64"]) -> int:
    """Runs the packed program over a `struct seccomp_data`, as the kernel's documentation of BPF says."""
    padded = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    steps = list(struct.iter_unpack("=HBBI", rules))
    accumulator, at = 0, 0
    while True:
        code, true, false, value = steps[at]
        at += 1
        match code:
            case 0x20:  # ld [k]
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x54:  # and #k
                accumulator &= value
            case 0x15:  # jeq
                at += true if accumulator == value else false
            case 0x35:  # jge
                at += true if accumulator >= value else false
            case 0x45:  # jset
                at += true if accumulator & value else false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"an instruction that is not used here: {code:#x}")


def eperm() -> int:
    return 0x0005_0000 | errno.EPERM


@machines
@pytest.mark.parametrize("call", list(DENIED))
def test_a_denied_call_fails_with_eperm(machine: str, call: str) -> None:
    number = DENIED[call][COLUMN[machine]]
    if number is None:
        pytest.skip(f"{machine} has no {call}")
    assert answer(program(machine), number, arch=ARCH[machine]) == eperm()


@machines
@given(number=st.integers(0, seccomp.LAST), arguments=st.tuples(*[st.integers(0, 2**64 - 1)] * 6))
def test_every_other_call_is_let_through(machine: str, number: int, arguments: tuple[int, ...]) -> None:
    special = {pair[COLUMN[machine]] for pair in [*DENIED.values(), *BY_ARGUMENTS.values()]}
    if number not in special:
        assert answer(program(machine), number, arguments, ARCH[machine]) == ALLOW


@machines
@given(number=st.integers(0, 2**32 - 1), arch=st.integers(0, 2**32 - 1))
def test_another_architecture_ends_the_process(machine: str, number: int, arch: int) -> None:
    if arch != ARCH[machine]:
        assert answer(program(machine), number, arch=arch) == KILL


@given(number=st.integers(0x4000_0000, 2**32 - 1))
def test_the_second_abi_of_x86_64_ends_the_process(number: int) -> None:
    assert answer(program("x86_64"), number) == KILL


@machines
@given(number=st.integers(seccomp.LAST + 1, 0x3FFF_FFFF))
def test_a_call_newer_than_the_table_is_not_there(machine: str, number: int) -> None:
    assert answer(program(machine), number, arch=ARCH[machine]) == 0x0005_0000 | errno.ENOSYS


@machines
@given(flags=st.integers(0, 2**64 - 1))
def test_clone_makes_processes_and_threads_but_no_namespaces(machine: str, flags: int) -> None:
    number = seccomp.CLONE[COLUMN[machine]]
    assert number is not None
    new = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
    arch = ARCH[machine]
    assert answer(program(machine), number, (flags,), arch) == (eperm() if flags & new else ALLOW)
    only_threads = ALLOW if flags & 0x10000 and not flags & new else eperm()
    assert answer(program(machine, one_process=True), number, (flags,), arch) == only_threads


@machines
def test_clone3_is_not_there_so_that_libraries_fall_back_to_clone(machine: str) -> None:
    assert answer(program(machine), 435, arch=ARCH[machine]) == 0x0005_0000 | errno.ENOSYS


@machines
@given(option=st.one_of(st.just(1), st.integers(0, 2**32 - 1)), high=st.integers(0, 2**32 - 1))
def test_the_signal_of_the_parents_death_is_not_changed(machine: str, option: int, high: int) -> None:
    number = seccomp.PRCTL[COLUMN[machine]]
    assert number is not None
    # The kernel looks at the low half alone, so a value hidden behind a high one must not pass.
    told = answer(program(machine), number, (high << 32 | option,), ARCH[machine])
    assert told == (eperm() if option == 1 else ALLOW)


@machines
@pytest.mark.parametrize("request_code", [0x5412, 0x541C, 1 << 32 | 0x5412])
def test_nothing_is_typed_into_a_terminal(machine: str, request_code: int) -> None:
    number = seccomp.IOCTL[COLUMN[machine]]
    assert number is not None
    assert answer(program(machine), number, (0, request_code), ARCH[machine]) == eperm()
    assert answer(program(machine), number, (0, 0x5401), ARCH[machine]) == ALLOW


@machines
@given(family=st.integers(0, 45), kind=st.integers(0, 10), options=st.sampled_from([0, 0o4000, 0o2000000, 0o2004000]))
def test_only_connected_streams_between_own_processes_are_made(
    machine: str, family: int, kind: int, options: int
) -> None:
    number = seccomp.SOCKETPAIR[COLUMN[machine]]
    assert number is not None
    told = answer(program(machine), number, (family, kind | options), ARCH[machine])
    assert told == (ALLOW if (family, kind) == (1, 1) else eperm())


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "/usr/include/asm-generic/unistd.h")],
)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed (apt install linux-libc-dev)")
    numbers = {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    }
    ours = {name: pair[COLUMN[machine]] for name, pair in (DENIED | BY_ARGUMENTS).items()}
    known = {name: number for name, number in ours.items() if name in numbers}
    assert len(known) > 60
    assert {name: numbers[name] for name in known} == known


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted: aarch64, x86_64"):
        seccomp.program("riscv64")


def test_the_program_fits_the_kernels_limit() -> None:
    assert len(seccomp.program("x86_64", one_process=True)) // 8 <= 4096
