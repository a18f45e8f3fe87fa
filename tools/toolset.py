"""Tools that share something: a class whose `@tool` methods share `self`.

`open` runs before the first call and `close` when the host lets the toolset go, after the calls that still run. A
toolset that could not be opened is tried again at its next call. Knows nothing of what its tools do.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tools.errors import ToolDeclarationError, ToolError
from tools.tool import DeclaredTool, Tool


@dataclass
class _Life:
    """Where a toolset is between its opening and its closing."""

    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    opened: bool = False
    calls: int = 0
    leaving: bool = False


class Toolset:
    """Base class of tools that share state. Methods declared with `@tool` become its tools, under their own names."""

    _life_: _Life | None = None  # made at first use, so that a subclass need not call super().__init__()

    def __init_subclass__(cls) -> None:
        """Raises `ToolDeclarationError` for a tool that has no `self`: it would be silently left out."""
        for name, value in vars(cls).items():
            if isinstance(value, (staticmethod, classmethod)) and isinstance(value.__func__, DeclaredTool):
                raise ToolDeclarationError(
                    f"{cls.__qualname__}.{name} is a {type(value).__name__}; a toolset's tools take self."
                )

    async def open(self) -> None:
        """Called once before the first call of any tool: connect, open files."""

    async def close(self) -> None:
        """Called once when the toolset is let go, if it was opened."""

    def tools(self) -> list[Tool]:
        """The tools of this instance, in the order of their declaration, bases first."""
        names = dict.fromkeys(
            name
            for kind in reversed(type(self).__mro__)
            for name, value in vars(kind).items()
            if isinstance(value, DeclaredTool)
        )
        # A name that a subclass has made something else is no tool any more.
        bound = (getattr(self, name) for name in names if isinstance(inspect.getattr_static(self, name), DeclaredTool))
        return list(bound)

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Holds the toolset open for one call.

        Raises:
            ToolError: it could not be opened; the message says why.
        """
        life = self._life()
        life.calls += 1
        try:
            async with life.changing:
                if not life.opened:
                    try:
                        await self.open()
                    except Exception as error:
                        raise ToolError(f"{type(self).__name__} could not be opened: {error}") from error
                    life.opened = True
            yield
        finally:
            life.calls -= 1
            if life.leaving:
                await self._close_when_idle(life)

    async def leave(self) -> None:
        """Closes the toolset, now or after the last running call. A later call opens it anew."""
        life = self._life()
        life.leaving = True
        await self._close_when_idle(life)

    def _life(self) -> _Life:
        if self._life_ is None:
            self._life_ = _Life()
        return self._life_

    async def _close_when_idle(self, life: _Life) -> None:
        async with life.changing:
            if life.opened and life.calls == 0:
                life.opened = False
                life.leaving = False
                await self.close()
