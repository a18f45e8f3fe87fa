"""Runs one tool call within its deadline; it ends in an outcome, even if the function fails or hangs.

A tool that does not stop when it is cancelled is left behind: the run goes on. The deadline can pause, because a
person's thinking is not the tool's slowness.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

from tools.context import Context, Question, SubAgentAnswer, SubAgentTask, ToolProgressStep
from tools.errors import Retry, ToolError
from tools.outcome import Call, CallOutput, CallProgress, Event, Outcome, failed
from tools.registry import Registry
from tools.result import result_of
from tools.session import Session
from tools.tool import Tool


class Deadline:
    """A context manager; `over` is done when the seconds have run out between its entry and its exit."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._pauses = 0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self.over.cancel()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time within does not count; pauses may overlap."""
        self._pauses += 1
        self._stop()
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0 and not self.over.done():
                self._start()

    def _start(self) -> None:
        self._timer = self._loop.call_later(self._left_s, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - self._loop.time())
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


log = logging.getLogger("ponder")

GRACE_S = 1.0  # how long a cancelled tool may take to clean up before we go on without it

Tell = Callable[[Callable[[float], Event]], None]  # takes an event that still lacks its milliseconds


class TimedOut(Exception):
    """The tool's time is over; a `TimeoutError` that it raises itself is an error like any other."""


class Invocations:
    """Runs tools with the registry's values, and keeps a reference to those that do not stop."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._strays = set[asyncio.Task[Any]]()

    async def run(self, call: Call, tool: Tool, arguments: Mapping[str, Any], session: Session, tell: Tell) -> Outcome:
        """The call's outcome; raises nothing but `asyncio.CancelledError`, after its tool was cancelled too."""
        deadline = Deadline(tool.timeout_s)
        ctx = self._context(call, session, deadline, tell)
        try:
            value = await self._within(deadline, ctx, tool, arguments)
            untrusted = tool.untrusted or ctx.read_untrusted
            result = result_of(value, tuple(ctx.sources), untrusted=untrusted, max_chars=tool.max_chars)
            if (ctx.files or ctx.refused) and session.keep_files is not None:
                kept = await session.keep_files(call.id, ctx.files)
                result = result.with_artifacts(replace(kept, refused=(*kept.refused, *ctx.refused)))
        except TimedOut:
            message = f"{tool.name} took longer than its {tool.timeout_s:g} s and was stopped."
            doubt = "" if tool.idempotent else " It may or may not have had its effect."
            return failed(call, "timeout", message + doubt)
        except Retry as error:
            return failed(call, "retry", error.hint, tool)
        except ToolError as error:
            return failed(call, "error", str(error), tool)
        except Exception as error:
            return failed(call, "error", f"{type(error).__name__}: {error}", tool)
        return Outcome(call.id, call.name, "ok", result)

    def _context(self, call: Call, session: Session, deadline: Deadline, tell: Tell) -> Context:
        loop = asyncio.get_running_loop()

        def report(event: Callable[[float], Event]) -> None:
            def deliver() -> None:
                if not ctx.cancelled:  # a thread's output after the outcome comes too late
                    tell(event)

            if _in_loop(loop):
                deliver()
            else:
                loop.call_soon_threadsafe(deliver)

        def on_progress(step: ToolProgressStep) -> None:
            report(lambda ms: CallProgress(call.id, call.name, step, ms))

        def on_output(text: str) -> None:
            report(lambda ms: CallOutput(call.id, call.name, text, ms))

        async def ask(question: Question) -> str:
            assert session.ask is not None
            with deadline.paused():
                return await session.ask(question)

        async def delegate(call_id: str, tasks: Sequence[SubAgentTask]) -> Sequence[SubAgentAnswer]:
            assert session.delegate is not None
            with deadline.paused():
                return await session.delegate(call_id, tasks)

        ctx = Context(
            user=session.user,
            call_id=call.id,
            tool=call.name,
            chat=session.chat,
            provided=self._registry.provided,
            ask=None if session.ask is None else ask,
            delegate=None if session.delegate is None else delegate,
            on_progress=on_progress,
            on_output=on_output,
            keeps_files=session.keep_files is not None,
        )
        return ctx

    async def _within(self, deadline: Deadline, ctx: Context, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        async def guarded() -> Any:
            try:
                return await tool.call(ctx, arguments)
            except SystemExit as error:  # which would end the event loop
                raise ToolError(f"it called for an exit: {error!r}") from None

        task = asyncio.create_task(guarded(), name=f"tool {tool.name}")
        try:
            with deadline:
                await asyncio.wait({task, deadline.over}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise TimedOut
            if task.cancelled():
                raise ToolError("it was cancelled from within.")
            return task.result()
        finally:
            ctx.end()
            if not task.done():
                await self._stop(task)

    async def _stop(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._strays.add(task)
        task.add_done_callback(self._forget)
        await asyncio.wait({task}, timeout=GRACE_S)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._strays.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("A tool that was stopped failed on the way: %r", error)


def _in_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
