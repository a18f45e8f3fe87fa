"""The routes of permissions: a user's grants to tools, everywhere or in one chat, and the remembered answers.

A chat can only narrow its user's grants. Every change applies from the next call on, also of a run that is under way.
Knows nothing of how a call is judged: the tools' policy does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from app.current_user import AppState, User
from app.errors import ApiError
from app.query_params import ONLY_KNOWN
from app.request_body import JsonBody
from tools.call_policy import CallPolicy
from tools.grants import Grant
from tools.options import PERMISSIONS, Permission

router = APIRouter(prefix="/api", tags=["Permissions"], dependencies=[ONLY_KNOWN])


class ClassesRequest(BaseModel):
    """The body of `PUT /api/permissions` and `PUT /api/chats/{id}/permissions`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    classes: list[Permission] = Field(
        max_length=len(PERMISSIONS), description=f"a list of classes: {', '.join(PERMISSIONS)}"
    )


ClassesBody = Annotated[ClassesRequest, Depends(JsonBody(ClassesRequest))]


async def policy_of(state: AppState) -> CallPolicy:
    return state.tool_service.executor.policy


Policy = Annotated[CallPolicy, Depends(policy_of)]


@router.get("/permissions")
async def permissions(user: User, policy: Policy) -> dict[str, Any]:
    return await asyncio.to_thread(_shown, policy, user)


@router.put("/permissions")
async def set_permissions(user: User, policy: Policy, wanted: ClassesBody) -> dict[str, Any]:
    await asyncio.to_thread(policy.grants.set_classes, user, wanted.classes)
    return await asyncio.to_thread(_shown, policy, user)


@router.delete("/permissions", status_code=204)
async def unset_permissions(user: User, policy: Policy) -> None:
    await asyncio.to_thread(policy.grants.unset_classes, user)


@router.delete("/permissions/{grant_id}", status_code=204)
async def forget(user: User, policy: Policy, grant_id: str) -> None:
    grants = policy.grants
    found = [grant for grant in await asyncio.to_thread(grants.of_user, user) if grant.id == grant_id]
    if not found:
        raise ApiError(404, f"No answer {grant_id!r:.60} is remembered.", code="not_found")
    await asyncio.to_thread(grants.withdraw, found[0])


@router.get("/chats/{chat_id}/permissions")
async def chat_permissions(user: User, state: AppState, policy: Policy, chat_id: str) -> dict[str, Any]:
    await state.store.chats.get(user, chat_id)
    return await asyncio.to_thread(_shown_of_chat, policy, user, chat_id)


@router.put("/chats/{chat_id}/permissions")
async def set_chat_permissions(
    user: User, state: AppState, policy: Policy, chat_id: str, wanted: ClassesBody
) -> dict[str, Any]:
    await state.store.chats.get(user, chat_id)
    await asyncio.to_thread(policy.grants.set_classes, user, wanted.classes, chat=chat_id)
    return await asyncio.to_thread(_shown_of_chat, policy, user, chat_id)


@router.delete("/chats/{chat_id}/permissions", status_code=204)
async def unset_chat_permissions(user: User, policy: Policy, chat_id: str) -> None:
    # Of a deleted chat too: its permissions must not stay.
    await asyncio.to_thread(policy.grants.unset_classes, user, chat=chat_id)


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
