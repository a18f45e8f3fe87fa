"""RMSNorm, or LayerNorm, with the residual sum before it, in one pass over the hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019); `weight` is float32, (hidden,). With
    `centred` x is less its mean first: LayerNorm (Ba et al. 2016) without a bias."""

    weight: Tensor
    eps: float
    centred: bool = False


def add_and_norm(
    x: Tensor, delta: Tensor | None, norm: Norm | None, *, delta_norm: Norm | None = None, multiplier: float = 1.0
) -> Tensor | None:
    """Adds `multiplier * delta` to `x` (tokens, hidden) in place, and returns `x` normalised: None without a `norm`.

    `delta` has x's shape and type and is normalised before if there is a `delta_norm`; without one `x` stays as it is.
    All is computed in float32; the sum is rounded before it is normalised, as the layer after sees it.
    """
    run = add_and_norm_triton if x.is_cuda else add_and_norm_torch
    return run(x, delta, norm, delta_norm=delta_norm, multiplier=multiplier)


def add_and_norm_torch(
    x: Tensor, delta: Tensor | None, norm: Norm | None, *, delta_norm: Norm | None = None, multiplier: float = 1.0
) -> Tensor | None:
    """The torch reference. See `add_and_norm`."""
    if delta is not None:
        added = delta.float() if delta_norm is None else normed(delta, delta_norm)
        x.copy_(x.float() + multiplier * added)
    return None if norm is None else normed(x, norm).to(x.dtype)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """The torch reference of the norm alone, in float32. The weight may be (heads, head_dim), for x (tokens, heads,
    head_dim)."""
    wide = x.float()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def add_and_norm_triton(
    x: Tensor, delta: Tensor | None, norm: Norm | None, *, delta_norm: Norm | None = None, multiplier: float = 1.0
) -> Tensor | None:
    """The kernel. See `add_and_norm`."""
    from engine.kernels.gpu.norm import add_and_norm_kernel, shape_for

    tokens, hidden = x.shape
    out = None if norm is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens == 0 or (delta is None and norm is None):
        return out
    block, warps = shape_for(hidden)
    add_and_norm_kernel[(tokens,)](
        x,
        delta,
        out,
        None if norm is None else norm.weight,
        None if delta_norm is None else delta_norm.weight,
        hidden,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        0.0 if norm is None else norm.eps,
        0.0 if delta_norm is None else delta_norm.eps,
        multiplier,
        centred=norm is not None and norm.centred,
        delta_centred=delta_norm is not None and delta_norm.centred,
        block=block,
        num_warps=warps,
    )
    return out
