"""Answers one request of the Responses API, tools included.

One response being made: the model's answer, or its loop with the server's tools, as numbered events.

The whole reply is what the last event carries, so a stream and a whole reply are the same work. A response is stored
before it is said to be complete: whoever reads that can build on it.

The server's own tools in a response, beside the client's functions, in one loop of the model's.

A call of the server's tools is run here; one of the client's ends the loop, as its result comes with a later request.
Nobody can be asked meanwhile, so what needs a person's approval fails.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from app.admission.request_budget import enter, narrow, output_limit, scheduling
from app.answering.answer_generation import (
    AnswerJob,
    CheckedGeneration,
    Generation,
    chat_logprobs,
    not_routed,
    remaining_context,
)
from app.answering.model_cascade import ModelPrompt, allowed_models
from app.answering.reasoning_config import AnswerGenerator, ReasoningConfig, prompted, reduced_by_load
from app.answering.served_model import ServedModel
from app.answering.thinking_summary import ThinkingSummary
from app.answering.tool_service import UnknownTool
from app.config import AUTO_NAME
from app.errors import ApiError, from_exception, invalid
from app.observability import tracing
from app.openai.responses_items import Json, Placed, conversation
from app.openai.responses_output import Output, Status
from app.openai.responses_request import Offer, ResponseRequest
from app.openai.responses_store import StoredResponses, with_ids
from app.openai.routing import Routing
from app.openai.text_constraints import Calling, constrain_text
from app.request_body import is_large
from engine.outputs import TokenLogprob
from engine.params import Span
from reasoning.agent import Agent, Happened, Limits, Returned, Style, Wrote
from reasoning.dialogue import after_calls
from reasoning.strategy import Event, Spent
from reasoning.thinking import Tally
from reasoning.turn import Turn
from tools.outcome import Call, Outcome
from tools.session import Session

if TYPE_CHECKING:
    from app.state import State
    from tools.executor import Executor
    from tools.tool import Tool


class HandedOver(Exception):
    """A turn called a function of the client's: it is the client's turn now."""


class ServedTools:
    """Runner of the calls of a model's loop. `outcomes` are those of the server's calls, by call id."""

    def __init__(
        self, executor: Executor, offered: Sequence[Tool], *, response: str, user: str, read_from: Collection[str],
        alone: bool,
    ) -> None:  # fmt: skip
        """`read_from`: tools whose results the conversation has already. `alone`: the client has no functions."""
        self.outcomes: dict[str, Outcome] = {}
        self._executor = executor
        self._offered = {tool.name: tool for tool in offered}
        self._session = Session(user, response, tainted_by=set(read_from), offered=tuple(offered))
        self._alone = alone

    def only_reads(self, call: Call) -> bool:
        # Beside the client's functions no call begins early: the loop may end with this turn, and would end it too.
        tool = self._offered.get(call.name)
        return self._alone and tool is not None and not tool.has_effects and tool.permission in ("none", "read")

    async def run(self, calls: Sequence[Call]) -> list[str]:
        """
        Raises:
            HandedOver: some of the calls are the client's; the others were run.
        """
        wanted = [call for call in calls if call.name in self._offered]
        outcomes = await self._executor.run(wanted, self._session, tracing.calls(lambda _: None))
        self.outcomes |= {outcome.call_id: outcome for outcome in outcomes}
        if len(wanted) < len(calls):
            raise HandedOver
        return [outcome.text for outcome in outcomes]


_FIRST = ("response.created", "response.in_progress")


async def response_job(body: Json, state: State, user: str) -> ResponseJob | RoutedResponse:
    """A request, checked.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    request = await asyncio.to_thread(ResponseRequest.of, body) if is_large(body) else ResponseRequest.of(body)
    auto = state.models.auto if request.model == AUTO_NAME else None
    served = state.models.default if auto is not None else state.models.get(request.model)
    narrow(request.priority, request.deadline_s)
    output_limit(request.max_output_tokens, "max_output_tokens")
    offer = Offer.of(request)
    enter(*((served,) if auto is None else auto.rungs))
    stored = StoredResponses(state.store, user)
    try:
        if auto is None:
            return await ResponseJob.of(request, offer, state, served, user, stored)
        if offer.served is not None:
            raise invalid("model", "model is 'auto'; accepted: one model's name together with tools of the server.")
        jobs: list[ResponseJob] = []

        async def prompt_of(served: ServedModel) -> ModelPrompt:
            job = await ResponseJob.of(request, offer, state, served, user, stored)
            job.reasoning_config.check_routed()
            if job.check is not None:
                raise not_routed()
            jobs.append(job)
            calls = job.calling.plan is not None
            return prompted(served, job.prompt, job.span, job.reasoning_config, job.variables, calls=calls)

        asked = allowed_models(await auto.prompted(prompt_of))
        return RoutedResponse(request, jobs, Routing(auto, asked, state.counting.watch("responses"), user))
    except Exception as error:
        raise offer.reworded(from_exception(error, param="input")) from error


