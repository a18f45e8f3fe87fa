"""Route of search in documents, with the served model as a judge of relevance.

A passage's relevance is how much likelier the model says yes than no to "does this text answer the question?". The
prompts are the same up to the text, so the K/V of that part is computed once, and nothing is generated. Retrieval gets
the judge as a plain function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.api.response_models import FoundShown
from app.current_user import AppState, User
from app.errors import from_exception, invalid
from app.query_params import ONLY_KNOWN
from app.request_body import JsonBody
from engine.errors import EngineError
from retrieval import BadFilter, BadQuery, Query
from retrieval.index.filters import as_sql
from retrieval.index.hybrid import MAX_HITS
from retrieval.records import among_of

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel


QUESTION = "Does this text answer the question? Reply yes or no.\n\nQuestion: {query}\n\nText: {text}"
MAX_LENGTH = 4000  # characters of a text that are read
AT_ONCE = 8  # texts scored together: few enough to leave capacity for chats


class Relevance:
    """A `retrieval.index.hybrid.Scorer`, to be called from a thread that is not the loop's."""

    def __init__(self, served: ServedModel, tenant: str, loop: asyncio.AbstractEventLoop) -> None:
        self._served = served
        self._tenant = tenant
        self._loop = loop
        tokenizer = served.engine.tokenizer
        self._answers = [tokenizer.encode("yes"), tokenizer.encode("no")]
        self._slots = asyncio.Semaphore(AT_ONCE)

    def __call__(self, query: str, texts: Sequence[str]) -> list[float]:
        """For each text log p(yes) - log p(no)."""
        return asyncio.run_coroutine_threadsafe(self._scores(query, texts), self._loop).result()

    async def _scores(self, query: str, texts: Sequence[str]) -> list[float]:
        return list(await asyncio.gather(*(self._score(query, text) for text in texts)))

    async def _score(self, query: str, text: str) -> float:
        asked = QUESTION.format(query=query, text=text[:MAX_LENGTH])
        variables = {"enable_thinking": False} if self._served.markers else {}
        prompt = await self._served.chat_tokens([{"role": "user", "content": asked}], variables)
        async with self._slots, await self._served.engine.open(prompt, tenant=self._tenant) as sequence:
            yes, no = await sequence.score(self._answers)
        return sum(yes) - sum(no)


router = APIRouter(prefix="/api", tags=["Documents"], dependencies=[ONLY_KNOWN])


class SearchRequest(BaseModel):
    """The body of `POST /api/search`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    query: str = Field(description="a text of 1 to 4000 characters")
    limit: int = Field(10, ge=1, le=MAX_HITS, description=f"an integer from 1 to {MAX_HITS}")
    filters: dict[str, Any] = Field(  # Any: `as_sql` checks it
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


SearchBody = Annotated[SearchRequest, Depends(JsonBody(SearchRequest))]


@router.post("/search")
async def search(user: User, state: AppState, wanted: SearchBody) -> FoundShown:
    among = among_of(wanted.collections)
    query = Query(user, wanted.query, wanted.limit, among, wanted.filters or None, wanted.rerank is True)
    judge = Relevance(state.served, user, asyncio.get_running_loop()) if wanted.rerank == "model" else None
    try:
        found = await asyncio.to_thread(state.library.search, query, judge)
    except (BadQuery, BadFilter, EngineError) as error:
        raise from_exception(error, param="query") from None
    return FoundShown.of(found)
