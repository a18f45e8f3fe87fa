"""Sandbox of one job: a process under bubblewrap, started ahead, used once, and gone with all that was in it.

Every process in it is below the first of a PID namespace, whose end the kernel announces only when all of them have
ended: so that end is waited for. The command line says which parts of the system the sandbox sees, read-only, and which
it is cut off from; bubblewrap applies the arguments in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from tools.sandbox.cgroups import Group, Groups
from tools.sandbox.interpreter import Interpreter
from tools.sandbox.job_report import Pipe, Report, UnreadableReport, ready, receive
from tools.sandbox.sandbox_config import SandboxConfig, SandboxFailed

WORK = "/tmp/work"
PACKAGES = "/packages"
UID = 1000  # as the sandbox sees itself
BESIDE = 1  # processes in a sandbox's cgroup that are not the code's: bubblewrap, outside the sandbox's namespaces
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


def bubblewrap_command(
    bubblewrap: Path, interpreter: Interpreter, config: SandboxConfig, *, info: int, seccomp: int, report: int
) -> list[str]:
    """Returns the command that starts one sandbox; the three numbers are descriptors it inherits."""
    words = [str(bubblewrap), "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    # As its first process the code's own can't outlive the sandbox, and bubblewrap reaps it: no zombie is left behind.
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
        # The launcher's environment is empty already, for /proc/1/environ shows that one.
        *("--clearenv", "--setenv", "HOME", WORK, "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"),
        *("--setenv", "TMPDIR", "/tmp"),
    ]
    program = resources.files("tools.sandbox").joinpath("worker.py").read_text("utf-8")
    settings = json.dumps(worker_settings(config, packages))
    return [*words, "--", str(interpreter.path), "-I", "-X", "utf8", "-c", program, settings, str(report)]


def worker_settings(config: SandboxConfig, packages: list[str]) -> dict[str, object]:
    """Returns the settings of the program in the sandbox: its limits as `setrlimit` takes them, soft and hard, and its
    caps."""
    limits = {
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_CPU": (config.cpu_s, config.cpu_s),  # SIGKILL at once: a namespace's first process ignores SIGXCPU
        "RLIMIT_FSIZE": (config.scratch_bytes, config.scratch_bytes),
        "RLIMIT_NOFILE": (config.descriptors, config.descriptors),
        "RLIMIT_NPROC": (config.processes, config.processes),
        "RLIMIT_MSGQUEUE": (0, 0),
        # With a cgroup this makes one greedy allocation a MemoryError that the code can read about; without one it is
        # the limit itself, so it must count shared and mapped memory too.
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


_START_S = 30.0
_STATUS_S = 0.5
_NICE = 10
_LAUNCHER = resources.files("tools.sandbox").joinpath("launch.py").read_text("utf-8")

Ending = Literal["reported", "unreadable", "timeout", "output", "died"]


@dataclass(frozen=True)
class Blueprint:
    """All that is the same for every sandbox of a pool."""

    config: SandboxConfig
    bubblewrap: Path
    interpreter: Interpreter
    seccomp: bytes
    groups: Groups | None
    uids: range | None  # which to take one of, where the server is root


@dataclass(frozen=True)
class Ended:
    """The end of a sandbox's one job, seen from outside."""

    how: Ending
    report: Report | None
    files: dict[str, bytes]
    stdout: bytes
    stderr: bytes
    status: int  # bubblewrap's: the code's own, or 128 and the number of the signal that ended it
    cpu_s: float  # of the processor, by its first process and those it waited for
    ended_by_memory: bool


