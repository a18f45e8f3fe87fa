"""The route of strategies: which there are, what they take, and what an effort of thinking stands for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from app.api.query import parameters
from app.state import State
from app.users import User

router = APIRouter(prefix="/api", tags=["Strategies"])


@router.get("/strategies")
async def strategies(request: Request, user: User) -> dict[str, Any]:
    parameters(request)
    state = State.of(request)
    manners = state.manners
    return {
        "strategies": [
            {
                "name": each.name, "about": each.about, "options": each.options.model_json_schema(),
                "origin": each.origin,
            }
            for each in manners.strategies
        ],
        "faults": [{"origin": origin, "error": why} for origin, why in manners.strategies.faults.items()],
        "efforts": {name: budget.model_dump() for name, budget in manners.efforts.items()},
        "limits": {
            "branches": manners.quota.branches, "nodes": manners.quota.nodes, "seconds": manners.seconds,
        },
        "thinking_text": state.settings.thinking_text,
    }  # fmt: skip
