"""Sandbox pool: sandboxes kept warm, each used for one run and thrown away, and how a run ended, in words.

A run takes a sandbox that is waiting, and another is started in its place as soon as the job has been handed over.
Knows nothing of tools or models.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from tools.sandbox.job_report import job
from tools.sandbox.sandbox_config import Exit, Finished, SandboxConfig, SandboxFailed, SandboxUnavailable
from tools.sandbox.sandbox_process import Blueprint, Ended, SandboxProcess
from tools.sandbox.support import check, plan_for

# The kernel ends a process by a coarser count of its time than it reports afterwards. Little else can have sent
# SIGKILL: a namespace's first process can't be killed from inside, and want of memory is known.
_NEARLY = 0.5


class Sandbox:
    """Runs Python that nobody vouches for. Made by `open`; `close` it, or use it in an `async with`."""

    def __init__(self, plan: Blueprint) -> None:
        self.config = plan.config
        self._plan = plan
        # One thread for as long as the sandbox lives: bubblewrap ends with the thread that started it.
        self._thread = ThreadPoolExecutor(1, "ponder-sandbox")
        self._warm = deque[asyncio.Task[SandboxProcess]]()
        self._turns = asyncio.Semaphore(plan.config.running)
        self._runs = set[asyncio.Task[Ended]]()
        self._closed = False

    @classmethod
    async def open(cls, config: SandboxConfig | None = None) -> Self:
        """Opens a pool and starts warming its sandboxes.

        Raises:
            SandboxUnavailable: this system can't give a sandbox with all its layers.
        """
        support = await check(config)
        if not support.ok:
            raise SandboxUnavailable(support.reasons)
        plan, _ = await asyncio.to_thread(plan_for, config or SandboxConfig())
        sandbox = cls(plan)
        sandbox._refill()
        return sandbox

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
        self, code: str, *, files: Mapping[str, bytes] | None = None, timeout_s: float | None = None
    ) -> Finished:
        """Runs the code in a sandbox of its own, with the files in its work directory; returns when the sandbox is
        gone.

        Raises:
            ValueError: the timeout or the files are not acceptable.
            SandboxFailed: no sandbox could be started, or the pool is closed.
        """
        limit = self.config.timeout_s if timeout_s is None else timeout_s
        if not 0 < limit <= 3600:
            raise ValueError(f"timeout_s is {limit}; accepted: more than 0, up to 3600.")
        work = job(code, files or {}, self.config)
        async with self._turns:
            process = await self._take()
            started = time.monotonic()
            run = asyncio.create_task(process.run(work, limit))
            self._runs.add(run)
            try:
                # The job goes out first; only then does the next sandbox compete for the processor.
                await asyncio.sleep(0)
                self._refill()
                ended = await run
            except asyncio.CancelledError:
                run.cancel()
                await asyncio.gather(run, return_exceptions=True)
                if self._closed:
                    raise SandboxFailed("The sandbox was closed while the code ran.") from None
                raise
            finally:
                self._runs.discard(run)
        return _finished(ended, self.config, limit, time.monotonic() - started)

    async def close(self) -> None:
        """Ends running and waiting sandboxes, and removes all that the pool made."""
        if self._closed:
            return
        self._closed = True
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        for waiting in self._warm:
            waiting.cancel()
        for process in await asyncio.gather(*self._warm, return_exceptions=True):
            if isinstance(process, SandboxProcess):
                await process.discard()
        self._warm.clear()
        await asyncio.to_thread(self._thread.shutdown)
        if self._plan.groups is not None:
            await asyncio.to_thread(self._plan.groups.close)

    def _refill(self) -> None:
        while not self._closed and len(self._warm) < self.config.warm:
            self._warm.append(asyncio.create_task(SandboxProcess.start(self._plan, self._thread)))

    async def _take(self) -> SandboxProcess:
        """A sandbox that waits for its job."""
        while not self._closed:
            self._refill()
            starting = self._warm.popleft()
            try:
                process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._warm.appendleft(starting)  # the next run's
                raise
            if process.alive:
                return process
            await process.discard()  # it died while it waited, as under the machine's lack of memory
        raise SandboxFailed("The sandbox is closed.")


def _finished(ended: Ended, config: SandboxConfig, timeout_s: float, seconds: float) -> Finished:
    report = ended.report
    kind: Exit
    match ended.how:
        case "reported" if report is not None and report.exit == "memory":
            kind, reason = "memory", _memory(config)
        case "reported" if report is not None:
            kind, reason = report.exit, report.reason
        case "output":
            kind, reason = "output", f"It wrote more than {config.output_bytes} bytes, the limit, and was stopped."
        case "timeout":
            kind, reason = "timeout", f"It was stopped after {timeout_s:g} s, the limit."
        case "unreadable":
            kind, reason = "killed", "Its process reported something that can't be read."
        case _:
            kind, reason = _death(ended, config)
    return Finished(
        exit=kind,
        stdout=ended.stdout.decode("utf-8", "replace"),
        stderr=ended.stderr.decode("utf-8", "replace"),
        value=report.value if report else None,
        seconds=seconds,
        reason=reason,
        files=ended.files,
        left_out=dict(report.left_out) if report else {},
    )


def _death(ended: Ended, config: SandboxConfig) -> tuple[Exit, str]:
    """Its process ended before it reported."""
    number = ended.status - 128 if ended.status > 128 else -ended.status
    if ended.ended_by_memory:
        return "memory", _memory(config)
    if number == signal.SIGKILL and ended.cpu_s >= _NEARLY * config.cpu_s:
        return "timeout", f"It used {config.cpu_s} s of the processor, the limit."
    if number <= 0:
        return "error", f"It ended its process with the status {ended.status}."
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return "killed", f"Its process was ended by {name}."


def _memory(config: SandboxConfig) -> str:
    return f"It needed more than {config.memory_bytes} bytes of memory, the limit."
