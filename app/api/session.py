"""Signing in and out: a key once, and then a cookie that no script can read.

Everybody may ask who they are, also nobody: the page does, before it shows anything. Knows nothing of keys.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers

from app.api.query import parameters
from app.auth import LOCAL, SESSION_PATH, Who, address_of
from app.body import json_object
from app.credentials import COOKIE, session_token
from app.data.accounts import SESSION_S
from app.errors import ApiError
from app.openai.fields import parse
from app.state import State

router = APIRouter(tags=["Session"])


class SessionRequest(BaseModel):
    """The body of `POST /api/session`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    key: str = Field(min_length=1, max_length=200, description="an API key, as `ponder keys create` shows it")


@router.get(SESSION_PATH)
async def session(request: Request) -> dict[str, Any]:
    parameters(request)
    state = State.of(request)
    if state.settings.auth == "off":
        return _shown("off", LOCAL)
    return _shown("keys", await state.auth.who(Headers(scope=request.scope), address_of(request.scope)))


@router.post(SESSION_PATH)
async def sign_in(request: Request) -> Response:
    parameters(request)
    auth = _asked(request).auth
    key = parse(await json_object(request), SessionRequest, no_effect=frozenset()).key.strip()
    who, token = await auth.sign_in(key, address_of(request.scope))
    response = JSONResponse(_shown("keys", who))
    response.set_cookie(
        COOKIE, token, max_age=int(SESSION_S), secure=request.url.scheme == "https", httponly=True, samesite="strict"
    )
    return response


@router.delete(SESSION_PATH)
async def sign_out(request: Request) -> Response:
    parameters(request)
    auth = _asked(request).auth
    if (token := session_token(request.headers)) is not None:
        await auth.sign_out(token)
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, secure=request.url.scheme == "https", httponly=True, samesite="strict")
    return response


def _asked(request: Request) -> State:
    """
    Raises:
        ApiError: 409, nobody is asked who they are.
    """
    state = State.of(request)
    if state.settings.auth == "off":
        message = "There is nothing to sign in to: this server asks nobody for a key (the setting auth is off)."
        raise ApiError(409, message, code="auth_off")
    return state


def _shown(auth: str, who: Who | None) -> dict[str, Any]:
    user = None if who is None else {"id": who.id, "name": who.name, "role": who.role}
    return {"auth": auth, "user": user, "expires_at": None if who is None else who.session_ends_at}
