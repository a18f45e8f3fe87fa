"""Links to chats, and the page that a link leads to: a chat as it was, to be read without signing in.

The page has questions, answers and the passages that answers cite. Thinking, calls of tools and passages that were
found but not cited are left out of it. It runs nothing and asks no server.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.chat_export import POLICY, SharedChat, SharedTurn, document, page, shared_chat
from app.current_user import AppState, User
from app.db.share_store import TooManyLinks
from app.errors import ApiError
from app.query_params import ONLY_KNOWN
from app.state import State

router = APIRouter(prefix="/api", tags=["Share"], dependencies=[ONLY_KNOWN])
page_router = APIRouter(tags=["Share"], dependencies=[ONLY_KNOWN])

MAX_PAGE = 8 << 20  # characters
HEADERS = {
    "Content-Security-Policy": f"sandbox allow-popups allow-popups-to-escape-sandbox; frame-ancestors 'none'; {POLICY}",
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
    "X-Robots-Tag": "noindex, nofollow, noarchive", "Cache-Control": "no-store",
}  # fmt: skip
_LABEL = re.compile(r"\[(S\d+)\]")
_GONE = {
    "en": ("There is no chat at this address", "The link was revoked, or its chat was deleted."),
    "de": ("Unter dieser Adresse gibt es keinen Chat", "Der Link wurde widerrufen, oder sein Chat wurde gelöscht."),
}


@router.post("/chats/{chat_id}/share", status_code=201)
async def share_chat(user: User, state: AppState, chat_id: str, response: Response) -> dict[str, Any]:
    title, text = await _rendered(state, user, chat_id)
    try:
        token, made = await state.store.shares.add(user, chat_id, title, text)
    except TooManyLinks as error:
        raise ApiError(409, str(error), code="too_many_links") from None
    response.headers["Cache-Control"] = "no-store"
    return {**made, "path": f"/share/{token}"}


@router.get("/shares")
async def shares(user: User, state: AppState) -> dict[str, Any]:
    return {"allowed": state.settings.sharing, "shares": await state.store.shares.of(user)}


@router.post("/shares/{share_id}/update")
async def update_share(user: User, state: AppState, share_id: str) -> dict[str, Any]:
    held = await state.store.shares.get(user, share_id)
    title, text = await _rendered(state, user, held["chat_id"])
    return await state.store.shares.replace(user, share_id, title, text)


@router.delete("/shares/{share_id}", status_code=204)
async def revoke_share(user: User, state: AppState, share_id: str) -> None:
    await state.store.shares.revoke(user, share_id)


@page_router.get("/share/{token}", include_in_schema=False)
async def shared_page(request: Request, state: AppState, token: str) -> Response:
    text = await state.store.shares.page(token) if state.settings.sharing else None
    if text is not None:
        return Response(text, media_type="text/html", headers=HEADERS)
    language = "de" if request.headers.get("accept-language", "").lower().startswith("de") else "en"
    title, why = _GONE[language]
    body = f'<header><h1>{title}</h1></header><main><p class="remark">{why}</p></main>'
    return Response(document(title, body, language), 404, media_type="text/html", headers=HEADERS)


async def _rendered(state: State, user: str, chat_id: str) -> tuple[str, str]:
    """Returns a chat's title and its page.

    Raises:
        NotThere: the user has no such chat.
        ApiError: chats may not be shared here, or this one may not.
    """
    store = state.store
    row = await store.chats.get(user, chat_id)
    if not state.settings.sharing:
        raise ApiError(403, "This server's operator has forbidden links to chats.", code="sharing_off")
    if row["private"]:
        raise ApiError(409, "This chat is private, and a link would show it to anybody.", code="chat_private")
    if row["leaf_id"] is None:
        raise ApiError(409, "Nothing was said in this chat yet; accepted: a chat with a question.", code="chat_empty")
    chat = await shared_chat(store, user, chat_id)
    least = sum(len(turn.content) for turn in chat.turns)
    text = await asyncio.to_thread(_public_page, chat) if least <= MAX_PAGE else ""
    if (least := max(least, len(text))) > MAX_PAGE:
        message = f"The chat's page has at least {least:,} characters; accepted: at most {MAX_PAGE:,}."
        raise ApiError(413, message, code="chat_too_long")
    return chat.title, text


def _public_page(chat: SharedChat) -> str:
    return page(replace(chat, turns=[_public(turn) for turn in chat.turns]))


def _public(turn: SharedTurn) -> SharedTurn:
    """Returns a turn without its thinking and calls, and with the sources that it cites alone."""
    cited = set(_LABEL.findall(turn.content))
    sources = [source for source in turn.sources if source.label in cited]
    return replace(turn, thinking="", thinking_s=None, steps=(), sources=sources)
