"""Computes a load's figures: percentiles, goodput under an objective, and whether the client was in the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.serve.load_client import Load, TurnOutcome

PERCENTS = (50, 90, 95, 99)
MAX_LATE_S = 0.05  # the client's own delay, in 1 of 100 requests, beyond which its figures are in doubt
MAX_BUSY = 0.8  # of a core


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of a good request. None: any."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def kept(self, outcome: TurnOutcome) -> bool:
        if not outcome.answered:
            return False
        bounds = (
            (self.ttft_s, outcome.ttft), (self.itl_s, outcome.itl), (self.e2e_s, outcome.ended - outcome.due)
        )  # fmt: skip
        return all(bound is None or value <= bound for bound, value in bounds)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """`{"n", "mean", "p50", …, "max"}`; nothing but n where there are none."""
    if not values:
        return {"n": 0}
    figures = {"n": len(values), "mean": float(np.mean(values))}
    figures |= {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTS}
    return {**figures, "max": float(max(values))}


def summary(load: Load, objective: Objective) -> dict[str, Any]:  # Any: JSON
    """Everything of one server, with a part for each class of requests."""
    kinds = sorted({outcome.kind for outcome in load.outcomes})
    figures = part(load.outcomes, load.seconds, objective)
    return {
        "target": load.target.name,
        "seconds": load.seconds,
        **figures,
        "kinds": {kind: part([o for o in load.outcomes if o.kind == kind], load.seconds, objective) for kind in kinds},
        "client": {"late_s": percentiles(load.late), "busy": load.busy, "in_the_way": in_the_way(load)},
    }


def in_the_way(load: Load) -> str:
    """Returns why the client's own figures are in doubt; empty where they are not."""
    late = float(np.percentile(load.late, 99)) if load.late else 0.0
    if late > MAX_LATE_S:
        return f"1 of 100 requests was sent {late * 1000:.0f} ms late: the client is short of time"
    if load.busy > MAX_BUSY:
        return f"the client used {load.busy:.0%} of a core: it may be what is measured"
    return ""


def part(outcomes: Sequence[TurnOutcome], seconds: float, objective: Objective) -> dict[str, Any]:  # Any: JSON
    """The figures of some outcomes of a load that took so many seconds."""
    answered = [outcome for outcome in outcomes if outcome.answered]
    good = sum(map(objective.kept, outcomes))
    prompt = sum(outcome.prompt_tokens for outcome in answered)
    refused = [outcome for outcome in outcomes if outcome.status == 429]
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "statuses": dict(Counter(str(outcome.status) for outcome in outcomes)),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common(5)),
        "refusal_s": percentiles([outcome.ended - outcome.sent for outcome in refused]),
        "ttft_s": percentiles([outcome.ttft for outcome in answered]),
        "itl_s": percentiles([outcome.itl for outcome in answered if outcome.completion_tokens > 1]),
        "gap_s": percentiles([gap for outcome in answered for gap in outcome.gaps]),
        "e2e_s": percentiles([outcome.ended - outcome.due for outcome in answered]),
        "prompt_tokens": prompt,
        "completion_tokens": sum(outcome.completion_tokens for outcome in answered),
        "cached": sum(outcome.cached_tokens for outcome in answered) / prompt if prompt else 0.0,
        "tokens_per_s": sum(outcome.completion_tokens for outcome in answered) / max(seconds, 1e-9),
        "good": good / len(outcomes) if outcomes else 0.0,
        "goodput_per_s": good / max(seconds, 1e-9),
    }
