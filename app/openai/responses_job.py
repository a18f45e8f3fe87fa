"""Answers one request of the Responses API as numbered events: the model's answer, or its loop with the server's tools.

The last event carries the whole reply, so a stream and a whole reply are the same work. A response is stored before it
is said to be complete, so a client that reads that can build on it.

A call of the server's tools is run here; one of the client's ends the loop, as its result comes with a later request.
Nobody can be asked meanwhile, so a call that needs a person's approval fails.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from app.admission.request_budget import narrow, output_limit
from app.answering.answer_pipeline import AnswerPipeline
from app.answering.answer_plan import AnswerPlan
from app.answering.remote_model import RemoteModel, RemotePlan
from app.answering.sub_agents import SubAgents, ToolLoop, delegated
from app.answering.thinking_summary import ThinkingSummary
from app.answering.tool_service import OfferedTools, UnknownTool
from app.config import AUTO_NAME
from app.errors import ApiError, from_exception, invalid
from app.observability import tracing
from app.openai.chat_completions import chat_logprobs, plan_chat
from app.openai.remote_requests import plan_remote_chat
from app.openai.responses_items import Json, Placed, conversation
from app.openai.responses_output import Output, Status
from app.openai.responses_request import ENCRYPTED, WEB_SEARCH, Offer, ResponseRequest
from app.openai.responses_store import StoredResponses, with_ids
from engine.outputs import TokenLogprob
from reasoning.agent import HandedOver, Limits, Returned, Wrote
from reasoning.thinking import Tally
from tools.context import SubAgentAnswer, SubAgentTask
from tools.outcome import Call, Outcome
from tools.session import Session

if TYPE_CHECKING:
    from app.answering.model_cascade import ModelCascade, Plan
    from app.state import State
    from tools.executor import Executor
    from tools.tool import Tool


class ServedTools:
    """Runner of the calls of a model's loop. `outcomes` are those of the server's calls, by call id."""

    def __init__(
        self, executor: Executor, offered: Sequence[Tool], *, response: str, user: str, read_from: Collection[str],
        alone: bool,
    ) -> None:  # fmt: skip
        """`read_from`: tools with results in the conversation already. `alone`: the client has no functions."""
        self.outcomes: dict[str, Outcome] = {}
        self.sub_agents: SubAgents | None = None  # once a model of this server writes
        self._executor = executor
        self._session = Session(
            user, response, tainted_by=set(read_from), offered=tuple(offered), delegate=self._delegate
        )
        self._tools = OfferedTools(executor, offered, self._session, lambda _: None)
        self._alone = alone

    def only_reads(self, call: Call) -> bool:
        # Beside the client's functions no call begins early: the loop may end with this turn, and would end it too.
        return self._alone and self._tools.only_reads(call)

    async def run(self, calls: Sequence[Call]) -> list[str]:
        """
        Raises:
            HandedOver: some of the calls are the client's; the others were run.
        """
        wanted = [call for call in calls if call.name in self._tools.offered]
        outcomes = await self._executor.run(wanted, self._session, tracing.calls(lambda _: None))
        self.outcomes |= {outcome.call_id: outcome for outcome in outcomes}
        if len(wanted) < len(calls):
            raise HandedOver
        return [outcome.text for outcome in outcomes]

    def begin(self, sub_agents: SubAgents) -> None:
        """From now on calls can delegate to `sub_agents`."""
        self.sub_agents = sub_agents

    async def _delegate(self, call_id: str, tasks: Sequence[SubAgentTask]) -> Sequence[SubAgentAnswer]:
        return await delegated(self.sub_agents, self._tools, call_id, tasks, lambda agent: lambda _: None)


REPEATED_WARNING = "The answer ended because it repeated itself (repetition_detection)."
_FIRST = ("response.created", "response.in_progress")


async def response_job(request: ResponseRequest, state: State, user: str) -> ResponseJob:
    """Plans a request.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    narrow(request.priority, request.deadline_s)
    output_limit(request.max_output_tokens, "max_output_tokens")
    offer = Offer.of(request)
    try:
        if request.model == AUTO_NAME and state.models.auto is not None and offer.served is not None:
            raise invalid("model", "model is 'auto'; accepted: one model's name together with tools of the server.")
        return await ResponseJob.of(request, offer, state, user)
    except Exception as error:
        raise offer.reworded(from_exception(error, param="input")) from error


