"""Attention over paged keys and values, by the pieces that `engine.kernels.work` cut.

Knows tensors and pieces; nothing of requests or layers' weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.work import END_KEY, FIRST_KEY, FIRST_QUERY, QUERIES, SLOT, TABLE
from engine.kv_cache.quantized_cache import QuantizedLayer, plain

LOG2E = math.log2(math.e)
Cache = Tensor | QuantizedLayer


@dataclass(frozen=True, slots=True)
class Pieces:
    """`work.AttentionWork` on a device, int32 throughout; unused entries are zeros. `small` may be None, and `large`.

    `parts` holds the parts to be merged, (slots, heads, head_dim) float32, and `part_weights` (slots, heads).
    """

    blocks: Tensor
    small: Tensor | None
    large: Tensor | None
    order: Tensor
    merged: Tensor
    starts: Tensor
    of_token: Tensor
    parts: Tensor
    part_weights: Tensor
    large_tile: int
    branched: bool = False  # `blocks` has slots of branches, too: see `work.Rows.listed`


def attend(
    query: Tensor,
    cache: Tensor | QuantizedLayer,
    pieces: Pieces,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    last_keys: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one layer.

    Args:
        query: (tokens, heads, head_dim), 16 bits; the last two dimensions lie together.
        cache: the layer's keys and values, (2, blocks, block_size, kv_heads, head_dim) of the query's dtype, or codes.
        pieces: of this step, cut for `window`: a query at position p sees the keys from p - window + 1 on, or, if
            windows are `chunked`, from the last multiple of the window.
        positions: (tokens,) int32.
        last_keys: (tokens,) int32, the last position that each attends to, where that is not its own for all.
        scale: of the scores; `softcap` c makes of a score s c * tanh(s / c).
        sinks: (heads,) float32, logits that join the denominators of the softmax and have no values (gpt-oss, OpenAI
            2025).
        out: the result is written there; made if None.

    Returns:
        (tokens, heads, head_dim).
    """
    run = attend_triton if query.is_cuda else attend_torch
    return run(
        query, cache, pieces, positions, scale=scale, window=window, chunked=chunked, softcap=softcap, sinks=sinks,
        last_keys=last_keys, out=out,
    )  # fmt: skip


