"""Routes of tools, approvals and strategies.

They list the tools with those that could not be loaded, take a user's decisions while a run waits for them, and list
the strategies with their options and the thinking that each effort stands for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from app.answering.tool_service import ToolService
from app.config.efforts import BudgetFields
from app.current_user import AppState, User
from app.query_params import ONLY_KNOWN
from app.request_body import JsonBody
from app.runs.remote_runs import RunCommand
from reasoning.fallback import fallback

router = APIRouter(prefix="/api", tags=["Tools"], dependencies=[ONLY_KNOWN])


class DecisionRequest(BaseModel):
    """The body of `POST /api/runs/{id}/approvals/{approval_id}`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    decision: Literal["once", "no", "always", "never"] = Field(description='"once", "no", "always" or "never"')
    scope: Literal["arguments", "tool"] = Field(
        "arguments", description='"arguments" (exactly this call) or "tool" (any call of it)'
    )
    expires_s: float | None = Field(None, gt=0, description="seconds above 0 that the answer is remembered")


DecisionBody = Annotated[DecisionRequest, Depends(JsonBody(DecisionRequest))]


class AnswerRequest(BaseModel):
    """The body of `POST /api/runs/{id}/questions/{question_id}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    text: str = Field(min_length=1, max_length=10_000, description="a text of 1 to 10000 characters")


AnswerBody = Annotated[AnswerRequest, Depends(JsonBody(AnswerRequest))]


@router.get("/tools")
async def tools(state: AppState) -> dict[str, Any]:
    return tool_list(state.tool_service)


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
        "faults": [{"origin": fault.origin, "message": fault.message} for fault in shed.faults],
        "off": shed.off,
        "skills": [
            {
                "name": skill.name, "description": skill.description, "license": skill.license, "compatibility":
                skill.compatibility, "metadata": skill.metadata, "allowed_tools": skill.allowed_tools, "notes":
                skill.notes,
            }
            for skill in shed.skills
        ],
    }  # fmt: skip


@router.post("/runs/{run_id}/approvals/{approval_id}", status_code=202)
async def approve(user: User, state: AppState, run_id: str, approval_id: str, wanted: DecisionBody) -> dict[str, str]:
    decision = wanted.model_dump()
    await state.runs.decide(RunCommand(kind="decide", user=user, run_id=run_id, number=approval_id, **decision))
    return {"id": approval_id}


@router.post("/runs/{run_id}/questions/{question_id}", status_code=202)
async def answer(user: User, state: AppState, run_id: str, question_id: str, wanted: AnswerBody) -> dict[str, str]:
    await state.runs.decide(RunCommand(kind="answer", user=user, run_id=run_id, number=question_id, text=wanted.text))
    return {"id": question_id}


strategies_router = APIRouter(prefix="/api", tags=["Strategies"], dependencies=[ONLY_KNOWN])


def _within(budget: BudgetFields, context: int) -> dict[str, Any]:
    """Returns a budget as JSON, of no more tokens than a context has."""
    most = budget.max_tokens
    return {**budget.model_dump(), "max_tokens": None if most is None else min(most, context)}


@strategies_router.get("/strategies")
async def strategies(user: User, state: AppState) -> dict[str, Any]:
    reasoning_resolver = state.reasoning_resolver
    context = max(each.engine.max_model_len for each in state.models)
    return {
        "strategies": [
            {
                "name": each.name, "about": each.about, "options": each.options.model_json_schema(),
                "origin": each.origin,
            }
            for each in reasoning_resolver.strategies
            if each.name != fallback.name or state.models.default.engine.fallback is not None  # it would be refused
        ],
        "faults": [{"origin": origin, "error": why} for origin, why in reasoning_resolver.strategies.faults.items()],
        "efforts": {name: _within(budget, context) for name, budget in reasoning_resolver.efforts.items()},
        "limits": {
            "branches": reasoning_resolver.quota.branches, "nodes": reasoning_resolver.quota.nodes, "seconds":
            reasoning_resolver.seconds,
        },
        "thinking_text": state.settings.thinking_text,
    }  # fmt: skip
