"""The tools that a server offers, opened together: built in, installed, and from the plugins' folder, which is watched.

Knows nothing of HTTP or runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from app.config import Settings
from retrieval.browse import Browser
from tools.executor import Executor
from tools.journal import SqliteJournal
from tools.options import Permission
from tools.plugins import PluginFolder
from tools.policy import Policy
from tools.registry import Registry
from tools.tool import Tool

if TYPE_CHECKING:
    from retrieval import Library

GRANTED: tuple[Permission, ...] = ("none", "read", "write", "network", "execute")  # what writes or executes asks first

BUILT_IN = "built in"


class UnknownTool(LookupError):
    """There is no such tool; the message names those there are."""


class Toolshed:
    """Open it before use. Its registry changes when plugins do; a run keeps the tools it began with."""

    def __init__(self, settings: Settings, library: Library | None = None) -> None:
        folder = settings.resolved_data_dir
        self.registry = Registry()
        self.executor = Executor(self.registry, Policy(default=GRANTED), SqliteJournal(folder / "calls.db"))
        self.plugins = PluginFolder(settings.plugins or folder / "plugins", self.registry)
        if library is not None:
            self.registry.provide(Browser, factory=lambda ctx: Browser(library, ctx.user))
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        from tools.builtin import documents

        self.registry.add(documents, origin=BUILT_IN)
        self.registry.load_entry_points()
        await self.plugins.scan()
        self._watching = asyncio.create_task(self.plugins.watch(), name="plugins")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self.registry.close()

    def offered(self, wanted: Literal["all"] | Sequence[str]) -> list[Tool]:
        """The tools of these names, in the order of names, so that a prompt repeats.

        Raises:
            UnknownTool: there is none of a name.
        """
        names = {tool.name for tool in self.registry}
        if wanted == "all":
            return sorted(self.registry, key=lambda tool: tool.name)
        if unknown := sorted(set(wanted) - names):
            near = self.registry.near(unknown[0]) or sorted(names)
            raise UnknownTool(f"There is no tool {unknown[0]!r:.70}; accepted: {', '.join(near) or 'none, yet'}.")
        return sorted((tool for tool in self.registry if tool.name in set(wanted)), key=lambda tool: tool.name)
