"""The routes of permissions: what a user lets tools do, everywhere or in one chat, and the answers that are remembered.

A chat can only narrow what its user allows. Every change holds from the next call on, also of a run that is under way.
Knows nothing of how a call is judged: the tools' policy does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.query_params import parameters
from app.current_user import User
from app.errors import ApiError
from app.request_body import json_object, parse
from app.state import State
from tools.call_policy import CallPolicy
from tools.grants import Grant
from tools.options import PERMISSIONS, Permission

router = APIRouter(prefix="/api", tags=["Permissions"])


class ClassesRequest(BaseModel):
    """The body of `PUT /api/permissions` and `PUT /api/chats/{id}/permissions`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    classes: list[Permission] = Field(
        max_length=len(PERMISSIONS), description=f"a list of classes: {', '.join(PERMISSIONS)}"
    )


@router.get("/permissions")
async def permissions(request: Request, user: User) -> dict[str, Any]:
    parameters(request)
    return await asyncio.to_thread(_shown, _policy(request), user)


@router.put("/permissions")
async def set_permissions(request: Request, user: User) -> dict[str, Any]:
    wanted = parse(await json_object(request), ClassesRequest, no_effect=frozenset())
    policy = _policy(request)
    await asyncio.to_thread(policy.grants.set_classes, user, wanted.classes)
    return await asyncio.to_thread(_shown, policy, user)


@router.delete("/permissions")
async def unset_permissions(request: Request, user: User) -> Response:
    parameters(request)
    await asyncio.to_thread(_policy(request).grants.unset_classes, user)
    return Response(status_code=204)


@router.delete("/permissions/{grant_id}")
async def forget(request: Request, user: User, grant_id: str) -> Response:
    parameters(request)
    grants = _policy(request).grants
    found = [grant for grant in await asyncio.to_thread(grants.of_user, user) if grant.id == grant_id]
    if not found:
        raise ApiError(404, f"No answer {grant_id!r:.60} is remembered.", code="not_found")
    await asyncio.to_thread(grants.withdraw, found[0])
    return Response(status_code=204)


@router.get("/chats/{chat_id}/permissions")
async def chat_permissions(request: Request, user: User, chat_id: str) -> dict[str, Any]:
    parameters(request)
    await State.of(request).store.chats.get(user, chat_id)
    return await asyncio.to_thread(_shown_of_chat, _policy(request), user, chat_id)


@router.put("/chats/{chat_id}/permissions")
async def set_chat_permissions(request: Request, user: User, chat_id: str) -> dict[str, Any]:
    wanted = parse(await json_object(request), ClassesRequest, no_effect=frozenset())
    await State.of(request).store.chats.get(user, chat_id)
    policy = _policy(request)
    await asyncio.to_thread(policy.grants.set_classes, user, wanted.classes, chat=chat_id)
    return await asyncio.to_thread(_shown_of_chat, policy, user, chat_id)


@router.delete("/chats/{chat_id}/permissions")
async def unset_chat_permissions(request: Request, user: User, chat_id: str) -> Response:
    parameters(request)
    # Of a chat that is gone too: what was said about it must not stay.
    await asyncio.to_thread(_policy(request).grants.unset_classes, user, chat=chat_id)
    return Response(status_code=204)


def _policy(request: Request) -> CallPolicy:
    return State.of(request).tool_service.executor.policy


def _shown(policy: CallPolicy, user: str) -> dict[str, Any]:
    return {
        "classes": _listed(policy.permitted(user, None)),
        "default": _listed(policy.default),
        "chats": {chat: _listed(held) for chat, held in policy.grants.chats(user).items()},
        "remembered": [_remembered(grant) for grant in policy.grants.of_user(user)],
    }


def _shown_of_chat(policy: CallPolicy, user: str, chat_id: str) -> dict[str, Any]:
    held = policy.grants.classes(user, chat_id)
    return {
        "chat_id": chat_id,
        "classes": None if held is None else _listed(held),
        "permitted": _listed(policy.permitted(user, chat_id)),
    }


def _remembered(grant: Grant) -> dict[str, Any]:
    return {
        "id": grant.id, "tool": grant.tool, "origin": grant.origin, "chat_id": grant.chat,
        "scope": "tool" if grant.arguments_hash is None else "arguments", "preview": grant.preview,
        "arguments_hash": grant.arguments_hash, "allow": grant.allow, "given_at": grant.given_at,
        "expires_at": grant.expires_at,
    }  # fmt: skip


def _listed(classes: Collection[Permission]) -> list[Permission]:
    return [each for each in PERMISSIONS if each in classes]
