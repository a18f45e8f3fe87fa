"""Limits of a step on a GPU: the pieces of attention for a device, and the sizes of step that CUDA graphs are kept
for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.kernels.work import WorkLimits
from engine.model.gpu_batch import StepCapacity, WorkCapacity
from engine.model.model_spec import ModelSpec

RESIDENT = 3  # programs of a decode that a multiprocessor holds at once (72 KiB of shared memory each, of 227)
RESIDENT_CODED = 2  # of quantized K/V, which takes more registers
FIXED_KEYS = 1024  # of a piece, where sums must be made alike in every batch
INTERPRETED_PROCESSORS = 4  # assumed multiprocessors where there is no device


def limits_for(spec: ModelSpec, device: torch.device, *, deterministic: bool) -> WorkLimits:
    """Returns the pieces that fill the device."""
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
    """Returns the same for quantized K/V."""
    return replace(limits, pieces=max(1, limits.pieces * RESIDENT_CODED // RESIDENT))


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows that graphs are kept for, up to `max_rows`: padding wastes less than a third above 4
    rows, and few steps cost as much as recording a graph."""
    steps = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, max(321, max_rows + 64), 64)]
    return (*(step for step in steps if step < max_rows), max_rows)


def decode_shapes(rows: int, windows: Sequence[int | None], limits: WorkLimits, max_blocks: int) -> list[StepCapacity]:
    """Returns capacities for `rows` decodes, smallest first: the decodes' own needs; then, since surplus pieces cost a
    launch too, with as many for shared prefixes as are worth a graph. Larger steps run without a graph."""
    if limits.fixed_keys is not None:
        works = [WorkCapacity(0, 4 * rows + limits.pieces, rows, rows, 4 * rows + limits.pieces)]
    else:
        works = [WorkCapacity(rows + limits.pieces, 0, rows, rows, rows + limits.pieces)]
        if limits.cascade and rows > 1:
            large, parts = limits.pieces + rows // 2, 8 * rows + 2 * limits.pieces
            works.append(WorkCapacity(rows + limits.pieces, large, 4 * rows, rows, parts))
    return [StepCapacity(rows, rows, (work,) * len(windows), rows * max_blocks) for work in works]
