"""The routes that give chats as a file and take such a file back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.api.query import parameters
from app.body import json_object
from app.data.exchange import BadChats, Export
from app.errors import invalid
from app.openai.fields import parse
from app.state import State
from app.users import User

router = APIRouter(prefix="/api", tags=["Chats"])

MAX_IMPORT_BYTES = 64 << 20


@router.get("/chats/export")
async def export_all(request: Request, user: User) -> Response:
    parameters(request)
    return _file(await State.of(request).store.exchange.export(user), "chats")


@router.get("/chats/{chat_id}/export")
async def export_one(request: Request, user: User, chat_id: str) -> Response:
    parameters(request)
    return _file(await State.of(request).store.exchange.export(user, chat_id), "chat")


@router.post("/chats/import")
async def import_chats(request: Request, user: User) -> Response:
    parameters(request)
    body = await json_object(request, MAX_IMPORT_BYTES)
    try:
        made = await State.of(request).store.exchange.add(user, parse(body, Export, no_effect=frozenset()))
    except BadChats as error:
        raise invalid(error.path, str(error)) from None
    return JSONResponse({"chat_ids": made}, 201)


def _file(export: dict[str, Any], name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="ponder-{name}.json"'}
    return JSONResponse(export, headers=headers)
