"""Costs of steps: fits find what made the steps, rooflines what the device's peaks allow."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from app.simulation.cost_model import (
    LLAMA_3_8B,
    PRESETS,
    CostError,
    LinearCost,
    ResampledCost,
    RooflineCost,
    SimulatedDevice,
    StepLoad,
    StepVariation,
    device_json,
    fit,
    fit_held_out,
    load_device,
    variation_of,
)

COST = LinearCost(0.004, 2e-4, 1e-4, 3e-8, 2e-9)


def made_up(count: int, cost: LinearCost, noise: float = 0.0, disturbed: float = 0.0) -> list[tuple[StepLoad, float]]:
    rng, samples = Random(5), list[tuple[StepLoad, float]]()
    for _ in range(count):
        prefill, decodes = rng.choice((0, rng.randint(2, 512))), rng.randint(1, 64)
        load = StepLoad(prefill, decodes, decodes * rng.randint(10, 4000), prefill * rng.randint(1, 4000))
        seconds = cost.seconds(load) * (1 + rng.uniform(-noise, noise))
        samples.append((load, seconds * (5 if rng.random() < disturbed else 1)))
    return samples


def test_a_fit_finds_the_cost_that_made_the_steps() -> None:
    found = fit(made_up(400, COST))
    for name, value in asdict(COST).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6)


def test_a_part_that_costs_nothing_is_never_negative() -> None:
    free = LinearCost(0.004, 2e-4, 0.0, 3e-8, 0.0)
    found = fit(made_up(400, free, noise=0.2))
    assert min(asdict(found).values()) >= 0
    assert found.prefill_token == pytest.approx(2e-4, rel=0.1)


def test_disturbed_steps_are_left_out() -> None:
    samples = made_up(600, COST, noise=0.02, disturbed=0.1)
    fitted = fit_held_out(samples)
    assert fitted.steps + fitted.held_out_steps == 600
    assert fitted.cost.step == pytest.approx(COST.step, rel=0.05)
    assert fitted.median_error < 0.02
    assert fitted.total_error < -0.1  # the held-out steps that were disturbed took longer


def test_a_fit_wants_as_many_steps_as_it_has_parts() -> None:
    with pytest.raises(ValueError, match=r"4 steps; accepted: at least 5"):
        fit(made_up(4, COST))


def test_a_decode_is_bound_by_memory_and_a_prefill_by_computing() -> None:
    cost = PRESETS["h200"]
    one = cost.seconds(StepLoad(0, 1, 2048, 0))
    assert one == pytest.approx((16.06e9 + 131_072 * 2049) / 4.8e12, rel=1e-3)
    twice = RooflineCost(LLAMA_3_8B, 2 * 989e12, 4.8e12)
    prefill = StepLoad(8192, 0, 0, 8192 * 8193 // 2)
    assert twice.seconds(StepLoad(0, 1, 2048, 0)) == one
    assert twice.seconds(prefill) == pytest.approx(cost.seconds(prefill) / 2)


@pytest.mark.parametrize(
    ("load", "measured_s"),
    [
        (StepLoad(8192, 0, 0, 8192 * 8193 // 2), 0.2252), (StepLoad(0, 1, 2048, 0), 0.00468),
        (StepLoad(0, 256, 256 * 1024, 0), 0.01653),
    ],
)  # fmt: skip
def test_the_measured_preset_is_near_what_was_measured(load: StepLoad, measured_s: float) -> None:
    assert PRESETS["h200-measured"].seconds(load) - PRESETS["h200-measured"].step_s == pytest.approx(
        measured_s, rel=0.2
    )
    assert PRESETS["h200"].seconds(load) < measured_s  # no device is faster than its roofline


VARIATION = StepVariation((0.005,), ((1.0, 1.1), (0.9, 2.0)))
DEVICE = SimulatedDevice("here", COST, 32_768, 512, 4096)


def test_a_device_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(device_json(DEVICE)))
    assert load_device(str(path)) == replace(DEVICE, name=str(path))


def test_steps_vary_as_those_that_were_measured() -> None:
    """Short steps differ by other ratios than long ones; means and high percentiles are those of the samples."""
    random, cost = Random(1), LinearCost(0.004, 2e-4, 0.0, 0.0, 0.0)
    loads = [StepLoad(random.choice((0, 400)), 1, 100, 0) for _ in range(20_000)]
    samples = [(load, cost.seconds(load) * random.uniform(*((1, 3) if load[0] else (0.9, 1.1)))) for load in loads]
    varied = ResampledCost(cost, variation_of(samples, cost), seed=7)
    drawn = [varied.seconds(load) for load in loads]
    for tokens in (0, 400):
        was, now = (
            np.array([each for load, each in zip(loads, of, strict=True) if load[0] == tokens])
            for of in ([seconds for _, seconds in samples], drawn)
        )
        assert now.mean() == pytest.approx(was.mean(), rel=0.01)
        for percent in (1, 50, 99):
            assert np.percentile(now, percent) == pytest.approx(np.percentile(was, percent), rel=0.02)
    again = ResampledCost(cost, varied.variation, seed=7)
    assert [again.seconds(load) for load in loads[:50]] == drawn[:50]
    assert drawn[:50] != [ResampledCost(cost, varied.variation, seed=8).seconds(load) for load in loads[:50]]


def test_a_device_whose_steps_vary_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    device = replace(DEVICE, cost=ResampledCost(COST, VARIATION))
    path.write_text(json.dumps(device_json(device)))
    assert load_device(str(path)) == replace(device, name=str(path))
    assert load_device(str(path), seed=3) == replace(device, name=str(path), cost=ResampledCost(COST, VARIATION, 3))


def test_a_preset_has_the_devices_memory_but_for_the_weights() -> None:
    device = load_device("h200")
    assert device.kv_tokens * LLAMA_3_8B.kv_bytes == pytest.approx(0.92 * 141e9 - 16.06e9, rel=1e-3)
    with pytest.raises(ValueError, match="RooflineCost"):
        device_json(device)


@pytest.mark.parametrize(
    "change",
    [None, {"cost": {"step": 1}}, {"cost": {**asdict(COST), "step": -1}}, {"cost": dict.fromkeys(asdict(COST), 0)},
     {"kv_tokens": 0}, {"max_batch_tokens": "many"}, {"variation": {"edges": [1.0], "ratios": [[1.0]]}},
     {"variation": {"edges": [2.0, 1.0], "ratios": [[1.0]] * 3}}, {"variation": {"edges": [], "ratios": [[0.0]]}},
     {"variation": {"edges": []}}],
)  # fmt: skip
def test_a_file_without_costs_is_refused(tmp_path: Path, change: dict[str, object] | None) -> None:
    path = tmp_path / "cost.json"
    path.write_text("" if change is None else json.dumps({**device_json(DEVICE), **change}))
    with pytest.raises(CostError, match="accepted: "):
        load_device(str(path))
    with pytest.raises(CostError, match="h300 is no cost .*accepted: h200, h200-measured, or a JSON file"):
        load_device("h300")
