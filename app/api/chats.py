"""Routes of chats, their folders, export and import, and of the server's facts for the page.

A chat's messages are a tree; its current branch is shown unless all of it is asked for.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.api.chat_export import POLICY, SharedChat, markdown, page, shared_chat
from app.api.files import attached
from app.api.runs import SETTINGS, ChatSettings, check_settings, settings_of_file
from app.current_user import AppState, User
from app.db.chat_exchange import MAX_FOLDER, MAX_TITLE, BadChats, Export
from app.db.chat_store import BadCursor, Tree
from app.db.file_store import SentFile
from app.errors import invalid
from app.openai.request_models import Private
from app.query_params import ONLY_KNOWN, Flag, QueryParams, WholeNumber
from app.request_body import JsonBody

router = APIRouter(prefix="/api", tags=["Chats"], dependencies=[ONLY_KNOWN])

_SHOWN = (
    "id", "parent_id", "role", "content", "thinking", "run_id", "thinking_s", "ttft_s", "tokens_per_s", "usage",
    "status", "error", "created_at", "images", "model",
)  # fmt: skip
_LIMIT, _MAX_COUNT = 100, 500  # chats of a page
_FOUND, _MAX_FOUND = 20, 100
_QUERY_CHARACTERS = 500


class ChatChange(BaseModel):
    """The body of `PATCH /api/chats/{id}`: what is absent stays as it is."""

    model_config = ConfigDict(strict=True, extra="forbid")

    title: str | None = Field(
        None, min_length=1, max_length=MAX_TITLE, description=f"a text of 1 to {MAX_TITLE} characters"
    )
    pinned: bool | None = Field(None, description="true or false")
    folder_id: str | None = Field(None, description="the id of a folder of yours, or null for none")
    leaf_id: str | None = Field(None, description="the id of a message of this chat")
    private: bool | None = Field(None, description="true or false: whether the chat is kept from remote models")
    settings: ChatSettings | None = Field(None, description=SETTINGS)


ChatChangeBody = Annotated[ChatChange, Depends(JsonBody(ChatChange, nulls=True))]


class NewChat(BaseModel):
    """The body of `POST /api/chats`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    private: Private = False
    settings: ChatSettings | None = Field(None, description=SETTINGS)
    preset_id: str | None = Field(None, description="the id of a preset, whose settings it has if it names none")


NewChatBody = Annotated[NewChat, Depends(JsonBody(NewChat))]


class ChatsQuery(BaseModel):
    """The parameters of `GET /api/chats`."""

    limit: WholeNumber = Field(_LIMIT, ge=1, le=_MAX_COUNT, description=f"a whole number from 1 to {_MAX_COUNT}")
    before: str | None = Field(None, description="what `next` of the page before says")
    folder_id: str | None = Field(None, description="the id of a folder of yours")


ChatsParams = Annotated[ChatsQuery, Depends(QueryParams(ChatsQuery))]


class ChatSearchQuery(BaseModel):
    """The parameters of `GET /api/chats/search`."""

    q: str = Field(
        pattern=r"\S", max_length=_QUERY_CHARACTERS,
        description=f"words, of at most {_QUERY_CHARACTERS} characters together",
    )  # fmt: skip
    limit: WholeNumber = Field(_FOUND, ge=1, le=_MAX_FOUND, description=f"a whole number from 1 to {_MAX_FOUND}")


ChatSearchParams = Annotated[ChatSearchQuery, Depends(QueryParams(ChatSearchQuery))]


class DeletedChatQuery(BaseModel):
    """The parameters of `DELETE /api/chats/{id}`."""

    notes: Literal["keep", "erase"] = Field("keep", description="keep, erase: the notes that memory has from this chat")


DeletedChatParams = Annotated[DeletedChatQuery, Depends(QueryParams(DeletedChatQuery))]


class ChatQuery(BaseModel):
    """The parameters of `GET /api/chats/{id}`."""

    all: Flag = Field("false", description="true or false: whether the messages of all branches")
    last: WholeNumber | None = Field(
        None, ge=1, le=_MAX_COUNT,
        description=f"a whole number from 1 to {_MAX_COUNT}: so many messages of the current branch, the last ones",
    )  # fmt: skip


ChatParams = Annotated[ChatQuery, Depends(QueryParams(ChatQuery))]


def version() -> str:
    try:
        return importlib.metadata.version("ponder")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+unknown"


@router.get("/server")
async def server(state: AppState) -> dict[str, Any]:
    served, audio = state.served, state.settings.audio
    return {
        "version": version(),
        "model": served.name,
        "max_model_len": served.engine.max_model_len,
        "device": served.engine.device,
        "dtype": served.engine.dtype,
        "about": served.about.text,
        "starters": list(served.about.starters),
        "max_upload": int(state.settings.max_upload),
        "audio": None if audio is None else audio.model_dump(include={"transcription_model", "speech_model", "voice"}),
        "diffusion": None if state.diffusion is None else state.diffusion.about,
    }


