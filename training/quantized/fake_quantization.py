"""Linears whose weights are rounded to codes with scales in each pass, as they are stored in the end.

The straight-through estimator (Bengio et al. 2013) passes gradients through the rounding as if it added a constant, so
weights within the codes' range learn, and so do scales (Esser et al. 2020, LSQ). Knows linears alone: nothing of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.quantization.quantized_weight import AffineWeight
from training.torch_model import Model

INSIDE = 0.25  # steps from its code at most that a weight begins, lest the noise of a few steps changes it


def straight_through(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns `rounding(x)`, with the gradient of x itself.

    The sum is exact: a number less its neighbour on a grid is a float (Sterbenz 1974).
    """
    return x + (rounding(x) - x).detach()


class FakeQuantizedLinear(nn.Module):
    """A linear without a bias, with the weight of symmetric codes that `affine` returns: (out, in).

    `weight` is learned in float32. It begins as near to `original` as it can with the codes of `start`. Scales are
    learned by the logarithm of their ratio to those of `start`, so they keep their signs, and rounded to `scale_dtype`.
    """

    start: Tensor

    def __init__(self, original: Tensor, start: AffineWeight, scale_dtype: torch.dtype) -> None:
        super().__init__()
        assert start.minimums is None, "codes are symmetric"
        self.bits, self.group, self.zero, self._scale_dtype = start.bits, start.group, start.zero, scale_dtype
        self.register_buffer("start", start.scales)  # (out, groups) float32, which `scale_dtype` has exactly
        self.log_scale = nn.Parameter(torch.zeros_like(start.scales))
        steps = original.float().unflatten(1, (-1, self.group)) / start.scales[..., None]
        codes = (start.codes.float() - start.zero).unflatten(1, (-1, self.group))
        nearest = (codes + (steps - codes).clamp(-INSIDE, INSIDE)) * start.scales[..., None]
        same = (steps - codes).abs() <= INSIDE
        self.weight = nn.Parameter(
            torch.where(same, original.float().unflatten(1, (-1, self.group)), nearest).flatten(1)
        )

    def scales(self) -> Tensor:
        """Returns the scales as they are stored, (out, groups) float32."""
        return straight_through(self.start * self.log_scale.exp(), lambda scales: scales.to(self._scale_dtype).float())

    def codes(self, scales: Tensor) -> Tensor:
        """Returns whole numbers about 0, (out, groups, group) float32."""
        steps = self.weight.unflatten(1, (-1, self.group)) / scales[..., None]
        return straight_through(steps.clamp(-self.zero, 2**self.bits - 1 - self.zero), torch.round)

    def quantized_weight(self) -> Tensor:
        """Returns the weight that codes and scales stand for, (out, in) float32."""
        scales = self.scales()
        return (self.codes(scales) * scales[..., None]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Takes (tokens, in), and returns (tokens, out)."""
        return F.linear(x, self.quantized_weight())

    @torch.no_grad()
    def affine(self) -> AffineWeight:
        """Returns codes and scales as they are stored."""
        scales = self.scales()
        codes = (self.codes(scales) + self.zero).flatten(1).to(torch.uint8)
        return AffineWeight(codes, scales, None, self.bits, self.group, self.zero)


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yields each linear of a model's layers with its name in a checkpoint, less ".weight"."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def fake_quantized(model: nn.Module) -> Iterator[tuple[str, FakeQuantizedLinear]]:
    """Yields each linear that is rounded, with its name."""
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantizedLinear):
            yield name, module


def quantize_linears(model: Model, starts: Mapping[str, AffineWeight], scale_dtype: torch.dtype) -> None:
    """Replaces every linear of the layers by one whose weight is rounded; nothing else learns from then on.

    `starts` has the first codes and scales by the linears' names. Raises KeyError: one is missing.
    """
    model.requires_grad_(False)
    for name, linear in list(linears(model)):
        parent, _, attribute = name.rpartition(".")
        rounded = FakeQuantizedLinear(linear.weight.detach(), starts[name], scale_dtype)
        setattr(model.get_submodule(parent), attribute, rounded)
