"""Plan, call, observe, go on, answer: a model's loop with tools, on one sequence that only ever grows.

Results are appended to the sequence, so nothing is prefilled twice; while tools run, the sequence's K/V is pinned.
`Tools` runs the calls. When a limit ends the calling, the model has one turn more, in which it cannot call, to answer
with the results so far. A call may delegate: each sub-agent is such a loop on a fork of the sequence, with a share of
what is left of the limits. Knows nothing of HTTP, chats, rights or approvals.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine.params import Span
from engine.tool_parsers import ToolPlan
from reasoning.thinking import AnswerFunction, Markers, Piece, think_and_answer
from reasoning.turn import CallMore, CallStart, Delta, Turn, TurnFinish
from tools.outcome import Call

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence

HELD_S = 60.0  # longest KV pin while tools run; the engine learns how long they take
WRAP_UP_TOKENS = 512  # of the budget, kept for the last answer, or an eighth of it where that is less
MIN_ANSWER = 128  # tokens that results leave for the last answer
MIN_SHARE = 16  # tokens of a sub-agent
MIN_RESULT_LENGTH = 200  # characters of a result that is cut
NEVER = -100.0  # the bias of a token that is not wanted

Limit = Literal["steps", "tokens", "seconds", "context"]
LIMIT_NOTES: dict[Limit, str] = {
    "steps": "No more calls are possible in this answer. Answer with what is known by now.",
    "tokens": "The answer has almost reached its longest. Answer briefly with what is known by now.",
    "seconds": "Time is up. Answer with what is known by now.",
    "context": "The conversation has almost filled the context. Answer briefly with what is known by now.",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a run of calls: `steps` turns that call, `tokens` that the model writes, `seconds` from the start."""

    steps: int = 8
    tokens: int = 8192
    seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Returned:
    """A call's result as the model reads it."""

    call: Call
    text: str


@dataclass(frozen=True, slots=True)
class Wrote:
    """A piece of the model's own, and its deltas of the turn. `finish_reason`: of the turn, with its last piece."""

    piece: Piece
    deltas: tuple[Delta, ...]
    finish_reason: TurnFinish | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """A call is complete. It runs as soon as its turn is over, or already if it only reads."""

    call: Call


@dataclass(frozen=True, slots=True)
class Limited:
    """A limit was reached: the next turn is the last."""

    limit: Limit


Happened = Wrote | Called | Returned | Limited


class HandedOver(Exception):
    """Raised by `Tools.run`: some of the calls are another's to run, so the loop ends with them."""


class BudgetSpent(Exception):
    """Raised by `Agent.delegate`: too few tokens are left of the answer's limit for its sub-agents."""


class Tools(Protocol):
    """Runs calls."""

    def only_reads(self, call: Call) -> bool:
        """Returns whether the call may run before the turn is over, beside others."""
        ...

    async def run(self, calls: Sequence[Call]) -> list[str]:
        """Run calls; a text for each, also for a failed one. Cancelled, it ends them.

        Raises:
            HandedOver: some of the calls are another's to run.
        """
        ...


@dataclass(frozen=True, slots=True)
class Style:
    """Style of a model's writing: `plan` constrains its calls, `after_calls` makes tokens of (id, name) and results."""

    plan: ToolPlan
    markers: Markers | None
    after_calls: Callable[[Sequence[tuple[str, str]], Sequence[str]], list[int]]
    opens_thinking: Callable[[list[int]], bool] = lambda tokens: False
    closes_thinking: Callable[[list[int]], bool] = lambda tokens: False
    first: ToolPlan | None = None  # of the first turn, where it is another


@dataclass(frozen=True, slots=True)
class SubTask:
    """A sub-agent's task: `asked` are the tokens that ask for it, after those of the agent that delegates it.

    `tools` runs the calls that `style` constrains; None where it may call nothing. `answers` writes its turns.
    """

    asked: Sequence[int]
    style: Style
    tools: Tools | None
    answers: AnswerFunction = think_and_answer


@dataclass(slots=True)
class _Place:
    """An agent's place in its sequence, which ends at `end` tokens; `idle` is set while its calls run."""

    seq: EngineSequence
    began: float
    end: int
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def remaining(self) -> int:
        return self.end - len(self.seq)


