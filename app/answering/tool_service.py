"""The tools that a server offers, opened together: built in, installed, and from the plugins' folder, which is watched.

Knows nothing of HTTP or runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from app.answering.served_model import ServedModel
from app.config import Settings
from app.errors import invalid
from app.observability import tracing
from retrieval.browse import Browser
from tools.builtin.skills import ORIGIN as SKILLS
from tools.builtin.skills import READ, RUN, skill_tools
from tools.call_policy import CallPolicy
from tools.executor import Executor
from tools.grants import SqliteGrants
from tools.journal import SqliteJournal
from tools.mcp import mcp_servers
from tools.options import Permission
from tools.outcome import Call
from tools.outcome import Event as CallEvent
from tools.plugins import PluginFolder
from tools.registry import Fault, Registry
from tools.schema import JSONSchema
from tools.session import Session
from tools.skills import Skill, SkillLibrary
from tools.tool import Tool

if TYPE_CHECKING:
    from retrieval import Library
    from tools.builtin.notes import NoteStore
    from tools.mcp.mcp_client import McpServer

# A tool that writes or executes asks first, unless it says "never": Python in its sandbox, and notes, which can be
# undone.
GRANTED: tuple[Permission, ...] = ("none", "read", "write", "network", "execute")

BUILT_IN = "built in"
SKILLS_SHARE = 1 / 4  # of a model's context that the list of skills may take

DELEGATE = "delegate"  # a model of another server has nobody to delegate to, nor has a sub-agent

log = logging.getLogger("ponder")


class OfferedTools:
    """Runs the calls of a model's loop: those of the tools that it was offered. `listen` hears of each call.

    `read_untrusted`: a result may be text that somebody else wrote.
    """

    def __init__(
        self, executor: Executor, offered: Iterable[Tool], session: Session, listen: Callable[[CallEvent], None]
    ) -> None:
        self.offered = {tool.name: tool for tool in offered}
        self.session = session
        self.read_untrusted = False
        self._executor = executor
        self._listen = listen

    def only_reads(self, call: Call) -> bool:
        tool = self.offered.get(call.name)
        return tool is not None and not tool.has_effects and tool.permission in ("none", "read")

    async def run(self, calls: Sequence[Call]) -> list[str]:
        offered = [call for call in calls if call.name in self.offered]  # names are constrained, but this decides
        outcomes = await self._executor.run(offered, self.session, tracing.calls(self._listen))
        self.read_untrusted |= any(outcome.result.untrusted for outcome in outcomes)
        texts = {outcome.call_id: outcome.text for outcome in outcomes}
        there = ", ".join(self.offered)
        return [texts.get(call.id) or f"There is no tool {call.name!r:.70} here; there are: {there}." for call in calls]

    def narrowed(self, offered: Iterable[Tool], listen: Callable[[CallEvent], None]) -> OfferedTools:
        """Returns some of the tools for a sub-agent, which delegates nothing and reads on from what was read here."""
        some = {tool.name: tool for tool in offered}
        session = replace(
            self.session, offered=tuple(some.values()), tainted_by=set(self.session.tainted_by), delegate=None,
            own={name: tool for name, tool in self.session.own.items() if name in some},
        )  # fmt: skip
        return OfferedTools(self._executor, some.values(), session, listen)


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
        self._journal = SqliteJournal(folder / "calls.db")
        self.executor = Executor(self.registry, policy, self._journal)
        self.plugins = PluginFolder(settings.plugins or folder / "plugins", self.registry)
        self.skills = SkillLibrary(settings.skills)
        self._runs_scripts = False
        if library is not None:
            self.registry.provide(Browser, factory=lambda ctx: Browser(library, ctx.user))
        self.off: dict[str, str] = {}  # missing tools, and their remedies
        self._settings = settings
        self._notes = notes
        self.mcp_servers: dict[str, McpServer] = {}
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
        for fault in self.skills.faults:
            log.warning("The skill %s is not loaded: %s", fault.folder, " ".join(fault.problems))
        self.registry.add(*self._skill_tools(list(self.skills)))
        self.registry.load_entry_points()
        servers = mcp_servers(self._settings.mcp, self.registry, os.environ)
        self.mcp_servers = {each.name: each for each in await self._closing.enter_async_context(servers)}
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
            self._sandbox_off("The sandbox is switched off.")
            return
        from tools.builtin.python import python
        from tools.sandbox import Sandbox, SandboxConfig, SandboxUnavailable, check

        config = SandboxConfig()
        support = await check(config)
        if not support.ok:
            self._sandbox_off(" ".join(support.reasons))
            return
        try:
            sandbox = await Sandbox.open(config)
        except SandboxUnavailable as error:
            self._sandbox_off(" ".join(error.reasons))
            return
        self._closing.push_async_callback(sandbox.close)
        self.registry.provide(Sandbox, sandbox)
        self.registry.add(python, origin=BUILT_IN)
        self._runs_scripts = True
        self.registry.replace(SKILLS, self._skill_tools(list(self.skills)))

    def _sandbox_off(self, reason: str) -> None:
        self.off["python"] = reason
        if len(self.skills):
            self.off[RUN] = reason

    def _skill_tools(self, skills: Sequence[Skill]) -> list[Tool]:
        return skill_tools(self.skills, skills, scripts=self._runs_scripts)

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

    def forget_user(self, user: str, runs: Iterable[str]) -> None:
        """Forgets the user's grants and permissions, and the calls of these runs. Writes to files."""
        self.grants.forget_user(user)
        for run in runs:
            self._journal.forget(run)

    @property
    def names(self) -> set[str]:
        """Returns the names of the tools that there are."""
        return {tool.name for tool in self.registry}

    @property
    def faults(self) -> list[Fault]:
        """Returns the tools and skills that could not be loaded, without the folders' places."""
        skills = [Fault(f"skill {Path(each.folder).name}", " ".join(each.problems)) for each in self.skills.faults]
        return [*self.registry.faults, *skills]

    async def guided_parameters(self, name: str) -> JSONSchema | None:
        """Returns a tool's `guided_parameters` as of now; None where it has none, or there is no such tool."""
        tool = self.registry.get(name)
        return None if tool is None or tool.guided_parameters is None else await tool.guided_parameters()

    def offered(
        self,
        wanted: Literal["all"] | Sequence[str] | None,
        skills: Literal["all"] | Sequence[str] | None = None,
        *,
        remote: bool = False,
    ) -> list[Tool]:
        """The tools of these names, in the order of names, so that a prompt repeats. `skills`: those that the tools of
        skills have; None for all, where these tools are wanted. `remote`: they are for another server's model.

        Raises:
            UnknownTool: there is none of a name, or not for another server's model.
            UnknownSkill: there is no skill of a name.
        """
        tools = [] if wanted is None else self._named(wanted)
        if remote and any(tool.name == DELEGATE for tool in tools):
            if wanted != "all":
                raise UnknownTool(f"The tool {DELEGATE!r} is for models of this server; accepted: one, or other tools.")
            tools = [tool for tool in tools if tool.name != DELEGATE]
        if skills is None:
            return tools
        chosen = self.skills.names if skills == "all" else skills
        own = self._skill_tools(self.skills.chosen(chosen))
        return sorted([*(tool for tool in tools if tool.origin != SKILLS), *own], key=lambda tool: tool.name)

    def check_skills(self, offered: Iterable[Tool], served: ServedModel) -> None:
        """
        Raises:
            ApiError: the list of skills among the tools takes more of the model's context than it may.
        """
        for tool in offered:
            most = int(SKILLS_SHARE * served.engine.max_model_len)
            if tool.origin == SKILLS and tool.name == READ and (tokens := _tokens(tool, served)) > most:
                raise invalid(
                    "skills", f"The list of skills has {tokens} tokens, and the context of {served.name} is "
                    f"{served.engine.max_model_len}; accepted: fewer skills, with at most {most} tokens together, or "
                    "tools without read_skill.", "skills_too_long",
                )  # fmt: skip

    def tell_skills(self, models: Iterable[ServedModel]) -> None:
        """Logs the tokens of the list of all skills for each model, as a warning where they are too many."""
        for served in models:
            for tool in self.registry:
                if tool.origin != SKILLS or tool.name != READ:
                    continue
                tokens, most = _tokens(tool, served), int(SKILLS_SHARE * served.engine.max_model_len)
                if tokens > most:
                    log.warning(
                        "The list of %d skills has %d tokens, and %s may have %d of them in its prompt; its requests "
                        "have to name fewer skills", len(self.skills), tokens, served.name, most,
                    )  # fmt: skip
                else:
                    log.info("The list of %d skills has %d tokens for %s", len(self.skills), tokens, served.name)

    def _named(self, wanted: Literal["all"] | Sequence[str]) -> list[Tool]:
        if wanted == "all":
            return sorted(self.registry, key=lambda tool: tool.name)
        if unknown := sorted(set(wanted) - self.names):
            near = self.registry.near(unknown[0]) or sorted(self.names)
            raise UnknownTool(f"There is no tool {unknown[0]!r:.70}; accepted: {', '.join(near) or 'none, yet'}.")
        return sorted((tool for tool in self.registry if tool.name in set(wanted)), key=lambda tool: tool.name)


def _tokens(tool: Tool, served: ServedModel) -> int:
    """Returns the tokens of a tool's description."""
    return len(served.engine.tokenizer.encode(tool.description))
