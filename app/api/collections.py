"""The routes of collections and of invitations to them: documents' owners, and the members who may read them or add to
them.

To someone without a right to it, a collection is not there.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.response_models import CollectionShown, FolderShown, InvitationShown, MemberShown
from app.current_user import AppState, User
from app.errors import ApiError, invalid
from app.query_params import ONLY_KNOWN, number_in_path
from app.request_body import JsonBody
from retrieval import CollectionNameTaken, TooManyInvited

router = APIRouter(prefix="/api", tags=["Collections"], dependencies=[ONLY_KNOWN])

MAX_USER_LENGTH = 200
MAX_PATH_LENGTH = 4096


class CollectionRequest(BaseModel):
    """The body of `POST /api/collections`, and of `PATCH /api/collections/{id}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1, description="a name of 1 to 200 characters")


CollectionBody = Annotated[CollectionRequest, Depends(JsonBody(CollectionRequest))]


class FolderRequest(BaseModel):
    """The body of `POST /api/collections/{id}/folders`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    path: str = Field(
        min_length=1, max_length=MAX_PATH_LENGTH,
        description=f"a path of 1 to {MAX_PATH_LENGTH} characters, on the machine of the one who asks",
    )  # fmt: skip


FolderBody = Annotated[FolderRequest, Depends(JsonBody(FolderRequest))]


class MemberRequest(BaseModel):
    """The body of `PUT /api/collections/{id}/members/{user}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["reader", "writer"] = Field(description='"reader" or "writer"')


MemberBody = Annotated[MemberRequest, Depends(JsonBody(MemberRequest))]


@router.get("/collections")
async def collections(user: User, state: AppState) -> dict[str, list[CollectionShown]]:
    found = await asyncio.to_thread(state.library.rights.collections, user)
    return {"collections": [CollectionShown.of(each) for each in found]}


@router.post("/collections", responses={201: {"model": CollectionShown}})
async def create(response: Response, user: User, state: AppState, wanted: CollectionBody) -> CollectionShown:
    rights = state.library.rights

    def make() -> tuple[CollectionShown, bool]:
        before = {each.id for each in rights.collections(user)}
        made = rights.create(user, wanted.name)
        return CollectionShown.of(made), made.id not in before

    try:
        shown, new = await asyncio.to_thread(make)
    except ValueError as error:
        raise invalid("name", str(error)) from None
    response.status_code = 201 if new else 200
    return shown


@router.patch("/collections/{collection_id}")
async def rename(user: User, state: AppState, collection_id: str, wanted: CollectionBody) -> CollectionShown:
    number = number_in_path(collection_id, "collection")
    rights = state.library.rights

    def change() -> CollectionShown:
        rights.rename(user, number, wanted.name)
        return CollectionShown.of(rights.collection(user, number))

    try:
        return await asyncio.to_thread(change)
    except ValueError as error:
        raise invalid("name", str(error)) from None
    except CollectionNameTaken as error:
        raise ApiError(409, str(error), param="name", code="name_taken") from None


@router.delete("/collections/{collection_id}", status_code=204)
async def delete(user: User, state: AppState, collection_id: str) -> None:
    number = number_in_path(collection_id, "collection")
    await asyncio.to_thread(state.library.delete_collection, user, number)


@router.get("/collections/{collection_id}/folders")
async def folders(user: User, state: AppState, collection_id: str) -> dict[str, list[FolderShown]]:
    number = number_in_path(collection_id, "collection")
    found = await asyncio.to_thread(state.library.store.folders.of, user, number)
    return {"folders": [FolderShown.of(each) for each in found]}


@router.post("/collections/{collection_id}/folders")
async def enter_folder(user: User, state: AppState, collection_id: str, wanted: FolderBody) -> FolderShown:
    number = number_in_path(collection_id, "collection")
    return FolderShown.of(await asyncio.to_thread(state.library.store.folders.enter, user, number, wanted.path))


@router.delete("/collections/{collection_id}/folders/{document_folder}", status_code=204)
async def delete_folder(user: User, state: AppState, collection_id: str, document_folder: str) -> None:
    collection, folder = number_in_path(collection_id, "collection"), number_in_path(document_folder, "folder")
    await asyncio.to_thread(state.library.delete_folder, user, collection, folder)


@router.get("/collections/{collection_id}/members")
async def members(user: User, state: AppState, collection_id: str) -> dict[str, list[MemberShown]]:
    number = number_in_path(collection_id, "collection")
    found = await asyncio.to_thread(state.library.rights.members, user, number)
    return {"members": [MemberShown.of(each) for each in found]}


@router.put("/collections/{collection_id}/members/{member}")
async def share(user: User, state: AppState, collection_id: str, member: str, wanted: MemberBody) -> MemberShown:
    """Invites, and answers alike whether there is such a user or not: nobody is looked up."""
    number = number_in_path(collection_id, "collection")
    if len(member) > MAX_USER_LENGTH or not member.strip() or not member.isprintable():
        raise invalid("user", f"The user is {member!r:.60}; accepted: a name of 1 to {MAX_USER_LENGTH} characters.")
    rights = state.library.rights
    try:
        return MemberShown.of(await asyncio.to_thread(rights.invite, user, number, member, wanted.role))
    except ValueError as error:
        raise invalid("user", str(error)) from None
    except TooManyInvited as error:
        raise ApiError(409, str(error), param="user", code="too_many_invitations") from None


@router.delete("/collections/{collection_id}/members/{member}", status_code=204)
async def unshare(user: User, state: AppState, collection_id: str, member: str) -> None:
    number = number_in_path(collection_id, "collection")
    if not await asyncio.to_thread(state.library.rights.remove, user, number, member):
        raise ApiError(404, f"{member!r:.60} is no member of collection {number}.", code="not_found")


@router.get("/invitations")
async def invitations(user: User, state: AppState) -> dict[str, list[InvitationShown]]:
    found = await asyncio.to_thread(state.library.rights.invitations, user)
    return {"invitations": [InvitationShown.of(each) for each in found]}


@router.post("/invitations/{collection_id}/accept")
async def accept(user: User, state: AppState, collection_id: str) -> CollectionShown:
    number = number_in_path(collection_id, "collection")
    rights = state.library.rights

    def join() -> CollectionShown:
        rights.accept(user, number)
        return CollectionShown.of(rights.collection(user, number))

    return await asyncio.to_thread(join)


@router.delete("/invitations/{collection_id}", status_code=204)
async def decline(user: User, state: AppState, collection_id: str) -> None:
    number = number_in_path(collection_id, "collection")
    await asyncio.to_thread(state.library.rights.decline, user, number)
