"""Shapes are timed, the fastest kept, and found again by the device's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.kernels import tune
from engine.kernels.gpu import tuned
from engine.kernels.tune import Shape, TuningProblem, fastest


def problem(
    takes: dict[Shape, float], ran: list[Shape]
) -> tuple[TuningProblem, Callable[[Callable[[], object]], float]]:
    """One whose candidates take so long; a negative time is a shape that does not fit."""

    def run(shape: Shape) -> None:
        ran.append(shape)
        if takes[shape] < 0:
            raise RuntimeError("out of resources")

    def milliseconds(launch: Callable[[], object]) -> float:
        launch()
        return takes[ran[-1]]

    return TuningProblem("some", (1, "two"), list(takes), lambda: run), milliseconds


def test_the_fastest_that_fits_is_chosen() -> None:
    ran: list[Shape] = []
    made, clock = problem({(1,): 2.0, (2,): -1.0, (3,): 1.5}, ran)
    best, took = fastest(made, (1,), clock)
    assert best == (3,) and took == {(1,): 2.0, (3,): 1.5}
    assert ran == [(1,), (2,), (3,)], "each once, the rule's first"


def test_the_rule_stays_where_nothing_is_clearly_faster() -> None:
    made, clock = problem({(1,): 1.0, (2,): 0.99}, [])
    assert fastest(made, (1,), clock)[0] == (1,)


def test_a_rule_that_does_not_fit_is_no_choice() -> None:
    made, clock = problem({(1,): -1.0, (2,): 3.0}, [])
    assert fastest(made, (1,), clock)[0] == (2,)


def test_what_a_user_tuned_counts_before_what_is_shipped(tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    tune._write(shipped / tuned.file_name("NVIDIA H200"), "NVIDIA H200", {"some 1": [1], "some 2": [2]})
    tune._write(own / tuned.file_name("nvidia-h200"), "NVIDIA H200", {"some 2": [3]})
    assert tuned.read("NVIDIA H200", (shipped, own)) == {"some 1": [1], "some 2": [3]}
    assert tuned.read("NVIDIA A100-SXM4-80GB", (shipped, own)) == {}
    told = json.loads((own / "nvidia-h200.json").read_text())
    assert told["torch"] == torch.__version__


def test_without_a_device_shapes_go_by_rule() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device, which may be tuned")
    assert tuned.shape("attention", (128, 16, 2), (16, 64, 4, 5)) == (16, 64, 4, 5)
    assert tune.main([]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("quantized", [False, True])
def test_attentions_problems_run(rows: int, quantized: bool, device: str) -> None:
    run = tune._attention(64, rows, quantized, device=device, context=320, count=2, kv_heads=1)
    wanted = run((rows, 64, 4, 3))
    found = run((rows, 32, 8, 2))
    assert isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)


def test_the_products_of_one_token_run(device: str) -> None:
    run = tune._one(24, 100, True, device=device)
    wanted, found = run((4, 128, 4, 1)), run((8, 64, 2, 1))
    assert isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.5)