@dataclass(slots=True)
class ResponseJob:
    """A checked request, ready to run."""

    request: ResponseRequest
    pipeline: AnswerPipeline
    stored: StoredResponses
    items: list[Json]  # of this request
    tools: ServedTools | None  # None where no call of this response is the server's
    output: Output
    thoughts: ThinkingSummary
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    repeated: bool = False  # the answer ended as it repeated itself
    private: bool = False  # it is kept from remote models, and so is what follows it
    _numbers: int = 0

    @classmethod
    async def of(cls, request: ResponseRequest, offer: Offer, state: State, user: str) -> ResponseJob:
        """
        Raises:
            ApiError: 400, in a chat request's words.
        """
        id, stored = f"resp_{uuid.uuid4().hex}", StoredResponses(state.store, user)
        given = request.input
        items = [{"role": "user", "content": given}] if isinstance(given, str) else await stored.resolved(given)
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
        private = request.private or stored.read_private
        remote = request.model in state.models.remotes
        offers_none = offer.served is None or offer.choice == "none"
        wanted, missing = ([], ()) if offers_none else _offered(state, offer, remote=remote)
        if wanted and not remote:
            state.tool_service.check_skills(wanted, state.models.get(request.model))
        shown = [*offer.functions, *(tool.spec() for tool in wanted)]

        async def planned(messages: list[Json]) -> tuple[Sequence[Plan], ModelCascade | None]:
            chat = await asyncio.to_thread(request.chat, messages, offer, shown)
            chat.private = private

            async def plan_remote(remote: RemoteModel) -> RemotePlan:
                remote.check_leaving(private=private, tools=[*said.ran, *(tool.name for tool in wanted)])
                return await plan_remote_chat(chat, remote)

            return await state.models.plans(
                request.model,
                lambda served: plan_chat(chat, served, state.reasoning_resolver, state.tool_selector, user, "input"),
                plan_remote,
            )

        plans, auto = await (truncated(messages, planned) if request.truncation == "auto" else planned(messages))
        plans = [replace(plan, warnings=(*missing, *plan.warnings)) for plan in plans]
        pipeline = AnswerPipeline(partial(state.counting.watch, "responses"), plans, 1, user, auto)
        tools: ServedTools | None = None
        if wanted and pipeline.plan.may_call:
            tools = ServedTools(
                state.tool_service.executor, wanted, response=id, user=user, read_from=said.read_from,
                alone=not offer.functions,
            )  # fmt: skip
            steps = min(state.settings.tool_steps, request.max_tool_calls or state.settings.tool_steps)
            most = Limits(steps, seconds=state.settings.tool_seconds)
            longest = request.max_output_tokens or min(pipeline.plan.limit, most.tokens)
            pipeline.loop = ToolLoop(tools, replace(most, tokens=longest), on_begin=tools.begin)

        def logprobs(entries: Sequence[TokenLogprob]) -> list[Json]:
            assert isinstance(pipeline.plan, AnswerPlan), "they are not asked for of a remote model"
            tokenizer = pipeline.plan.served.engine.tokenizer
            return list(chat_logprobs(tokenizer, entries, request.top_logprobs or 0)["content"])

        output = Output(
            {tool.name for tool in wanted}, logprobs if request.shows_logprobs else None, offer.namespaces,
            seals=ENCRYPTED in request.include,
        )  # fmt: skip
        pipeline.said = lambda: conversation([("output", dict(item)) for item in output.items]).messages
        return cls(request, pipeline, stored, with_ids(items), tools, output, state.thoughts(user), id, private=private)

    async def whole(self) -> Json:
        """The response, when all of it is there."""
        response: Json = {}
        async with aclosing(self._events()) as batches:
            async for batch in batches:
                response = batch[-1].get("response", response)
        return response

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. An error before the first is raised."""
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
        async with aclosing(self.pipeline.stream()) as stream:
            async for _, each in stream:
                events: list[Json] = []
                if not begun:
                    begun = True
                    events += [{"type": kind, "response": self._response("in_progress")} for kind in _FIRST]
                match each:
                    case Wrote(piece, deltas, _):
                        finish = piece.finish_reason or finish
                        self.repeated = finish == "repetition"
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

    def _numbered(self, event: Json) -> Json:
        number, self._numbers = self._numbers, self._numbers + 1
        return {**event, "sequence_number": number}

    def _response(self, status: str) -> Json:
        request, pipeline = self.request, self.pipeline
        plan = pipeline.plan
        sampling = plan.sampling
        ended = status in ("completed", "incomplete")
        warnings = [*plan.warnings, *([REPEATED_WARNING] if self.repeated else [])]
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
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata,
            "model": plan.served.name,
            "output": [dict(item) for item in self.output.items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {name: (request.reasoning or {}).get(name) for name in ("effort", "summary")},
            "store": request.store,
            "temperature": sampling.temperature,
            "text": {
                "format": (request.text or {}).get("format") or {"type": "text"},
                "verbosity": (request.text or {}).get("verbosity") or "medium",
            },
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": request.truncation,
            "usage": _usage(pipeline.tally) if ended else None,
            "user": request.user,
            **({"routing": pipeline.routing} if pipeline.is_routed else {}),
            **({"private": True} if self.private else {}),
            **({"warnings": warnings} if warnings else {}),
        }


Planned = TypeVar("Planned")


async def truncated(messages: list[Json], planned: Callable[[list[Json]], Awaitable[Planned]]) -> Planned:
    """Plans with as many of the newest turns as fit; system messages that begin the chat stay.

    Raises:
        ApiError: what `planned` raises: the newest turn alone is too long, or something else is wrong.
    """
    first = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    begins = [at for at in range(first + 1, len(messages)) if messages[at]["role"] == "user"]  # of what may be kept
    found: Planned | None = None
    low, high = -1, len(begins) - 1
    at = -1  # all of it, first
    while low <= high:
        kept = messages if at < 0 else [*messages[:first], *messages[begins[at] :]]
        try:
            found = await planned(kept)
            high = at - 1
        except ApiError as error:
            if error.code != "context_length_exceeded" or (found is None and at >= len(begins) - 1):
                raise
            low = at + 1
        at = (low + high) // 2
    assert found is not None
    return found


def _offered(state: State, offer: Offer, *, remote: bool) -> tuple[list[Any], tuple[str, ...]]:
    """Returns the server's tools that are wanted, and warnings. Coding agents list a web search beside their functions
    without being told to: where the server has none, the model reads the others, and a warning says so."""
    assert offer.served is not None
    served, missing = offer.served, tuple[str, ...]()
    path = f"tools[{offer.served_place}]"
    if isinstance(served, list) and WEB_SEARCH in served and WEB_SEARCH not in state.tool_service.names:
        lacks = f"{path} is a web search, and this server has no search engine"
        served = [name for name in served if name != WEB_SEARCH]
        if not served and not offer.functions:
            accepted = "accepted: other tools, or a server with the setting searxng"
            raise invalid(path, f"{lacks}; {accepted}.")
        missing = (f"{lacks}: it is not offered to the model.",)
    try:
        return list(state.tool_service.offered(served, remote=remote)), missing
    except UnknownTool as unknown:
        path = f"{path}.allowed_tools"
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
