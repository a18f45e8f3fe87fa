"""The routes of `/api`: chats and their runs, for the page. A run's events are server-sent, resumable by number.

Bodies are checked by hand-written types with the same error shape as `/v1`. Knows nothing of how answers are made.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent

from app.body import json_object
from app.errors import ApiError, invalid
from app.openai.fields import explain
from app.openai.stream import PING_S, STREAM_HEADERS
from app.runs.live import ChatBusy
from app.runs.log import RunLog
from app.runs.run import Ask
from app.runs.trace import lines
from app.state import State
from app.store import Row
from app.toolshed import UnknownTool
from app.users import User

router = APIRouter(prefix="/api", tags=["Chats"])


class RunRequest(BaseModel):
    """The body of `POST /api/chats/{id}/runs`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    content: str = Field(min_length=1, description="a non-empty text")
    temperature: float | None = Field(None, ge=0, le=2, description="a number from 0 (greedy) to 2")
    max_tokens: int | None = Field(None, ge=1, description="an integer of 1 or more")
    thinking: bool | None = Field(None, description="true or false")
    collections: Literal["all"] | list[int] | None = Field(
        None, description='"all", or a list of your collections\' ids: answer from their documents'
    )
    tools: Literal["all"] | Annotated[list[str], Field(min_length=1, max_length=128)] | None = Field(
        None, description='"all", or a list of 1 to 128 tools\' names: what the model may call'
    )


def version() -> str:
    try:
        return importlib.metadata.version("ponder")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+unknown"


@router.get("/server")
async def server(request: Request) -> dict[str, Any]:
    served = State.of(request).served
    return {
        "version": version(),
        "model": served.name,
        "max_model_len": served.engine.max_tokens,
        "device": served.engine.device,
        "dtype": served.engine.dtype,
        "about": served.about.text,
        "starters": list(served.about.starters),
    }


@router.get("/chats")
async def chats(request: Request) -> dict[str, list[Row]]:
    return {"chats": await State.of(request).store.chats()}


@router.post("/chats")
async def create_chat(request: Request) -> Response:
    if body := await json_object(request):
        name = next(iter(body))
        raise invalid(name, f"{name!r:.60} is not a field of this request; accepted: {{}}.", "unknown_parameter")
    return JSONResponse(await State.of(request).store.create_chat(), 201)


@router.get("/chats/{chat_id}")
async def chat(request: Request, chat_id: str) -> dict[str, Any]:
    state = State.of(request)
    row = await state.store.chat(chat_id)
    if row is None:
        raise _missing("chat", chat_id)
    messages = await state.store.messages(chat_id)
    shown = (
        "id", "role", "content", "thinking", "run_id", "thinking_s", "ttft_s", "tokens_per_s", "usage", "status",
        "error",
    )  # fmt: skip
    # What the store says of a message, not the moment: its events are read from `active_run_id` from their start.
    active = next((m["run_id"] for m in messages if m["status"] == "running"), None)
    return {**row, "messages": [{name: m[name] for name in shown} for m in messages], "active_run_id": active}


@router.delete("/chats/{chat_id}")
async def delete_chat(request: Request, chat_id: str) -> Response:
    state = State.of(request)
    if await state.store.chat(chat_id) is None:
        raise _missing("chat", chat_id)
    if run_id := state.runs.active_in(chat_id):
        await state.runs.cancel(run_id)
    await state.store.delete_chat(chat_id)
    return Response(status_code=204)


