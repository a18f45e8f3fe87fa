"""Routing of requests among replicas, by their states alone.

`least_loaded` and `prefix_aware` are functions of the replicas as they are now. The latter sends a prompt to where most
of it is cached, unless that replica has much more to do than another (cache-aware routing of SGLang's router; Zheng et
al. 2024). Knows nothing of the replicas but `ReplicaState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Literal, Protocol, get_args

RouterName = Literal["round-robin", "random", "least-loaded", "prefix-aware"]
ROUTERS: tuple[RouterName, ...] = get_args(RouterName)
MIN_CACHED = 0.25  # of a prompt's blocks, below which its place does not matter
MAX_DIFFERENCE, MAX_RATIO = 32, 1.5  # of requests: beyond both, replicas are out of balance


class ReplicaState(Protocol):
    """The state of a replica that a choice goes by."""

    @property
    def requests(self) -> int:
        """Counts the requests that run or wait."""
        ...

    @property
    def unread_tokens(self) -> int:
        """Counts the tokens of prompts whose answers have not begun."""
        ...

    def cached_blocks(self, digests: Sequence[bytes]) -> int:
        """Counts the blocks of a prompt, by their chained digests, that the replica has cached."""
        ...


class Router(Protocol):
    """Chooses a replica."""

    by_state: bool  # whether a choice depends on the replicas' states

    def choose(self, replicas: Sequence[ReplicaState], digests: Sequence[bytes]) -> int: ...


def least_loaded(replicas: Sequence[ReplicaState]) -> int:
    """Returns the replica with the fewest requests; of these, the one with the fewest unread tokens, or the first."""
    return min(range(len(replicas)), key=lambda at: (replicas[at].requests, replicas[at].unread_tokens))


def prefix_aware(replicas: Sequence[ReplicaState], digests: Sequence[bytes]) -> int:
    """Returns the replica with most of a prompt's blocks, the least loaded of equals. Where the replicas are out of
    balance, or none has `MIN_CACHED` of the prompt, the least loaded one."""
    loads = [each.requests for each in replicas]
    if max(loads) - min(loads) > MAX_DIFFERENCE and max(loads) > MAX_RATIO * min(loads):
        return least_loaded(replicas)
    cached = [each.cached_blocks(digests) for each in replicas]
    best = max(cached)
    if not digests or best < MIN_CACHED * len(digests):
        return least_loaded(replicas)
    holders = [at for at, blocks in enumerate(cached) if blocks == best]
    return holders[least_loaded([replicas[at] for at in holders])]


class RoundRobin:
    by_state = False

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, replicas: Sequence[ReplicaState], digests: Sequence[bytes]) -> int:
        return next(self._turns) % len(replicas)


class RandomChoice:
    by_state = False

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, replicas: Sequence[ReplicaState], digests: Sequence[bytes]) -> int:
        return self._random.randrange(len(replicas))


class LeastLoaded:
    by_state = True

    def choose(self, replicas: Sequence[ReplicaState], digests: Sequence[bytes]) -> int:
        return least_loaded(replicas)


class PrefixAware:
    by_state = True

    def choose(self, replicas: Sequence[ReplicaState], digests: Sequence[bytes]) -> int:
        return prefix_aware(replicas, digests)


def router_of(name: RouterName, seed: int) -> Router:
    """Builds a router by its name; `seed` is for `random`."""
    match name:
        case "round-robin":
            return RoundRobin()
        case "random":
            return RandomChoice(seed)
        case "least-loaded":
            return LeastLoaded()
        case "prefix-aware":
            return PrefixAware()
