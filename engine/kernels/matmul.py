"""A batch-invariant matrix product: each row has the same bits with any other rows.

Libraries choose a kernel, and so the order of a sum, by the number of rows. Here tiles and order are the weight's alone
(He et al. 2025, on batch invariance): each number is summed over one tile of columns after the other by one program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Invariant:
    """x -> x @ weight.T + bias, for `weight` (out, in) and `bias` (out,) of 16 bits on one device."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        run = multiply_triton if self.weight.is_cuda else multiply_torch
        return run(x, self.weight, self.bias)


def multiply_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The torch reference, summed in float64: (tokens, in) and (out, in) -> (tokens, out) of x's type."""
    total = x.double() @ weight.double().T
    return (total if bias is None else total + bias.double()).to(x.dtype)


def multiply_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The kernel. See `multiply_torch`."""
    from engine.kernels.gpu.matmul import multiply_kernel, shape_for

    (tokens, width), rows = x.shape, len(weight)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if tokens:
        shape = shape_for(rows, width)
        multiply_kernel[-(-tokens // shape.tokens), -(-rows // shape.rows)](
            x,
            weight,
            bias,
            out,
            tokens,
            rows,
            width,
            x.stride(0),
            weight.stride(0),
            block_tokens=shape.tokens,
            block_rows=shape.rows,
            block_width=shape.width,
            whole=width % shape.width == 0,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
    return out
