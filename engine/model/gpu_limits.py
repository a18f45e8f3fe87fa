"""The limits of a step on a GPU, and the memory left for K/V.

How attention is cut for a device, and the sizes of step that CUDA graphs are kept for.

How much of a GPU is left for K/V: what is free once the largest step has been run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.kernels.work import Limits
from engine.model.batch import NULL_BLOCK, Batch, KVCache
from engine.model.decoder import Decoder
from engine.model.gpu_batch import Room, WorkRoom
from engine.model.model_spec import ModelSpec

RESIDENT = 3  # programs of a decode that a multiprocessor holds at once (72 KiB of shared memory each, of 227)
RESIDENT_CODED = 2  # of K/V in 8 bits, which takes more registers
FIXED_KEYS = 1024  # of a piece, where sums must be made alike in every batch
INTERPRETED_PROCESSORS = 4  # what stands for a device's multiprocessors where there is none


def limits_for(spec: ModelSpec, device: torch.device, *, deterministic: bool) -> Limits:
    """As many pieces as fill the device."""
    processors = INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Limits(
        group_heads=spec.heads // spec.kv_heads,
        pieces=max(1, RESIDENT * processors // spec.kv_heads),
        large_tile=128 if spec.head_dim <= 128 and not deterministic else 64,
        fixed_keys=FIXED_KEYS if deterministic else None,
        cascade=not deterministic,
    )


def of_coded(limits: Limits) -> Limits:
    """The same where K/V is in 8 bits."""
    return replace(limits, pieces=max(1, limits.pieces * RESIDENT_CODED // RESIDENT))


def ladder(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are kept for, up to `most`: padding wastes less than a third above 4 rows, and few
    steps cost what a graph costs to make."""
    steps = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, max(321, most + 64), 64)]
    return (*(step for step in steps if step < most), most)


def decode_rooms(rows: int, windows: Sequence[int | None], limits: Limits, max_blocks: int) -> list[Room]:
    """What `rows` decodes may take, the least first: what they need by themselves; then, as pieces that are not there
    cost a launch too, with as much for shared prefixes as is worth a graph. What needs more is run without one."""
    if limits.fixed_keys is not None:
        works = [WorkRoom(0, 4 * rows + limits.pieces, rows, rows, 4 * rows + limits.pieces)]
    else:
        works = [WorkRoom(rows + limits.pieces, 0, rows, rows, rows + limits.pieces)]
        if limits.cascade and rows > 1:
            large, parts = limits.pieces + rows // 2, 8 * rows + 2 * limits.pieces
            works.append(WorkRoom(rows + limits.pieces, large, 4 * rows, rows, parts))
    return [Room(rows, rows, (work,) * len(windows), rows * max_blocks) for work in works]


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
