"""Chooses the number of blocks of a K/V pool, by the settings or by the memory that is free beside the weights."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.core.scheduler import MAX_LOGITS
from engine.errors import InvalidParameter
from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.kv_groups import KVGroups
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder
from engine.model.memory import STATES_SHARE, block_bytes, free_bytes, useful_blocks

_USED_SHARE = 0.92  # of free memory: the rest is for graphs, and for the driver


def pool_blocks(
    config: EngineConfig,
    decoder: Decoder,
    device: torch.device,
    max_model_len: int,
    groups: KVGroups | None,
    adapters: int,
) -> int:
    """Returns the number of blocks in the pool, each of one of the `groups`: as configured, by blocks of all layers; or
    as many as could ever be used, for so many bytes of `adapters` too, as far as memory goes. Of a computer's memory
    that is a quarter, as others live there too; of a GPU's the rest beside the largest step."""
    width = 1 if groups is None else groups.width
    if config.kv_blocks is not None:
        return config.kv_blocks * width
    # of all ranks, which share the memory; the first has as many layers and heads as any, and contexts divide a block
    divided = config.ranks // config.prefill_context_parallel_size
    per_block = divided * block_bytes(decoder.spec, config.block_size, decoder.dtype, config.kv_dtype, groups)
    if config.kv_bytes is not None:
        blocks = config.kv_bytes // per_block
        if blocks < width:
            least_bytes = width * per_block
            raise InvalidParameter(
                "kv_bytes", f"kv_bytes is {config.kv_bytes}; accepted: at least {least_bytes}, one block of this model."
            )
        return blocks
    if device.type == "cuda":
        tokens = min(config.step_tokens, max_model_len)
        rows = config.max_running + MAX_LOGITS
        kv_bytes = left_for_kv(decoder, device, batch_tokens=tokens, rows=rows, max_len=max_model_len)
    else:
        kv_bytes = free_bytes(device) // 4
    if decoder.spec.recurrent_layers:  # both together take no more
        kv_bytes -= config.state_bytes or int(STATES_SHARE * kv_bytes)
    useful = width * useful_blocks(config, max_model_len) - (-adapters // per_block)
    return max(1, min(useful, kv_bytes // per_block))


def left_for_kv(decoder: Decoder, device: torch.device, *, batch_tokens: int, rows: int, max_len: int) -> int:
    """Returns the bytes left for K/V, after a prefill of `batch_tokens` and the logits of `rows` rows have measured a
    step's memory.

    `max_len` is the length of the longest context: attention that is split alike in every batch has parts for all of
    it.
    """
    spec, fixed = decoder.spec, decoder.packed_for.fixed_keys
    widest = max(kind.head_dim for kind in decoder.packed_for.kinds)
    parts = 0 if fixed is None else 4 * batch_tokens * -(-max_len // fixed) * spec.heads * (widest + 1)
    block_size = 16
    kv = KVCache.of(spec, 1, block_size, decoder.dtype, device)
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
    return max(0, int(torch.cuda.mem_get_info(device)[0] * _USED_SHARE) - 2 * step - parts)
