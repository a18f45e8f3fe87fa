"""Runs the calls a model makes: checked, permitted, approved, within limits, and recorded before they are believed.

Every way a call can end is an outcome that the model reads; nothing but cancellation is raised. Calls that only read
run at the same time; a call with effects waits for those before it, and those after it wait for it. Knows nothing of
models, prompts or HTTP: a session names the user, and how a person can be reached.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from tools.call_policy import Allowed, CallPolicy, Denied, NeedsApproval, canonical, fingerprint, parsed
from tools.errors import ArgumentProblem, BadArguments, JournalConflict, NotAnswered
from tools.invocation import Invocations, Tell
from tools.journal import Journal, SqliteJournal
from tools.limits import RateLimits
from tools.outcome import Call, CallError, CallResult, CallStarted, Event, Outcome, failed
from tools.registry import Registry
from tools.result import Result
from tools.session import Session
from tools.tool import Tool

log = logging.getLogger("ponder")

_CACHED = 1000  # results kept
_OUTCOME = TypeAdapter(Outcome)

Listen = Callable[[Event], None]


class Executor:
    """Runs calls. The clock gives seconds, for the cache and for how long calls took."""

    def __init__(
        self,
        registry: Registry,
        policy: CallPolicy,
        journal: Journal | None = None,
        limits: RateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.policy = policy
        self.journal: Journal = SqliteJournal(":memory:") if journal is None else journal
        self.limits = RateLimits() if limits is None else limits
        self._clock = clock
        self._cache = OrderedDict[tuple[Tool, str, str], tuple[float, Result]]()
        self._invocations = Invocations(registry)

    async def run(self, calls: Sequence[Call], session: Session, listen: Listen = lambda _: None) -> list[Outcome]:
        """The outcomes, in the order of the calls. `listen` gets every event, in this event loop's thread.

        Taint counts from the next `run`: the model that made these calls had not read their results.

        Raises:
            asyncio.CancelledError: the run was cancelled; its tools were too.
        """
        tainted = frozenset(session.tainted_by)
        outcomes = list[Outcome]()
        together = list[Call]()
        for call in calls:
            tool = self._tool(call, session)
            if tool is None or not tool.has_effects:
                together.append(call)
                continue
            outcomes += await self._all(together, session, tainted, listen)
            outcomes += await self._all([call], session, tainted, listen)
            together = []
        outcomes += await self._all(together, session, tainted, listen)
        session.tainted_by |= {outcome.name for outcome in outcomes if outcome.result.untrusted}
        return outcomes

    async def _all(
        self, calls: Sequence[Call], session: Session, tainted: frozenset[str], listen: Listen
    ) -> list[Outcome]:
        tasks = [asyncio.create_task(self._announced(call, session, tainted, listen)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # Only after a cancellation is any of them still running.
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _announced(self, call: Call, session: Session, tainted: frozenset[str], listen: Listen) -> Outcome:
        """One call, with its events."""
        start = self._clock()

        def since_start() -> float:
            return 1000 * (self._clock() - start)

        def tell(make: Callable[[float], Event]) -> None:
            try:
                listen(make(since_start()))
            except Exception:
                log.exception("A listener to tool calls failed")

        tell(lambda ms: CallStarted(call.id, call.name, call.arguments, ms))
        try:
            outcome = await self._recorded(call, session, tainted, tell, since_start)
        except JournalConflict as error:
            outcome = failed(call, "error", str(error))
        except Exception as error:  # a bug or a full disk of ours: the model goes on, the operator reads the log
            log.exception("The call %s of %s failed outside of the tool", call.id, call.name)
            outcome = failed(call, "error", f"{type(error).__name__}: {error}")
        last = CallResult if outcome.ok else CallError
        tell(lambda ms: last(call.id, call.name, outcome, ms))
        return outcome

    async def _recorded(
        self,
        call: Call,
        session: Session,
        tainted: frozenset[str],
        tell: Tell,
        since_start: Callable[[], float],
    ) -> Outcome:
        """One call, from the journal if it was finished before, and else into it."""
        try:
            arguments = parsed(call.arguments)
        except ValueError as error:
            return failed(call, "bad_arguments", str(BadArguments(call.name, [ArgumentProblem("", str(error))])))
        key = (session.run, call.id)
        mark = fingerprint(call.name, arguments)
        known = await asyncio.to_thread(self.journal.look, *key, mark)
        if known is not None and known.outcome is not None:
            return replace(_OUTCOME.validate_json(known.outcome), replayed=True)
        tool = self._tool(call, session)
        if known is not None and (tool is None or not tool.idempotent):
            return _interrupted(call)
        outcome = await self._checked(call, tool, arguments, session, tainted, tell)
        if outcome.kind == "interrupted":
            return outcome
        outcome = replace(outcome, result=replace(outcome.result, ms=since_start()))
        try:
            text = _OUTCOME.dump_json(outcome).decode()
            stands = await asyncio.to_thread(self.journal.finish, *key, mark, text)
        except JournalConflict:
            raise
        except Exception:
            # It did run, and the model must know. A resumed run will be notified that it may have.
            log.exception("The outcome of call %s of %s could not be recorded", call.id, call.name)
            return outcome
        return outcome if stands == text else replace(_OUTCOME.validate_json(stands), replayed=True)

    async def _checked(
        self,
        call: Call,
        tool: Tool | None,
        arguments: dict[str, Any],
        session: Session,
        tainted: frozenset[str],
        tell: Tell,
    ) -> Outcome:
        """One call that was never run: everything that may speak against it, then the call."""
        if tool is None:
            near = self.registry.near(call.name)
            there = f"did you mean {' or '.join(near)}?" if near else f"there are: {self._names()}."
            return failed(call, "unknown_tool", f"There is no tool {call.name!r}; {there}")
        try:
            tool.validate(arguments)
        except BadArguments as error:
            return failed(call, "bad_arguments", str(error))
        tainted |= self._foreign_descriptions(tool, session)
        ruling = await asyncio.to_thread(
            self.policy.decide, tool, arguments, user=session.user, chat=session.chat, call_id=call.id,
            tainted_by=tainted,
        )  # fmt: skip
        if isinstance(ruling, Denied):
            return failed(call, "denied", ruling.reason)
        kept = self._kept(tool, session.user, arguments)
        if kept is not None:
            return Outcome(call.id, call.name, "ok", kept, cached=True)
        if tool.rate is not None and (wait_s := self.limits.take(session.user, tool.name, tool.rate)) > 0:
            message = f"{tool.name} may be called {tool.rate}; wait {wait_s:.1f} s, or go on without it."
            return replace(failed(call, "rate_limited", message), retry_after_s=wait_s)
        if isinstance(ruling, NeedsApproval):
            answer = await self._approved(tool, ruling, session)
            if isinstance(answer, Denied):
                return failed(call, "denied", answer.reason)
        if not tool.idempotent:
            mark = fingerprint(call.name, arguments)
            if not await asyncio.to_thread(self.journal.begin, session.run, call.id, mark):
                return _interrupted(call)
        outcome = await self._invocations.run(call, tool, arguments, session, tell)
        if outcome.ok:
            self._keep(tool, session.user, arguments, outcome.result)
        return outcome

    async def _approved(self, tool: Tool, asked: NeedsApproval, session: Session) -> Allowed | Denied:
        if session.approve is None:
            return Denied(f"{tool.name} needs a person's approval, and nobody can be asked here. {asked.reason}")
        try:
            decision = await session.approve(asked)
        except NotAnswered as error:
            return Denied(f"{tool.name} needs a person's approval, and none came: {error}")
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is None or me.cancelling():
                raise
            return Denied(f"{tool.name} needs a person's approval, and the question was withdrawn.")
        return await asyncio.to_thread(self.policy.accept, tool, asked, decision, user=session.user, chat=session.chat)

    def _foreign_descriptions(self, tool: Tool, session: Session) -> frozenset[str]:
        """The tools with descriptions that may have asked for this call: those of other origins, written by others."""
        shown = self.registry if session.offered is None else session.offered
        return frozenset(each.name for each in shown if each.foreign and each.origin != tool.origin)

    def _tool(self, call: Call, session: Session) -> Tool | None:
        return session.own.get(call.name) or self.registry.get(call.name)

    def _kept(self, tool: Tool, user: str, arguments: Mapping[str, Any]) -> Result | None:
        if not tool.cache_s:
            return None
        until, kept = self._cache.get((tool, user, canonical(arguments)), (0.0, None))
        return kept if self._clock() < until else None

    def _keep(self, tool: Tool, user: str, arguments: Mapping[str, Any], made: Result) -> None:
        if not tool.cache_s or made.artifacts:  # files are of one chat
            return
        key = (tool, user, canonical(arguments))
        self._cache[key] = (self._clock() + tool.cache_s, made)
        self._cache.move_to_end(key)
        while len(self._cache) > _CACHED:
            self._cache.popitem(last=False)

    def _names(self) -> str:
        return ", ".join(sorted(tool.name for tool in self.registry)) or "none"


def _interrupted(call: Call) -> Outcome:
    message = (
        f"This call of {call.name} was interrupted before: it may or may not have happened, and was not run again. "
        "Look whether it did, or ask."
    )
    return failed(call, "interrupted", message)
