"""Rounding of a linear layer's weight to codes: to the nearest, and by GPTQ (Frantar et al. 2022).

Both give the same form: symmetric codes, a scale for each group of columns, in the dtype that it is stored in. Knows
weights and the second moments of their inputs; nothing of models or files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.quantization.quantized_weight import AffineWeight, round_to_nearest

BLOCK = 128  # columns whose errors reach the rest at once; a group lies within one, or is the whole row
DAMPING = 0.01  # of the mean second moment, added to all of them


def nearest(weight: Tensor, bits: int, group: int, scale_dtype: torch.dtype) -> AffineWeight:
    """Rounds `weight` (out, in) to the nearest codes, with scales that `scale_dtype` has exactly."""
    return _coded(weight, _scales(weight, bits, group, scale_dtype), bits, group)


def gptq(
    weight: Tensor, hessian: Tensor, bits: int, group: int, scale_dtype: torch.dtype, *, act_order: bool = False
) -> AffineWeight:
    """Rounds `weight` (out, in) column by column, each column's error made up for by those not rounded yet.

    `hessian` (in, in) float64 is proportional to the inputs' second moments. A group's scale is that of its columns
    when the first one's turn comes. With `act_order`, columns with the largest moments come first, and scales are those
    of the weights as they were, so that columns of a group stay together as stored.
    """
    out, width = weight.shape
    work, hessian = weight.double(), hessian.clone()
    unused = hessian.diagonal() == 0  # inputs that are always 0: any weight does
    hessian.diagonal()[unused] = 1.0
    work[:, unused] = 0.0
    fixed = act_order or group == width
    scales = _scales(work, bits, group, scale_dtype) if fixed else torch.empty(out, width // group)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(width)
    work, upper = work[:, order], _inverse_factor(hessian[order][:, order])
    codes = torch.empty(out, width, dtype=torch.uint8)
    zero = 2 ** (bits - 1)
    for first in range(0, width, BLOCK):
        last = min(first + BLOCK, width)
        errors = torch.empty(out, last - first, dtype=torch.float64)
        for column in range(first, last):
            number = int(order[column]) // group
            if not fixed and column % group == 0:
                scales[:, number] = _scales(work[:, column : column + group], bits, group, scale_dtype)[:, 0]
            value, scale = work[:, column], scales[:, number].double()
            code = (value / scale).round().clamp(-zero, zero - 1)
            error = (value - code * scale) / upper[column, column]
            work[:, column + 1 : last] -= torch.outer(error, upper[column, column + 1 : last])
            codes[:, order[column]] = (code + zero).to(torch.uint8)
            errors[:, column - first] = error
        work[:, last:] -= errors @ upper[first:last, last:]
    return AffineWeight(codes, scales, None, bits, group, zero)


def _scales(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    """Returns the scales that `round_to_nearest` gives, as `dtype` has them: (out, groups) float32."""
    rounded = round_to_nearest(weight, bits, group, symmetric=True).scales
    stored = rounded.to(dtype)
    return torch.where(stored == 0, torch.finfo(dtype).tiny, stored).float()  # of a group that is all zeros


def _coded(weight: Tensor, scales: Tensor, bits: int, group: int) -> AffineWeight:
    zero = 2 ** (bits - 1)
    steps = (weight.double().unflatten(1, (-1, group)) / scales.double()[..., None]).flatten(1).round_()
    codes = steps.clamp_(-zero, zero - 1).add_(zero).to(torch.uint8)
    return AffineWeight(codes, scales, None, bits, group, zero)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the damped inverse: (in, in) float64."""
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True)
