"""Scheduling policies by name: the sequences that run in the next step, and its token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.policies.orders import (
    Arrival,
    Exclusive,
    FairShare,
    PrefillFirst,
    PriorityClasses,
    ShortestFirst,
    Static,
)
from engine.core.policies.policy import Policy, PrefillBudget, Queue, StepGrant

if TYPE_CHECKING:
    from engine.config import EngineConfig

__all__ = ["Policy", "PrefillBudget", "Queue", "StepGrant", "policy_of"]


def policy_of(config: EngineConfig) -> Policy:
    """Builds the policy that a configuration names."""
    chunks = PrefillBudget(config.step_tokens, config.itl_goal_s, fixed=config.fixed_chunks)
    ageing = config.ageing_s
    match config.policy:
        case "decode-first":
            return Policy(ageing, chunks)
        case "prefill-first":
            return PrefillFirst(ageing, PrefillBudget(config.step_tokens, fixed=True))
        case "fcfs":
            return Arrival(ageing, PrefillBudget(config.step_tokens, fixed=True))
        case "shortest-first":
            return ShortestFirst(ageing, chunks, config.step_tokens)
        case "priority":
            return PriorityClasses(ageing, chunks)
        case "fair":
            return FairShare(ageing, chunks, max(1, config.step_tokens // 8), config.max_running)
        case "exclusive":
            return Exclusive(ageing, PrefillBudget(config.step_tokens, fixed=True))
        case "static":
            return Static(ageing, PrefillBudget(config.step_tokens, fixed=True), config.max_running)
