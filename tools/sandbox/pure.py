"""Small pure code, run by an interpreter of its own (pydantic-monty) that has no files, no network and few modules.

It needs nothing of the system, so it works where no sandbox does; but it knows only a part of Python, and says so when
code needs more. The interpreter, and all code that touches its values, is in processes that can be ended. Knows nothing
of sandboxes.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Self

from tools.sandbox.sandbox_config import Finished, SandboxFailed
from tools.workers.process_pool import ProcessPool, WorkerFailed

_SHOWING_S = 3.0  # past the limit of time, to end the interpreter and to make text of the value
_SHOWING_BYTES = 512 << 20  # of memory, for the same


@dataclass(frozen=True)
class PureConfig:
    """The limits of every run.

    Raises:
        ValueError: a limit is not in its range.
    """

    running: int = 2  # at one time; further runs wait
    timeout_s: float = 2.0
    memory_bytes: int = 64 << 20
    recursion: int = 500  # calls within calls
    output_bytes: int = 64 << 10
    value_chars: int = 20_000

    def __post_init__(self) -> None:
        for name in ("running", "memory_bytes", "recursion", "output_bytes", "value_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: 1 and more.")
        if not 0 < self.timeout_s <= 60:
            raise ValueError(f"timeout_s is {self.timeout_s}; accepted: more than 0, up to 60.")


class Pure:
    """Runs small pure code. Made by `open`; `close` it, or use it in an `async with`."""

    def __init__(self, config: PureConfig, workers: ProcessPool) -> None:
        self.config = config
        self._workers = workers
        self._closed = False

    @classmethod
    async def open(cls, config: PureConfig | None = None) -> Self:
        """Starts an interpreter and its process.

        Raises:
            SandboxFailed: it could not be started.
        """
        config = config or PureConfig()
        workers = ProcessPool(
            "tools.sandbox.monty", timeout_s=config.timeout_s + _SHOWING_S, memory_bytes=_SHOWING_BYTES,
            count=config.running,
        )  # fmt: skip
        try:
            await asyncio.to_thread(workers.start)
        except WorkerFailed as error:
            raise SandboxFailed(f"The interpreter for pure code could not be started: {error}.") from None
        return cls(config, workers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the interpreters; again does nothing."""
        self._closed = True
        await asyncio.to_thread(self._workers.close)

    async def run(self, code: str) -> Finished:
        """Runs the code in an interpreter of its own; files it can neither be given nor make.

        Raises:
            SandboxFailed: it is closed, or the interpreter does not work.
        """
        if self._closed:
            raise SandboxFailed("The interpreter for pure code is closed.")
        try:
            return Finished(**await self._workers.ask({"code": code, **asdict(self.config)}))
        except WorkerFailed as error:
            if error.late:
                reason = "Its value took too long to be made into text: give a smaller one, or print what is needed."
                return Finished("timeout", "", "", None, self.config.timeout_s + _SHOWING_S, reason)
            reason = "Its value was too large to be made into text: give a smaller one, or print what is needed."
            return Finished("memory", "", "", None, 0.0, reason)
        except ValueError as error:
            raise SandboxFailed(f"The interpreter for pure code does not work: {error}") from None
