"""The command line of a jail: what of the system it sees, read-only, and what it is cut off from.

Knows nothing of processes: it makes lists of words. bubblewrap does what they say in their order.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from tools.sandbox.interpreter import Interpreter
from tools.sandbox.records import SandboxConfig

WORK = "/tmp/work"
PACKAGES = "/packages"
UID = 1000  # as the jail sees itself
BESIDE = 1  # processes in a jail's cgroup that are not the code's: bubblewrap, outside the jail's namespaces
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


def jail(
    bubblewrap: Path, interpreter: Interpreter, config: SandboxConfig, *, info: int, seccomp: int, report: int
) -> list[str]:
    """The words that start one jail; the three numbers are descriptors it inherits."""
    words = [str(bubblewrap), "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    # As its first process the code's own can't outlive the jail, and bubblewrap reaps it: no zombie is left behind.
    words += ["--as-pid-1", "--die-with-parent", "--new-session"]
    words += ["--uid", str(UID), "--gid", str(UID), "--hostname", "jail"]
    words += ["--info-fd", str(info), "--seccomp", str(seccomp), "--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM:
        path = Path(folder)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), folder]
        elif path.is_dir():
            words += ["--ro-bind", folder, folder]
    for prefix in interpreter.prefixes:
        if not prefix.is_relative_to("/usr"):
            words += ["--ro-bind", str(prefix), str(prefix)]
    packages = [f"{PACKAGES}/{number}" for number in range(len(config.packages))]
    for source, destination in zip(config.packages, packages, strict=True):
        words += ["--ro-bind", str(source.resolve()), destination]
    words += [
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(config.scratch_bytes), "--tmpfs", "/tmp", "--dir", WORK, "--chdir", WORK),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        # What the launcher had is gone already: it began with an empty environment, for /proc/1/environ shows that.
        *("--clearenv", "--setenv", "HOME", WORK, "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"),
        *("--setenv", "TMPDIR", "/tmp"),
    ]
    program = resources.files("tools.sandbox").joinpath("worker.py").read_text("utf-8")
    settings = json.dumps(worker_settings(config, packages))
    return [*words, "--", str(interpreter.path), "-I", "-X", "utf8", "-c", program, settings, str(report)]


def worker_settings(config: SandboxConfig, packages: list[str]) -> dict[str, object]:
    """What the program in the jail is told: its limits as `setrlimit` takes them, soft and hard, and its caps."""
    limits = {
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_CPU": (config.cpu_s, config.cpu_s),  # SIGKILL at once: a namespace's first process ignores SIGXCPU
        "RLIMIT_FSIZE": (config.scratch_bytes, config.scratch_bytes),
        "RLIMIT_NOFILE": (config.descriptors, config.descriptors),
        "RLIMIT_NPROC": (config.processes, config.processes),
        "RLIMIT_MSGQUEUE": (0, 0),
        # With a cgroup this makes one greedy allocation a MemoryError that the code can read about; without one it is
        # the limit itself, so it must count what is shared and mapped too.
        "RLIMIT_DATA" if config.cgroups else "RLIMIT_AS": (config.memory_bytes, config.memory_bytes),
    }
    return {
        "preload": config.preload,
        "packages": packages,
        "limits": limits,
        "value_chars": config.value_chars,
        "files": config.files,
        "file_bytes": config.file_bytes,
    }
