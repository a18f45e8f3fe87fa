"""Weights as integers with scales: the form between readers of quantised checkpoints and kernels.

Knows no file format and no kernel. Kernels pack it into a layout of their own and drop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MIN_SCALE = 1e-30  # of a group that is all zeros
_ROWS = 8192  # rounded at once: a whole vocabulary in float32 would take several times its memory


@dataclass(frozen=True, slots=True)
class AffineWeight:
    """The weight scale * (code - zero) + minimum of a linear layer (out, in).

    `group` columns share a scale: 16, 32, 64, 128, or `in` for a scale a row.
    """

    codes: Tensor  # (out, in) uint8, unpacked codes 0..2**bits-1
    scales: Tensor  # (out, in // group) float32
    minimums: Tensor | None  # (out, in // group) float32
    bits: int  # 4 or 8
    group: int  # columns of a scale
    zero: int  # the code that stands for 0, before the minimum

    @classmethod
    def joined(cls, parts: Sequence[AffineWeight]) -> AffineWeight | None:
        """Returns the rows of all parts one below the other; None where they have not one form."""
        if len({(each.bits, each.group, each.zero, each.minimums is None) for each in parts}) > 1:
            return None
        minimums = [each.minimums for each in parts if each.minimums is not None]
        return replace(
            parts[0],
            codes=torch.cat([each.codes for each in parts]),
            scales=torch.cat([each.scales for each in parts]),
            minimums=torch.cat(minimums) if minimums else None,
        )

    def rows(self, order: Tensor) -> AffineWeight:
        """Returns the weight with its rows in another order, (out,) int64."""
        minimums = None if self.minimums is None else self.minimums[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], minimums=minimums)

    def dequantize(self) -> Tensor:
        """Returns the weight, (out, in) float32."""
        values = (self.codes.float() - self.zero).unflatten(1, (-1, self.group)) * self.scales[..., None]
        if self.minimums is not None:
            values += self.minimums[..., None]
        return values.flatten(1)


def round_to_nearest(weight: Tensor, bits: int, group: int, symmetric: bool) -> AffineWeight:
    """Rounds `weight` (out, in) to codes of `bits` with a scale for each `group` columns, which divide `in`.

    Symmetric: the value of the largest magnitude in a group becomes the lowest code of 4 bits, -8 about zero, as one
    side then has the eighth step; of 8 bits, plus or minus 127. Otherwise codes run from the group's minimum to its
    maximum.
    """
    out, width = weight.shape
    highest = 2**bits - 1
    zero = 2 ** (bits - 1) if symmetric else 0
    codes = torch.empty(out, width, dtype=torch.uint8)
    scales = torch.empty(out, width // group)
    minimums = None if symmetric else torch.empty(out, width // group)
    for first in range(0, out, _ROWS):
        rows = slice(first, min(first + _ROWS, out))
        values = weight[rows].float().unflatten(1, (-1, group))
        if minimums is not None:
            low = values.amin(-1)
            scale = ((values.amax(-1) - low) / highest).clamp_(min=MIN_SCALE)
            minimums[rows] = low
            values = values - low[..., None]
        elif bits == 4:
            extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True)).squeeze(-1)
            scale = torch.where(extreme.abs() < MIN_SCALE, MIN_SCALE, extreme / -zero)
        else:
            scale = (values.abs().amax(-1) / (zero - 1)).clamp_(min=MIN_SCALE)
        scales[rows] = scale
        whole = (values / scale[..., None]).round_().add_(zero).clamp_(0, highest)
        codes[rows] = whole.flatten(1).to(torch.uint8)
    return AffineWeight(codes, scales, minimums, bits, group, zero)
