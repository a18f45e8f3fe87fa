"""Autoscaling of replicas by what holds them back: requests that wait, and K/V memory. Pure functions of figures.

A replica reports its requests, those that wait included, and which share of its KV blocks sequences hold. The number
of replicas is the larger of what either measure asks for, as by Kubernetes' horizontal autoscaler: current × measured ÷
target, within a tolerance that keeps it from moving to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

TOLERANCE = 0.1  # a measure this near its target asks for no change


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's requests, those that wait included, and the share of its KV blocks that sequences hold."""

    requests: float
    kv_used: float


@dataclass(frozen=True, slots=True)
class ScalingTargets:
    """Averages to hold.

    Raises:
        ValueError: one is out of range.
    """

    requests: float = 8.0  # of a replica
    kv_used: float = 0.7

    def __post_init__(self) -> None:
        if not self.requests > 0:
            raise ValueError(f"requests is {self.requests}; accepted: more than 0 requests a replica.")
        if not 0 < self.kv_used <= 1:
            raise ValueError(f"kv_used is {self.kv_used}; accepted: a share above 0, up to 1.")


def desired_replicas(loads: Sequence[ReplicaLoad], current: int, least: int, most: int, targets: ScalingTargets) -> int:
    """Returns how many replicas there should be. Replicas that have not reported yet count as those that have."""
    if not loads:
        return max(least, min(most, current))
    by_requests = sum(each.requests for each in loads) / len(loads) / targets.requests
    by_memory = sum(each.kv_used for each in loads) / len(loads) / targets.kv_used
    ratio = max(by_requests, by_memory)
    wanted = current if abs(ratio - 1) <= TOLERANCE else math.ceil(current * ratio)
    return max(least, min(most, wanted))


def read_load(metrics: str) -> ReplicaLoad:
    """Reads a server's load from its `/metrics`."""
    requests, blocks = 0.0, dict[str, float]()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "ponder_backlog_answers":
                requests += sample.value
            elif sample.name == "ponder_kv_blocks":
                state = sample.labels["state"]
                blocks[state] = blocks.get(state, 0.0) + sample.value
    total = sum(blocks.values())
    return ReplicaLoad(requests, blocks.get("used", 0.0) / total if total else 0.0)
