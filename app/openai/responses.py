"""The routes of `/v1/responses`: make one, whole or as typed events; read, list and delete stored ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from app.current_user import AppState, Asker, User, check_reasoning_scopes, check_scope
from app.errors import invalid
from app.openai.event_stream import EventStream, reply
from app.openai.responses_job import response_job
from app.openai.responses_request import RESPONSES_NO_EFFECT, RESPONSES_REFUSED, SERVED_KINDS, ResponseRequest
from app.openai.responses_store import StoredResponses
from app.query_params import ONLY_KNOWN, QueryParams, WholeNumber
from app.request_body import MAX_BODY_BYTES, JsonBody

router = APIRouter(prefix="/v1", tags=["OpenAI"])

_MAX_ITEMS = 100


class TypedEvents(EventStream):
    """Server-sent events that end with a typed one: `[DONE]` belongs to the older endpoints."""

    done = b""


ResponseBody = Annotated[
    ResponseRequest,
    Depends(JsonBody(ResponseRequest, RESPONSES_REFUSED, no_effect=RESPONSES_NO_EFFECT, most=MAX_BODY_BYTES)),
]


@router.post("/responses")
async def create_response(request: Request, user: User, who: Asker, state: AppState, wanted: ResponseBody) -> Response:
    if any(isinstance(tool, dict) and tool.get("type") in SERVED_KINDS for tool in wanted.tools or ()):
        check_scope(who, "tools")
    check_reasoning_scopes(wanted.checker, wanted.strategy_options, who)
    job = await response_job(wanted, state, user)
    return await reply(request, job, TypedEvents if wanted.stream else None, "input")


@router.get("/responses/{response_id}", dependencies=[ONLY_KNOWN])
async def read_response(response_id: str, user: User, state: AppState) -> dict[str, Any]:
    return await StoredResponses(state.store, user).get(response_id)


@router.delete("/responses/{response_id}", dependencies=[ONLY_KNOWN])
async def delete_response(response_id: str, user: User, state: AppState) -> dict[str, Any]:
    await StoredResponses(state.store, user).delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


class ItemsQuery(BaseModel):
    """The parameters of `GET /v1/responses/{id}/input_items`."""

    limit: WholeNumber = Field(20, ge=1, le=_MAX_ITEMS, description=f"an integer from 1 to {_MAX_ITEMS}")
    order: Literal["asc", "desc"] = Field("desc", description="'asc' or 'desc'")
    after: str | None = Field(None, description="the id of an item of this list")


ItemsParams = Annotated[ItemsQuery, Depends(QueryParams(ItemsQuery))]


@router.get("/responses/{response_id}/input_items", dependencies=[ONLY_KNOWN])
async def input_items(response_id: str, user: User, state: AppState, given: ItemsParams) -> dict[str, Any]:
    """The newest item first, as in OpenAI's API."""
    items = await StoredResponses(state.store, user).input_of(response_id)
    if given.order == "desc":
        items.reverse()
    if given.after is not None:
        at = next((at for at, item in enumerate(items) if item["id"] == given.after), None)
        if at is None:
            raise invalid("after", f"after is {given.after!r:.60}; accepted: the id of an item of this list.")
        items = items[at + 1 :]
    page = items[: given.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
