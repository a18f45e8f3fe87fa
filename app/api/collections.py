"""The routes of collections: whose documents they are, and who else may read them or add to them.

To someone without a right to it, a collection is not there.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.query import number_in_path
from app.api.shown import CollectionShown
from app.body import json_object
from app.data.accounts import Accounts
from app.errors import ApiError, invalid
from app.openai.fields import parse
from app.state import State
from app.users import User
from retrieval import NameTaken

router = APIRouter(prefix="/api", tags=["Collections"])

LONGEST_USER = 200


class CollectionRequest(BaseModel):
    """The body of `POST /api/collections`, and of `PATCH /api/collections/{id}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1, description="a name of 1 to 200 characters")


class MemberRequest(BaseModel):
    """The body of `PUT /api/collections/{id}/members/{user}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["reader", "writer"] = Field(description='"reader" or "writer"')


@router.get("/collections")
async def collections(request: Request, user: User) -> dict[str, list[CollectionShown]]:
    found = await asyncio.to_thread(State.of(request).library.rights.collections, user)
    return {"collections": [CollectionShown.of(each) for each in found]}


@router.post("/collections")
async def create(request: Request, user: User) -> Response:
    wanted = parse(await json_object(request), CollectionRequest, no_effect=frozenset())
    rights = State.of(request).library.rights

    def make() -> tuple[CollectionShown, bool]:
        before = {each.id for each in rights.collections(user)}
        made = rights.create(user, wanted.name)
        return CollectionShown.of(made), made.id not in before

    try:
        shown, new = await asyncio.to_thread(make)
    except ValueError as error:
        raise invalid("name", str(error)) from None
    return JSONResponse(shown.model_dump(), 201 if new else 200)


@router.patch("/collections/{collection_id}")
async def rename(request: Request, user: User, collection_id: str) -> CollectionShown:
    number = number_in_path(collection_id, "collection")
    wanted = parse(await json_object(request), CollectionRequest, no_effect=frozenset())
    rights = State.of(request).library.rights

    def change() -> CollectionShown:
        rights.rename(user, number, wanted.name)
        return CollectionShown.of(rights.collection(user, number))

    try:
        return await asyncio.to_thread(change)
    except ValueError as error:
        raise invalid("name", str(error)) from None
    except NameTaken as error:
        raise ApiError(409, str(error), param="name", code="name_taken") from None


@router.delete("/collections/{collection_id}")
async def delete(request: Request, user: User, collection_id: str) -> Response:
    number = number_in_path(collection_id, "collection")
    await asyncio.to_thread(State.of(request).library.delete_collection, user, number)
    return Response(status_code=204)


@router.get("/collections/{collection_id}/members")
async def members(request: Request, user: User, collection_id: str) -> dict[str, list[dict[str, str]]]:
    number = number_in_path(collection_id, "collection")
    found = await asyncio.to_thread(State.of(request).library.rights.members, user, number)
    return {"members": [{"user": member, "role": role} for member, role in found.items()]}


@router.put("/collections/{collection_id}/members/{member}")
async def share(request: Request, user: User, collection_id: str, member: str) -> Response:
    number = number_in_path(collection_id, "collection")
    wanted = parse(await json_object(request), MemberRequest, no_effect=frozenset())
    if len(member) > LONGEST_USER or not member.strip() or not member.isprintable():
        raise invalid("user", f"The user is {member!r:.60}; accepted: a name of 1 to {LONGEST_USER} characters.")
    state = State.of(request)
    if state.settings.auth == "keys" and member not in {each.id for each in await state.auth.do(Accounts.users)}:
        raise invalid("user", f"There is no user {member!r:.70}; accepted: the id of a user.", "user_not_found")
    rights = state.library.rights

    def give() -> None:
        if rights.collection(user, number).owner == member:
            raise invalid("user", f"{member!r} owns this collection; accepted: somebody else.")
        rights.share(user, number, member, wanted.role)

    await asyncio.to_thread(give)
    return JSONResponse({"user": member, "role": wanted.role})


@router.delete("/collections/{collection_id}/members/{member}")
async def unshare(request: Request, user: User, collection_id: str, member: str) -> Response:
    number = number_in_path(collection_id, "collection")
    rights = State.of(request).library.rights

    def take() -> bool:
        there = member in rights.members(user, number)
        rights.share(user, number, member, None)
        return there

    if not await asyncio.to_thread(take):
        raise ApiError(404, f"{member!r:.60} is no member of collection {number}.", code="not_found")
    return Response(status_code=204)
