"""Responses that were stored, each with its input and the response before it: a conversation is a chain of them.

Each is kept once, so deleting one takes its text out of every conversation that went through it; such a conversation
cannot be continued any more, and says so. Knows nothing of the items' meaning.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Text, bindparam, delete, literal, or_, select

from app.db.connection import insert
from app.db.store import Store
from app.db.tables import responses, text_position
from app.errors import ApiError, invalid
from app.openai.responses_items import Json

_OF_USER = responses.c.user == bindparam("user")
_RESPONSE = select(responses.c.input, responses.c.response).where(responses.c.id == bindparam("id"), _OF_USER)
_ITEM = bindparam("item", type_=Text)
_WITH_ITEM = (
    select(responses.c.input, responses.c.response)
    .where(
        _OF_USER,
        or_(*(text_position(each, _ITEM) > 0 for each in (responses.c.input, responses.c.response))),
    )
    .order_by(responses.c.created_at.desc())
    .limit(1)
)
_KEPT = (responses.c.previous_id, responses.c.input, responses.c.response)
_last = select(*_KEPT, literal(0).label("depth")).where(responses.c.id == bindparam("id"), _OF_USER)
_chain = _last.cte("chain", recursive=True)
_before = select(*_KEPT, _chain.c.depth + 1).join(_chain, responses.c.id == _chain.c.previous_id).where(_OF_USER)
_chain = _chain.union_all(_before)
_CHAIN = select(_chain.c.previous_id, _chain.c.input, _chain.c.response).order_by(_chain.c.depth.desc())


class StoredResponses:
    """One user's; another's are not found. `read_private`: something of a private response was read."""

    def __init__(self, store: Store, user: str) -> None:
        self.read_private = False
        self._database = store.database
        self._user = user

    async def add(self, response: Json, items: Sequence[Json]) -> None:
        """Keep a response that has ended, and the items it was asked with."""
        kept = {
            "id": response["id"], "user": self._user, "previous_id": response["previous_response_id"],
            "created_at": response["created_at"], "input": json.dumps(items), "response": json.dumps(response),
        }  # fmt: skip
        await self._database.read(lambda db: insert(db, responses, kept))

    async def get(self, id: str) -> Json:
        """
        Raises:
            ApiError: 404.
        """
        return dict(json.loads((await self._row(id))["response"]))

    async def input_of(self, id: str) -> list[Json]:
        """The items that a response was asked with.

        Raises:
            ApiError: 404.
        """
        return list(json.loads((await self._row(id))["input"]))

    async def delete(self, id: str) -> None:
        """
        Raises:
            ApiError: 404.
        """
        remove = delete(responses).where(responses.c.id == id, responses.c.user == self._user)
        if not await self._database.read(lambda db: db.execute(remove).rowcount):
            raise _missing(id)

    async def history(self, id: str) -> list[Any]:
        """All items up to the end of this response, the oldest first. Any: they are clients' JSON.

        Raises:
            ApiError: 400: it is not stored, or one before it is not any more.
        """
        rows = await self._database.rows(_CHAIN, id=id, user=self._user)
        if not rows or rows[0]["previous_id"] is not None:
            what = f"is {id!r:.80}, which is not stored" if not rows else "leads to a response that was deleted"
            raise ApiError(
                400, f"previous_response_id {what}; accepted: the id of a stored response, with all before it.",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        return [item for row in rows for item in self._items(row)]

    async def resolved(self, items: Sequence[Any]) -> list[Any]:
        """The items, each `item_reference` replaced by the item that it names. Any: they are clients' JSON.

        Raises:
            ApiError: 400: no item of that id is stored.
        """
        found: dict[str, Json] = {}
        made = list[Any]()
        for at, item in enumerate(items):
            if not isinstance(item, dict) or item.get("type") != "item_reference":
                made.append(item)
                continue
            id = item.get("id")
            if isinstance(id, str) and id not in found:
                for row in await self._database.rows(_WITH_ITEM, item=id, user=self._user):
                    found |= {each["id"]: each for each in self._items(row)}
            if not isinstance(id, str) or id not in found:
                message = f"input[{at}].id is {id!r:.80}; accepted: the id of an item of a stored response."
                raise invalid(f"input[{at}].id", message)
            made.append(found[id])
        return made

    def _items(self, row: Mapping[str, str]) -> list[Any]:
        response = json.loads(row["response"])
        self.read_private = self.read_private or response.get("private", False)
        return [*json.loads(row["input"]), *response["output"]]

    async def _row(self, id: str) -> dict[str, Any]:
        rows = await self._database.rows(_RESPONSE, id=id, user=self._user)
        if not rows:
            raise _missing(id)
        return rows[0]


def with_ids(items: Sequence[Any]) -> list[Json]:
    """Checked input items as they are kept: each has an id and a type, a message's text is a list of parts."""
    return [_with_id(dict(item)) for item in items]


def _with_id(item: Json) -> Json:
    item["type"] = kind = item.get("type") or "message"
    if kind == "message" and isinstance(item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        more: Json = {"annotations": []} if part == "output_text" else {}
        item["content"] = [{"type": part, "text": item["content"], **more}]
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}.get(kind, kind)
    item["id"] = item.get("id") or f"{prefix}_{uuid.uuid4().hex}"
    return item


def _missing(id: str) -> ApiError:
    return ApiError(404, f"No response {id!r:.80} is stored.", param="response_id", code="not_found")
