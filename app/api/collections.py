"""The routes of collections and of invitations to them: documents' owners, and who else may read them or add to them.

To someone without a right to it, a collection is not there.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.query_params import number_in_path
from app.api.response_models import CollectionShown, InvitationShown, MemberShown
from app.current_user import User
from app.errors import ApiError, invalid
from app.request_body import json_object, parse
from app.state import State
from retrieval import CollectionNameTaken, TooManyInvited

router = APIRouter(prefix="/api", tags=["Collections"])

MAX_USER_LENGTH = 200


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
    except CollectionNameTaken as error:
        raise ApiError(409, str(error), param="name", code="name_taken") from None


@router.delete("/collections/{collection_id}")
async def delete(request: Request, user: User, collection_id: str) -> Response:
    number = number_in_path(collection_id, "collection")
    await asyncio.to_thread(State.of(request).library.delete_collection, user, number)
    return Response(status_code=204)


@router.get("/collections/{collection_id}/members")
async def members(request: Request, user: User, collection_id: str) -> dict[str, list[MemberShown]]:
    number = number_in_path(collection_id, "collection")
    found = await asyncio.to_thread(State.of(request).library.rights.members, user, number)
    return {"members": [MemberShown.of(each) for each in found]}


@router.put("/collections/{collection_id}/members/{member}")
async def share(request: Request, user: User, collection_id: str, member: str) -> MemberShown:
    """Invites, and answers alike whether there is such a user or not: nobody is looked up."""
    number = number_in_path(collection_id, "collection")
    wanted = parse(await json_object(request), MemberRequest, no_effect=frozenset())
    if len(member) > MAX_USER_LENGTH or not member.strip() or not member.isprintable():
        raise invalid("user", f"The user is {member!r:.60}; accepted: a name of 1 to {MAX_USER_LENGTH} characters.")
    rights = State.of(request).library.rights
    try:
        return MemberShown.of(await asyncio.to_thread(rights.invite, user, number, member, wanted.role))
    except ValueError as error:
        raise invalid("user", str(error)) from None
    except TooManyInvited as error:
        raise ApiError(409, str(error), param="user", code="too_many_invitations") from None


@router.delete("/collections/{collection_id}/members/{member}")
async def unshare(request: Request, user: User, collection_id: str, member: str) -> Response:
    number = number_in_path(collection_id, "collection")
    if not await asyncio.to_thread(State.of(request).library.rights.remove, user, number, member):
        raise ApiError(404, f"{member!r:.60} is no member of collection {number}.", code="not_found")
    return Response(status_code=204)


@router.get("/invitations")
async def invitations(request: Request, user: User) -> dict[str, list[InvitationShown]]:
    found = await asyncio.to_thread(State.of(request).library.rights.invitations, user)
    return {"invitations": [InvitationShown.of(each) for each in found]}


@router.post("/invitations/{collection_id}/accept")
async def accept(request: Request, user: User, collection_id: str) -> CollectionShown:
    number = number_in_path(collection_id, "collection")
    rights = State.of(request).library.rights

    def join() -> CollectionShown:
        rights.accept(user, number)
        return CollectionShown.of(rights.collection(user, number))

    return await asyncio.to_thread(join)


@router.delete("/invitations/{collection_id}")
async def decline(request: Request, user: User, collection_id: str) -> Response:
    number = number_in_path(collection_id, "collection")
    await asyncio.to_thread(State.of(request).library.rights.decline, user, number)
    return Response(status_code=204)
