"""Cgroups, version 1 and 2: a group for each sandbox that limits the memory and processes of all of it together.

Every pool has one folder in each hierarchy and locks it, so that a later one can recognise the leftovers of a killed
server and remove them. Knows nothing of the processes in a group.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "ponder-"
_REMOVAL_S = 2.0  # for the kernel to release a group without processes


class NoCgroups(RuntimeError):
    """No cgroup can be made here; the text names the missing part and how to get it."""


@dataclass(frozen=True)
class _Mount:
    version: int
    controllers: frozenset[str]  # of version 1
    root: str  # the part of the hierarchy that is mounted
    at: Path


class Groups:
    """The cgroups of one sandbox.

    Raises:
        NoCgroups: memory and processes can't both be limited here.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.version, bases = (2, [_delegated(folder)]) if folder else _bases()
        name = f"{_PREFIX}{secrets.token_hex(6)}"
        self._locks = list[int]()
        self._homes = list[Path]()
        self._count = 0
        try:
            for base in bases:
                with _held(base):  # or another's sweep could take our folder before we lock it
                    _sweep(base)
                    home = base / name
                    home.mkdir()
                    self._homes.append(home)
                    self._locks.append(_lock(home))
                if self.version == 2:
                    (home / "cgroup.subtree_control").write_text("+memory +pids")
        except OSError as error:
            self.close()
            raise NoCgroups(_reason(f"{error.strerror} at {error.filename}")) from error

    def group(self, memory_bytes: int, processes: int) -> Group:
        """A new empty group with these limits.

        Raises:
            OSError: the kernel refused.
        """
        self._count += 1
        folders = [home / f"jail-{self._count}" for home in self._homes]
        for folder in folders:
            folder.mkdir()
        group = Group(self.version, tuple(folders))
        try:
            group.limit(memory_bytes, processes)
        except OSError:
            group.remove()
            raise
        return group

    def close(self) -> None:
        """Removes the remaining groups, killing all processes in them."""
        for home in self._homes:
            _clear(home)
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()
        self._homes.clear()


@dataclass(frozen=True)
class Group:
    """One sandbox's cgroup: a folder in each hierarchy."""

    version: int
    folders: tuple[Path, ...]

    def limit(self, memory_bytes: int, processes: int) -> None:
        memory, pids = self.folders[0], self.folders[-1]
        if self.version == 2:
            (memory / "memory.max").write_text(str(memory_bytes))
            (memory / "memory.oom.group").write_text("1")
            swap = memory / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
        else:
            (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
            both = memory / "memory.memsw.limit_in_bytes"
            if both.exists():
                both.write_text(str(memory_bytes))
        (pids / "pids.max").write_text(str(processes))

    def ended_by_memory(self) -> bool:
        """Returns whether the kernel killed something in the group because it met its limit of memory."""
        file = self.folders[0] / ("memory.events" if self.version == 2 else "memory.oom_control")
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields.get("oom_kill", 0)) > 0

    def kill(self) -> None:
        """Sends SIGKILL to all that is in the group."""
        for folder in self.folders:
            _kill(folder)

    def remove(self) -> None:
        """Removes the group; blocks for as long as the kernel takes to let go of it, usually not at all."""
        for folder in self.folders:
            _remove(folder)


def _bases() -> tuple[int, list[Path]]:
    """The version, and where groups can be made: one folder for memory and one for processes, or one for both."""
    mounts = _mounts()
    paths = _own_paths()
    one = {
        controller: mount
        for mount in mounts
        if mount.version == 1
        for controller in mount.controllers & {"memory", "pids"}
    }
    if len(one) == 2:
        bases = [_below(one[controller], paths.get(controller, "/")) for controller in ("memory", "pids")]
        for base in bases:
            if not os.access(base, os.W_OK):
                raise NoCgroups(_reason(f"{base} can't be written to"))
        return 1, bases
    two = next((mount for mount in mounts if mount.version == 2), None)
    if two is None:
        raise NoCgroups(_reason("no hierarchy of cgroups with memory and pids is mounted"))
    own = _below(two, paths.get("", "/"))
    # A group with processes of its own can't be divided, except for the root: then beside it, not below.
    for base in (own, own.parent):
        if base.is_relative_to(two.at) and _divides(base):
            return 2, [base]
    raise NoCgroups(_reason(f"neither {own} nor the group above it can be divided"))


def _delegated(folder: Path) -> Path:
    if not _divides(folder):
        raise NoCgroups(_reason(f"{folder} is no cgroup v2 folder that can be divided by memory and pids"))
    return folder


def _divides(folder: Path) -> bool:
    """Returns whether groups made below this folder can limit memory and processes, switching that on where it is
    allowed."""
    control = folder / "cgroup.subtree_control"
    try:
        if not {"memory", "pids"} <= set(control.read_text().split()):
            control.write_text("+memory +pids")
        return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
    except OSError:
        return False


def _mounts() -> list[_Mount]:
    found = list[_Mount]()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, at = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind in ("cgroup", "cgroup2"):
            found.append(_Mount(2 if kind == "cgroup2" else 1, frozenset(options.split(",")), root, Path(at)))
    return found


def _own_paths() -> dict[str, str]:
    """Returns where this process is in each hierarchy, by controller; "" is version 2's."""
    paths = dict[str, str]()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _below(mount: _Mount, path: str) -> Path:
    return mount.at / os.path.relpath(path, mount.root) if path.startswith(mount.root) else mount.at


def _lock(home: Path) -> int:
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _held(base: Path) -> Iterator[None]:
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(base: Path) -> None:
    """Removes the leftovers of killed servers: folders of ours without a lock."""
    for home in base.glob(f"{_PREFIX}*"):
        try:
            lock = _lock(home)
        except OSError:
            continue
        _clear(home)
        os.close(lock)


def _clear(home: Path) -> None:
    for folder in [*home.glob("jail-*"), home]:
        _kill(folder)
        _remove(folder)


def _kill(folder: Path) -> None:
    try:
        pids = [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return
        raise
    for pid in pids:
        if pid:  # 0 is a process of a namespace that can't be seen from here
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _remove(folder: Path) -> None:
    until = time.monotonic() + _REMOVAL_S
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
            time.sleep(0.001)


def _reason(what: str) -> str:
    return (
        f"The memory and processes of a sandbox can't be limited together, because {what}: start the server as root, "
        "or in a delegated cgroup (systemd-run --user --scope -p Delegate=yes …), or allow sandboxes of one process "
        "(cgroups=False)."
    )
