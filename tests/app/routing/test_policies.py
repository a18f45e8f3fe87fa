"""Routing policies: where a prefix is, below the cap; else where there is least to do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.policies import LOAD_FACTOR, POLICIES, PolicyName, ReplicaState, load_cap, prefix_aware

LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def states(*loads: int) -> list[ReplicaState]:
    return [ReplicaState(f"r{at}", load) for at, load in enumerate(loads)]


def test_the_longest_prefix_wins_and_of_equals_the_least_loaded() -> None:
    assert prefix_aware(states(1, 0, 0), {"r0": 3, "r1": 2}, 0) == "r0"
    assert prefix_aware(states(1, 0, 0), {"r0": 3, "r2": 3}, 0) == "r2"
    assert prefix_aware(states(1, 0, 1), {}, 0) == "r1"


def test_new_prompts_spread_over_replicas_by_what_they_hold() -> None:
    replicas = [ReplicaState("a", 0, 50), ReplicaState("b", 0, 20), ReplicaState("c", 0, 30)]
    assert prefix_aware(replicas, {}, 0) == "b"


def test_a_replica_at_its_cap_is_passed_over_for_the_next_longest_prefix() -> None:
    assert prefix_aware(states(9, 1, 0), {"r0": 100, "r1": 2}, 0) == "r1"


@given(LOADS, st.dictionaries(st.sampled_from(["r0", "r1", "r2"]), st.integers(0, 9)), st.integers(0, 99))
def test_no_replica_goes_beyond_the_cap(loads: list[int], matched: dict[str, int], turn: int) -> None:
    replicas = states(*loads)
    chosen = next(each for each in replicas if each.name == prefix_aware(replicas, matched, turn))
    average = (sum(loads) + 1) / len(loads)
    assert chosen.in_flight + 1 <= max(LOAD_FACTOR * average + 1, average + 2)
    assert chosen.in_flight < load_cap(replicas)


@pytest.mark.parametrize("policy", ["round_robin", "random"])
def test_the_blind_policies_use_all_replicas_about_alike(policy: PolicyName) -> None:
    counts = Counter(POLICIES[policy](states(0, 0, 0), {"r0": 5}, turn) for turn in range(600))
    assert set(counts) == {"r0", "r1", "r2"} and min(counts.values()) > 150


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_a_function_of_its_arguments(policy: PolicyName) -> None:
    replicas = states(4, 2, 3)
    assert len({POLICIES[policy](replicas, {"r1": 1}, 7) for _ in range(20)}) == 1


def test_least_loaded_looks_at_requests_first() -> None:
    replicas = [ReplicaState("a", 2, 0), ReplicaState("b", 1, 99), ReplicaState("c", 1, 50)]
    assert POLICIES["least_loaded"](replicas, {"a": 9}, 0) == "c"
