"""The operator's routes: the server's figures, its runs, and the permissions of tools, of all users together.

They are polled while somebody looks, and keep no connection open meanwhile: a browser has few of those. No text of a
question or an answer is returned. Knows nothing of how anything is measured.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from app.api.chats import version
from app.api.tools import tool_list
from app.config import changed_settings
from app.current_user import AppState, Operator
from app.db.account_store import Accounts
from app.observability.bottleneck import bottleneck
from app.query_params import ONLY_KNOWN, QueryParams, WholeNumber
from app.state import State
from tools.options import PERMISSIONS

if TYPE_CHECKING:
    from engine import Stats
    from engine.outputs import SpeculationStats

router = APIRouter(prefix="/api/operator", tags=["Operator"], dependencies=[ONLY_KNOWN])

_WINDOWS_S = (60.0, 900.0)
_RUNS, _MAX_RUNS = 50, 500


class RunsQuery(BaseModel):
    """The parameters of `GET /api/operator/runs`."""

    limit: WholeNumber = Field(_RUNS, ge=1, le=_MAX_RUNS, description=f"a whole number from 1 to {_MAX_RUNS}")


RunsParams = Annotated[RunsQuery, Depends(QueryParams(RunsQuery))]


@router.get("/stats")
async def stats(who: Operator, state: AppState) -> dict[str, Any]:
    engines = await state.meter.look()
    windows = state.meter.windows
    return {
        "at": time.time(),
        "version": version(),
        "uptime_s": windows.uptime_s,
        "memory_bytes": _memory_bytes(),
        "answering": state.meter.answering,
        "by_priority": state.admission.by_priority,
        "windows": [windows.window(seconds) for seconds in _WINDOWS_S],
        "series": windows.series(),
        "cost_per_million_tokens": state.meter.cost_per_million,
        "energy": state.meter.energy(),
        "models": [
            {**_model(name, counters), "bottleneck": _bottleneck(state, name)} for name, counters in engines.items()
        ],
        "settings": changed_settings(state.settings),
    }


@router.get("/runs")
async def runs(who: Operator, state: AppState, given: RunsParams) -> dict[str, Any]:
    newest = await state.store.overview.newest_runs(given.limit)
    return {
        "by_status": await state.store.overview.runs_by_status(),
        "runs": [{**each, "model": each["model"] or state.served.name} for each in newest],
    }


@router.get("/tools")
async def tools(who: Operator, state: AppState) -> dict[str, Any]:
    users = [each.id for each in await state.auth.do(Accounts.users)]
    return {**tool_list(state.tool_service), **await asyncio.to_thread(_allowed, state, users)}


def _allowed(state: State, users: list[str]) -> dict[str, Any]:
    policy = state.tool_service.executor.policy
    return {
        "users": [
            {
                "user": user,
                "classes": [each for each in PERMISSIONS if each in policy.permitted(user, None)],
                "remembered": len(policy.grants.of_user(user)),
            }
            for user in users
        ]
    }


def _model(name: str, counters: Stats | None) -> dict[str, Any]:
    if counters is None:
        return {"name": name, "stopped": True}
    return {
        "name": name,
        "stopped": False,
        "running": counters.running,
        "waiting": counters.waiting,
        "sequences": counters.sequences,
        "blocks": {
            "used": counters.blocks_used,
            "adapters": counters.adapter_blocks_pinned + counters.adapter_blocks_used + counters.adapter_blocks_idle,
            "cached": counters.blocks_cached,
            "free": counters.blocks_free,
        },
        "block_size": counters.block_size,
        "prefix_hit_rate": counters.prefix_hit_rate if counters.prefix_query_tokens else None,
        "preemptions": counters.preemptions,
        "speculation": _speculation(counters.speculation),
    }


def _bottleneck(state: State, model: str) -> dict[str, Any] | None:
    """Returns what limits a model's engine, with the settings that would help and are as they come."""
    found = bottleneck(state.meter.windows.last_minute(model), state.settings.max_running)
    changed = changed_settings(state.settings).keys() - {"kv_blocks", "max_running", "threads", "max_batch_tokens"}
    if found is None:
        return None
    return {**asdict(found), "settings": [name for name in found.settings if name not in changed]}


def _speculation(counters: SpeculationStats) -> dict[str, Any] | None:
    """Returns what became of drafts; None where nothing was drafted."""
    if not counters.drafted:
        return None
    tried = zip(counters.drafted_at, counters.accepted_at, strict=True)
    return {
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "acceptance": [accepted / drafted for drafted, accepted in tried if drafted],  # by position
        "tokens_per_step": counters.tokens_per_step,
        "saved_s": counters.saved_s,
    }


def _memory_bytes() -> int:
    """Returns the process's bytes in memory now; where the system does not report it, its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
