"""The tools that a server offers, opened together: built in, installed, and from the plugins' folder, which is watched.

Knows nothing of HTTP or runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from app.config import Settings
from retrieval.browse import Browser
from tools.call_policy import CallPolicy
from tools.executor import Executor
from tools.grants import SqliteGrants
from tools.journal import SqliteJournal
from tools.mcp import mcp_servers
from tools.options import Permission
from tools.plugins import PluginFolder
from tools.registry import Registry
from tools.tool import Tool

if TYPE_CHECKING:
    from retrieval import Library
    from tools.builtin.notes import NoteStore

# A tool that writes or executes asks first, unless it says "never": Python in its sandbox, and notes, which can be
# undone.
GRANTED: tuple[Permission, ...] = ("none", "read", "write", "network", "execute")

BUILT_IN = "built in"


class UnknownTool(LookupError):
    """There is no such tool; the message names those there are."""


class ToolService:
    """Open it before use. Its registry changes when plugins do; a run keeps the tools it began with."""

    def __init__(self, settings: Settings, library: Library | None = None, notes: NoteStore | None = None) -> None:
        """`notes`: the store of the notes' tools; without one they are off."""
        folder = settings.resolved_data_dir
        self.registry = Registry()
        self.grants = SqliteGrants(folder / "permissions.db")
        policy = CallPolicy(self.grants, default=GRANTED)
        self.executor = Executor(self.registry, policy, SqliteJournal(folder / "calls.db"))
        self.plugins = PluginFolder(settings.plugins or folder / "plugins", self.registry)
        if library is not None:
            self.registry.provide(Browser, factory=lambda ctx: Browser(library, ctx.user))
        self.off: dict[str, str] = {}  # missing tools, and their remedies
        self._settings = settings
        self._notes = notes
        self._closing = contextlib.AsyncExitStack()
        self._watching: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        from tools.builtin import documents
        from tools.builtin.builtin_tools import BuiltinConfig, builtin_tools
        from tools.sql import SqlDatabase

        attached = {name: SqlDatabase(path) for name, path in self._settings.databases.items()}
        here = builtin_tools(BuiltinConfig(self._notes, attached, self._settings.web, self._settings.searxng))
        self.off |= here.off
        self.registry.add(*here.tools, documents, origin=BUILT_IN)
        self.registry.load_entry_points()
        await self._closing.enter_async_context(mcp_servers(self._settings.mcp, self.registry, os.environ))
        self._opening = asyncio.create_task(self._open_python(), name="sandbox")
        await self.plugins.scan()
        self._watching = asyncio.create_task(self.plugins.watch(), name="plugins")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in (self._watching, self._opening):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await self._closing.aclose()
        await self.registry.close()
        self.grants.close()

    async def ready(self) -> None:
        """Wait for the tools that a server opens in the background."""
        if self._opening is not None:
            await asyncio.wait({self._opening})

    async def _open_python(self) -> None:
        """Python for models, once this system's sandbox is probed: some hundred milliseconds."""
        await self._open_small_python()
        if not self._settings.sandbox:
            self.off["python"] = "The sandbox is switched off."
            return
        from tools.builtin.python import python
        from tools.sandbox import Sandbox, SandboxConfig, SandboxUnavailable, check

        config = SandboxConfig()
        support = await check(config)
        if not support.ok:
            self.off["python"] = " ".join(support.reasons)
            return
        try:
            sandbox = await Sandbox.open(config)
        except SandboxUnavailable as error:
            self.off["python"] = " ".join(error.reasons)
            return
        self._closing.push_async_callback(sandbox.close)
        self.registry.provide(Sandbox, sandbox)
        self.registry.add(python, origin=BUILT_IN)

    async def _open_small_python(self) -> None:
        """The part of Python that needs no sandbox, for small pure code. It is never put in the other's place."""
        from tools.builtin.python import small_python
        from tools.sandbox import Pure, SandboxFailed

        try:
            pure = await Pure.open()
        except SandboxFailed as error:
            self.off["small_python"] = str(error)
            return
        self._closing.push_async_callback(pure.close)
        self.registry.provide(Pure, pure)
        self.registry.add(small_python, origin=BUILT_IN)

    @property
    def names(self) -> set[str]:
        """Returns the names of the tools that there are."""
        return {tool.name for tool in self.registry}

    def offered(self, wanted: Literal["all"] | Sequence[str]) -> list[Tool]:
        """The tools of these names, in the order of names, so that a prompt repeats.

        Raises:
            UnknownTool: there is none of a name.
        """
        if wanted == "all":
            return sorted(self.registry, key=lambda tool: tool.name)
        if unknown := sorted(set(wanted) - self.names):
            near = self.registry.near(unknown[0]) or sorted(self.names)
            raise UnknownTool(f"There is no tool {unknown[0]!r:.70}; accepted: {', '.join(near) or 'none, yet'}.")
        return sorted((tool for tool in self.registry if tool.name in set(wanted)), key=lambda tool: tool.name)
