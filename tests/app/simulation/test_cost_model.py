"""Costs of steps: fits find what made the steps, rooflines what the device's peaks allow."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from app.simulation.cost_model import (
    LLAMA_3_8B,
    PRESETS,
    CostError,
    LinearCost,
    RooflineCost,
    StepLoad,
    cost_json,
    fit,
    fit_held_out,
    load_cost,
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
    for name, value in cost_json(COST).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6)


def test_a_part_that_costs_nothing_is_never_negative() -> None:
    free = LinearCost(0.004, 2e-4, 0.0, 3e-8, 0.0)
    found = fit(made_up(400, free, noise=0.2))
    assert min(cost_json(found).values()) >= 0
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


def test_costs_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"cost": cost_json(COST)}))
    assert load_cost(path) == COST


@pytest.mark.parametrize(
    "text", ["", "{}", '{"cost": {"step": 1}}', json.dumps({"cost": {**cost_json(COST), "step": -1}}),
             json.dumps({"cost": dict.fromkeys(cost_json(COST), 0)})]
)  # fmt: skip
def test_a_file_without_costs_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(CostError, match="accepted: "):
        load_cost(path)
