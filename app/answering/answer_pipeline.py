"""Makes the answers to one request: admission, sequences, pieces, validation, tool calls, usage, outcome. One stream.

Every API plans its requests (`AnswerPlan`) and renders the items of `AnswerPipeline.stream`. Closing the stream, for
any reason, closes its sequences and with them everything below. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from app.admission.request_budget import priority, scheduling
from app.answering.answer_plan import AnswerPlan
from app.answering.model_cascade import ModelCascade, ModelChosen, Plan
from app.answering.next_turn import Messages, NextTurn
from app.answering.remote_answer import RemoteAnswer
from app.answering.remote_model import RemotePlan, SentToRemote
from app.answering.schema_check import wrong_with
from app.answering.sub_agents import SubAgents, ToolLoop
from app.connections import finish
from app.errors import ApiError
from app.observability.metrics import RequestWatch
from engine import DeadlineExceeded
from reasoning.agent import Agent, Happened, Wrote
from reasoning.route import Routed
from reasoning.strategy import Event, Spent
from reasoning.thinking import Piece, Tally
from reasoning.turn import CallStart, Content, Turn

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence
    from engine.outputs import Prefill

T = TypeVar("T")
Answered = tuple[int, Happened]  # with the answer's index

TRIES = 2  # at an answer that is valid against its schema


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """The engine has the request; each of its answers may have `limit` tokens."""

    limit: int


@dataclass(frozen=True, slots=True)
class AnswerDeferred(Event):
    """The fallback weights of the engine go on with the answer, after `tokens` of it."""

    tokens: int


@dataclass(slots=True)
class AnswerPipeline:
    """One request's work for the engine. `tally` fills as the answers grow.

    `watch` begins the request's clock. `plans` has one for each prompt, and `n` answers to each; with `auto` it has one
    for each model, and one answer, as it has for a remote model. With `loop` the one answer calls tools. `on_event`
    hears strategies, cascades, the fallback weights, and reports of what was sent to a remote model. `said` returns the
    answer as the chat's next prompt will have it: with `loop` only its caller knows.
    """

    watch: Callable[[], RequestWatch]
    plans: Sequence[Plan]
    n: int = 1
    tenant: str = ""  # owner of the prefix cache's blocks that may be hit
    auto: ModelCascade | None = None
    loop: ToolLoop | None = None
    on_event: Callable[[Event], None] = lambda event: None
    on_prefill: Callable[[Prefill], None] = lambda prefill: None
    said: Callable[[], Messages] | None = None
    tally: Tally = field(default_factory=Tally)
    routing: dict[str, Any] = field(default_factory=dict)  # of cascade, remote and fallback as JSON, once there is one
    agent: Agent | None = None  # of the loop, once it runs
    sequence: EngineSequence | None = None  # of the first prompt, once it is open
    _chosen: Plan | None = None
    _content: list[str] = field(default_factory=list)  # of the only answer
    _calls: bool = False  # the answer has calls

    @property
    def plan(self) -> Plan:
        """The plan that gives the answer: of several models it is known when the first piece comes."""
        return self._chosen or self.plans[0]

    @property
    def is_routed(self) -> bool:
        """Returns whether the reply has a report of `routing`."""
        return self.auto is not None or isinstance(self.plans[0], RemotePlan) or "fallback" in self.routing

    async def stream(self) -> AsyncGenerator[Answered, None]:
        """Yields the answers' events as they come: pieces with their deltas, calls, results.

        Raises:
            ApiError: 422 `schema_not_met`: an answer was not valid in any try. 429: the request's key may not use so
                many tokens now.
            DeadlineExceeded: the request's deadline passed before an answer had a token.
            EngineError: as `Engine.open` and `generate` raise it.
            RemoteError: a remote model fails, or may not be asked now.
        """
        watch = self.watch()
        with watch.measured():
            if self.auto is not None:
                stream = self._routed(self.auto, watch)
            elif isinstance(remote := self.plans[0], RemotePlan):
                stream = self._sent(remote, watch)
            elif self.loop is not None:
                stream = self._looped(remote, self.loop, watch)
            else:
                stream = self._written(self._local, watch)
            late: list[Answered] = []  # ends of answers at the deadline, while no answer has a token
            async with aclosing(stream) as answered:
                async for each in answered:
                    if isinstance(each[1], Wrote):
                        if each[1].piece.finish_reason == "deadline" and not self.tally.completion_tokens:
                            late.append(each)
                            continue
                        self._record(each[1])
                    yield each
            if late and not self.tally.completion_tokens:
                raise DeadlineExceeded("The answer was not begun before the deadline.")
            for each in late:
                yield each
        self._warm_next_turn()

    def _record(self, wrote: Wrote) -> None:
        for delta in wrote.deltas:
            if isinstance(delta, Content):
                self._content.append(delta.text)
            self._calls = self._calls or isinstance(delta, CallStart)

    def _warm_next_turn(self) -> None:
        """Has the next turn's prompt prefilled: of several models the first is asked first again."""
        plan, content = self.plans[0], "".join(self._content)
        if not isinstance(plan, AnswerPlan) or plan.render is None or plan.served.next_turns is None:
            return
        said = self.said
        if said is None and self.loop is None and not self._calls:
            said = partial(list, [{"role": "assistant", "content": content}])
        if said is not None and self.n == 1:
            plan.served.next_turns.answered(NextTurn(plan.render, said, self.tenant, priority()))

    @property
    def _local(self) -> list[AnswerPlan]:
        return [plan for plan in self.plans if isinstance(plan, AnswerPlan)]

    async def _written(self, plans: Sequence[AnswerPlan], watch: RequestWatch) -> AsyncGenerator[Answered, None]:
        turns = [plan.turn() for plan in plans for _ in range(self.n)]
        pieces = self._pieces(plans, self.n, watch)
        if (schema := plans[0].check) is not None:
            pieces = self._valid(pieces, schema, watch)
        async with aclosing(pieces) as stream:
            async for index, piece in stream:
                yield index, _wrote(piece, turns[index])

    async def _routed(self, auto: ModelCascade, watch: RequestWatch) -> AsyncGenerator[Answered, None]:
        plans = self._local
        longest, limit = max(len(plan.prompt) for plan in plans), max(plan.limit for plan in self.plans)
        watch.admit([plan.served for plan in plans], self.tenant, longest, limit)
        self.on_event(Admitted(limit))
        self._keep_local(auto)
        turn, read = plans[0].turn(), set[int]()
        async with aclosing(auto.answer(self.plans, self.tenant, self.tally)) as items:
            async for item in items:
                if isinstance(item, Wrote):
                    watch.tokens(0, item.piece.spent, 0, item.piece.part)
                    yield 0, item
                    continue
                if isinstance(item, Piece):
                    self._count(0, 0, item, watch, read)
                    yield 0, _wrote(item, turn)
                    continue
                if isinstance(item, ModelChosen):
                    self._chosen = item.plan
                    if isinstance(item.plan, AnswerPlan):
                        turn = item.plan.turn()
                        self.tally.prompt_tokens += len(item.plan.prompt)
                self._hear(item)

    def _keep_local(self, auto: ModelCascade) -> None:
        """Reports that nothing was sent to the cascade's remote model, until something is."""
        if auto.remote is not None:
            why = auto.stays or "a model of this server was sure enough"
            self.routing["remote"] = {"model": auto.remote.name, "sent": False, "why": why}

    async def _sent(self, plan: RemotePlan, watch: RequestWatch) -> AsyncGenerator[Answered, None]:
        watch.admit([], self.tenant, plan.prompt.estimated_tokens, plan.limit)
        self.routing["model"] = plan.served.name
        self.on_event(Admitted(plan.limit))
        answer = RemoteAnswer(plan, self.tally, wrong_with, "the request names it", self._hear, self.loop)
        async with aclosing(answer.stream()) as happening:
            async for each in happening:
                if isinstance(each, Wrote):
                    watch.tokens(0, each.piece.spent, 0, each.piece.part)
                yield 0, each

    async def _looped(self, plan: AnswerPlan, loop: ToolLoop, watch: RequestWatch) -> AsyncGenerator[Answered, None]:
        agent = self.agent = plan.agent(loop.tools, loop.limits, self._hear, loop.clock)
        loop.on_begin(SubAgents(plan, agent, self._hear, self.tenant))
        self.tally.prompt_tokens += len(plan.prompt)
        watch.admit([plan.served], self.tenant, len(plan.prompt), plan.limit)
        with ExitStack() as closing:
            seq = await self._open(plan, watch, closing)
            self.on_event(Admitted(plan.limit))
            appended, read = 0, set[int]()
            async with aclosing(agent.run(seq, plan.remaining)) as happening:
                async for each in happening:
                    if isinstance(each, Wrote):
                        self.tally.prompt_tokens += agent.appended - appended  # by results, which this turn has read
                        appended = agent.appended
                        self._count(0, 0, each.piece, watch, read)
                    yield 0, each

    async def _pieces(
        self, plans: Sequence[AnswerPlan], n: int, watch: RequestWatch
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all answers as they come, each with its answer's index: plan by plan, n answers to each."""
        prompts, limit = sum(len(plan.prompt) for plan in plans), max(plan.limit for plan in plans)
        self.tally.prompt_tokens += prompts
        watch.admit([plans[0].served], self.tenant, prompts, limit, len(plans) * n)
        with ExitStack() as closing:
            answers: list[AsyncGenerator[Piece, None]] = []
            for plan in plans:
                root = await self._open(plan, watch, closing)
                answers += [plan.generate(seq, self._hear) for seq in ([root] if n == 1 else root.fork(n))]
            self.on_event(Admitted(limit))
            read = set[int]()
            async with aclosing(interleave(answers)) as stream:
                async for index, piece in stream:
                    self._count(index, index // n, piece, watch, read)
                    yield index, piece

    async def _open(self, plan: AnswerPlan, watch: RequestWatch, closing: ExitStack) -> EngineSequence:
        from_where: dict[str, Any] = {"remote_prefill": plan.remote_prefill, "chunks": plan.chunks}  # Any: arguments
        given = {**from_where, "streaming": plan.streaming, **scheduling()}
        seq = await plan.served.open(plan.prompt, tenant=self.tenant, **given)
        closing.callback(seq.close)
        self.sequence = self.sequence or seq

        def read(prefill: Prefill) -> None:
            watch.reading()
            self.on_prefill(prefill)

        seq.on_prefill = read
        return seq

    def _count(self, index: int, prompt: int, piece: Piece, watch: RequestWatch, read: set[int]) -> None:
        """Counts a piece of an answer to a prompt; `read` collects the prompts with known cached tokens."""
        # The answers to one prompt share it; the tokens that the first admitted found cached are the saving.
        if piece.prompt_tokens and prompt not in read:
            read.add(prompt)
            self.tally.cached_tokens += piece.cached_tokens
        before = self.tally.completion_tokens
        self.tally.add(piece)
        if self._local and self._local[0].served.engine.fallback is not None:
            self._report_fallback(piece, before)
        watch.tokens(index, piece.spent, self.tally.cached_tokens, piece.part)

    def _report_fallback(self, piece: Piece, before: int) -> None:
        """Reports the tokens of the fallback weights; `before` are those of the answers before this piece."""
        tally = self.tally
        if piece.fallback and tally.fallback_tokens == piece.fallback:
            self._hear(AnswerDeferred(before))
        self.routing["fallback"] = {"tokens": tally.fallback_tokens, "of": tally.completion_tokens}

    def _hear(self, event: Event) -> None:
        if isinstance(event, Spent):
            self.tally.add_unseen(event.written, event.read)
        elif isinstance(event, Routed):
            self.routing |= routing_json(event)
        elif isinstance(event, SentToRemote):
            self.routing["remote"] = event.as_json()
        self.on_event(event)

    # -- validation of answers with a mask that allows a superset of their schema

    async def _valid(
        self, pieces: AsyncGenerator[tuple[int, Piece], None], schema: str, watch: RequestWatch
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Buffers each answer until it is found valid, or was cut off; one that is not is generated once more."""
        held: dict[int, list[Piece]] = {}
        async with aclosing(pieces) as stream:
            async for index, piece in stream:
                held.setdefault(index, []).append(piece)
                if piece.finish_reason is None:
                    continue
                answer = held.pop(index)
                wrong = await _wrong(schema, answer)
                for at in range(1, TRIES):
                    if wrong is not None:
                        answer = await self._again(self._local[index // self.n], at, watch)
                        wrong = await _wrong(schema, answer)
                if wrong is not None:
                    raise ApiError(
                        422, f"The answer is not valid against its schema in {TRIES} tries: {wrong}. The schema "
                        'cannot be held exactly and has "strict": false; accepted: asking again, or a schema that can '
                        "be held.",
                        param="response_format", code="schema_not_met", kind="schema_not_met",
                    )  # fmt: skip
                for each in answer:
                    yield index, each

    async def _again(self, plan: AnswerPlan, at: int, watch: RequestWatch) -> list[Piece]:
        """Generates an answer anew. A greedy one would be the same, so it is sampled."""
        sampling = plan.span.sampling
        seed = None if sampling.seed is None else sampling.seed ^ at
        sampling = replace(sampling, temperature=sampling.temperature or 1.0, seed=seed)
        again = replace(plan, span=replace(plan.span, sampling=sampling))
        async with aclosing(self._pieces([again], 1, watch)) as found:
            return [piece async for _, piece in found]


def _wrote(piece: Piece, turn: Turn) -> Wrote:
    return Wrote(piece, tuple(turn.take(piece)), turn.finish_reason)


def routing_json(routed: Routed) -> dict[str, Any]:
    """A cascade's report. `cost` is in tokens of the largest model."""
    tried = [
        {
            "model": each.model, "passed": each.passed, "why": each.why, "tokens": each.tokens, "cost": each.cost,
            "seconds": round(each.seconds, 4), "verdicts": [asdict(verdict) for verdict in each.verdicts],
        }
        for each in routed.tried
    ]  # fmt: skip
    return {"model": routed.model, "escalated": routed.escalated, "cost": routed.cost, "tried": tried}


async def interleave(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams in the order they come, each with its stream's index. The first failure ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(i, s)) for i, s in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        await finish(*pumps)


async def _wrong(schema: str, pieces: Sequence[Piece]) -> str | None:
    """Returns why a whole answer is not valid; None where it is, where it is calls, or where it was cut off."""
    if pieces[-1].finish_reason != "stop" or isinstance(pieces[-1].stop_reason, str):
        return None
    if any(piece.part == "call" for piece in pieces):
        return None
    return await wrong_with(schema, "".join(piece.text for piece in pieces if piece.part == "answer"))