@router.post("/chats/{chat_id}/runs")
async def start_run(request: Request, user: User, chat_id: str) -> Response:
    body = await json_object(request)
    if unknown := [name for name in body if name not in RunRequest.model_fields]:
        accepted = ", ".join(RunRequest.model_fields)
        message = f"{unknown[0]!r:.60} is not a field of this request; accepted: {accepted}."
        raise invalid(unknown[0], message, "unknown_parameter")
    try:
        wanted = RunRequest.model_validate(body)
    except ValidationError as error:
        raise explain(error, RunRequest) from None
    if not wanted.content.strip():
        raise invalid("content", "content is white space alone; accepted: a non-empty text.")
    if isinstance(wanted.collections, list):  # one that is not there is said before anything begins
        await asyncio.to_thread(State.of(request).library.rights.readable, user, wanted.collections)
    try:
        started = await State.of(request).runs.start(chat_id, Ask(**wanted.model_dump(), user=user))
    except UnknownTool as error:
        raise invalid("tools", str(error), "unknown_tool") from None
    except ChatBusy:
        message = "This chat's last answer is still being made; wait for it, or cancel its run."
        raise ApiError(409, message, code="chat_busy") from None
    if started is None:
        raise _missing("chat", chat_id)
    run_id, message_id = started
    return JSONResponse({"run_id": run_id, "message_id": message_id}, 202)


@router.get("/runs/{run_id}")
async def run(request: Request, run_id: str) -> dict[str, Any]:
    state = State.of(request)
    log = await _log(state, run_id)
    row = await state.store.run(run_id)
    if row is None:
        raise _missing("run", run_id)
    texts: dict[str, list[str]] = {"thinking.delta": [], "answer.delta": []}
    for event in log.events:
        if event.type in texts:
            texts[event.type].append(json.loads(event.data)["text"])
    return {
        "id": run_id,
        "chat_id": row["chat_id"],
        "status": log.events[-1].type.removeprefix("run.") if log.ended else "running",
        "last_seq": log.last_seq,
        "thinking": "".join(texts["thinking.delta"]),
        "answer": "".join(texts["answer.delta"]),
    }


@router.get("/runs/{run_id}/events")
async def events(request: Request, run_id: str) -> Response:
    # A browser that reconnects by itself repeats the first address, `after` included, and adds the newer number.
    numbers = [request.headers.get("last-event-id") or "0", request.query_params.get("after") or "0"]
    if bad := [n for n in numbers if not (n.isascii() and n.isdigit() and len(n) < 16)]:
        raise invalid("after", f"after is {bad[0]!r:.40}; accepted: an event's number, 0 or more.")
    log = await _log(State.of(request), run_id)
    return EventSourceResponse(
        _follow(log, max(map(int, numbers))),
        headers=STREAM_HEADERS,
        ping=int(PING_S),
        ping_message_factory=lambda: ServerSentEvent(comment="ping"),
        sep="\n",
    )


@router.get("/runs/{run_id}/trace")
async def trace(request: Request, run_id: str) -> Response:
    """The run as JSON lines, for `ponder replay`."""
    state = State.of(request)
    log = await _log(state, run_id)
    recipe = await state.store.trace(run_id)
    if recipe is None:
        when = "asked no model, or its server crashed" if log.ended else "is still being made"
        raise ApiError(404, f"There is no trace of run {run_id!r:.60}: it {when}.", code="no_trace")
    body = "".join(f"{line}\n" for line in lines(recipe, log.events))
    headers = {"Content-Disposition": f'attachment; filename="{run_id}.jsonl"'}
    return Response(body, media_type="application/x-ndjson", headers=headers)


@router.post("/runs/{run_id}/cancel")
async def cancel(request: Request, run_id: str) -> Response:
    if not await State.of(request).runs.cancel(run_id):
        raise _missing("run", run_id)
    return JSONResponse({"id": run_id}, 202)


async def _follow(log: RunLog, after: int) -> AsyncGenerator[ServerSentEvent, None]:
    async for event in log.follow(after):
        yield ServerSentEvent(event.data, event=event.type, id=str(event.seq))


async def _log(state: State, run_id: str) -> RunLog:
    log = await state.runs.log(run_id)
    if log is None:
        raise _missing("run", run_id)
    return log


def _missing(what: str, id: str) -> ApiError:
    return ApiError(404, f"There is no {what} {id!r:.60}.", code=f"{what}_not_found")
