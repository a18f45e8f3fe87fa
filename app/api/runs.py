"""The routes of `/api` for runs: an answer that is being made, its events, and its record.

A run's events are server-sent, resumable by number. Knows nothing of how answers are made.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette import EventSourceResponse, ServerSentEvent

from app.admission.request_budget import enter, narrow, output_limit
from app.answering.checkers import CHECKER
from app.answering.model_cascade import ModelCascade
from app.answering.reasoning_config import ReasoningConfig, ReasoningRequest, reduced_by_load
from app.answering.remote_model import RemoteModel
from app.answering.request_images import RequestImages
from app.answering.served_model import ServedModel
from app.answering.tool_service import UnknownTool
from app.api.files import files_to_send
from app.config import AUTO_NAME, DEFAULT_NAME
from app.config.efforts import EFFORTS, THINKING, BudgetFields, Effort
from app.current_user import AppState, Asker, User, check_reasoning_scopes, check_scope
from app.db.chat_exchange import MAX_IMAGES
from app.db.file_store import MAX_FILES, SentFile
from app.db.run_store import MAX_COMPARED, LoggedEvent, Place, RunKey
from app.db.sqlite import ChatBusy
from app.errors import ApiError, invalid
from app.openai.event_stream import PING_S, STREAM_HEADERS
from app.openai.request_models import (
    DeadlineS,
    MinP,
    OptionalPenalty,
    OutputTokens,
    Priority,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from app.query_params import ONLY_KNOWN, Flag, QueryParams, WholeNumber, whole_number
from app.request_body import MAX_BODY_BYTES, JsonBody, checked, parse
from app.runs.research import WEB_SEARCH
from app.runs.run import RunSpec
from app.runs.trace import lines
from app.state import State
from tools.skills import UnknownSkill

router = APIRouter(prefix="/api", tags=["Runs"], dependencies=[ONLY_KNOWN])

_KEY_CHARACTERS = 255
_SYSTEM_CHARACTERS = 100_000
_REASONING = frozenset({"thinking", "reasoning_effort", "strategy", "strategy_options"})
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"
)  # fmt: skip


class _Budgeted(BaseModel):
    """`thinking` of a run, where it is an object."""

    thinking: BudgetFields = Field(description=THINKING)


SETTINGS = "an object of a run's fields of how its answer is made, from model to sampling"


class ChatSettings(BaseModel):
    """Fields of a run that say how its answer is made; a chat keeps them, too."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    system: str | None = Field(
        None, min_length=1, max_length=_SYSTEM_CHARACTERS,
        description=f"a text of 1 to {_SYSTEM_CHARACTERS} characters, which the model reads before everything",
    )  # fmt: skip
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: OptionalPenalty = None
    frequency_penalty: OptionalPenalty = None
    seed: Seed = None
    max_tokens: OutputTokens = None
    model: str | None = Field(None, description="a served model's name; GET /v1/models lists them")
    thinking: bool | dict[str, Any] | None = Field(None, description=f"true, false, or {THINKING}")
    reasoning_effort: Effort | None = Field(None, description=EFFORTS)
    strategy: str | None = Field(None, description="the name of a strategy, such as tree; GET /api/strategies")
    strategy_options: dict[str, Any] | None = Field(None, description="an object of the strategy's options")
    collections: Literal["own", "all"] | list[int] | None = Field(
        None, description='"own", "all" (shared ones, too), or a list of collections\' ids: answer from their documents'
    )
    tools: Literal["all"] | Annotated[list[str], Field(min_length=1, max_length=128)] | None = Field(
        None, description='"all", or a list of 1 to 128 tools\' names: what the model may call'
    )

    skills: Literal["all"] | Annotated[list[str], Field(max_length=1000)] | None = Field(
        None,
        description='"all", or a list of up to 1000 skills\' names: what the model may read; left out, all where tools '
        "has read_skill",
    )

    def asked(self) -> ReasoningRequest:
        """Returns the reasoning that the fields ask for.

        Raises:
            ApiError: the budget of thinking is not as accepted.
        """
        thinks = self.thinking if isinstance(self.thinking, bool) else None
        budget = None
        if isinstance(self.thinking, dict):
            budget = parse({"thinking": self.thinking}, _Budgeted).thinking
        return ReasoningRequest(self.reasoning_effort, budget, self.strategy, self.strategy_options, thinks)

    def sampling(self) -> dict[str, float]:
        """Returns the sampling parameters that are to be other than the model's authors chose them."""
        return {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}

    def system_prompt(self) -> str | None:
        """The system prompt.

        Raises:
            ApiError: it is white space.
        """
        if self.system is not None and not self.system.strip():
            raise invalid("system", "system is white space alone; accepted: a non-empty text, or none.")
        return self.system

    def kept(self) -> dict[str, Any]:
        """Returns the fields that are set, as JSON."""
        return self.model_dump(mode="json", exclude_none=True)