def attend_torch(
    query: Tensor,
    cache: Tensor | QuantizedLayer,
    pieces: Pieces,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    last_keys: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The torch reference: piece by piece, query by query, in float32. See `attend`."""
    out = torch.empty_like(query) if out is None else out
    codes = cache.codes if isinstance(cache, QuantizedLayer) else cache
    kv_heads, width = codes.shape[3:]
    for each in (pieces.small, pieces.large):
        for piece in [] if each is None else each.tolist():
            if piece[QUERIES] == 0:
                continue
            blocks = pieces.blocks[piece[TABLE] : piece[TABLE] - (-piece[END_KEY] // cache.shape[2])].long()
            whole = plain(codes[:, blocks]).float()
            if isinstance(cache, QuantizedLayer):
                whole = whole * cache.scales[:, blocks].unsqueeze(-1)
            first, end = piece[FIRST_KEY], piece[END_KEY]
            keys, values = whole.reshape(2, -1, kv_heads, width)[:, first:end].transpose(1, 2)
            places = torch.arange(first, end, device=query.device)
            begin = int(pieces.blocks[piece[TABLE] - 2]) if pieces.branched else end
            if begin < end:
                at = max(begin, first)
                after = piece[TABLE] + int(pieces.blocks[piece[TABLE] - 1]) - begin
                own = _rows_at(cache, pieces.blocks[after + at : after + end].long())
                keys[:, at - first :], values[:, at - first :] = own.transpose(1, 2)
            for i in range(piece[QUERIES]):
                token = int(pieces.order[piece[FIRST_QUERY] + i])
                q = query[token].float().view(kv_heads, -1, width)
                scores = q @ keys.transpose(1, 2) * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                hidden = places > (positions if last_keys is None else last_keys)[token]
                if window is not None:
                    position = positions[token]
                    hidden |= places < (position - position % window if chunked else position - window + 1)
                scores = scores.masked_fill(hidden, -torch.inf)
                weights = scores.logsumexp(-1)  # (kv_heads, group)
                found = torch.where(hidden, 0.0, (scores - weights.unsqueeze(-1)).exp()) @ values
                if piece[SLOT] < 0:
                    if sinks is not None:
                        found = found * torch.sigmoid(weights - sinks.view(weights.shape)).unsqueeze(-1)
                    out[token] = found.view(query.shape[1:]).to(out.dtype)
                else:
                    pieces.parts[piece[SLOT] + i] = found.reshape(query.shape[1:]).nan_to_num()
                    pieces.part_weights[piece[SLOT] + i] = weights.flatten() * LOG2E
    starts = pieces.starts.tolist()
    for i, token in enumerate(pieces.merged.tolist()):
        some = pieces.of_token[starts[i] : starts[i + 1]].long()
        if len(some):
            weights = pieces.part_weights[some] / LOG2E
            if sinks is not None:
                weights = torch.cat([weights, sinks[None]])
            shares = torch.softmax(weights, 0)[: len(some)]
            out[token] = (shares.unsqueeze(-1) * pieces.parts[some]).sum(0).to(out.dtype)
    return out


def _rows_at(cache: Tensor | QuantizedLayer, slots: Tensor) -> Tensor:
    """Returns the keys and values at slots (n,): (2, n, kv_heads, head_dim) float32."""
    if isinstance(cache, QuantizedLayer):
        return cache.tokens(slots, torch.float32)
    return cache.flatten(1, 2)[:, slots].float()


def attend_triton(
    query: Tensor,
    cache: Tensor | QuantizedLayer,
    pieces: Pieces,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    last_keys: Tensor | None = None,
    out: Tensor | None = None,
    shapes: Mapping[int, Sequence[int]] | None = None,
) -> Tensor:
    """The kernels. See `attend`. `shapes`: candidates while tuning, by rows of a tile."""
    from engine.kernels.gpu.attention import AttentionShape, attend_kernel, merge_kernel, padded_to, shape_for

    out = query.new_empty(query.shape) if out is None else out
    codes = cache.codes if isinstance(cache, QuantizedLayer) else cache
    scales = cache.scales if isinstance(cache, QuantizedLayer) else None
    _, _, block_size, kv_heads, width = codes.shape
    heads = query.shape[1]
    for each, rows in ((pieces.small, 16), (pieces.large, pieces.large_tile)):
        if each is None:
            continue
        group = heads // kv_heads
        shape = shape_for(width, max(rows, -(-group // 16) * 16), codes.element_size())
        if shapes is not None and rows in shapes:
            shape = AttentionShape(*shapes[rows])
        attend_kernel[len(each), kv_heads](
            out,
            pieces.parts,
            pieces.part_weights,
            query,
            codes[0],
            codes[1],
            None if scales is None else scales[0],
            None if scales is None else scales[1],
            sinks,
            each,
            pieces.order,
            positions,
            positions if last_keys is None else last_keys,
            pieces.blocks,
            scale * LOG2E if softcap is None else scale / softcap,
            0.0 if softcap is None else softcap * LOG2E,
            window or 0,
            query.stride(0),
            out.stride(0),
            codes.stride(1),
            codes.stride(2),
            codes.stride(3),
            0 if scales is None else scales.stride(1),
            0 if scales is None else scales.stride(2),
            group=group,
            block_size=block_size,
            width=width,
            padded=padded_to(width),
            rows=shape.rows,
            tile=shape.tile,
            windowed=window is not None,
            chunked=chunked and window is not None,
            capped=softcap is not None,
            quantized=scales is not None,
            fp8=codes.dtype == torch.uint8,
            branched=pieces.branched,
            stages=shape.stages,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
    if len(pieces.merged):
        merge_kernel[len(pieces.merged), heads](
            out,
            pieces.parts,
            pieces.part_weights,
            sinks,
            pieces.merged,
            pieces.starts,
            pieces.of_token,
            out.stride(0),
            heads,
            width=width,
            padded=padded_to(width),
            num_warps=1,
        )
    return out
