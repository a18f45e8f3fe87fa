"""How much of a GPU is left for K/V: what is free once the largest step has been run."""

from __future__ import annotations

import torch

from engine.batch import NULL_BLOCK, Batch, KVCache
from engine.models.decoder import Decoder

USED_SHARE = 0.92  # of what is free: the rest is for graphs, and for what the driver takes as it goes


def left_for_kv(decoder: Decoder, device: torch.device, *, batch_tokens: int, rows: int, longest: int) -> int:
    """Bytes, after a prefill of `batch_tokens` and the logits of `rows` rows have shown what a step takes besides.

    `longest` is how far a context may go: attention that is cut alike in every batch has parts for all of it.
    """
    spec, fixed = decoder.spec, decoder.packed_for.limits.fixed_keys
    parts = 0 if fixed is None else 4 * batch_tokens * -(-longest // fixed) * spec.heads * (spec.head_dim + 1)
    block_size = 16
    kv = KVCache(spec.layers, 1, block_size, spec.kv_heads, spec.head_dim, decoder.dtype, device)
    order = torch.arange(batch_tokens, device=device)
    table = torch.full((1, -(-batch_tokens // block_size)), NULL_BLOCK, device=device)
    wanted = torch.arange(min(rows, batch_tokens), device=device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    slots = order % block_size
    decoder.forward(Batch(order * 0, order, slots, (0, batch_tokens), (batch_tokens,), table, wanted), kv)
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return max(0, int(torch.cuda.mem_get_info(device)[0] * USED_SHARE) - 2 * step - parts)
