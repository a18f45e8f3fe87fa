"""The routes of folders, which chats may be put under."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.query import parameters
from app.body import json_object
from app.data.exchange import MAX_FOLDER
from app.errors import invalid
from app.openai.fields import parse
from app.state import State
from app.users import User

router = APIRouter(prefix="/api", tags=["Folders"])


class FolderRequest(BaseModel):
    """The body of `POST /api/folders` and `PATCH /api/folders/{id}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1, max_length=MAX_FOLDER, description=f"a text of 1 to {MAX_FOLDER} characters")


@router.get("/folders")
async def folders(request: Request, user: User) -> dict[str, Any]:
    parameters(request)
    return {"folders": await State.of(request).store.folders.of(user)}


@router.post("/folders")
async def create_folder(request: Request, user: User) -> Response:
    name = await _name(request)
    return JSONResponse(await State.of(request).store.folders.create(user, name), 201)


@router.patch("/folders/{folder_id}")
async def rename_folder(request: Request, user: User, folder_id: str) -> dict[str, Any]:
    name = await _name(request)
    return await State.of(request).store.folders.rename(user, folder_id, name)


@router.delete("/folders/{folder_id}")
async def delete_folder(request: Request, user: User, folder_id: str) -> dict[str, Any]:
    parameters(request)
    until = await State.of(request).store.deleted.delete("folder", user, folder_id)
    return {"id": folder_id, "restorable_until": until}


@router.post("/folders/{folder_id}/restore")
async def restore_folder(request: Request, user: User, folder_id: str) -> dict[str, Any]:
    parameters(request)
    store = State.of(request).store
    await store.deleted.restore("folder", user, folder_id)
    return await store.folders.get(user, folder_id)


async def _name(request: Request) -> str:
    parameters(request)
    name = parse(await json_object(request), FolderRequest, no_effect=frozenset()).name
    if name != name.strip():
        raise invalid("name", f"name is {name!r:.60}; accepted: a text without white space around it.")
    return name