@dataclass(slots=True)
class Agent:
    """One answer's loop. `span` has the sampling and stops of every turn; its limit of tokens is `limits`'.

    `lent_steps` and `lent_tokens` are what sub-agents have used of the limits, and what those that run may yet use.
    """

    style: Style
    tools: Tools
    span: Span
    limits: Limits = field(default_factory=Limits)
    held_s: float = HELD_S
    answers: AnswerFunction = think_and_answer  # writes each turn, such as a budget's
    clock: Callable[[], float] = time.monotonic
    spent: int = 0  # tokens that the model has written
    steps: int = 0
    appended: int = 0  # tokens of results that the model has been given
    lent_steps: int = 0
    lent_tokens: int = 0
    _place: _Place | None = field(default=None, init=False)

    async def run(self, seq: EngineSequence, remaining: int) -> AsyncGenerator[Happened, None]:
        """Everything that happens until the answer is there. `remaining`: tokens of context for it all.

        Raises:
            CannotContinue: the model's chat template takes no results.
            EngineError: as `generate` raises it.
        """
        began, last = self.clock(), self.limits.steps < 1
        place = self._place = _Place(seq, began, len(seq) + remaining)
        while True:
            turn = _CallingTurn(self.style.plan, self.tools)
            try:
                async with aclosing(self._turn(seq, place.remaining, wrap_up=last)) as pieces:
                    async for piece in pieces:
                        self.spent += piece.spent
                        deltas = turn.take(piece)
                        yield Wrote(piece, deltas, turn.finish_reason)
                        for call in turn.newly_closed():
                            yield Called(call)
                if turn.finish_reason != "tool_calls" or last:
                    return
                self.steps += 1
                seq.hold(self.held_s, waiting_for=turn.waits_for())
                place.idle.set()
                returned = await turn.results()
                place.idle.clear()
            except HandedOver:
                return
            finally:
                turn.cancel()
            for call, text in returned:
                yield Returned(call, text)
            limit = self._limit(began, remaining, place.remaining, sum(len(text) for _, text in returned))
            texts = [text for _, text in returned]
            if limit is not None:
                last = True
                texts[-1] = f"{texts[-1]}\n\n{LIMIT_NOTES[limit]}"
                yield Limited(limit)
            tokens = self._fitting([call for call, _ in returned], texts, place.remaining)
            self.appended += len(tokens)
            seq.append(tokens)

    async def delegate(self, tasks: Sequence[SubTask]) -> list[SubAgent]:
        """Returns a sub-agent for each task, on forks of the sequence, once the turn that calls is over.

        Each has an equal share of the steps and tokens that are left, but for the tokens of the last answer, and all of
        the seconds. What it does not use goes back when it is closed.

        Raises:
            BudgetSpent: fewer than `MIN_SHARE` tokens are left for each.
            EngineError: as `fork` raises it.
        """
        place, n = self._place, len(tasks)
        assert place is not None, "its own calls delegate"
        await place.idle.wait()
        steps = max(0, self.limits.steps - self.steps - self.lent_steps) // n
        tokens = (self._tokens_left - self._wrap_up_tokens) // n
        if tokens < MIN_SHARE:
            raise BudgetSpent(f"{max(0, tokens)} tokens are left for each of {n}; accepted: {MIN_SHARE} or more.")
        seconds = self.limits.seconds - (self.clock() - place.began)
        made = list[SubAgent]()
        for task, fork in zip(tasks, place.seq.fork(n), strict=True):
            share = Limits(0 if task.tools is None else steps, tokens, seconds)
            tools = self.tools if task.tools is None else task.tools  # without steps nothing is called
            agent = Agent(task.style, tools, self.span, share, self.held_s, task.answers, self.clock)
            self.lent_steps += share.steps
            self.lent_tokens += share.tokens
            made.append(SubAgent(self, agent, fork, task.asked, place.remaining))
        return made

    @property
    def _tokens_left(self) -> int:
        return self.limits.tokens - self.spent - self.lent_tokens

    @property
    def _wrap_up_tokens(self) -> int:
        return min(WRAP_UP_TOKENS, self.limits.tokens // 8)

    def _limit(self, began: float, whole: int, remaining: int, coming: int) -> Limit | None:
        """`remaining`: context left of the `whole`; `coming`: characters of results, at most as many tokens."""
        if self.steps + self.lent_steps >= self.limits.steps:
            return "steps"
        if self._tokens_left <= self._wrap_up_tokens:
            return "tokens"
        if self.clock() - began >= self.limits.seconds:
            return "seconds"
        if remaining - coming <= min(WRAP_UP_TOKENS, whole // 8):
            return "context"
        return None

    def _fitting(self, calls: Sequence[Call], texts: list[str], remaining: int) -> list[int]:
        """Tokens of the results, the longest of them cut until the last answer has its place."""
        while True:
            tokens = self.style.after_calls([(call.id, call.name) for call in calls], texts)
            longest = max(range(len(texts)), key=lambda at: len(texts[at]))
            if len(tokens) <= remaining - MIN_ANSWER or len(texts[longest]) <= MIN_RESULT_LENGTH:
                return tokens
            kept = max(MIN_RESULT_LENGTH, len(texts[longest]) // 2) // 2
            texts[longest] = f"{texts[longest][:kept]} […] {texts[longest][-kept:]}"

    async def _turn(self, seq: EngineSequence, remaining: int, *, wrap_up: bool) -> AsyncGenerator[Piece, None]:
        plan, sampling = self.style.plan, self.span.sampling
        if self.style.first is not None and self.steps == 0:
            plan = self.style.first
        constraint = plan.without_calls if wrap_up else plan.constrained
        if wrap_up and plan.marker is not None:
            sampling = replace(sampling, logit_bias={**sampling.logit_bias, plan.marker: NEVER})
        left = max(1, min(remaining, self._tokens_left))
        span = replace(self.span, sampling=sampling, max_tokens=left, constraint=constraint)
        if wrap_up and self.style.markers is not None:
            seq.append(self.style.markers.missing_header(seq.tokens))
        tokens = seq.tokens
        opened, closed = self.style.opens_thinking(tokens), self.style.closes_thinking(tokens)
        async with aclosing(
            self.answers(seq, span, self.style.markers, opened=opened, closed=closed, calls=not wrap_up)
        ) as pieces:
            async for piece in pieces:
                yield piece


@dataclass(slots=True)
class SubAgent:
    """A loop for one task that another loop delegates. Close it: its fork goes, and what it did not use goes back."""

    caller: Agent
    agent: Agent
    seq: EngineSequence
    asked: Sequence[int]
    remaining: int

    @property
    def read(self) -> int:
        """Returns the tokens that it was given: its task and its results."""
        return len(self.asked) + self.agent.appended

    async def run(self) -> AsyncGenerator[Happened, None]:
        """Everything that happens until its answer is there. Raises as `Agent.run`."""
        self.seq.append(self.asked)
        async with aclosing(self.agent.run(self.seq, self.remaining - len(self.asked))) as happening:
            async for each in happening:
                yield each

    def close(self) -> None:
        limits = self.agent.limits
        if not self.seq.closed:
            self.caller.lent_steps -= limits.steps - self.agent.steps
            self.caller.lent_tokens -= limits.tokens - self.agent.spent
        self.seq.close()


class _CallingTurn:
    """A turn under way, and the calls in it that already run."""

    def __init__(self, plan: ToolPlan, tools: Tools) -> None:
        self._turn = Turn(plan.parser)
        self._tools = tools
        self._writing: list[tuple[CallStart, list[str]]] = []
        self._closed = list[Call]()
        self._reported = 0
        self._early: dict[str, asyncio.Task[list[str]]] = {}

    @property
    def finish_reason(self) -> TurnFinish | None:
        return self._turn.finish_reason

    def take(self, piece: Piece) -> tuple[Delta, ...]:
        deltas = tuple(self._turn.take(piece))
        for delta in deltas:
            match delta:
                case CallStart():
                    self._close()
                    self._writing.append((delta, []))
                case CallMore(_, fragment):
                    self._writing[-1][1].append(fragment)
                    if fragment.rstrip().endswith("}") and _whole("".join(self._writing[-1][1])):
                        self._close()
        if piece.finish_reason == "stop":
            self._close()
        return deltas

    def newly_closed(self) -> list[Call]:
        """Calls that were completed since the last time."""
        new, self._reported = self._closed[self._reported :], len(self._closed)
        return new

    def _close(self) -> None:
        """The call being written is complete, once."""
        if len(self._writing) == len(self._closed):
            return
        start, fragments = self._writing[-1]
        call = Call(start.id, start.name, "".join(fragments))
        self._closed.append(call)
        if self._tools.only_reads(call) and all(self._tools.only_reads(other) for other in self._closed):
            self._early[call.id] = asyncio.ensure_future(self._tools.run([call]))

    def waits_for(self) -> set[str]:
        """Names of the tools that were called."""
        return {call.name for call in self._closed}

    async def results(self) -> list[tuple[Call, str]]:
        """Of every call, in their order."""
        late = [call for call in self._closed if call.id not in self._early]
        texts = dict(zip((call.id for call in late), await self._tools.run(late) if late else [], strict=True))
        for id, task in self._early.items():
            (texts[id],) = await task
        return [(call, texts[call.id]) for call in self._closed]

    def cancel(self) -> None:
        for task in self._early.values():
            task.cancel()


def _whole(text: str) -> bool:
    try:
        value: Any = json.loads(text)  # any JSON
    except ValueError:
        return False
    return isinstance(value, dict)
