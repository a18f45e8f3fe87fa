"""`model: auto`: several models behind one name. A small one answers first, a larger one where that is not good enough.

The cascade is `reasoning.route`'s; this makes its steps of served models. A request for one model is an `AnswerPlan`,
so this knows nothing of messages, templates or HTTP.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from app.admission.request_budget import RequestBudget, scheduling
from app.answering.answer_plan import AnswerPlan
from app.answering.remote_answer import RemoteAnswer
from app.answering.remote_model import RemoteModel, RemotePlan
from app.answering.schema_check import wrong_with
from app.answering.served_model import ServedModel
from app.connections import finish
from app.errors import ApiError, from_exception
from app.remote.wire_formats import RemoteError
from engine import DeadlineExceeded
from engine.outputs import TokenLogprob
from reasoning.agent import Wrote
from reasoning.candidate import TOP, Candidate
from reasoning.route import CascadeStep, Confident, Decided, FirstTokens, Gate, Routed, Tried, Whole, cascade
from reasoning.strategy import Event, Spent
from reasoning.thinking import AnswerFunction, Piece, Tally, think_and_answer

Plan = AnswerPlan | RemotePlan
GateName = Literal["confidence", "first_tokens", "entropy", "whole"]
CONFIDENCE = 0.97
FIRST_CONFIDENCE = 0.9
ENTROPY = 0.1  # nats


@dataclass(frozen=True, slots=True)
class ModelChosen(Event):
    """The pieces that follow are the answer by this plan, one of those that were given."""

    plan: Plan


class ModelCascade:
    """A cascade of models, asked in order until an answer is good enough. Costs are in tokens of the largest model.

    For each request: `plans = await auto.plans(make)`, where `make(served)` plans the request for that model; then
    `async with aclosing(auto.answer(plans)) as items`, and of the items

    - a `Tried` for each model that was asked: its answer's measurements, whether it passed, and `why` not;
    - a `Spent` after a `Tried` that did not pass: the tokens of an answer that nobody sees;
    - one `ModelChosen`, just before the first piece: take the model's parts from its `plan` (its name, its
      tokenizer for log-probabilities, the parser of its calls);
    - the answer's `Piece`s, the last one with a finish reason. The last model's come as they are written, another's all
      at once, when it has passed; a remote model's are in `Wrote`s, with `SentToRemote` before them;
    - one `Routed`, the report: before the pieces of an answer that passed, after those of the last model's.

    Where the request's deadline comes before the next model's first token, or a remote model fails, the answer before
    is given after all.
    """

    def __init__(self, steps: Sequence[ServedModel], gate: Gate, remote: RemoteModel | None = None) -> None:
        """`remote` is asked last, where the request may be sent to it."""
        self.steps = tuple(steps)
        self.gate = gate
        self.remote = remote
        self.stays = ""  # the reason for which the current request is not sent to the remote
        self.counts: Counter[tuple[str, bool]] = Counter()  # answers by model, and whether they were given
        self.hear: Callable[[str, bool], None] = lambda model, given: None  # each of them

    async def plans(self, make: Callable[[ServedModel], Awaitable[AnswerPlan]]) -> list[AnswerPlan]:
        """The request for every model with enough context for it, in order. Others are left out, unless all are too
        short.

        Raises:
            Exception: as `make` raises it otherwise.
        """
        made: list[AnswerPlan] = []
        too_long: Exception | None = None
        for served in self.steps:
            try:
                made.append(await make(served))
            except Exception as error:
                if from_exception(error).code != "context_length_exceeded":
                    raise
                too_long = error
        if not made and too_long is not None:
            raise too_long
        return made

    async def with_remote(
        self, plans: Sequence[AnswerPlan], make: Callable[[RemoteModel], Awaitable[RemotePlan]]
    ) -> tuple[list[Plan], ModelCascade]:
        """Returns the plans with the remote's at the end, where there is a remote and the request may be sent to it;
        and the cascade for this request, which has the reason why not."""
        if self.remote is None:
            return list(plans), self
        try:
            last = await make(self.remote)
            self.remote.spending.check(last.prompt.estimated_tokens, last.limit)
        except ApiError as refusal:
            mine = copy.copy(self)
            mine.stays = refusal.message
            return list(plans), mine
        return [*plans, last], self

    async def answer(
        self, plans: Sequence[Plan], tenant: str = "", tally: Tally | None = None
    ) -> AsyncGenerator[Piece | Wrote | Event, None]:
        """One answer; see the class for its items. Closing it ends the answer being written, and frees its blocks.

        Args:
            tally: gets a remote model's tokens.

        Raises:
            EngineError: as `Engine.open` and `generate` raise it.
            RemoteError: the remote model fails.
        """
        items: asyncio.Queue[Piece | Wrote | Event | None] = asyncio.Queue()
        work = asyncio.create_task(self._climb(plans, tenant, items.put_nowait, tally or Tally()))
        work.add_done_callback(lambda _: items.put_nowait(None))
        try:
            while (item := await items.get()) is not None:
                yield item
            await work
        finally:
            await finish(work)

    async def _climb(
        self, plans: Sequence[Plan], tenant: str, emit: Callable[[Piece | Wrote | Event], None], tally: Tally
    ) -> None:
        largest = max(each.served.parameters for each in plans if isinstance(each, AnswerPlan))
        last = len(plans) - 1
        read: list[int] = []  # by the models asked so far: tokens of the prompt that were not in their caches
        tried: list[Tried] = []
        asked: list[Candidate] = []
        sent: list[Piece] = []  # of the remote's answer

        def step(at: int, one: Plan) -> CascadeStep:
            if isinstance(one, RemotePlan):  # its cost is money, and in its own report
                return CascadeStep(one.served.name, partial(_sent, one, tally, emit, sent), 0.0, judged=False)

            async def answer(measured: bool) -> Candidate:
                shown: list[Piece] = []

                def show(piece: Piece) -> None:
                    if not shown:
                        emit(ModelChosen(one))
                    shown.append(piece)
                    emit(piece)

                # the answer before a remote's is given if that fails: it is written to its end
                early = at < last and not isinstance(plans[at + 1], RemotePlan)
                stops = self.gate.stops if early and isinstance(self.gate, FirstTokens) else None
                candidate = await _written(one, tenant, measured, show if at == last else lambda piece: None, stops)
                read.append(sum(piece.prompt_tokens - piece.cached_tokens for piece in candidate.pieces[:1]))
                asked.append(candidate)
                return candidate

            return CascadeStep(one.served.name, answer, one.served.parameters / largest)

        steps = [step(at, one) for at, one in enumerate(plans)]
        try:
            async with aclosing(cascade(steps, [self.gate])) as climbing:
                async for item in climbing:
                    if isinstance(item, Event):
                        emit(item)
                    if isinstance(item, Tried):
                        tried.append(item)
                        self.counts[item.model, item.passed] += 1
                        self.hear(item.model, item.passed)
                        if not item.passed:
                            emit(Spent(item.tokens, read[-1]))
                    elif isinstance(item, Candidate) and len(read) <= last and not sent:
                        _give(plans[len(read) - 1], item, emit)
        except (RemoteError, DeadlineExceeded, ApiError) as error:
            late = from_exception(error).code == "deadline_exceeded"
            if not asked or sent or not (late or isinstance(error, RemoteError)):
                raise
            # The next one said nothing: the last answer of a model of ours is given, and so it was not unseen.
            emit(Spent(-tried[-1].tokens, -read[-1]))
            emit(Routed(tuple(tried)))
            _give(plans[len(read) - 1], asked[-1], emit)


def _give(plan: Plan, candidate: Candidate, emit: Callable[[Piece | Wrote | Event], None]) -> None:
    emit(ModelChosen(plan))
    for piece in candidate.pieces:
        emit(piece)
    if candidate.stopped:  # by a gate, and no other model had time
        emit(Piece(candidate.pieces[-1].part, "", 0, finish_reason="deadline"))


async def _sent(
    one: RemotePlan, tally: Tally, emit: Callable[[Piece | Wrote | Event], None], sent: list[Piece], measured: bool
) -> Candidate:
    """The remote model's answer, which `emit` gets as it comes."""
    answer = RemoteAnswer(one, tally, wrong_with, "no model of this server was sure enough", emit)
    async with aclosing(answer.stream()) as happening:
        async for each in happening:
            if isinstance(each, Wrote):
                if not sent:
                    emit(ModelChosen(one))
                sent.append(each.piece)
                emit(each)
    return Candidate(0, tuple(sent), (), counted=answer.written)


