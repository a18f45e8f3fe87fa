"""What a sandbox could leave behind on this machine, for the tests of it, and whether there can be one here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from tools.sandbox import Sandbox, SandboxConfig, Support, check

SUPPORT: Support = asyncio.run(check())
needs_sandboxes = pytest.mark.skipif(not SUPPORT.ok, reason=" ".join(SUPPORT.reasons))

# Nothing is imported ahead, because here more sandboxes are started than waited for.
SMALL = SandboxConfig(warm=1, memory_bytes=128 << 20, processes=16, scratch_bytes=16 << 20, timeout_s=10, preload=())


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
