"""The simulator's benchmark: steps are recorded as they ran, and workloads keep what they share."""

from __future__ import annotations

import pytest

from bench.load.drive import drive
from bench.load.workload import TraceRequest
from bench.simulation.recorder import recorded
from bench.simulation.validation import as_recorded, errors

pytestmark = pytest.mark.slow


async def test_every_step_is_recorded_with_what_it_had() -> None:
    prompt, other = tuple(range(1000, 1100)), tuple(range(2000, 2050))
    async with recorded(kv_blocks=256) as (engine, recorder):
        before = (await engine.stats()).steps
        await drive(engine, [TraceRequest(0.0, prompt, 12), TraceRequest(0.0, other, 7)])
        after = await engine.stats()
    samples = recorder.samples
    assert len(samples) == after.steps - before
    assert sum(load.prefill_tokens for load, _ in samples) == 150
    assert sum(load.pairs for load, _ in samples) == 100 * 101 // 2 + 50 * 51 // 2
    assert sum(load.decodes for load, _ in samples) == 11 + 6
    assert sum(load.context for load, _ in samples) == sum(range(101, 112)) + sum(range(51, 57))
    assert all(0 < seconds < 60 for _, seconds in samples)


def test_a_workload_shares_the_same_blocks_in_the_simulator() -> None:
    first, second, third = as_recorded(
        [TraceRequest(0.0, tuple(range(40)), 3, "a"), TraceRequest(1.0, (*range(40), 7), 4, "a", 2),
         TraceRequest(2.0, tuple(range(40)), 3, "b")]
    )  # fmt: skip
    assert first.digests(16) == second.digests(16) and len(first.digests(16)) == 2
    assert first.tail != second.tail  # their last blocks differ
    assert not set(first.digests(16)) & set(third.digests(16))
    assert (second.at, second.output_tokens, second.priority) == (1.0, 4, 2)


def test_errors_are_relative_and_held_to_the_goal() -> None:
    real = {"ttft_s": {"p50": 1.0, "p99": 2.0}, "itl_s": {"p50": 0.1, "p99": 0.2}}
    near = {"ttft_s": {"p50": 1.05, "p99": 1.9}, "itl_s": {"p50": 0.1, "p99": 0.21}}
    assert errors(real, near)["within"] and errors(real, near)["ttft_s p99"] == pytest.approx(-0.05)
    assert not errors(real, {**near, "ttft_s": {"p50": 1.2, "p99": 2.0}})["within"]
