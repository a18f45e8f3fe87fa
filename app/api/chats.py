"""Routes of chats, their folders, export and import, and of what the page reads of its server.

A chat's messages are a tree; its current branch is shown unless all of it is asked for.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.chat_export import POLICY, SharedChat, markdown, page, shared_chat
from app.api.query_params import bounded, parameters, texts
from app.current_user import User
from app.db.chat_exchange import MAX_FOLDER, MAX_TITLE, BadChats, Export
from app.db.chat_store import BadCursor, Tree
from app.errors import invalid
from app.request_body import checked, json_object, parse
from app.state import State

router = APIRouter(prefix="/api", tags=["Chats"])

_SHOWN = (
    "id", "parent_id", "role", "content", "thinking", "run_id", "thinking_s", "ttft_s", "tokens_per_s", "usage",
    "status", "error", "created_at",
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


def version() -> str:
    try:
        return importlib.metadata.version("ponder")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+unknown"


@router.get("/server")
async def server(request: Request) -> dict[str, Any]:
    parameters(request)
    served = State.of(request).served
    return {
        "version": version(),
        "model": served.name,
        "max_model_len": served.engine.max_model_len,
        "device": served.engine.device,
        "dtype": served.engine.dtype,
        "about": served.about.text,
        "starters": list(served.about.starters),
        "max_upload": int(State.of(request).settings.max_upload),
    }


@router.get("/chats")
async def chats(request: Request, user: User) -> dict[str, Any]:
    given = texts(request, "limit", "before", "folder_id")
    limit = bounded("limit", given.get("limit"), _LIMIT, _MAX_COUNT)
    state = State.of(request)
    try:
        found, more = await state.store.chats.of(
            user, limit=limit, before=given.get("before"), folder_id=given.get("folder_id")
        )
    except BadCursor as error:
        message = f"before is {str(error)!r:.60}; accepted: what `next` of the page before says."
        raise invalid("before", message) from None
    return {
        "chats": [{**each, "running": state.runs.active_in(each["id"]) is not None} for each in found],
        "next": more,
    }


@router.post("/chats")
async def create_chat(request: Request, user: User) -> Response:
    parameters(request)
    if body := await json_object(request):
        name = next(iter(body))
        raise invalid(name, f"{name!r:.60} is not a field of this request; accepted: {{}}.", "unknown_parameter")
    return JSONResponse(await State.of(request).store.chats.create(user), 201)


@router.get("/chats/search")
async def search_chats(request: Request, user: User) -> dict[str, Any]:
    given = texts(request, "q", "limit")
    query = given.get("q", "")
    if not query.strip() or len(query) > _QUERY_CHARACTERS:
        what = "missing" if not query.strip() else f"{len(query)} characters long"
        raise invalid("q", f"q is {what}; accepted: words, of at most {_QUERY_CHARACTERS} characters together.")
    limit = bounded("limit", given.get("limit"), _FOUND, _MAX_FOUND)
    found = await State.of(request).store.search.find(user, query, limit)
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
async def chat(request: Request, user: User, chat_id: str) -> dict[str, Any]:
    whole = texts(request, "all").get("all", "false")
    if whole not in ("true", "false"):
        raise invalid("all", f"all is {whole!r:.60}; accepted: true or false.")
    store = State.of(request).store
    row, messages = await store.chats.whole(user, chat_id)
    tree = Tree(messages)
    # What the store says of a message, not the moment: its events are read from `active_run_id` from their start.
    active = next((m["run_id"] for m in messages if m["status"] == "running"), None)
    shown = messages if whole == "true" else tree.branch(row["leaf_id"])
    return {
        **row,
        "messages": [
            {
                **{name: message[name] for name in _SHOWN},
                "steps": [step.model_dump() for step in message["steps"]],
                "siblings": tree.siblings(message["id"]),
            }
            for message in shown
        ],
        "active_run_id": active,
    }


@router.patch("/chats/{chat_id}")
async def change_chat(request: Request, user: User, chat_id: str) -> dict[str, Any]:
    parameters(request)
    body = await json_object(request)
    wanted = parse(body, ChatChange, no_effect=frozenset())
    changes = wanted.model_dump(exclude_unset=True)
    for name, value in body.items():
        if value is None:
            if name != "folder_id":
                accepted = ChatChange.model_fields[name].description
                raise invalid(name, f"{name} is null; accepted: {accepted}.")
            changes[name] = None
    if not changes:
        accepted = ", ".join(ChatChange.model_fields)
        raise invalid(None, f"The body changes nothing; accepted: some of {accepted}.", "missing_required_parameter")
    if not changes.get("title", "?").strip():
        raise invalid("title", f"title is white space; accepted: {ChatChange.model_fields['title'].description}.")
    return await State.of(request).store.chats.change(user, chat_id, changes)


@router.delete("/chats/{chat_id}")
async def delete_chat(request: Request, user: User, chat_id: str) -> dict[str, Any]:
    parameters(request)
    state = State.of(request)
    until = await state.store.deleted.delete("chat", user, chat_id)  # first: from now on no answer begins in it
    if run_id := state.runs.active_in(chat_id):
        await state.runs.cancel(user, run_id)
    return {"id": chat_id, "restorable_until": until}


@router.post("/chats/{chat_id}/restore")
async def restore_chat(request: Request, user: User, chat_id: str) -> dict[str, Any]:
    parameters(request)
    store = State.of(request).store
    await store.deleted.restore("chat", user, chat_id)
    return await store.chats.get(user, chat_id)


folders_router = APIRouter(prefix="/api", tags=["Folders"])


class FolderRequest(BaseModel):
    """The body of `POST /api/folders` and `PATCH /api/folders/{id}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1, max_length=MAX_FOLDER, description=f"a text of 1 to {MAX_FOLDER} characters")


@folders_router.get("/folders")
async def folders(request: Request, user: User) -> dict[str, Any]:
    parameters(request)
    return {"folders": await State.of(request).store.folders.of(user)}


@folders_router.post("/folders")
async def create_folder(request: Request, user: User) -> Response:
    name = await _name(request)
    return JSONResponse(await State.of(request).store.folders.create(user, name), 201)


@folders_router.patch("/folders/{folder_id}")
async def rename_folder(request: Request, user: User, folder_id: str) -> dict[str, Any]:
    name = await _name(request)
    return await State.of(request).store.folders.rename(user, folder_id, name)


@folders_router.delete("/folders/{folder_id}")
async def delete_folder(request: Request, user: User, folder_id: str) -> dict[str, Any]:
    parameters(request)
    until = await State.of(request).store.deleted.delete("folder", user, folder_id)
    return {"id": folder_id, "restorable_until": until}


@folders_router.post("/folders/{folder_id}/restore")
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


exchange_router = APIRouter(prefix="/api", tags=["Chats"])

MAX_IMPORT_BYTES = 32 << 20
MAX_IMPORT_NAMES = 100_000  # those of about 7,000 messages
_NAME_CHARACTERS = 80
_FORMS: dict[
    str, tuple[Callable[[SharedChat], str], str, str]
] = {  # for reading: how, the media type, and the name's end
    "html": (page, "text/html", "html"),
    "markdown": (markdown, "text/markdown", "md"),
}


@exchange_router.get("/chats/export")
async def export_all(request: Request, user: User) -> Response:
    parameters(request)
    return _json(await State.of(request).store.exchange.export(user), "ponder-chats")


@exchange_router.get("/chats/{chat_id}/export")
async def export_one(request: Request, user: User, chat_id: str) -> Response:
    form = texts(request, "format").get("format", "json")
    store = State.of(request).store
    if form == "json":
        return _json(await store.exchange.export(user, chat_id), "ponder-chat")
    if form not in _FORMS:
        raise invalid("format", f"format is {form!r:.60}; accepted: json, {', '.join(_FORMS)}.")
    write, media_type, end = _FORMS[form]
    chat = await shared_chat(store, user, chat_id)
    text = await asyncio.to_thread(write, chat)
    # Should a browser show it all the same, it is no page of this server's.
    headers = {**_attached(_export_name(chat.title), end), "Content-Security-Policy": f"sandbox; {POLICY}"}
    return Response(text, media_type=media_type, headers={**headers, "X-Content-Type-Options": "nosniff"})


@exchange_router.post("/chats/import")
async def import_chats(request: Request, user: User) -> Response:
    parameters(request)
    body = await json_object(request, MAX_IMPORT_BYTES, names=MAX_IMPORT_NAMES)
    try:
        made = await State.of(request).store.exchange.add(user, await checked(body, Export, no_effect=frozenset()))
    except BadChats as error:
        raise invalid(error.path, str(error)) from None
    return JSONResponse({"chat_ids": made}, 201)


def _json(export: dict[str, Any], name: str) -> Response:
    return JSONResponse(export, headers=_attached(name, "json"))


def _export_name(title: str) -> str:
    """A file's name that every system takes."""
    words = re.sub(r"[^\w\- ]+", " ", title[:_NAME_CHARACTERS])
    return " ".join(words.split()) or "chat"


def _attached(name: str, end: str) -> dict[str, str]:
    plain = name if name.isascii() else "chat"
    return {"Content-Disposition": f"attachment; filename=\"{plain}.{end}\"; filename*=UTF-8''{quote(name)}.{end}"}
