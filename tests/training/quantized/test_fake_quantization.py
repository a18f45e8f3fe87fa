"""Rounded linears: their values against the stored form, their gradients against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.quantization.gptq import nearest
from engine.model.quantization.quantized_weight import AffineWeight
from training.quantized.fake_quantization import FakeQuantizedLinear, straight_through

OUT, IN, GROUP = 6, 64, 32


def random_start(seed: int = 0) -> AffineWeight:
    """Returns codes over all of their range, and scales of both signs that bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (OUT, IN), generator=generator).to(torch.uint8)
    scales = torch.randn(OUT, IN // GROUP, generator=generator).bfloat16().float()
    return AffineWeight(codes, scales, None, 4, GROUP, 8)


def moved_linear() -> FakeQuantizedLinear:
    """Returns a linear whose scales are moved from their start, and whose weights lie inside and outside of the range
    of codes, none within 1% of a step of where rounding or clipping changes."""
    torch.manual_seed(1)
    linear = FakeQuantizedLinear(torch.randn(OUT, IN), random_start(), torch.bfloat16)
    with torch.no_grad():
        linear.log_scale.uniform_(-0.2, 0.2)
        steps = torch.rand(OUT, IN // GROUP, GROUP) * 24 - 12
        steps = steps.round() + (steps - steps.round()).clamp(-0.48, 0.48)
        steps[..., 0], steps[..., 1] = -8.3, 7.3
        linear.weight.copy_((steps * linear.scales()[..., None]).flatten(1))
    return linear


@pytest.mark.parametrize("start", ["nearest", "others"])
def test_a_linear_begins_as_the_stored_weight_near_the_original(start: str) -> None:
    torch.manual_seed(0)
    original = torch.randn(OUT, IN).bfloat16().float()
    affine = nearest(original, 4, GROUP, torch.bfloat16) if start == "nearest" else random_start()
    linear = FakeQuantizedLinear(original, affine, torch.bfloat16)
    assert torch.equal(linear.quantized_weight(), affine.dequantize())
    x = torch.randn(3, IN)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, affine.dequantize()))
    steps = original.unflatten(1, (-1, GROUP)) / affine.scales[..., None]
    away = (steps - (affine.codes.float() - 8).unflatten(1, (-1, GROUP))).abs().flatten(1)
    kept = linear.weight == original
    assert torch.equal(kept, away <= 0.25), "an original near its code stays as it is"
    if start == "nearest":
        assert kept.float().mean() > 0.4
    nearer = (linear.weight - original).abs() < (affine.dequantize() - original).abs()
    assert bool(nearer[~kept].all())


def test_what_is_stored_is_what_is_computed() -> None:
    linear = moved_linear()
    affine = linear.affine()
    assert torch.equal(affine.dequantize(), linear.quantized_weight())
    assert torch.equal(affine.scales.bfloat16().float(), affine.scales)
    assert not torch.equal(affine.scales, linear.start)
    assert int(affine.codes.min()) == 0 and int(affine.codes.max()) == 15


def test_rounding_passes_gradients_and_adds_no_error() -> None:
    x = (torch.randn(100_000) * 5).requires_grad_()
    found = straight_through(x, torch.round)
    assert torch.equal(found, x.round())
    found.sum().backward()
    assert x.grad is not None and bool((x.grad == 1).all())


def test_gradients_are_those_of_the_unrounded_function() -> None:
    """The function without rounding, in float64: what rounding added to steps and to scales is a constant."""
    linear = moved_linear()
    upstream = torch.randn(OUT, IN)
    (linear.quantized_weight() * upstream).sum().backward()
    start = linear.start.double()
    weight, log_scale = linear.weight.detach().double(), linear.log_scale.detach().double()

    def grouped(weight: Tensor) -> Tensor:
        return weight.unflatten(1, (-1, GROUP))

    def steps(weight: Tensor, scales: Tensor) -> Tensor:
        return (grouped(weight) / scales[..., None]).clamp(-8, 7)

    of_scales = (start * log_scale.exp()).bfloat16().double() - start * log_scale.exp()
    scales = start * log_scale.exp() + of_scales
    of_steps = steps(weight, scales).round() - steps(weight, scales)
    assert bool((of_scales != 0).any()) and bool((of_steps != 0).any())

    def unrounded(weight: Tensor, log_scale: Tensor) -> Tensor:
        scales = start * log_scale.exp() + of_scales
        return ((steps(weight, scales) + of_steps) * scales[..., None] * grouped(upstream.double())).sum()

    def differences(of: Tensor, value: Tensor) -> Tensor:
        found = torch.empty_like(of)
        for at in range(of.numel()):
            change = torch.zeros_like(of)
            change.view(-1)[at] = 1e-6
            pairs = [(weight + sign * change, log_scale) if of is weight else (weight, log_scale + sign * change)
                     for sign in (1, -1)]  # fmt: skip
            above, below = (unrounded(*each) for each in pairs)
            found.view(-1)[at] = (above - below) / 2e-6
        torch.testing.assert_close(value.double(), found, rtol=1e-3, atol=1e-4)
        return found

    assert linear.weight.grad is not None and linear.log_scale.grad is not None
    of_weight = differences(weight, linear.weight.grad)
    assert bool((of_weight == 0).any()) and bool((of_weight != 0).any()), "weights out of range stay"
    differences(log_scale, linear.log_scale.grad)
