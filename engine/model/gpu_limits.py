"""Limits of a step on a GPU: how attention is cut for a device, and the sizes of step that CUDA graphs are kept for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.kernels.work import WorkLimits
from engine.model.gpu_batch import Room, WorkRoom
from engine.model.model_spec import ModelSpec

RESIDENT = 3  # programs of a decode that a multiprocessor holds at once (72 KiB of shared memory each, of 227)
RESIDENT_CODED = 2  # of K/V in 8 bits, which takes more registers
FIXED_KEYS = 1024  # of a piece, where sums must be made alike in every batch
INTERPRETED_PROCESSORS = 4  # what stands for a device's multiprocessors where there is none


def limits_for(spec: ModelSpec, device: torch.device, *, deterministic: bool) -> WorkLimits:
    """As many pieces as fill the device."""
    processors = INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return WorkLimits(
        group_heads=spec.heads // spec.kv_heads,
        pieces=max(1, RESIDENT * processors // spec.kv_heads),
        large_tile=128 if spec.head_dim <= 128 and not deterministic else 64,
        fixed_keys=FIXED_KEYS if deterministic else None,
        cascade=not deterministic,
    )


def limits_for_quantized(limits: WorkLimits) -> WorkLimits:
    """The same where K/V is in 8 bits."""
    return replace(limits, pieces=max(1, limits.pieces * RESIDENT_CODED // RESIDENT))


def graph_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are kept for, up to `most`: padding wastes less than a third above 4 rows, and few
    steps cost what a graph costs to make."""
    steps = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, max(321, most + 64), 64)]
    return (*(step for step in steps if step < most), most)


def decode_shapes(rows: int, windows: Sequence[int | None], limits: WorkLimits, max_blocks: int) -> list[Room]:
    """Returns the shapes of `rows` decodes, the least first: what they need by themselves; then, as pieces that are not
    there cost a launch too, with as much for shared prefixes as is worth a graph. What needs more is run without
    one."""
    if limits.fixed_keys is not None:
        works = [WorkRoom(0, 4 * rows + limits.pieces, rows, rows, 4 * rows + limits.pieces)]
    else:
        works = [WorkRoom(rows + limits.pieces, 0, rows, rows, rows + limits.pieces)]
        if limits.cascade and rows > 1:
            large, parts = limits.pieces + rows // 2, 8 * rows + 2 * limits.pieces
            works.append(WorkRoom(rows + limits.pieces, large, 4 * rows, rows, parts))
    return [Room(rows, rows, (work,) * len(windows), rows * max_blocks) for work in works]
