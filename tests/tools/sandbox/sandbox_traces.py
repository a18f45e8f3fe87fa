"""Traces that a sandbox could leave on this machine, a watch over them, and the mark of tests that need a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.sandbox import Finished, Sandbox, SandboxConfig, Support, check

SUPPORT: Support = asyncio.run(check())
needs_sandboxes = pytest.mark.skipif(not SUPPORT.ok, reason=" ".join(SUPPORT.reasons))

# Nothing is imported ahead, because here more sandboxes are started than waited for.
SMALL = SandboxConfig(warm=1, memory_bytes=128 << 20, processes=16, scratch_bytes=16 << 20, timeout_s=10, preload=())

# Code for a sandbox: `call` makes a system call by its number and tells the error. Numbers differ between machines, and
# tables of them have a column for each.
SYSCALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return errno.errorcode.get(ctypes.get_errno(), "fine") if result < 0 else "fine"
"""
COLUMN = 0 if os.uname().machine == "x86_64" else 1


def homes(sandbox: Sandbox) -> list[Path]:
    """The folders of its cgroups, which name it among all sandboxes of this machine."""
    assert sandbox._plan.groups is not None
    return list(sandbox._plan.groups._homes)


def processes(home: Path) -> dict[int, str]:
    """All processes of the machine that are in a cgroup below this one, and which: removed groups keep their name."""
    found = dict[int, str]()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                for line in (each / "cgroup").read_text().splitlines():
                    _, below, name = line.partition(f"/{home.name}/")
                    if below:
                        found[int(each.name)] = name.split()[0]
    return found


def groups_of_processes(home: Path) -> list[str]:
    """The names of the sandboxes that have processes."""
    return list(processes(home).values())


def zombies() -> list[str]:
    """Children of this process that ended and were not waited for."""
    found = list[str]()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (each / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" and int(parent) == os.getpid():
                    found.append(each.name)
    return found


@dataclass
class Watched:
    """A pool with one warm sandbox, of which every run must have left nothing when it returns."""

    sandbox: Sandbox
    runs: int = 0

    async def run(self, code: str, timeout_s: float = 10) -> Finished:
        finished = await self.sandbox.run(code, timeout_s=timeout_s)
        self.runs += 1
        # Sandboxes are numbered as they are started, and used in that order.
        used = {f"jail-{number}" for number in range(1, self.runs + 1)}
        for home in homes(self.sandbox):
            assert {folder.name for folder in home.glob("jail-*")} & used == set()
        assert set(groups_of_processes(homes(self.sandbox)[0])) & used == set()
        assert zombies() == []
        return finished
