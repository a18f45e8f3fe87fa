"""The gated short convolution of LFM2 (Liquid AI 2025): a causal one over the last few tokens.

A token's place in the paged cache holds what later tokens mix in, so it needs no state: see `KVCache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.batch import Batch


def earlier_slots(batch: Batch, block_size: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns the slots of the `count` tokens before each one, the nearest last, (tokens, count), and which there are,
    (tokens, count, 1)."""
    starts = torch.tensor(batch.query_starts, device=batch.positions.device)
    rows = torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), starts.diff())
    positions = batch.positions[:, None] - torch.arange(count, 0, -1, device=starts.device)
    known = positions.clamp(min=0)
    slots = batch.block_tables[rows[:, None], known // block_size] * block_size + known % block_size
    if batch.branches is not None and batch.branches.slots.shape[1]:
        own = known - torch.tensor(batch.branches.starts, device=starts.device)[rows, None]
        of_branch = batch.branches.slots[rows[:, None], own.clamp(0, batch.branches.slots.shape[1] - 1)]
        slots = torch.where(own < 0, slots, of_branch)
    return slots, (positions >= 0).unsqueeze(-1)


def short_convolution(
    projected: Tensor, taps: Tensor, cache: Tensor, slots: Tensor, earlier: Tensor, there: Tensor
) -> Tensor:
    """Returns the gated outputs (tokens, hidden) of `projected` (tokens, 3 * hidden): gate in, gate out and values.

    `taps` are (taps, hidden) float32, `cache` is (2, blocks, block_size, 1, hidden / 2). `earlier` and `there` are of
    `earlier_slots`, for all taps but one.
    """
    gate_in, gate_out, values = projected.chunk(3, dim=-1)
    product = gate_in * values
    kept = cache.view(2, -1, cache.shape[-1])
    kept.index_copy_(1, slots, product.unflatten(1, (2, -1)).transpose(0, 1))
    before = kept[:, earlier].permute(1, 2, 0, 3).flatten(2)  # (tokens, taps - 1, hidden)
    mixed = (before.float() * there * taps[:-1]).sum(1).addcmul_(product.float(), taps[-1])
    return gate_out * mixed.to(projected.dtype)
