"""Routing policies: pure functions of what is known of the replicas and of a prompt. Each returns a replica's name.

Knows nothing of HTTP or events. `turn` numbers the requests: whatever a policy would remember follows from it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LOAD_FACTOR = (
    1.25  # a replica's share of the requests in flight, times the average (bounded loads, Mirrokni et al. 2018)
)

PolicyName = Literal["prefix_aware", "least_loaded", "round_robin", "random"]


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica that takes requests. `cached_blocks` are all that it holds, of any prompt."""

    name: str
    in_flight: int = 0  # requests
    cached_blocks: int = 0


Policy = Callable[[Sequence[ReplicaState], Mapping[str, int], int], str]


def _least(replicas: Sequence[ReplicaState]) -> ReplicaState:
    return min(replicas, key=lambda each: (each.in_flight, each.cached_blocks, each.name))


def round_robin(replicas: Sequence[ReplicaState], matched: Mapping[str, int], turn: int) -> str:
    """Takes the replicas in turn."""
    return replicas[turn % len(replicas)].name


def pick_random(replicas: Sequence[ReplicaState], matched: Mapping[str, int], turn: int) -> str:
    """Takes any replica, the same one for the same turn."""
    return replicas[random.Random(turn).randrange(len(replicas))].name


def least_loaded(replicas: Sequence[ReplicaState], matched: Mapping[str, int], turn: int) -> str:
    """Takes the replica with the fewest requests in flight, then with the fewest cached blocks."""
    return _least(replicas).name


def load_cap(replicas: Sequence[ReplicaState]) -> int:
    """Returns the requests in flight that a replica may have with one more: its share of all, times `LOAD_FACTOR`. One
    request more than the average is always allowed, as a few cannot be shared evenly."""
    average = (1 + sum(each.in_flight for each in replicas)) / len(replicas)
    return max(math.ceil(LOAD_FACTOR * average), math.ceil(average) + 1)


def prefix_aware(replicas: Sequence[ReplicaState], matched: Mapping[str, int], turn: int) -> str:
    """Takes the replica that has most of the prompt cached, of those below the load cap; of equals the least loaded.

    `matched` has the leading blocks of the prompt that each replica has; none for one that is missing.
    """
    cap = load_cap(replicas)
    below = [each for each in replicas if each.in_flight < cap] or list(replicas)
    most = max(matched.get(each.name, 0) for each in below)
    return _least([each for each in below if matched.get(each.name, 0) == most]).name


POLICIES: dict[PolicyName, Policy] = {
    "prefix_aware": prefix_aware,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "random": pick_random,
}