@dataclass(slots=True)
class RoutedResponse:
    """A checked request that several models may answer: the job of the one that does replies."""

    request: ResponseRequest
    jobs: list[ResponseJob]
    routing: Routing

    async def whole(self) -> Json:
        """The response, when all of it is there."""
        async with aclosing(self.routing):
            return await (await self._chosen()).whole()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. What goes wrong before the first is raised."""
        async with aclosing(self.routing), aclosing((await self._chosen()).chunks()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _chosen(self) -> ResponseJob:
        job = self.jobs[await self.routing.begin()]
        job.routing, job.tally = self.routing, self.routing.tally
        return job


@dataclass(slots=True)
class ResponseJob:
    """A checked request, ready to run."""

    request: ResponseRequest
    state: State
    served: ServedModel
    reasoning_config: ReasoningConfig
    user: str
    stored: StoredResponses
    items: list[Json]  # of this request
    prompt: list[int]
    room: int
    span: Span
    calling: Calling
    tools: ServedTools | None  # None where no call of this response is the server's
    variables: Json
    output: Output
    thoughts: ThinkingSummary
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    tally: Tally = field(default_factory=Tally)
    check: str | None = None  # the schema that the answer has to be valid against, where the mask holds a superset
    warnings: tuple[str, ...] = ()  # what of the request is not held
    routing: Routing | None = None  # where several models may answer, and this one does
    _results: int = 0  # tokens of results that the model has not read yet
    _numbers: int = 0

    @classmethod
    async def of(
        cls,
        request: ResponseRequest,
        offer: Offer,
        state: State,
        served: ServedModel,
        user: str,
        stored: StoredResponses,
    ) -> ResponseJob:
        """
        Raises:
            ApiError: 400, in a chat request's words.
        """
        given = request.input
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        placed: list[Placed] = [(f"input[{at}]", item) for at, item in enumerate(items)]
        if request.previous_response_id is not None:
            before = await stored.history(request.previous_response_id)
            placed = [("previous_response_id", item) for item in before] + placed
        said = await asyncio.to_thread(conversation, placed)
        messages = said.messages
        if request.instructions is not None:
            messages = [{"role": "system", "content": request.instructions}, *messages]
        if not messages:
            raise invalid("input", "input is empty; accepted: a string, or a list of at least one item.")
        wanted = [] if offer.served is None or offer.choice == "none" else _offered(state, offer)
        shown = [*offer.functions, *(tool.spec() for tool in wanted)]
        chat = await asyncio.to_thread(request.chat, messages, offer, shown)
        reasoning_config = reduced_by_load(state.reasoning_resolver.of(chat.asked, served, user), served)
        variables = {**reasoning_config.variables, **chat.chat_template_kwargs}
        calling = await Calling.of(chat, served, user)
        held = await constrain_text(chat, served, user) if calling.plan is None else None
        constraint = None if held is None else held.constrained
        prompt = await served.chat_tokens(chat.template_messages(), variables, calling.shown)
        prompt = reasoning_config.prompt(prompt, served)
        room = remaining_context(served, prompt, request.max_output_tokens, "input")
        span = chat.span(served.sampling, room=room, vocab_size=served.engine.vocab_size, default_limit=None)
        span = replace(
            span, sampling=calling.without_calls(span.sampling), logprobs=chat.engine_logprobs,
            constraint=constraint if calling.plan is None else calling.plan.constrained,
        )  # fmt: skip

        def logprobs(entries: Sequence[TokenLogprob]) -> list[Json]:
            return list(chat_logprobs(served.engine.tokenizer, entries, request.top_logprobs or 0)["content"])

        output = Output({tool.name for tool in wanted}, logprobs if request.include else None)
        job = cls(
            request, state, served, reasoning_config, user, stored, with_ids(items), prompt, room, span, calling, None,
            variables, output, state.thoughts(user), check=None if held is None else held.check,
            warnings=calling.warnings if held is None else held.warnings,
        )  # fmt: skip
        if wanted and calling.plan is not None:
            job.tools = ServedTools(
                state.tool_service.executor, wanted, response=job.id, user=user, read_from=said.read_from,
                alone=not offer.functions,
            )  # fmt: skip
        return job

    async def whole(self) -> Json:
        """The response, when all of it is there."""
        response: Json = {}
        async with aclosing(self._events()) as batches:
            async for batch in batches:
                response = batch[-1].get("response", response)
        return response

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. What goes wrong before the first is raised."""
        begun = False
        try:
            async with aclosing(self._events()) as batches:
                async for batch in batches:
                    begun = True
                    yield b"".join(_sent(event) for event in batch)
        except Exception as error:
            if not begun:
                raise
            failed = self._response("failed") | {"error": _failure(from_exception(error))}
            yield _sent(self._numbered({"type": "response.failed", "response": failed}))

    async def _events(self) -> AsyncGenerator[list[Json], None]:
        """Batches of numbered events, none of them empty."""
        finish: str | None = None
        begun = False
        async with aclosing(self._happening()) as happening:
            async for each in happening:
                events: list[Json] = []
                if not begun:
                    begun = True
                    events += [{"type": kind, "response": self._response("in_progress")} for kind in _FIRST]
                match each:
                    case Wrote(piece, deltas):
                        finish = piece.finish_reason or finish
                        ended = piece.finish_reason is not None
                        for delta in await self.thoughts.seen(deltas, ended=ended):
                            events += self.output.take(delta)
                        if piece.finish_reason is not None:  # of a turn: calls may take a while from here
                            events += self.output.end_item(_status(finish))
                    case Returned(call):
                        assert self.tools is not None
                        events += self.output.returned(call.id, self.tools.outcomes[call.id])
                if events:
                    yield [self._numbered(event) for event in events]
        status = _status(finish)
        events = self.output.end(status, {} if self.tools is None else self.tools.outcomes)
        events.append({"type": f"response.{status}", "response": self._response(status)})
        if self.request.store:
            await self.stored.add(events[-1]["response"], self.items)
        yield [self._numbered(event) for event in events]

    async def _happening(self) -> AsyncGenerator[Happened, None]:
        """Yields what the model writes, and what calls of the server's tools return."""
        if self.tools is not None:
            async with aclosing(self._acted(self.tools)) as happening:
                async for each in happening:
                    yield each
            return
        plan = self.calling.plan
        made = Generation(
            self.served, self.state.counting, "responses", [self.prompt], 1, [self.span], chat=True,
            calls=plan is not None, reasoning_config=self.reasoning_config, variables=self.variables, tenant=self.user,
            tally=self.tally,
        )  # fmt: skip
        generation: AnswerJob = self.routing or (made if self.check is None else CheckedGeneration(made, self.check))
        turn = Turn(None if plan is None else plan.parser)
        async with aclosing(generation.pieces()) as pieces:
            async for _, piece in pieces:
                yield Wrote(piece, tuple(turn.take(piece)))

    async def _acted(self, tools: ServedTools) -> AsyncGenerator[Happened, None]:
        """The loop with the server's tools."""
        agent = self._agent(tools)
        watch = self.state.counting.watch("responses")
        with watch.measured(), suppress(HandedOver):
            watch.admit([self.served], self.user, len(self.prompt), self.span.max_tokens or 0)
            async with (
                await self.served.engine.open(self.prompt, tenant=self.user, **scheduling()) as seq,
                aclosing(agent.run(seq, self.room)) as happening,
            ):
                async for each in happening:
                    if isinstance(each, Wrote):
                        if not self.tally.prompt_tokens:  # of the prompt alone; what follows was never looked up
                            self.tally.cached_tokens = each.piece.cached_tokens
                            self.tally.prompt_tokens = len(self.prompt)
                        self.tally.prompt_tokens += self._results
                        self._results = 0
                        self.tally.add(each.piece)
                        watch.tokens(0, each.piece.spent, self.tally.cached_tokens, each.piece.part)
                    yield each

    def _agent(self, tools: ServedTools) -> Agent:
        served, settings = self.served, self.state.settings
        assert self.calling.plan is not None and self.span.max_tokens is not None

        def appended(calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[int]:
            tokens = after_calls(served.engine.tokenizer, calls, texts, self.variables)
            self._results = len(tokens)
            return tokens

        style = Style(
            self.calling.plan, served.markers, appended, served.opens_thinking, served.closes_thinking
        )  # fmt: skip
        most = Limits(settings.tool_steps, seconds=settings.tool_seconds)
        limits = replace(most, tokens=self.request.max_output_tokens or min(self.span.max_tokens, most.tokens))
        answers = AnswerGenerator(self.reasoning_config, served, self.variables, self._hear)
        return Agent(style, tools, self.span, limits, answers=answers)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Spent):
            self.tally.add_unseen(event.written, event.read)

    def _numbered(self, event: Json) -> Json:
        number, self._numbers = self._numbers, self._numbers + 1
        return {**event, "sequence_number": number}

    def _response(self, status: str) -> Json:
        request, sampling = self.request, self.span.sampling
        ended = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": self.served.name,
            "output": [dict(item) for item in self.output.items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
            "store": request.store,
            "temperature": sampling.temperature,
            "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": request.truncation,
            "usage": _usage(self.tally) if ended else None,
            "user": request.user,
            **({} if self.routing is None else {"routing": self.routing.report}),
            **({"warnings": list(self.warnings)} if self.warnings else {}),
        }


def _offered(state: State, offer: Offer) -> list[Any]:
    """The server's tools that are wanted."""
    assert offer.served is not None
    try:
        return list(state.tool_service.offered(offer.served))
    except UnknownTool as unknown:
        path = f"tools[{offer.served_place}].allowed_tools"
        raise invalid(path, f"{path}: {unknown}") from None


def _status(finish: str | None) -> Status:
    return "incomplete" if finish == "length" else "completed"


def _usage(tally: Tally) -> Json:
    return {
        "input_tokens": tally.prompt_tokens,
        "input_tokens_details": {"cached_tokens": tally.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": tally.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
    }


def _failure(error: ApiError) -> Json:
    code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
    return {"code": code, "message": error.message}


def _sent(event: Json) -> bytes:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)