class SandboxProcess:
    """A running sandbox that waits for its job. Made by `start`; its owner must `discard` it or `run` it."""

    def __init__(self, plan: Blueprint, started: _Started) -> None:
        self._plan = plan
        self._process = started.process
        self._first = started.first
        self._outer = os.pidfd_open(started.process.pid)
        self._group = started.group
        self._job = Pipe(started.job)
        self._report = Pipe(started.report)
        self._stdout = Pipe(started.stdout)
        self._stderr = Pipe(started.stderr)
        self._cpu_s = 0.0
        self._removal: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, plan: Blueprint, thread: Executor) -> SandboxProcess:
        """Starts a sandbox and waits until its Python is ready. `thread` starts it and must outlive it: they end
        together.

        Raises:
            SandboxFailed: it could not be started; the text has the error output of bubblewrap or Python.
        """
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(thread, _start, plan)
        try:
            started = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread can't be stopped, so its sandbox is thrown away as soon as it is there.
            with contextlib.suppress(SandboxFailed):
                await cls(plan, await starting).discard()
            raise
        process = cls(plan, started)
        try:
            async with asyncio.timeout(_START_S):
                await process._report.exactly(1)
        except (EOFError, TimeoutError) as error:
            process._kill()
            said = (await process._stderr.read()).decode("utf-8", "replace").strip()
            await process.discard()
            raise SandboxFailed(f"A sandbox could not be started: {said or 'it did not get ready'}") from error
        except BaseException:
            await process.discard()
            raise
        return process

    @property
    def alive(self) -> bool:
        return not select.select([self._outer], [], [], 0)[0]

    async def run(self, job: bytes, timeout_s: float) -> Ended:
        """Runs the job, then ends everything in the sandbox."""
        spent = asyncio.Event()
        out, err = bytearray(), bytearray()
        limit = self._plan.config.output_bytes
        reading = [
            asyncio.ensure_future(_collect(pipe, into, (out, err), limit, spent))
            for pipe, into in ((self._stdout, out), (self._stderr, err))
        ]
        talk = asyncio.ensure_future(self._talk(job))
        full = asyncio.ensure_future(spent.wait())
        died = asyncio.ensure_future(ready(self._outer))
        how: Ending = "timeout"
        report, files = None, dict[str, bytes]()
        try:
            await asyncio.wait((talk, full, died), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if talk.done() and talk.exception() is not None:
                # The code's process has ended, or closed its pipe: its status follows, if it has one.
                await asyncio.wait((died,), timeout=_STATUS_S)
            if spent.is_set():
                how = "output"
            elif talk.done() or died.done():
                how = "died"
            self._kill()
            await _cancel(full, died)
            await self._wait()
            # All writers are dead, so reading now ends; a report that was on its way is in the pipe.
            await asyncio.gather(*reading)
            if spent.is_set():
                how = "output"
            elif how == "died":
                try:
                    report, files = await talk
                    how = "reported"
                except UnreadableReport:
                    how = "unreadable"
                except (EOFError, OSError):
                    pass
            memory = self._group is not None and self._group.ended_by_memory()
            return Ended(how, report, files, bytes(out), bytes(err), self._process.returncode, self._cpu_s, memory)
        finally:
            await _cancel(talk, full, died, *reading)
            await self.discard()

    async def discard(self) -> None:
        """Ends everything in the sandbox, closes its pipes and removes its cgroup; again does nothing."""
        if self._removal is None:
            self._kill()
            self._removal = asyncio.create_task(self._remove())
        await asyncio.shield(self._removal)

    async def _remove(self) -> None:
        await self._wait()
        for pipe in (self._job, self._report, self._stdout, self._stderr):
            pipe.close()
        os.close(self._first)
        os.close(self._outer)
        if self._group is not None:
            self._group.kill()
            with contextlib.suppress(OSError):  # one that the kernel still keeps is removed when the pool closes
                await asyncio.to_thread(self._group.remove)

    async def _talk(self, job: bytes) -> tuple[Report, dict[str, bytes]]:
        await self._job.write(job)
        self._job.close()
        return await receive(self._report, self._plan.config)

    def _kill(self) -> None:
        # Not bubblewrap itself: it reaps the first process and passes on its status.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)

    async def _wait(self) -> None:
        """Until no process of the sandbox is left."""
        await ready(self._first)
        try:
            async with asyncio.timeout(_STATUS_S):
                await ready(self._outer)
        except TimeoutError:
            self._process.kill()
            await ready(self._outer)
        if self._process.returncode is None:
            # Not Popen's own wait, which does not return the usage.
            _, status, used = os.wait4(self._process.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._cpu_s = used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class _Started:
    process: subprocess.Popen[bytes]
    first: int  # pidfd of the first process in the sandbox's PID namespace
    group: Group | None
    job: int
    report: int
    stdout: int
    stderr: int


def _start(plan: Blueprint) -> _Started:
    """Starts the launcher, which becomes bubblewrap, and waits until the namespaces are made. Blocks."""
    config = plan.config
    try:
        group = plan.groups.group(config.memory_bytes, config.processes + BESIDE) if plan.groups else None
    except OSError as error:
        raise SandboxFailed(f"A sandbox's cgroup could not be made: {error}") from error
    ours, theirs = list[int](), list[int]()
    try:
        names = ("job", "report", "stdout", "stderr", "info", "filter")
        for name in names:
            reading, writing = os.pipe()
            inward = name in ("job", "filter")
            theirs.append(reading if inward else writing)
            ours.append(writing if inward else reading)
        job, report, stdout, stderr, info, rules = ours
        os.write(rules, plan.seccomp)  # far less than a pipe's capacity
        os.close(rules)
        ours.remove(rules)
        process = _launch(plan, group, dict(zip(names, theirs, strict=True)))
        _close(theirs)
        first = _first_process(process, info, stderr)
        os.close(info)
        return _Started(process, first, group, job, report, stdout, stderr)
    except BaseException:
        _close([*ours, *theirs])
        if group is not None:
            group.kill()
            group.remove()
        raise


def _launch(plan: Blueprint, group: Group | None, ends: dict[str, int]) -> subprocess.Popen[bytes]:
    words = bubblewrap_command(
        plan.bubblewrap,
        plan.interpreter,
        plan.config,
        info=ends["info"],
        seccomp=ends["filter"],
        report=ends["report"],
    )
    settings = {
        "cgroups": [str(folder) for folder in group.folders] if group else [],
        "nice": _NICE,
        "uid": secrets.choice(plan.uids) if plan.uids else None,
        "command": words,
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, json.dumps(settings)],
        env={},
        cwd="/",
        stdin=ends["job"],
        stdout=ends["stdout"],
        stderr=ends["stderr"],
        pass_fds=(ends["info"], ends["filter"], ends["report"]),
        start_new_session=True,  # the terminal's Ctrl-C is for the server, which ends its sandboxes itself
    )


def _first_process(process: subprocess.Popen[bytes], info: int, stderr: int) -> int:
    """A pidfd of the process that ends last."""
    try:
        info_fields = json.loads(_read_all(info))
        return os.pidfd_open(info_fields["child-pid"])
    except (ValueError, KeyError, OSError, TimeoutError) as error:
        process.kill()
        process.wait()
        said = _read_all(stderr).decode("utf-8", "replace").strip()
        raise SandboxFailed(f"A sandbox could not be started: {said or error}") from error


def _read_all(descriptor: int) -> bytes:
    content = bytearray()
    while select.select([descriptor], [], [], _START_S)[0]:
        piece = os.read(descriptor, 4096)
        if not piece:
            return bytes(content)
        content += piece
    raise TimeoutError(f"nothing was heard for {_START_S:.0f} s")


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


async def _collect(
    pipe: Pipe, into: bytearray, both: tuple[bytearray, bytearray], limit: int, spent: asyncio.Event
) -> None:
    """Reads to the end and keeps the bytes within the limit of both together; sets `spent` at the limit."""
    while piece := await pipe.read():
        left = limit - sum(map(len, both))
        into += piece[:left]
        if len(piece) > left:
            spent.set()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
