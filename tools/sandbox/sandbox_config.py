"""Records of a sandbox: its limits, the outcome of one run, whether this system can have one.

Plain data. Knows nothing of bubblewrap, cgroups or how a limit is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Exit = Literal["ok", "error", "timeout", "memory", "output", "killed"]

NAME_BYTES = 255
DEPTH = 8
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class SandboxConfig:
    """The limits of every sandbox of one pool, and how many of them wait and run.

    Raises:
        ValueError: a limit is not in its range.
    """

    warm: int = 2  # sandboxes kept waiting
    running: int = 4  # sandboxes with code in them at one time; further runs wait
    timeout_s: float = 10.0  # of the wall's clock, for a run that names none
    cpu_s: int = 30  # of each process
    memory_bytes: int = 512 << 20  # of all processes of a sandbox together, files in /tmp included
    processes: int = 32  # and threads, the code's own among them
    scratch_bytes: int = 64 << 20  # /tmp, the work directory in it
    output_bytes: int = 1 << 20  # stdout and stderr together
    value_chars: int = 20_000  # of the last expression's repr
    file_bytes: int = 8 << 20  # all files given to a run, and all files collected from it
    files: int = 64  # given, and collected
    descriptors: int = 64  # open at one time in each process
    preload: tuple[str, ...] = ("math", "statistics", "json", "re", "datetime", "decimal", "fractions", "random", "csv")
    bubblewrap: Path | None = None  # else the system's
    python: Path | None = None  # the interpreter; else this one, if the sandbox's user can read it, else the system's
    packages: tuple[Path, ...] = ()  # folders that code may import from, mounted read-only
    cgroups: bool = True  # False: a sandbox has one process, with its address space limited instead
    cgroup: Path | None = None  # a cgroup v2 folder delegated to this process, else where it runs

    def __post_init__(self) -> None:
        least = {
            "warm": 1,
            "running": 1,
            "cpu_s": 1,
            "memory_bytes": 64 << 20,
            "processes": 1,
            "scratch_bytes": 1 << 20,
            "output_bytes": 1,
            "value_chars": 1,
            "file_bytes": 0,
            "files": 0,
            "descriptors": 16,
        }
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: {lowest} and more.")
        if not 0 < self.timeout_s <= 3600:
            raise ValueError(f"timeout_s is {self.timeout_s}; accepted: more than 0, up to 3600.")
        if self.file_bytes > self.scratch_bytes:
            raise ValueError(
                f"file_bytes is {self.file_bytes}, more than the {self.scratch_bytes} scratch_bytes that have to hold "
                "them; accepted: no more than that."
            )


@dataclass(frozen=True)
class Finished:
    """The end of one run. All of it was made by code that nobody vouches for: text to show, never to trust."""

    exit: Exit
    stdout: str
    stderr: str
    value: str | None  # repr of the last expression, None where there is none or it is None
    seconds: float  # on the wall's clock, from the code's handing over to its report
    reason: str = ""  # why `exit` is not "ok", with the limit where one was met
    files: Mapping[str, bytes] = field(default_factory=dict)  # new and changed ones, by path below the work directory
    left_out: Mapping[str, str] = field(default_factory=dict)  # files not collected, and why


@dataclass(frozen=True)
class Support:
    """This system's support of a sandbox: missing layers, and how to get them."""

    ok: bool
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # differences here, though no layer lacks


class SandboxUnavailable(RuntimeError):
    """This system can't give a sandbox with all its layers; `reasons` names the missing ones."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("The Python sandbox is off: " + " ".join(self.reasons))


class SandboxFailed(RuntimeError):
    """A sandbox could not be started, or the pool is closed."""


def check_name(name: str) -> str:
    """The name of a file below the work directory, as it came.

    Raises:
        ValueError: it leads elsewhere, or is no path that every system supports.
    """
    parts = name.split("/")
    if (
        not name
        or _CONTROL.search(name)
        or "\\" in name
        or len(parts) > DEPTH
        or any(part in ("", ".", "..") or len(part.encode("utf-8", "replace")) > NAME_BYTES for part in parts)
    ):
        raise ValueError(
            f"{name[:100]!r} is no name for a file; accepted: a relative path of at most {DEPTH} parts divided by '/', "
            f"each at most {NAME_BYTES} bytes, without '.', '..', backslashes and control characters."
        )
    return name
