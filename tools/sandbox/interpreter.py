"""Finds the Python that a sandbox runs: this one where the sandbox's user can read it, else the system's.

A sandbox's user is nobody else's, so an interpreter in somebody's private home folder is out of its reach. Knows
nothing of sandboxes.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

OLDEST = (3, 9)
_SYSTEM = (Path("/usr/bin/python3"), Path("/usr/local/bin/python3"))
_ASK = "import json, sys; print(json.dumps([sys.base_prefix, sys.base_exec_prefix, *sys.version_info[:2]]))"


class NoInterpreter(RuntimeError):
    """No Python can be used in a sandbox; the text says why."""


@dataclass(frozen=True)
class Interpreter:
    """A Python and the folders that it needs."""

    path: Path
    prefixes: tuple[Path, ...]


def find(asked: Path | None, *, as_root: bool) -> Interpreter:
    """The interpreter asked for, else the first usable one. `as_root`: the sandbox's user will be another than ours.

    Raises:
        NoInterpreter: none is usable.
    """
    own = Path(getattr(sys, "_base_executable", sys.executable))
    refused = list[str]()
    for path in (asked,) if asked else (own, *_SYSTEM):
        reason = unreadable(path, as_root=as_root)
        if reason is None:
            found = _ask(path)
            if isinstance(found, Interpreter):
                reason = next(
                    filter(None, (unreadable(prefix, as_root=as_root) for prefix in found.prefixes)),
                    None,
                )
                if reason is None:
                    return found
            else:
                reason = found
        refused.append(reason)
    raise NoInterpreter(
        "No Python can be used in a sandbox: "
        + "; ".join(dict.fromkeys(refused))
        + f". Accepted: Python {OLDEST[0]}.{OLDEST[1]} or newer where every user can read it (python=…), "
        "as the system's is (apt install python3)."
    )


def unreadable(path: Path, *, as_root: bool) -> str | None:
    """Returns why the sandbox's user can't read the path, or None."""
    try:
        real = path.resolve(strict=True)
    except OSError:
        return f"{path} is not there"
    if not as_root:
        return None if os.access(real, os.R_OK) else f"{path} can't be read"
    for part in (*reversed(real.parents), real):
        mode = part.stat().st_mode
        needed = stat.S_IXOTH if part != real else stat.S_IROTH
        if not mode & needed:
            return f"{path} is closed to other users by {part}"
    return None


def _ask(path: Path) -> Interpreter | str:
    try:
        asked = subprocess.run([path, "-I", "-S", "-c", _ASK], env={}, capture_output=True, timeout=30, check=True)
        base, exec_base, major, minor = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{path} does not run ({error})"
    if (major, minor) < OLDEST:
        return f"{path} is Python {major}.{minor}"
    return Interpreter(path.resolve(), tuple(dict.fromkeys((Path(base), Path(exec_base)))))
