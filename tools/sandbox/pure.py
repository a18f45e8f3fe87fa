"""Small pure code, run by an interpreter of its own (pydantic-monty) that has no files, no network and few modules.

It needs nothing of the system, so it is there where jails are not; but it knows only a part of Python, and says so
when code needs more. Knows nothing of jails.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Literal, Self

import pydantic_monty
from pydantic_monty import AsyncMonty, ResourceLimits

from tools.sandbox.records import Exit, Finished, SandboxFailed

_GRACE_S = 2.0  # past its limit, before the interpreter's process is ended from outside


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

    def __init__(self, config: PureConfig, interpreters: AsyncMonty) -> None:
        self.config = config
        self._interpreters = interpreters
        self._closed = False

    @classmethod
    async def open(cls, config: PureConfig | None = None) -> Self:
        """An interpreter whose process is up."""
        config = config or PureConfig()
        interpreters = AsyncMonty(
            max_processes=config.running,
            max_checkouts_per_worker=1,  # what one run did to its process is not the next one's
            request_timeout=config.timeout_s + _GRACE_S,
        )
        await interpreters.__aenter__()
        return cls(config, interpreters)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the interpreters; again does nothing."""
        if not self._closed:
            self._closed = True
            await self._interpreters.__aexit__(None, None, None)

    async def run(self, code: str) -> Finished:
        """Runs the code in an interpreter of its own; files it can neither be given nor make.

        Raises:
            SandboxFailed: it is closed.
        """
        if self._closed:
            raise SandboxFailed("The interpreter for pure code is closed.")
        config = self.config
        printed = _Printed(config.output_bytes)
        limits: ResourceLimits = {
            "max_feed_duration_secs": config.timeout_s,
            "max_memory": config.memory_bytes,
            "max_recursion_depth": config.recursion,
            "max_total_sleep_secs": 0.0,
        }
        kind: Exit = "ok"
        value, reason, trace = None, "", ""
        async with self._interpreters.checkout(limits=limits, os_policy={"sleep": "zero"}) as session:
            started = time.monotonic()
            try:
                value = await session.feed_run(code, print_callback=printed)
            except pydantic_monty.MontyRuntimeError as error:
                kind, reason = _judged(error, config)
                trace = error.display()
            except pydantic_monty.MontySyntaxError as error:
                kind, reason, trace = "error", error.display("type-msg"), error.display()
            except pydantic_monty.MontyCrashedError as error:
                kind, reason = ("timeout" if error.timed_out else "killed"), str(error)
            except pydantic_monty.MontyError as error:
                kind, reason = "error", str(error)
            seconds = time.monotonic() - started
        if printed.full:
            kind, reason = "output", f"It wrote more than {config.output_bytes} bytes, the limit; the rest is cut."
        shown = None if value is None else await asyncio.to_thread(_shown, value, config.value_chars)
        return Finished(kind, printed.text["stdout"], printed.text["stderr"] + trace, shown, seconds, reason)


class _Printed:
    """What was printed, up to a limit in bytes of both streams together."""

    def __init__(self, most: int) -> None:
        self.text = {"stdout": "", "stderr": ""}
        self.full = False
        self._room = most

    def __call__(self, stream: Literal["stdout", "stderr"], text: str) -> None:
        content = text.encode("utf-8", "replace")
        self.full |= len(content) > self._room
        self.text[stream] += content[: self._room].decode("utf-8", "ignore")
        self._room = max(0, self._room - len(content))


def _judged(error: pydantic_monty.MontyRuntimeError, config: PureConfig) -> tuple[Exit, str]:
    match error.exception():
        case TimeoutError():
            return "timeout", f"It was stopped after {config.timeout_s:g} s, the limit."
        case MemoryError():
            return "memory", f"It needed more than {config.memory_bytes} bytes of memory, the limit."
        case _:
            return "error", error.display("type-msg")


def _shown(value: object, most: int) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError, MemoryError) as error:
        return f"(not shown: {type(error).__name__}: {error})"
    return text if len(text) <= most else f"{text[:most]}… (cut from {len(text)} characters)"
