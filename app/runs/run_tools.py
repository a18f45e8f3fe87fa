"""A run's tools: the executor's calls as events of the log, and a person's approvals and answers on their way back.

A person's pending decisions wait in here, by number, until they are made or too late. Knows nothing of HTTP, nor of how
the model writes its calls.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from app.answering.sub_agents import SubAgents, delegated
from app.answering.tool_service import OfferedTools
from app.errors import ApiError, invalid
from app.observability import tracing
from app.runs.events import (
    ApprovalRequested,
    ApprovalResolved,
    QuestionAnswered,
    QuestionAsked,
    ToolArtifact,
    ToolCall,
    ToolError,
    ToolOutput,
    ToolProgress,
    ToolResult,
    ToolSource,
)
from reasoning.agent import Limits
from tools.builtin.skills import ORIGIN as SKILLS
from tools.call_policy import Decision, NeedsApproval
from tools.context import Question, Source, SubAgentAnswer, SubAgentTask
from tools.errors import NotAnswered
from tools.outcome import Call, CallError, CallOutput, CallProgress, CallResult, CallStarted
from tools.outcome import Event as CallEvent
from tools.session import Session

if TYPE_CHECKING:
    from app.db.artifact_store import ArtifactStore
    from app.runs.event_log import RunLog
    from tools.executor import Executor
    from tools.tool import Tool

WAIT_S = 900.0  # for a person
SHOWN = 20_000  # characters of a result in an event
Answer = Literal["once", "no", "always", "never"]


@dataclass(slots=True)
class _Waiting:
    """A decision that a person is to make; `asked` is the event that said so."""

    asked: ApprovalRequested | QuestionAsked
    decided: asyncio.Future[Any]  # a Decision, or an answer's text


class RunTools:
    """The tools offered to one run. `wait_s` is how long a person has to decide.

    `tainted_by`: tools with untrusted output in the conversation already.
    """

    def __init__(
        self, executor: Executor, offered: Sequence[Tool], log: RunLog, *, run: str, chat: str, user: str,
        limits: Limits, wait_s: float = WAIT_S, tainted_by: Collection[str] = (),
        artifacts: ArtifactStore | None = None,
    ) -> None:  # fmt: skip
        """`artifacts` keeps the files that tools make; without it they are gone with the call."""
        self.sub_agents: SubAgents | None = None  # once a model of this server writes
        self.specs = [tool.spec() for tool in offered]
        self.limits = limits
        self._executor = executor
        self._log = log
        self._wait_s = wait_s
        self._waiting: dict[str, _Waiting] = {}
        self._numbers = 0
        self._waited_s = 0.0
        self._waits_since: float | None = None
        self._session = Session(
            user, run, chat, approve=self._approve, ask=self._ask, delegate=self._delegate,
            offered=tuple(offered), tainted_by=set(tainted_by),
            own={tool.name: tool for tool in offered if tool.origin == SKILLS},
            keep_files=None if artifacts is None else partial(artifacts.keep, chat, run),
        )  # fmt: skip
        self._tools = OfferedTools(executor, offered, self._session, self._listen)

    @property
    def tainted_by(self) -> Collection[str]:
        """The tools with untrusted output that the run has read by now, or its conversation before."""
        return self._session.tainted_by

    @property
    def waiting_for(self) -> Literal["approval", "answer"] | None:
        """Returns what the run waits for from a person."""
        for waiting in self._waiting.values():
            if not waiting.decided.done():
                return "approval" if isinstance(waiting.asked, ApprovalRequested) else "answer"
        return None

    def clock(self) -> float:
        """Seconds that pass, except while a person is asked: a run is not to end because they think."""
        now = time.monotonic()
        return now - self._waited_s - (0.0 if self._waits_since is None else now - self._waits_since)

    def has_read(self, what: str) -> None:
        """The model is shown text that somebody else may have written, beside its tools' results."""
        self._session.tainted_by.add(what)

    # -- the agent's interface

    def only_reads(self, call: Call) -> bool:
        return self._tools.only_reads(call)

    async def run(self, calls: Sequence[Call]) -> list[str]:
        return await self._tools.run(calls)

    def begin(self, sub_agents: SubAgents) -> None:
        """From now on calls can delegate to `sub_agents`."""
        self.sub_agents = sub_agents

    async def _delegate(self, call_id: str, tasks: Sequence[SubAgentTask]) -> Sequence[SubAgentAnswer]:
        def listen(agent: str) -> Callable[[CallEvent], None]:
            return lambda event: self._log.append(_logged(event, agent))

        return await delegated(self.sub_agents, self._tools, call_id, tasks, listen)

    async def search(self, tool: str, query: str, count: int, tainted_by: Collection[str]) -> Sequence[Source]:
        """Calls a tool that searches for a program; returns the sources of its result, none where it fails.

        `tainted_by`: tools with untrusted output that the query may come from.
        """
        self._numbers += 1
        call = Call(f"search_{self._numbers}", tool, {"query": query, "count": count})
        session = replace(self._session, tainted_by={*self._session.tainted_by, *tainted_by})
        (outcome,) = await self._executor.run([call], session, tracing.calls(self._listen))
        return outcome.result.sources if outcome.ok else ()

    # -- a person's decisions

    def decide(
        self, number: str, answer: Answer, *, scope: Literal["arguments", "tool"], expires_s: float | None
    ) -> None:
        """Answer an approval.

        Raises:
            ApiError: it waits for nothing, or such an answer is not remembered.
        """
        waiting = self._named(number, ApprovalRequested)
        assert isinstance(waiting.asked, ApprovalRequested)
        try:
            decision = Decision(answer, waiting.asked.arguments_hash, scope, expires_s)
        except ValueError as error:
            raise invalid("decision", str(error)) from None
        waiting.decided.set_result(decision)

    def answer(self, number: str, text: str) -> None:
        """Answer a tool's question.

        Raises:
            ApiError: it waits for nothing, or the text is none of its choices.
        """
        waiting = self._named(number, QuestionAsked)
        assert isinstance(waiting.asked, QuestionAsked)
        choices = waiting.asked.choices
        if choices is not None and text not in choices:
            raise invalid("text", f"text is {text!r:.60}; accepted: {', '.join(map(repr, choices))}.")
        waiting.decided.set_result(text)

    def _named(self, number: str, kind: type) -> _Waiting:
        waiting = self._waiting.get(number)
        if waiting is None or waiting.decided.done() or not isinstance(waiting.asked, kind):
            what = "approval" if kind is ApprovalRequested else "question"
            raise ApiError(
                404, f"No {what} {number!r:.60} waits in this run; it may be decided already.", code="not_waiting"
            )
        return waiting

    # -- the executor's callbacks

    async def _approve(self, wanted: NeedsApproval) -> Decision:
        number = self._next("approval")
        asked = ApprovalRequested(
            approval_id=number, call_id=wanted.call_id, name=wanted.tool, reason=wanted.reason, risk=wanted.risk,
            preview=wanted.preview, arguments_hash=wanted.arguments_hash, expires_at=time.time() + self._wait_s,
        )  # fmt: skip
        decision: Decision | None = await self._decided(number, asked)
        shown: Literal["once", "no", "always", "never", "expired"] = "expired" if decision is None else decision.answer
        self._log.append(ApprovalResolved(approval_id=number, call_id=wanted.call_id, decision=shown))
        return decision or Decision("no", wanted.arguments_hash)

    async def _ask(self, question: Question) -> str:
        number = self._next("question")
        choices = None if question.choices is None else list(question.choices)
        asked = QuestionAsked(
            question_id=number, call_id=question.call_id, name=question.tool, text=question.text, choices=choices,
            expires_at=time.time() + self._wait_s,
        )  # fmt: skip
        text: str | None = await self._decided(number, asked)
        self._log.append(QuestionAnswered(question_id=number, call_id=question.call_id, text=text))
        if text is None:
            raise NotAnswered("nobody answered in time")
        return text

    async def _decided(self, number: str, asked: ApprovalRequested | QuestionAsked) -> Any:
        """Asks for a decision and returns it, None where it became too late."""
        if not self._waiting:
            self._waits_since = time.monotonic()
        waiting = self._waiting[number] = _Waiting(asked, asyncio.get_running_loop().create_future())
        self._log.append(asked)
        try:
            await asyncio.wait([waiting.decided], timeout=self._wait_s)
            return waiting.decided.result() if waiting.decided.done() else None
        finally:
            del self._waiting[number]
            if not self._waiting and self._waits_since is not None:
                self._waited_s += time.monotonic() - self._waits_since
                self._waits_since = None

    def _next(self, what: str) -> str:
        self._numbers += 1
        return f"{what}_{self._numbers}"

    def _listen(self, event: CallEvent) -> None:
        """The executor's events, as those of the log."""
        self._log.append(_logged(event))


def _logged(event: CallEvent, agent: str | None = None) -> BaseModel:
    """`agent`: the sub-agent that calls."""
    id, name = event.call_id, event.name
    match event:
        case CallStarted(arguments=given):
            shown = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            return ToolCall(call_id=id, name=name, arguments=shown, agent=agent)
        case CallProgress(step=step):
            return ToolProgress(call_id=id, name=name, text=step.text, done=step.done, total=step.total)
        case CallOutput(text=text):
            return ToolOutput(call_id=id, name=name, text=text)
        case CallResult(outcome=outcome):
            result = outcome.result
            sources = [ToolSource(**asdict(source)) for source in result.sources]
            return ToolResult(
                call_id=id, name=name, text=result.text[:SHOWN], truncated=result.truncated,
                untrusted=result.untrusted, sources=sources, ms=event.ms,
                artifacts=[ToolArtifact(**asdict(file)) for file in result.artifacts],
            )  # fmt: skip
        case CallError(outcome=outcome):
            return ToolError(call_id=id, name=name, kind=outcome.kind, message=outcome.result.text, ms=event.ms)
