"""A linear layer of one token, fused with the operations before and after it in one pass over the weight.

A decode of one sequence waits for the weights alone, and every kernel between two of them is time in which the memory
does nothing. So the norm before a layer, the gate of an MLP and the residual sum after one are done by the programs
that read the weight: the norm's scale is a factor of the whole sum, and is found beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.gated import gated_torch
from engine.kernels.norm import Norm, normed
from engine.model.model_spec import Activation


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: Activation | None = None,
    add_to: Tensor | None = None,
    multiplier: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes norm(x) @ weight.T + bias of one token.

    Args:
        x: (1, in), of 16 bits.
        weight: (out, in), closely packed, and `bias` (out,), of x's type.
        norm: of x, before.
        activation: if given, the weight's rows are gates, then as many ups, and the result is activation(gate) * up.
        add_to: (1, out) of x's type, to which `multiplier` times the result is added in place; it is returned then.
        dtype: of the result, if not x's.

    Returns:
        (1, out), or (1, out / 2) with an activation.
    """
    run = gemv_triton if x.is_cuda else gemv_torch
    return run(
        x, weight, bias, norm=norm, activation=activation, add_to=add_to, multiplier=multiplier, dtype=dtype
    )  # fmt: skip


def gemv_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: Activation | None = None,
    add_to: Tensor | None = None,
    multiplier: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The torch reference, in float32. See `gemv`."""
    wide = x.float() if norm is None else normed(x, norm)
    y = wide @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if activation is not None:
        y = gated_torch(y, activation)
    if add_to is not None:
        return add_to.copy_(add_to.float() + multiplier * y)
    return y.to(dtype or x.dtype)


def gemv_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: Activation | None = None,
    add_to: Tensor | None = None,
    multiplier: float = 1.0,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """The kernel. See `gemv`. `shape`: a candidate while tuning."""
    from engine.kernels.gpu.gemv import GemvShape, gemv_kernel, shape_for

    rows, width = weight.shape
    rows = rows if activation is None else rows // 2
    out = torch.empty(1, rows, dtype=dtype or x.dtype, device=x.device) if add_to is None else add_to
    chosen = GemvShape(*shape) if shape is not None else shape_for(rows, width, gated=activation is not None)
    gemv_kernel[(-(-rows // chosen.rows),)](
        x,
        weight,
        bias,
        None if norm is None else norm.weight,
        out,
        rows,
        width,
        0.0 if norm is None else norm.eps,
        multiplier,
        activation=activation or "",
        adds=add_to is not None,
        block_rows=chosen.rows,
        block_width=chosen.width,
        whole=width % chosen.width == 0 and rows % chosen.rows == 0,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    return out