class RunRequest(ChatSettings):
    """The body of `POST /api/chats/{id}/runs`."""

    content: str | None = Field(None, min_length=1, description="a non-empty text")
    images: list[str] | None = Field(
        None, min_length=1, max_length=MAX_IMAGES,
        description=f"a list of 1 to {MAX_IMAGES} images as data: URLs, beside content, for a model that sees",
    )  # fmt: skip
    parent_id: str | None = Field(
        None, description="the id of the answer that this question follows, or null for a new beginning"
    )
    regenerate: str | None = Field(None, description="the id of a question, to answer it once more")
    files: Annotated[list[str], Field(min_length=1, max_length=MAX_FILES)] | None = Field(
        None, description=f"a list of 1 to {MAX_FILES} ids of files, beside content, that answers are made from",
    )  # fmt: skip
    compare: bool = Field(
        False, description=f"true beside regenerate: to answer while up to {MAX_COMPARED - 1} others answer it, too"
    )
    priority: Priority = None
    deadline_s: DeadlineS = None
    checker: dict[str, Any] | None = Field(None, description=CHECKER)

    def asked(self) -> ReasoningRequest:
        return replace(super().asked(), checker=self.checker)

    def completed(self, settings: Mapping[str, Any]) -> Self:
        """Returns the request with a chat's settings for what it does not name; null is a name, too. The fields of
        reasoning are one: where it names one of them, the chat's are left out."""
        named = self.model_fields_set
        if named & _REASONING:
            named = named | _REASONING
        return self.model_copy(update={name: value for name, value in settings.items() if name not in named})

    def place(self, files: Sequence[SentFile] = ()) -> Place:
        """Returns the place of the answer. `files`: those that are given, as the message keeps them.

        Raises:
            ApiError: content and regenerate are both given, or neither, or compare without regenerate.
        """
        if self.compare and self.regenerate is None:
            message = "compare is true without regenerate; accepted: compare beside regenerate, the id of a question."
            raise invalid("compare", message)
        if self.regenerate is not None:
            given = [name for name in ("content", "images", "files") if getattr(self, name) is not None]
            if given or "parent_id" in self.model_fields_set:
                beside = (*given, "parent_id")[0]
                raise invalid(
                    beside, f"{beside} is given beside regenerate, which answers the question where it stands; "
                    "accepted: content, perhaps with parent_id, or regenerate alone.",
                )  # fmt: skip
            return Place(None, regenerate=self.regenerate, compare=self.compare)
        if self.content is None:
            message = "content is missing; accepted: a non-empty text, or regenerate, the id of a question."
            raise invalid("content", message, "missing_required_parameter")
        if not self.content.strip():
            raise invalid("content", "content is white space alone; accepted: a non-empty text.")
        images = tuple(self.images or ())
        at_leaf = "parent_id" not in self.model_fields_set
        return Place(self.content, self.parent_id, at_leaf, images=images, files=tuple(files))


RunBody = Annotated[RunRequest, Depends(JsonBody(RunRequest, most=MAX_BODY_BYTES, nulls=True))]


