"""One sequence and 16 positions at a time: the same arithmetic for a token whatever else is in its step.

For kernels whose sums depend on how many rows they are given, as torch's do: here every call of a model has the shapes
that its positions alone decide, with tokens that nobody asked for in the gaps. Slow: a step costs as many passes as it
touches tiles. Knows nothing of what a decoder computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.batch import NULL_BLOCK, Batch, KVCache
from engine.kv.coded import CodedCache

TILE = 16  # positions; tile t of a sequence holds positions 16 t to 16 t + 15


def tilewise(
    forward: Callable[[Batch, KVCache | CodedCache], Tensor], batch: Batch, kv: KVCache | CodedCache
) -> Tensor:
    """What `forward` returns for `batch`, with K/V written alike: (len(logits_at), vocab)."""
    wanted = set(batch.logits_at.tolist())
    found: dict[int, Tensor] = {}  # token of the batch -> its logits
    for row, context in enumerate(batch.context_lens):
        first, end = batch.query_starts[row], batch.query_starts[row + 1]
        offset = context - end  # position of token t is t + offset
        while first < end:
            tile = (first + offset) // TILE
            last = min(end, (tile + 1) * TILE - offset)
            logits = forward(_tile(batch, kv.block_size, row, tile, first, last, offset), kv)
            found.update((t, logits[t + offset - tile * TILE]) for t in range(first, last) if t in wanted)
            first = last
    order = [found[token] for token in batch.logits_at.tolist()]
    if order:
        return torch.stack(order)
    return torch.empty(0, 0, device=batch.positions.device)


def _tile(batch: Batch, block_size: int, row: int, tile: int, first: int, last: int, offset: int) -> Batch:
    """Tokens [first, last) of `row` as part of a whole tile; the others of the tile write to the null block.

    Logits are asked for at every token: the number of the head's rows is a shape too.
    """
    device = batch.positions.device
    start = tile * TILE
    within = slice(first + offset - start, last + offset - start)
    positions = torch.arange(start, start + TILE, device=device)
    tokens = torch.zeros(TILE, dtype=torch.int64, device=device)
    slots = NULL_BLOCK * block_size + positions % block_size
    tokens[within], slots[within] = batch.token_ids[first:last], batch.slots[first:last]
    blocks = -(-(start + TILE) // block_size)
    table = torch.full((1, blocks), NULL_BLOCK, dtype=torch.int64, device=device)
    known = min(blocks, batch.block_tables.shape[1])
    table[0, :known] = batch.block_tables[row, :known]
    everywhere = torch.arange(TILE, device=device)
    return Batch(tokens, positions, slots, (0, TILE), (start + TILE,), table, everywhere, in_place=False)
