"""How attention is cut for a device, and the sizes of step that CUDA graphs are kept for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.gpu.packing import Room, WorkRoom
from engine.kernels.work import Limits
from engine.models.spec import ModelSpec

RESIDENT = 3  # programs of a decode that a multiprocessor holds at once (72 KiB of shared memory each, of 227)
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


def ladder(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are kept for, up to `most`: padding wastes less than a third above 4 rows, and few
    steps cost what a graph costs to make."""
    steps = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, max(321, most + 64), 64)]
    return (*(step for step in steps if step < most), most)


def decode_room(rows: int, windows: Sequence[int | None], limits: Limits, max_blocks: int) -> Room:
    """What `rows` decodes may take: what they surely need, and as much for shared prefixes as is worth a graph."""
    work = WorkRoom(
        small=rows + limits.pieces,
        large=(limits.pieces + rows // 2) if limits.cascade and rows > 1 else 0,
        order=4 * rows,
        merged=rows,
        parts=8 * rows + 2 * limits.pieces,
    )
    return Room(rows, rows, (work,) * len(windows), rows * max_blocks)