@router.post("/chats/{chat_id}/runs", status_code=202)
async def start_run(
    request: Request, user: User, who: Asker, state: AppState, chat_id: str, given: RunBody
) -> dict[str, Any]:
    key = _key(request, chat_id, given)  # as it came: the chat's settings may change before it is sent again
    chat = await state.store.chats.get(user, chat_id)
    wanted = given.completed(chat["settings"] or {})
    if wanted.collections is not None or wanted.files is not None:
        check_scope(who, "documents")
    files = await files_to_send(state, user, chat_id, wanted.files or ())
    if wanted.tools is not None or wanted.skills:
        check_scope(who, "tools")
    check_reasoning_scopes(wanted.checker, wanted.strategy_options, who)
    narrow(wanted.priority, wanted.deadline_s)
    output_limit(wanted.max_tokens)
    if (remote := state.models.remotes.get(wanted.model or "")) is not None:
        remote.images.check_seeing(wanted.images or (), "images", remote.name, sees=remote.settings.sees)
        await _strip(wanted, remote.images)
        return await _started(state, chat_id, key, _remote_spec(wanted, remote, user, files))
    served, auto = _models_of(state, wanted)
    enter(*((served,) if auto is None else auto.steps))
    reasoning_config = reduced_by_load(
        _reasoning_config(state, wanted, served, auto, user), served if auto is None else auto.steps[0]
    )
    if reasoning_config.searches:
        has_files = bool(files or await state.store.files.in_chat(user, chat_id))
        _check_research(wanted, state.tool_service.names, has_files)
    for one in (served,) if auto is None else auto.steps:
        one.images.check_seeing(wanted.images or (), "images", one.name, sees=one.sees)
    await _strip(wanted, served.images)
    if wanted.content is not None:
        await _check_length(wanted.content, state.models if auto is not None else [served])
    ask = RunSpec(
        wanted.place(files), wanted.system_prompt(), wanted.sampling(), max_tokens=wanted.max_tokens,
        collections=wanted.collections, tools=wanted.tools, skills=wanted.skills, served=served, auto=auto,
        reasoning_config=reasoning_config, user=user,
    )  # fmt: skip
    return await _started(state, chat_id, key, ask)


def _models_of(state: State, wanted: ChatSettings) -> tuple[ServedModel, ModelCascade | None]:
    """The model that is asked for, which is none of another server's, or the default and the cascade.

    Raises:
        ApiError: 404: there is none of the name.
    """
    auto = state.models.auto if wanted.model == AUTO_NAME else None
    return state.models.default if auto is not None else state.models.get(wanted.model or DEFAULT_NAME), auto


def _reasoning_config(
    state: State, wanted: ChatSettings, served: ServedModel, auto: ModelCascade | None, user: str
) -> ReasoningConfig:
    """
    Raises:
        ApiError, InvalidParameter: fields of reasoning are out of range or contradict others, or several models are
            asked for what needs one.
    """
    reasoning_config = state.reasoning_resolver.of(wanted.asked(), served, user)
    if auto is not None:
        reasoning_config.check_routed()
        for name in ("tools", "skills"):
            if getattr(wanted, name):
                raise invalid(name, f"{name} are asked for of 'auto'; accepted: the name of one model beside {name}.")
    return reasoning_config


