"""`POST /api/search`: a question in, passages out, each with its place in its document."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.body import json_object
from app.errors import invalid
from app.openai.fields import parse
from app.shown import FoundShown
from app.state import State
from app.users import User
from retrieval import BadFilter, BadQuery, Query
from retrieval.filters import as_sql
from retrieval.search import MOST_HITS

router = APIRouter(prefix="/api", tags=["Documents"])

MOST_VALUES = 1000  # that filters compare with


class SearchRequest(BaseModel):
    """The body of `POST /api/search`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    query: str = Field(description="a text of 1 to 4000 characters")
    limit: int = Field(10, ge=1, le=MOST_HITS, description=f"an integer from 1 to {MOST_HITS}")
    filters: dict[str, Any] = Field(  # Any: `as_sql` checks what is in it
        default_factory=dict, description='an object such as {"media_type": "application/pdf", "year": {"gte": 2020}}'
    )
    collections: Annotated[list[int], Field(max_length=1000)] | None = Field(
        None, description="a list of at most 1000 numbers of collections; without it all that may be read"
    )
    rerank: bool = Field(False, description="true or false")

    @field_validator("filters")
    @classmethod
    def _applicable(cls, filters: dict[str, Any]) -> dict[str, Any]:
        try:
            _, values = as_sql(filters)
        except BadFilter as error:
            raise invalid("filters", str(error)) from None
        if len(values) > MOST_VALUES:
            raise invalid("filters", f"filters compare with {len(values)} values; accepted: at most {MOST_VALUES}.")
        for value in values:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise invalid("filters", f"filters have the number {value!s:.40}; accepted: 64-bit integers.")
        return filters


@router.post("/search")
async def search(request: Request, user: User) -> FoundShown:
    wanted = parse(await json_object(request), SearchRequest, no_effect=frozenset())
    among = None if wanted.collections is None else frozenset(wanted.collections)
    query = Query(user, wanted.query, wanted.limit, among, wanted.filters or None, wanted.rerank)
    try:
        found = await asyncio.to_thread(State.of(request).library.search, query)
    except BadQuery as error:
        raise invalid("query", str(error)) from None
    except BadFilter as error:
        raise invalid("filters", str(error)) from None
    return FoundShown.of(found)
