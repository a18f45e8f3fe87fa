"""The filter of system calls in a sandbox, as a classic BPF program for `seccomp(2)`.

Forbidden calls are denied by number, with EPERM so that programs can say so; a call that is newer than this table gets
ENOSYS, so that the kernel's next mount API is not a hole; a foreign architecture's calls, with numbers of other
meanings, end the process. Knows nothing of bubblewrap, which loads the program.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

ALLOW = 0x7FFF_0000
KILL = 0x8000_0000  # the whole process
_ERRNO = 0x0005_0000

_LOAD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes each, low word first

X32 = 0x4000_0000  # set in the numbers of x86-64's second ABI
LAST = 466  # removexattrat; later calls did not exist when this table was written

# x86_64, aarch64; None where the architecture has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # Talking to anything outside. Connected pairs of streams are let through below: asyncio wakes itself with one.
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    # Looking into or steering other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Mounts and roots.
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
    "statmount": (457, 457),
    "listmount": (458, 458),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # New namespaces; clone is looked at by its flags.
    "unshare": (272, 97),
    "setns": (308, 268),
    # Large attack surfaces that Python needs nothing of.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "vmsplice": (278, 75),
    "seccomp": (317, 277),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # The machine itself.
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "create_module": (174, None),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    "sysfs": (139, None),
    "iopl": (172, None),
    "ioperm": (173, None),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
FORK = (57, None)
VFORK = (58, None)
PRCTL = (157, 167)
IOCTL = (16, 29)
SOCKETPAIR = (53, 199)

NEW_NAMESPACES = 0x7E02_0000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
THREAD = 0x0001_0000  # CLONE_THREAD
SET_PARENT_DEATH_SIGNAL = 1
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX type into the terminal that started the server
_AF_UNIX = _SOCK_STREAM = 1

_ARCHITECTURES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}


@dataclass(frozen=True)
class Instruction:
    """One instruction of classic BPF: `true` and `false` are how many to skip."""

    code: int
    value: int
    true: int = 0
    false: int = 0


def program(machine: str | None = None, *, one_process: bool = False) -> bytes:
    """The filter for `machine` (as `uname -m` names it), the kernel's `struct sock_filter` one after the other.

    `one_process` denies new processes too, and lets threads be.

    Raises:
        ValueError: there is no table of calls for this machine.
    """
    steps = instructions(machine or platform.machine(), one_process=one_process)
    return b"".join(struct.pack("=HBBI", s.code, s.true, s.false, s.value) for s in steps)


def instructions(machine: str, *, one_process: bool = False) -> list[Instruction]:
    """The same, not yet packed. Every jump goes a few steps forward, so the 8-bit offsets always suffice."""
    if machine not in _ARCHITECTURES:
        raise ValueError(
            f"There is no list of system calls for {machine!r}; accepted: {', '.join(sorted(_ARCHITECTURES))}."
        )
    column, arch = _ARCHITECTURES[machine]
    steps = [Instruction(_LOAD, _ARCH), Instruction(_JEQ, arch, 1), _ret(KILL), Instruction(_LOAD, _NUMBER)]
    if machine == "x86_64":
        steps += [Instruction(_JGE, X32, 0, 1), _ret(KILL)]
    steps += [Instruction(_JGE, LAST + 1, 0, 1), _ret(denied(errno.ENOSYS))]
    # glibc tries clone3 first, with flags in memory where a filter can't look, and falls back to clone.
    steps += _on(CLONE3[column], [_ret(denied(errno.ENOSYS))])
    flags = [Instruction(_LOAD, _argument(0)), Instruction(_JSET, NEW_NAMESPACES, 0, 1), _ret(denied())]
    if one_process:
        flags += [Instruction(_JSET, THREAD, 1), _ret(denied())]
    steps += _on(CLONE[column], [*flags, _ret(ALLOW)])
    # The sandbox dies with its server by this signal, and the code may not take it back.
    steps += _on(PRCTL[column], _unless(0, (SET_PARENT_DEATH_SIGNAL,)))
    steps += _on(IOCTL[column], _unless(1, TERMINAL_INPUT))
    pair = [
        Instruction(_LOAD, _argument(0)),
        Instruction(_JEQ, _AF_UNIX, 1),
        _ret(denied()),
        Instruction(_LOAD, _argument(1)),
        Instruction(_AND, 0xF),  # without SOCK_NONBLOCK and SOCK_CLOEXEC
        Instruction(_JEQ, _SOCK_STREAM, 1),
        _ret(denied()),
        _ret(ALLOW),
    ]
    steps += _on(SOCKETPAIR[column], pair)
    numbers = [pair_of[column] for pair_of in DENIED.values()]
    if one_process:
        numbers += [FORK[column], VFORK[column]]
    for number in numbers:
        steps += _on(number, [_ret(denied())])
    return [*steps, _ret(ALLOW)]


def denied(number: int = errno.EPERM) -> int:
    """The filter's answer that makes a call fail with this errno."""
    return _ERRNO | number


def _ret(value: int) -> Instruction:
    return Instruction(_RET, value)


def _argument(index: int) -> int:
    return _ARGUMENTS + 8 * index


def _on(number: int | None, body: list[Instruction]) -> list[Instruction]:
    """The body, which returns in every case, where the call has this number."""
    return [] if number is None else [Instruction(_JEQ, number, 0, len(body)), *body]


def _unless(argument: int, values: Sequence[int]) -> list[Instruction]:
    """Allows, unless the argument has one of these values."""
    steps = [Instruction(_LOAD, _argument(argument))]
    for value in values:
        steps += [Instruction(_JEQ, value, 0, 1), _ret(denied())]
    return [*steps, _ret(ALLOW)]
