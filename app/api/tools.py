"""Routes of tools, notes, approvals and strategies.

They list the tools with those that could not be loaded, take a user's decisions while a run waits for them, and list
the strategies with their options and the thinking that each effort stands for.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.answering.tool_service import ToolService
from app.api.query_params import parameters
from app.current_user import User
from app.errors import ApiError
from app.request_body import json_object, parse
from app.runs.run_tools import RunTools
from app.state import State
from tools.builtin.notes import NoteError

router = APIRouter(prefix="/api", tags=["Tools"])


class DecisionRequest(BaseModel):
    """The body of `POST /api/runs/{id}/approvals/{approval_id}`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    decision: Literal["once", "no", "always", "never"] = Field(description='"once", "no", "always" or "never"')
    scope: Literal["arguments", "tool"] = Field(
        "arguments", description='"arguments" (exactly this call) or "tool" (any call of it)'
    )
    expires_s: float | None = Field(None, gt=0, description="seconds above 0 that the answer is remembered")


class AnswerRequest(BaseModel):
    """The body of `POST /api/runs/{id}/questions/{question_id}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    text: str = Field(min_length=1, max_length=10_000, description="a text of 1 to 10000 characters")


@router.get("/tools")
async def tools(request: Request) -> dict[str, Any]:
    return tool_list(State.of(request).tool_service)


def tool_list(shed: ToolService) -> dict[str, Any]:
    """The tools there are, those that could not be loaded, and those that are switched off, as JSON."""
    registry = shed.registry
    return {
        "tools": [
            {
                "name": tool.name, "description": tool.description, "parameters": tool.parameters,
                "permission": tool.permission, "approval": tool.approval, "timeout_s": tool.timeout_s,
                "idempotent": tool.idempotent, "origin": tool.origin,
            }
            for tool in sorted(registry, key=lambda tool: tool.name)
        ],
        "faults": [{"origin": fault.origin, "message": fault.message} for fault in registry.faults],
        "off": shed.off,
    }  # fmt: skip


@router.get("/notes")
async def notes(request: Request, user: User) -> dict[str, Any]:
    shed = State.of(request).tool_service
    kept = await asyncio.to_thread(lambda: shed.notebook().all(user))
    return {"notes": [asdict(note) for note in kept]}


@router.delete("/notes/{number}", status_code=204)
async def forget_note(request: Request, user: User, number: str) -> None:
    shed = State.of(request).tool_service
    try:
        if not re.fullmatch(r"\d{1,9}", number):
            raise NoteError(f"There is no note {number!r:.60}; GET /api/notes lists them.")
        await asyncio.to_thread(lambda: shed.notebook().forget(user, int(number)))
    except NoteError as error:
        raise ApiError(404, str(error), code="not_found") from None


@router.post("/runs/{run_id}/approvals/{approval_id}")
async def approve(request: Request, user: User, run_id: str, approval_id: str) -> Response:
    wanted = parse(await json_object(request), DecisionRequest, no_effect=frozenset())
    tools = await _tools_of(request, user, run_id)
    tools.decide(approval_id, wanted.decision, scope=wanted.scope, expires_s=wanted.expires_s)
    return JSONResponse({"id": approval_id}, 202)


@router.post("/runs/{run_id}/questions/{question_id}")
async def answer(request: Request, user: User, run_id: str, question_id: str) -> Response:
    wanted = parse(await json_object(request), AnswerRequest, no_effect=frozenset())
    (await _tools_of(request, user, run_id)).answer(question_id, wanted.text)
    return JSONResponse({"id": question_id}, 202)


async def _tools_of(request: Request, user: str, run_id: str) -> RunTools:
    """
    Raises:
        NotThere: the user has no such run.
        ApiError: it waits for nobody.
    """
    runs = State.of(request).runs
    await runs.log(user, run_id)
    found = runs.tools_of(run_id)
    if found is None:
        raise ApiError(404, f"There is no run {run_id!r:.60} that waits for anybody.", code="not_waiting")
    return found


strategies_router = APIRouter(prefix="/api", tags=["Strategies"])


@strategies_router.get("/strategies")
async def strategies(request: Request, user: User) -> dict[str, Any]:
    parameters(request)
    state = State.of(request)
    reasoning_resolver = state.reasoning_resolver
    return {
        "strategies": [
            {
                "name": each.name, "about": each.about, "options": each.options.model_json_schema(),
                "origin": each.origin,
            }
            for each in reasoning_resolver.strategies
        ],
        "faults": [{"origin": origin, "error": why} for origin, why in reasoning_resolver.strategies.faults.items()],
        "efforts": {name: budget.model_dump() for name, budget in reasoning_resolver.efforts.items()},
        "limits": {
            "branches": reasoning_resolver.quota.branches, "nodes": reasoning_resolver.quota.nodes, "seconds":
            reasoning_resolver.seconds,
        },
        "thinking_text": state.settings.thinking_text,
    }  # fmt: skip
