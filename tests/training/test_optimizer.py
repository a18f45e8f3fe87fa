"""The recipes: the optimizer, the schedule, and models that are small enough to commit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.training.conftest import TINY
from training import mixture, plans
from training.alignment import ROLES
from training.torch_model import Model
from training.trainer import Optimizer, orthogonalise, wsd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 16, 16), (1, 8, 24), (3, 24, 8)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = orthogonalise(torch.randn(shape), dtype=dtype)
    values = torch.linalg.svdvals(made)
    assert made.dtype == torch.float32
    assert values.min() > 0.3 and values.max() < 1.5


def test_the_rate_warms_up_stays_and_falls_to_nothing() -> None:
    shares = [wsd(step / 100) for step in range(101)]
    assert shares[0] < 0.1
    assert shares[10] == shares[59] == 1.0
    assert 0.4 < shares[80] < 0.6
    assert shares[100] == 0.0


def test_it_learns_to_repeat_a_sequence() -> None:
    torch.manual_seed(0)
    model = Model(TINY)
    optimizer = Optimizer(model)
    tokens = torch.randint(0, TINY.vocab_size, (4, 12), dtype=torch.int32)
    batch = mixture.stacked(tokens.numpy(), np.ones((4, 12), np.float32), np.full((len(ROLES), 4, 12, 2), -1, np.int32))
    losses: list[float] = []
    for _ in range(60):
        loss = model.loss([batch])[0] / 44
        loss.backward()
        optimizer.step(1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_models_of_a_device_fit_their_limits_in_bfloat16(device: str) -> None:
    sizes: dict[plans.Name, int] = {}
    names: tuple[plans.Name, ...] = ("pebble", "pebble-draft")
    for name in names:
        with torch.device("meta"):
            model = Model(plans.plan(name, device).model)
        sizes[name] = 2 * sum(weight.numel() for weight in model.parameters())
    assert sizes["pebble"] <= 40e6
    assert sum(sizes.values()) <= 44e6  # and a megabyte for tokenizers and cards