def allowed_models(plans: Sequence[AnswerPlan]) -> list[AnswerPlan]:
    """Returns the models that the current request may ask, in order: those before the first that many wait for; one at
    least."""
    kept = list(plans)
    if (request_budget := RequestBudget.current()) is None:
        return kept
    busy = [at for at, each in enumerate(kept) if at and request_budget.thinking_limit(each.served) is not None]
    if busy:
        kept = kept[: busy[0]]
        request_budget.reduce_models([each.served.name for each in kept])
    return kept


async def _written(
    one: AnswerPlan, tenant: str, measured: bool, hear: Callable[[Piece], None],
    stops: Callable[[Sequence[TokenLogprob]], bool] | None = None,
) -> Candidate:  # fmt: skip
    """One model's answer, in a sequence of its own; `hear` gets its pieces as they come. It is whole unless `stops`,
    asked after each piece with all log-probabilities so far, ends it.

    Raises:
        DeadlineExceeded: it passed before the first token.
    """
    served, span = one.served, one.span
    # A budget writes the answer itself, so a gate then measures the answer alone.
    write: AnswerFunction = partial(think_and_answer, thinking_logprobs=TOP) if measured else think_and_answer
    if one.reasoning_config.budget is not None:
        write = one.generator()
    wanted = replace(span, logprobs=max(span.logprobs or 0, TOP)) if measured else span
    pieces: list[Piece] = []
    logprobs: list[TokenLogprob] = []
    stopped = False
    async with await served.open(one.prompt, tenant=tenant, **scheduling()) as seq:
        writing = write(
            seq, wanted, served.markers, opened=served.opens_thinking(one.prompt),
            closed=served.closes_thinking(one.prompt), calls=one.tool_plan is not None,
        )  # fmt: skip
        async with aclosing(writing) as written:
            async for piece in written:
                if piece.finish_reason == "deadline" and not sum(each.spent for each in (*pieces, piece)):
                    raise DeadlineExceeded("The answer was not begun before the deadline.")
                logprobs += piece.logprobs
                shown = span.logprobs is not None and piece.part != "thinking"
                pieces.append(piece if shown else replace(piece, logprobs=()))
                hear(pieces[-1])
                if stopped := piece.finish_reason is None and stops is not None and stops(logprobs):
                    break
        written_tokens = tuple(seq.tokens[len(one.prompt) :])
        return Candidate(0, tuple(pieces), written_tokens, tuple(logprobs), stopped=stopped)


def gate_of(name: GateName, bar: float | None = None) -> Gate:
    """The gate that the settings name, with their bar or its own default.

    Raises:
        ValueError: the bar makes no sense for it.
    """
    match name:
        case "confidence":
            return Confident(CONFIDENCE if bar is None else bar)
        case "first_tokens":
            return FirstTokens(FIRST_CONFIDENCE if bar is None else bar)
        case "entropy":
            return Decided(ENTROPY if bar is None else bar)
        case "whole":
            return Whole()
