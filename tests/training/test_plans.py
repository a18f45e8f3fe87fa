"""The recipes: their models are small enough to commit."""

import pytest
import torch

from training import plans
from training.torch_model import Model


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
