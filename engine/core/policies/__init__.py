"""Scheduling policies by name: who runs in the next step, and how many tokens it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.policies.orders import Arrival, Classes, Exclusive, FairShare, PrefillFirst, ShortestFirst, Static
from engine.core.policies.policy import Policy, Turn
from engine.core.policies.prefill_budget import Chunks, Queue

if TYPE_CHECKING:
    from engine.config import EngineConfig

__all__ = ["Chunks", "Policy", "Queue", "Turn", "policy_of"]


def policy_of(config: EngineConfig) -> Policy:
    """The policy that a configuration names."""
    chunks = Chunks(config.step_tokens, config.itl_goal_s, fixed=config.fixed_chunks)
    ageing = config.ageing_s
    match config.policy:
        case "decode-first":
            return Policy(ageing, chunks)
        case "prefill-first":
            return PrefillFirst(ageing, Chunks(config.step_tokens, fixed=True))
        case "fcfs":
            return Arrival(ageing, Chunks(config.step_tokens, fixed=True))
        case "shortest-first":
            return ShortestFirst(ageing, chunks, config.step_tokens)
        case "priority":
            return Classes(ageing, chunks)
        case "fair":
            return FairShare(ageing, chunks, max(1, config.step_tokens // 8), config.max_running)
        case "exclusive":
            return Exclusive(ageing, Chunks(config.step_tokens, fixed=True))
        case "static":
            return Static(ageing, Chunks(config.step_tokens, fixed=True), config.max_running)
