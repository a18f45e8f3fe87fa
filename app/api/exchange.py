"""The routes that give chats as a file and take such a file back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.api.query import parameters, texts
from app.body import json_object
from app.data.exchange import BadChats, Export
from app.errors import invalid
from app.openai.fields import checked
from app.share.markdown import markdown
from app.share.page import POLICY, page
from app.share.told import Told, told
from app.state import State
from app.users import User

router = APIRouter(prefix="/api", tags=["Chats"])

MAX_IMPORT_BYTES = 32 << 20
MAX_IMPORT_NAMES = 100_000  # those of about 7,000 messages
_NAME_CHARACTERS = 80
_FORMS: dict[str, tuple[Callable[[Told], str], str, str]] = {  # for reading: how, the media type, and the name's end
    "html": (page, "text/html", "html"),
    "markdown": (markdown, "text/markdown", "md"),
}


@router.get("/chats/export")
async def export_all(request: Request, user: User) -> Response:
    parameters(request)
    return _json(await State.of(request).store.exchange.export(user), "ponder-chats")


@router.get("/chats/{chat_id}/export")
async def export_one(request: Request, user: User, chat_id: str) -> Response:
    form = texts(request, "format").get("format", "json")
    store = State.of(request).store
    if form == "json":
        return _json(await store.exchange.export(user, chat_id), "ponder-chat")
    if form not in _FORMS:
        raise invalid("format", f"format is {form!r:.60}; accepted: json, {', '.join(_FORMS)}.")
    write, media_type, end = _FORMS[form]
    chat = await told(store, user, chat_id)
    text = await asyncio.to_thread(write, chat)
    # Should a browser show it all the same, it is no page of this server's.
    headers = {**_attached(_name(chat.title), end), "Content-Security-Policy": f"sandbox; {POLICY}"}
    return Response(text, media_type=media_type, headers={**headers, "X-Content-Type-Options": "nosniff"})


@router.post("/chats/import")
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


def _name(title: str) -> str:
    """A file's name that every system takes."""
    words = re.sub(r"[^\w\- ]+", " ", title[:_NAME_CHARACTERS])
    return " ".join(words.split()) or "chat"


def _attached(name: str, end: str) -> dict[str, str]:
    plain = name if name.isascii() else "chat"
    return {"Content-Disposition": f"attachment; filename=\"{plain}.{end}\"; filename*=UTF-8''{quote(name)}.{end}"}
