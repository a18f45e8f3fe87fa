"""`POST /api/search`: a question in, passages out, each with its place in its document."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.api.relevance import Relevance
from app.api.shown import FoundShown
from app.body import json_object
from app.errors import from_exception, invalid
from app.openai.fields import parse
from app.state import State
from app.users import User
from engine.errors import EngineError
from retrieval import BadFilter, BadQuery, Query
from retrieval.filters import as_sql
from retrieval.records import among_of
from retrieval.search import MOST_HITS

router = APIRouter(prefix="/api", tags=["Documents"])


class SearchRequest(BaseModel):
    """The body of `POST /api/search`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    query: str = Field(description="a text of 1 to 4000 characters")
    limit: int = Field(10, ge=1, le=MOST_HITS, description=f"an integer from 1 to {MOST_HITS}")
    filters: dict[str, Any] = Field(  # Any: `as_sql` checks what is in it
        default_factory=dict, description='an object such as {"media_type": "application/pdf", "year": {"gte": 2020}}'
    )
    collections: Literal["own", "all"] | Annotated[list[int], Field(max_length=1000)] | None = Field(
        None, description='"own", "all" (shared ones, too), or a list of at most 1000 numbers of collections'
    )
    rerank: bool | Literal["model"] = Field(False, description='true, false or "model"')

    @field_validator("filters")
    @classmethod
    def _applicable(cls, filters: dict[str, Any]) -> dict[str, Any]:
        try:
            as_sql(filters)
        except BadFilter as error:
            raise invalid("filters", str(error)) from None
        return filters


@router.post("/search")
async def search(request: Request, user: User) -> FoundShown:
    wanted = parse(await json_object(request), SearchRequest, no_effect=frozenset())
    among = among_of(wanted.collections)
    query = Query(user, wanted.query, wanted.limit, among, wanted.filters or None, wanted.rerank is True)
    state = State.of(request)
    judge = Relevance(state.served, user, asyncio.get_running_loop()) if wanted.rerank == "model" else None
    try:
        found = await asyncio.to_thread(state.library.search, query, judge)
    except (BadQuery, BadFilter, EngineError) as error:
        raise from_exception(error, param="query") from None
    return FoundShown.of(found)
