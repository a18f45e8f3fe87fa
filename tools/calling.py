"""Runs a tool's function of any kind: plain, async, or a generator of either.

A plain function runs in a thread, so that it may block. Knows nothing of timeouts; the caller may stop waiting.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing, closing
from typing import Any, TypeVar, cast

from tools.context import Context
from tools.errors import ToolError

R = TypeVar("R")


async def evaluated(ctx: Context, start: Callable[[], Any], function: Callable[..., Any]) -> Any:
    """Returns the function's result, of any kind; the pieces of a generator are shown as they come."""
    if inspect.isasyncgenfunction(function):
        async with aclosing(cast("AsyncGenerator[object, None]", start())) as stream:
            return "".join([_shown(ctx, piece) async for piece in stream])
    if inspect.isgeneratorfunction(function):
        return await in_thread(lambda: "".join(_pieces(ctx, cast("Generator[object, None, None]", start()))))
    if inspect.iscoroutinefunction(function):
        return await start()
    return await in_thread(start)


def _pieces(ctx: Context, stream: Generator[object, None, None]) -> Iterator[str]:
    with closing(stream):
        for piece in stream:
            if ctx.cancelled:  # nobody waits: the generator is closed between two pieces, where its thread can stop
                return
            yield _shown(ctx, piece)


def _shown(ctx: Context, piece: object) -> str:
    if not isinstance(piece, str):
        raise TypeError(f"a streaming tool yields strings, and this one yielded {type(piece).__name__}")
    ctx.output(piece)
    return piece


async def in_thread(work: Callable[[], R]) -> R:
    """Runs a plain function in a thread of its own.

    A daemon, and none of a pool's: a function that never returns must neither starve other calls nor delay the end of
    the process. Cancelled, we stop waiting; the thread goes on, and can see it by its `ctx.cancelled`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(value: R | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("R", value))

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit must end neither the loop nor the wait
            error = ToolError(f"it called for an exit: {raised!r}")
        if isinstance(error, StopIteration):  # which no future can carry
            error = RuntimeError(f"StopIteration: {error}")
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="tool", daemon=True).start()
    return await done
