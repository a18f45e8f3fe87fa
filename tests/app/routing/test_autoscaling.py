"""Autoscaling: the larger of what waiting requests and K/V memory ask for, within bounds."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.autoscaling import ReplicaLoad, ScalingTargets, desired_replicas, read_load
from tests.app.conftest import Server

TARGETS = ScalingTargets(requests=4, kv_used=0.5)
LOADS = st.lists(st.builds(ReplicaLoad, st.floats(0, 100), st.floats(0, 1)), max_size=5)


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (ReplicaLoad(8, 0.1), 4),  # twice the requests
        (ReplicaLoad(1, 1.0), 4),  # twice the memory
        (ReplicaLoad(4.2, 0.5), 2),  # near both targets
        (ReplicaLoad(1, 0.1), 1),
        (ReplicaLoad(0, 0.0), 1),
        (ReplicaLoad(100, 1.0), 6),
    ],
)
def test_two_replicas_become_as_many_as_hold_both_averages(load: ReplicaLoad, wanted: int) -> None:
    assert desired_replicas([load, load], 2, 1, 6, TARGETS) == wanted


def test_nothing_reported_is_no_reason_to_change() -> None:
    assert desired_replicas([], 3, 1, 6, TARGETS) == 3


@given(LOADS, st.integers(1, 5), st.integers(1, 3), st.integers(3, 8))
def test_the_bounds_are_kept(loads: list[ReplicaLoad], current: int, least: int, most: int) -> None:
    assert least <= desired_replicas(loads, current, least, most, TARGETS) <= most


@given(LOADS.filter(bool), st.integers(1, 5))
def test_more_load_never_asks_for_fewer(loads: list[ReplicaLoad], current: int) -> None:
    more = [ReplicaLoad(each.requests * 2, min(1.0, each.kv_used * 2)) for each in loads]
    assert desired_replicas(more, current, 1, 9, TARGETS) >= desired_replicas(loads, current, 1, 9, TARGETS)


def test_targets_that_cannot_be_held_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_used is 2"):
        ScalingTargets(kv_used=2)
    with pytest.raises(ValueError, match="requests is 0"):
        ScalingTargets(requests=0)


def test_a_servers_load_is_read_from_its_metrics(server: Server) -> None:
    idle = read_load(httpx.get(f"{server.url}/metrics").text)
    body = {
        "model": "default", "messages": [{"role": "user", "content": "hi " * 200}], "stream": True, "max_tokens": 500,
        "chat_template_kwargs": {"forever": True},
    }  # fmt: skip
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.until(lambda stats: stats.running == 1 and stats.blocks_used > 10)
        busy = read_load(httpx.get(f"{server.url}/metrics").text)
    assert (idle.requests, busy.requests) == (0, 1) and 0 < busy.kv_used < 1 and busy.kv_used > idle.kv_used