@router.get("/chats")
async def chats(user: User, state: AppState, given: ChatsParams) -> dict[str, Any]:
    try:
        found, more = await state.store.chats.of(
            user, limit=given.limit, before=given.before, folder_id=given.folder_id
        )
    except BadCursor as error:
        message = f"before is {str(error)!r:.60}; accepted: what `next` of the page before says."
        raise invalid("before", message) from None
    active = await state.runs.activity([each["id"] for each in found])
    return {
        "chats": [{**each, "running": each["id"] in active, "waiting_for": active.get(each["id"])} for each in found],
        "next": more,
    }


@router.post("/chats", status_code=201)
async def create_chat(user: User, state: AppState, wanted: NewChatBody) -> dict[str, Any]:
    settings = None if wanted.settings is None else await check_settings(state, user, wanted.settings)
    imported = False
    if wanted.preset_id is not None:
        preset = await state.store.presets.get(user, wanted.preset_id)
        settings = preset["settings"] if settings is None else settings
        imported = preset["imported"] or preset["role"] != "owner"
    return await state.store.chats.create(user, private=wanted.private, settings=settings, imported=imported)


@router.get("/chats/search")
async def search_chats(user: User, state: AppState, given: ChatSearchParams) -> dict[str, Any]:
    found = await state.store.search.find(user, given.q, given.limit)
    return {
        "results": [
            {
                "chat_id": each.chat_id, "title": each.title, "message_id": each.message_id, "snippet": each.snippet,
                "marks": [{"start": start, "end": end} for start, end in each.marks],
            }
            for each in found
        ]
    }  # fmt: skip


@router.get("/chats/{chat_id}")
async def chat(user: User, state: AppState, chat_id: str, given: ChatParams) -> dict[str, Any]:
    store = state.store
    if given.all == "true" and given.last is not None:
        raise invalid("last", "last is of the current branch, and all=true asks for every one; accepted: one of them.")
    if given.last is not None:
        row, tree, shown = await store.chats.end_of(user, chat_id, given.last)
    else:
        row, messages = await store.chats.whole(user, chat_id)
        tree = Tree(messages)
        shown = messages if given.all == "true" else tree.branch(row["leaf_id"])
    # The message as stored, not as of now: its events are read from `active_run_ids` from their start.
    active = [each["run_id"] for each in tree.messages.values() if each["status"] == "running"]
    sent = [SentFile(**each) for message in shown for each in message["files"]]
    files = iter(await attached(state.library, user, sent))
    return {
        **row,
        "messages": [
            {
                **{name: message[name] for name in _SHOWN},
                "steps": [step.model_dump() for step in message["steps"]],
                "files": [next(files) for _ in message["files"]],
                "siblings": tree.siblings(message["id"]),
            }
            for message in shown
        ],
        "earlier": len(tree.branch(row["leaf_id"])) - len(shown) if given.last is not None else 0,
        "active_run_id": active[0] if active else None,
        "active_run_ids": active,
    }


@router.patch("/chats/{chat_id}")
async def change_chat(user: User, state: AppState, chat_id: str, wanted: ChatChangeBody) -> dict[str, Any]:
    changes = wanted.model_dump(exclude_unset=True)
    for name, value in changes.items():
        if value is None and name != "folder_id":
            raise invalid(name, f"{name} is null; accepted: {ChatChange.model_fields[name].description}.")
    if not changes:
        accepted = ", ".join(ChatChange.model_fields)
        raise invalid(None, f"The body changes nothing; accepted: some of {accepted}.", "missing_required_parameter")
    if not changes.get("title", "?").strip():
        raise invalid("title", f"title is white space; accepted: {ChatChange.model_fields['title'].description}.")
    if wanted.settings is not None:
        await state.store.chats.get(user, chat_id)  # another's chat is not there, whatever is asked of it
        changes["settings"] = await check_settings(state, user, wanted.settings)
    changed = await state.store.chats.change(user, chat_id, changes)
    if changes.get("private"):
        await state.store.shares.revoke_all(chat_id)
    return changed


@router.delete("/chats/{chat_id}")
async def delete_chat(user: User, state: AppState, chat_id: str, given: DeletedChatParams) -> dict[str, Any]:
    until = await state.store.deleted.delete("chat", user, chat_id)  # first: from now on no answer begins in it
    await state.store.shares.revoke_all(chat_id)
    await state.store.memory.let_go_with_chat(user, chat_id, given.notes == "erase")
    await state.runs.cancel_in(user, chat_id)
    return {"id": chat_id, "restorable_until": until}


@router.post("/chats/{chat_id}/restore")
async def restore_chat(user: User, state: AppState, chat_id: str) -> dict[str, Any]:
    store = state.store
    await store.deleted.restore("chat", user, chat_id)
    return await store.chats.get(user, chat_id)


folders_router = APIRouter(prefix="/api", tags=["Folders"], dependencies=[ONLY_KNOWN])


