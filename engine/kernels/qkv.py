"""Fuses the steps between the QKV projection and attention in one pass: norms of heads, rotation, and the new keys and
values written to the paged cache, in 8 bits where it is quantized.

Components that rotate together are neighbours (see `engine.model.layers.interleave`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.norm import Norm, normed
from engine.kv_cache.quantized_cache import QuantizedLayer


def place(
    joined: Tensor,
    heads: int,
    cache: Tensor | QuantizedLayer,
    slots: Tensor,
    *,
    rotation: Tensor | None = None,
    norm: Norm | None = None,
    query_scale: Tensor | None = None,
    has_kv: bool = True,
) -> Tensor:
    """Finishes queries in place, and writes keys and values to their slots.

    Args:
        joined: (tokens, (heads + 2 * kv_heads) * head_dim): queries, keys and values of each token; the queries alone
            of a layer that reads those of an earlier one, without `has_kv`.
        cache: the layer's, (2, blocks, block_size, kv_heads, head_dim).
        slots: (tokens,) int32, `block * block_size + offset`.
        rotation: (tokens, head_dim / 2, 2) float32, cosine and sine; None for a layer without positions.
        norm: of each head of queries and keys; its weight is (heads + kv_heads, head_dim), or has as many rows more as
            values are normalised, too.
        query_scale: (tokens,) float32, a factor of each token's queries; None: 1.

    Returns:
        The queries, (tokens, heads, head_dim): a view of `joined`.
    """
    run = place_triton if joined.is_cuda else place_torch
    return run(
        joined, heads, cache, slots, rotation=rotation, norm=norm, query_scale=query_scale, has_kv=has_kv
    )  # fmt: skip


def place_torch(
    joined: Tensor,
    heads: int,
    cache: Tensor | QuantizedLayer,
    slots: Tensor,
    *,
    rotation: Tensor | None = None,
    norm: Norm | None = None,
    query_scale: Tensor | None = None,
    has_kv: bool = True,
) -> Tensor:
    """The torch reference. See `place`."""
    kv_heads, width = cache.shape[3:]
    qkv = joined.view(len(joined), -1, width)
    if norm is not None:
        own = qkv[:, : len(norm.weight)]
        values = own[:, heads + kv_heads :]
        values.copy_(normed(values, replace(norm, weight=norm.weight[heads + kv_heads :])))
    turned = qkv[:, : heads + kv_heads].float()
    if norm is not None:
        turned = normed(turned, replace(norm, weight=norm.weight[: heads + kv_heads]))
    if rotation is not None:
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.view_as_complex(rotation).unsqueeze(1)).flatten(-2)
    if query_scale is not None:
        turned[:, :heads] *= query_scale[:, None, None]
    qkv[:, : heads + kv_heads] = turned.to(joined.dtype)
    if not has_kv:
        return qkv[:, :heads]
    new = qkv[:, heads:].unflatten(1, (2, kv_heads)).transpose(0, 1)
    if isinstance(cache, QuantizedLayer):
        cache.store(slots.long(), torch.cat([turned[:, heads:], qkv[:, heads + kv_heads :].float()], 1)
                    .unflatten(1, (2, kv_heads)).transpose(0, 1))  # fmt: skip
    else:
        cache.view(2, -1, kv_heads, width).index_copy_(1, slots.long(), new)
    return qkv[:, :heads]


def place_triton(
    joined: Tensor,
    heads: int,
    cache: Tensor | QuantizedLayer,
    slots: Tensor,
    *,
    rotation: Tensor | None = None,
    norm: Norm | None = None,
    query_scale: Tensor | None = None,
    has_kv: bool = True,
) -> Tensor:
    """The kernel. See `place`."""
    from engine.kernels.gpu.qkv import place_kernel, shape_for

    codes = cache.codes if isinstance(cache, QuantizedLayer) else cache
    scales = cache.scales if isinstance(cache, QuantizedLayer) else None
    tokens, (kv_heads, width) = len(joined), codes.shape[3:]
    if tokens:
        padded, block, warps = shape_for(width)
        place_kernel[-(-tokens // block), heads + 2 * kv_heads * has_kv](
            joined,
            codes[0],
            codes[1],
            None if scales is None else scales[0],
            None if scales is None else scales[1],
            slots,
            rotation,
            None if norm is None else norm.weight,
            query_scale,
            tokens,
            joined.stride(0),
            0.0 if norm is None else norm.eps,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            padded=padded,
            normed=0 if norm is None else len(norm.weight),
            centred=norm is not None and norm.centred,
            block=block,
            coding="none" if scales is None else "fp8" if codes.dtype == torch.uint8 else "int8",
            num_warps=warps,
        )
    return joined.view(tokens, -1, width)[:, :heads]
