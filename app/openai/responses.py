"""The routes of `/v1/responses`: make one, whole or as typed events; read, list and delete what was stored."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Send

from app.connections import while_connected
from app.current_user import Asker, User, check_checker_scope, check_scope
from app.errors import ApiError, from_exception, invalid
from app.openai.event_stream import DONE, EventStream
from app.openai.responses_job import response_job
from app.openai.responses_store import StoredResponses
from app.request_body import MAX_BODY_BYTES, json_object
from app.state import State

_CHAIN = """
    WITH RECURSIVE chain (id, previous_id, input, response, depth) AS (
        SELECT id, previous_id, input, response, 0 FROM responses WHERE id = ?1 AND user = ?2
        UNION ALL
        SELECT r.id, r.previous_id, r.input, r.response, chain.depth + 1
        FROM responses r JOIN chain ON r.id = chain.previous_id WHERE r.user = ?2)
    SELECT previous_id, input, response FROM chain ORDER BY depth DESC"""


router = APIRouter(prefix="/v1", tags=["OpenAI"])

_MAX_ITEMS = 100


class TypedEvents(EventStream):
    """Server-sent events that end with a typed one: `[DONE]` belongs to the older endpoints."""

    async def _write(self, send: Send, data: bytes) -> None:
        if data is not DONE:
            await super()._write(send, data)


@router.post("/responses")
async def create_response(request: Request, user: User, who: Asker) -> Response:
    body = await json_object(request, MAX_BODY_BYTES)
    if any(isinstance(tool, dict) and tool.get("type") == "mcp" for tool in _list(body.get("tools"))):
        check_scope(who, "tools")
    check_checker_scope(body, who)
    job = await response_job(body, State.of(request), user)
    if job.request.stream:
        return TypedEvents(job.chunks(), explain=_explain)
    try:
        return JSONResponse(await while_connected(request, job.whole()))
    except Exception as error:
        raise _explain(error) from error


@router.get("/responses/{response_id}")
async def read_response(request: Request, response_id: str, user: User) -> dict[str, Any]:
    _no_query(request)
    return await StoredResponses(State.of(request).store, user).get(response_id)


@router.delete("/responses/{response_id}")
async def delete_response(request: Request, response_id: str, user: User) -> dict[str, Any]:
    _no_query(request)
    await StoredResponses(State.of(request).store, user).delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/responses/{response_id}/input_items")
async def input_items(request: Request, response_id: str, user: User) -> dict[str, Any]:
    """The newest item first, as in OpenAI's API."""
    _no_query(request, "limit", "order", "after")
    query = request.query_params
    order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order is {order!r:.60}; accepted: 'asc' or 'desc'.")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_ITEMS):
        raise invalid("limit", f"limit is {limit!r:.60}; accepted: an integer from 1 to {_MAX_ITEMS}.")
    items = await StoredResponses(State.of(request).store, user).input_of(response_id)
    if order == "desc":
        items.reverse()
    if after is not None:
        at = next((at for at, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise invalid("after", f"after is {after!r:.60}; accepted: the id of an item of this list.")
        items = items[at + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


def _list(value: Any) -> list[Any]:  # Any: JSON
    return value if isinstance(value, list) else []


def _no_query(request: Request, *accepted: str) -> None:
    """That nothing else is asked for in the address."""
    for name in request.query_params:
        if name not in accepted:
            shown = ", ".join(accepted) or "no parameters"
            raise invalid(name, f"{name:.60} is not supported; accepted: {shown}.", "unsupported_parameter")


def _explain(error: BaseException) -> ApiError:
    return from_exception(error, param="input")