class FolderRequest(BaseModel):
    """The body of `POST /api/folders` and `PATCH /api/folders/{id}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1, max_length=MAX_FOLDER, description=f"a text of 1 to {MAX_FOLDER} characters")

    @field_validator("name")
    @classmethod
    def _without_space(cls, name: str) -> str:
        if name != name.strip():
            raise invalid("name", f"name is {name!r:.60}; accepted: a text without white space around it.")
        return name


FolderBody = Annotated[FolderRequest, Depends(JsonBody(FolderRequest))]


@folders_router.get("/folders")
async def folders(user: User, state: AppState) -> dict[str, Any]:
    return {"folders": await state.store.folders.of(user)}


@folders_router.post("/folders", status_code=201)
async def create_folder(user: User, state: AppState, wanted: FolderBody) -> dict[str, Any]:
    return await state.store.folders.create(user, wanted.name)


@folders_router.patch("/folders/{folder_id}")
async def rename_folder(user: User, state: AppState, folder_id: str, wanted: FolderBody) -> dict[str, Any]:
    return await state.store.folders.rename(user, folder_id, wanted.name)


@folders_router.delete("/folders/{folder_id}")
async def delete_folder(user: User, state: AppState, folder_id: str) -> dict[str, Any]:
    until = await state.store.deleted.delete("folder", user, folder_id)
    return {"id": folder_id, "restorable_until": until}


@folders_router.post("/folders/{folder_id}/restore")
async def restore_folder(user: User, state: AppState, folder_id: str) -> dict[str, Any]:
    store = state.store
    await store.deleted.restore("folder", user, folder_id)
    return await store.folders.get(user, folder_id)


exchange_router = APIRouter(prefix="/api", tags=["Chats"], dependencies=[ONLY_KNOWN])

MAX_IMPORT_BYTES = 32 << 20
MAX_IMPORT_NAMES = 100_000  # those of about 7,000 messages
_NAME_CHARACTERS = 80
_FORMS: dict[
    str, tuple[Callable[[SharedChat], str], str, str]
] = {  # for reading: how, the media type, and the name's end
    "html": (page, "text/html", "html"),
    "markdown": (markdown, "text/markdown", "md"),
}


ImportBody = Annotated[Export, Depends(JsonBody(Export, most=MAX_IMPORT_BYTES, names=MAX_IMPORT_NAMES))]


class ExportQuery(BaseModel):
    """The parameters of `GET /api/chats/{id}/export`."""

    format: Literal["json", "html", "markdown"] = Field("json", description="json, html, markdown")


ExportParams = Annotated[ExportQuery, Depends(QueryParams(ExportQuery))]


@exchange_router.get("/chats/export")
async def export_all(user: User, state: AppState) -> Response:
    return await attached_json(await state.store.exchange.export(user), "ponder-chats")


@exchange_router.get("/chats/{chat_id}/export")
async def export_one(user: User, state: AppState, chat_id: str, given: ExportParams) -> Response:
    store = state.store
    if given.format == "json":
        return await attached_json(await store.exchange.export(user, chat_id), "ponder-chat")
    write, media_type, end = _FORMS[given.format]
    chat = await shared_chat(store, user, chat_id)
    text = await asyncio.to_thread(write, chat)
    # Should a browser show it all the same, it is no page of this server's.
    attached = attachment(f"{_export_name(chat.title)}.{end}", f"chat.{end}")
    headers = {**attached, "Content-Security-Policy": f"sandbox; {POLICY}"}
    return Response(text, media_type=media_type, headers={**headers, "X-Content-Type-Options": "nosniff"})


@exchange_router.post("/chats/import", status_code=201)
async def import_chats(user: User, state: AppState, wanted: ImportBody) -> dict[str, Any]:
    for at, each in enumerate(wanted.chats):
        if each.settings is not None:
            each.settings = await settings_of_file(each.settings, f"chats[{at}].settings")
    try:
        made = await state.store.exchange.add(user, wanted)
    except BadChats as error:
        raise invalid(error.path, str(error)) from None
    return {"chat_ids": made.new, "known": [{"position": at, "chat_id": id} for at, id in made.known.items()]}


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


_PIECE = 1 << 18  # bytes; what a connection has no room for is moved in memory at each write


async def attached_json(export: dict[str, Any], name: str) -> Response:
    """Returns JSON as a file of this name. Encodes it step by step in a thread, as chats may have many megabytes, and
    sends it in pieces."""
    body = await asyncio.to_thread(lambda: "".join(_ENCODER.iterencode(export)).encode())

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), _PIECE):
            yield body[at : at + _PIECE]

    headers = {**attachment(f"{name}.json", "chat.json"), "Content-Length": str(len(body))}
    return StreamingResponse(pieces(), media_type="application/json", headers=headers)


def _export_name(title: str) -> str:
    """A file's name that every system takes."""
    words = re.sub(r"[^\w\- ]+", " ", title[:_NAME_CHARACTERS])
    return " ".join(words.split()) or "chat"


def attachment(name: str, otherwise: str) -> dict[str, str]:
    """Returns the header of a file to be saved as `name`, which has no quotation marks; by clients that know only ASCII
    as `otherwise`, where it is not (RFC 6266)."""
    plain = name if name.isascii() else otherwise
    return {"Content-Disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"}