async def settings_of_file(fields: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Checks the form of settings that a file has; whether there is what they name, a run of them tells. Any: JSON.

    Raises:
        ApiError: 400, naming the place by `path`.
    """
    try:
        settings = await checked(fields, ChatSettings, no_effect=frozenset())
        settings.system_prompt()
        settings.asked()
    except ApiError as error:
        raise invalid(f"{path}.{error.param}", f"{path}.{error.message}") from None
    return settings.kept()


async def check_settings(state: State, user: str, settings: ChatSettings) -> dict[str, Any]:
    """Checks settings as those of a run are, and returns them as JSON, to be kept.

    Raises:
        ApiError, InvalidParameter: as a run with them is refused.
        NotFound: a collection is wanted that the user may not read.
    """
    settings.system_prompt()
    output_limit(settings.max_tokens)
    if (remote := state.models.remotes.get(settings.model or "")) is not None:
        _remote_sampling(settings, remote)
    else:
        served, auto = _models_of(state, settings)
        _reasoning_config(state, settings, served, auto, user)
    try:
        state.tool_service.offered(settings.tools, settings.skills, remote=remote is not None)
    except UnknownTool as error:
        raise invalid("tools", str(error), "unknown_tool") from None
    except UnknownSkill as error:
        raise invalid("skills", str(error), "unknown_skill") from None
    if isinstance(settings.collections, list):
        await asyncio.to_thread(state.library.rights.readable, user, settings.collections)
    return settings.kept()


def _check_research(wanted: RunRequest, there: Collection[str], has_files: bool) -> None:
    """
    Raises:
        ApiError: 400: the run's strategy searches, and it has nothing to search in, or something it does not use.
    """
    if (wanted.strategy_options or {}).get("collections") is not None:
        message = "strategy_options.collections is for requests without a field collections; accepted: that field."
        raise invalid("strategy_options.collections", message)
    searches_web = wanted.tools is not None and WEB_SEARCH in (there if wanted.tools == "all" else wanted.tools)
    if wanted.collections is None and not searches_web and not has_files:
        accepted = f'"own", "all" or ids, files, or tools with {WEB_SEARCH}'
        message = f"collections are missing, and {wanted.strategy!r} searches in them; accepted: {accepted}."
        raise invalid("collections", message, "missing_required_parameter")
    if isinstance(wanted.tools, list) and (others := [name for name in wanted.tools if name != WEB_SEARCH]):
        accepted = f"{WEB_SEARCH}, or all"
        message = f"tools has {others[0]!r:.70}, which {wanted.strategy!r} does not call; accepted: {accepted}."
        raise invalid("tools", message)
    if wanted.skills:
        raise invalid("skills", f"skills are given, and {wanted.strategy!r} reads none; accepted: no skills.")


async def _strip(wanted: RunRequest, images: RequestImages) -> None:
    """Replaces a question's images by their pictures alone, as the chat keeps them. Raises as `stripped`."""
    if wanted.images is not None:
        wanted.images = [await images.stripped(url, f"images[{at}]") for at, url in enumerate(wanted.images)]


def _remote_spec(wanted: RunRequest, remote: RemoteModel, user: str, files: Sequence[SentFile]) -> RunSpec:
    """The run of a remote model.

    Raises:
        ApiError: 400: a field means nothing to it.
    """
    remote.check_fields(name for name in ("checker", "priority") if getattr(wanted, name) is not None)
    return RunSpec(
        wanted.place(files), wanted.system_prompt(), _remote_sampling(wanted, remote), max_tokens=wanted.max_tokens,
        collections=wanted.collections, tools=wanted.tools, skills=wanted.skills, served=remote, user=user,
    )  # fmt: skip


def _remote_sampling(wanted: ChatSettings, remote: RemoteModel) -> dict[str, Any]:
    """Returns what a remote model is asked for beside the question.

    Raises:
        ApiError: 400: a field means nothing to it.
    """
    remote.check_fields(
        name for name in ("thinking", "strategy", "strategy_options") if getattr(wanted, name) is not None
    )
    effort = {} if wanted.reasoning_effort is None else {"reasoning_effort": wanted.reasoning_effort}
    sampling: dict[str, Any] = {**wanted.sampling(), **effort}
    remote.check_fields(sampling)
    remote.sampling(sampling)
    remote.limit(wanted.max_tokens)
    return sampling


async def _started(state: AppState, chat_id: str, key: RunKey | None, ask: RunSpec) -> dict[str, Any]:
    try:
        started = await state.runs.start(chat_id, ask, key)
    except UnknownTool as error:
        raise invalid("tools", str(error), "unknown_tool") from None
    except UnknownSkill as error:
        raise invalid("skills", str(error), "unknown_skill") from None
    except ChatBusy:
        message = "This chat's last answer is still being made; wait for it, or cancel its run."
        if ask.place.compare:
            message = (
                f"This chat makes an answer to another question, or {MAX_COMPARED} to this one; accepted: compare with "
                f"up to {MAX_COMPARED - 1} answers to the same question under way."
            )
        raise ApiError(409, message, code="chat_busy") from None
    return started._asdict()


class EventsQuery(BaseModel):
    """The parameters of `GET /api/runs/{id}/events`."""

    after: WholeNumber = Field(0, description="an event's number, 0 or more")
    follow: Flag = Field("true", description="true, or false for the events that are there")


EventsParams = Annotated[EventsQuery, Depends(QueryParams(EventsQuery))]


@router.get("/runs/{run_id}")
async def run(user: User, state: AppState, run_id: str) -> dict[str, Any]:
    log = await state.runs.log(user, run_id)
    row = await state.store.runs.get(user, run_id)
    texts: dict[str, list[str]] = {"thinking.delta": [], "answer.delta": []}
    for event in log.events:
        if event.type in texts:
            texts[event.type].append(json.loads(event.data)["text"])
    return {
        "id": run_id,
        "chat_id": row["chat_id"],
        "status": log.status,
        "last_seq": log.last_seq,
        "thinking": "".join(texts["thinking.delta"]),
        "answer": "".join(texts["answer.delta"]),
    }


@router.get("/runs/{run_id}/events")
async def events(request: Request, user: User, state: AppState, run_id: str, given: EventsParams) -> Response:
    # A browser that reconnects by itself repeats the first address, `after` included, and adds the newer number.
    last = request.headers.get("last-event-id") or "0"
    if (number := whole_number(last)) is None:
        raise invalid("after", f"after is {last!r:.40}; accepted: an event's number, 0 or more.")
    log = await state.runs.log(user, run_id)
    after = max(number, given.after)
    return EventSourceResponse(
        _sent(log.follow(after) if given.follow == "true" else log.there(after)),
        headers=STREAM_HEADERS,
        ping=int(PING_S),
        ping_message_factory=lambda: ServerSentEvent(comment="ping"),
        sep="\n",
    )


@router.get("/runs/{run_id}/trace")
async def trace(user: User, state: AppState, run_id: str) -> Response:
    """The run as JSON lines, for `ponder replay`."""
    log = await state.runs.log(user, run_id)
    if state.settings.thinking_text != "shown":
        message = "A trace has the tokens of the thinking, and this server does not show them."
        raise ApiError(403, message, code="thinking_not_shown", kind="permission_error")
    recipe = await state.store.runs.trace(run_id)
    if log.status == "running":
        message = f"There is no trace of run {run_id!r:.60} yet: it is still being made."
        raise ApiError(404, message, code="no_trace")
    body = "".join(f"{line}\n" for line in lines(recipe, log.events))
    headers = {"Content-Disposition": f'attachment; filename="{run_id}.jsonl"'}
    return Response(body, media_type="application/x-ndjson", headers=headers)


@router.post("/runs/{run_id}/cancel", status_code=202)
async def cancel(user: User, state: AppState, run_id: str) -> dict[str, str]:
    await state.runs.cancel(user, run_id)
    return {"id": run_id}


async def _sent(events: AsyncGenerator[LoggedEvent, None]) -> AsyncGenerator[ServerSentEvent, None]:
    async for event in events:
        yield ServerSentEvent(event.data, event=event.type, id=str(event.seq))


async def _check_length(content: str, answering: Iterable[ServedModel]) -> None:
    """
    Raises:
        ApiError: the question alone is longer than the context of every model that may answer.
    """
    served = max(answering, key=lambda each: each.engine.max_model_len)
    most = served.engine.max_model_len
    if len(content) <= most and len(content.encode()) <= most:  # no token is shorter than a byte
        return
    tokens = len(await served.text_tokens(content, "content"))
    if tokens >= most:
        length = f"This model's maximum context length is {most} tokens, and the prompt has {tokens}"
        raise invalid("content", f"{length}; accepted: at most {most - 1}.", "context_length_exceeded")


def _key(request: Request, chat_id: str, wanted: RunRequest) -> RunKey | None:
    """Reads the header Idempotency-Key.

    Raises:
        ApiError: 400.
    """
    given = request.headers.getlist("idempotency-key")
    if not given:
        return None
    key = given[0]
    if len(given) > 1 or not (0 < len(key) <= _KEY_CHARACTERS and key.isascii() and key.isprintable()):
        what = "given twice" if len(given) > 1 else f"{key!r:.60}"
        raise invalid(
            "Idempotency-Key", f"Idempotency-Key is {what}; accepted: 1 to {_KEY_CHARACTERS} printable characters."
        )
    asked = json.dumps([chat_id, wanted.model_dump(mode="json", exclude_unset=True)], sort_keys=True)
    return RunKey(key, hashlib.sha256(asked.encode()).hexdigest())
