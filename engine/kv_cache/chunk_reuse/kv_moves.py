"""Copies tokens' K/V within a cache to other positions: keys are rotated by the difference, and all else is copied.

The rotation is made in float32 and rounded once to the cache's number format. Knows nothing of chunks or sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.step import Step
from engine.model.batch import KVCache
from engine.model.model_spec import ModelSpec, Rope
from engine.model.rope import Rotation, rotate_


def why_not(spec: ModelSpec) -> str | None:
    """Says why this architecture's K/V cannot be moved; None where it can."""
    if spec.recurrent_layers:
        return "it has recurrent layers, whose states have no place"
    if spec.latent is not None:
        return "its K/V are latents"
    if any(spec.windows) or spec.chunked:
        return "layers of it attend within windows"
    if any(rope is not None and rope.sections for rope in spec.ropes):
        return "its positions have rows and columns (M-RoPE)"
    if spec.mtp_layers:
        return "it drafts by layers of multi-token prediction"
    return None


class KVMover:
    """Moves K/V in one cache. `rotations` are the decoder's."""

    def __init__(self, spec: ModelSpec, kv: KVCache, rotations: dict[Rope, Rotation]) -> None:
        assert why_not(spec) is None, "see there"
        self._kv = kv
        with_blocks = sorted({*spec.attending_layers, *spec.conv_layers})
        self._rotated: list[tuple[Tensor, Rotation]] = []  # keys (blocks, block_size, kv_heads, head_dim)
        for index, layer in zip(with_blocks, kv.layers(), strict=True):
            rope = spec.ropes[index] if index in spec.attending_layers else None
            if rope is not None and index not in spec.shared_kv:
                self._rotated.append((layer[0], rotations[rope]))

    def run(self, step: Step) -> None:
        """Makes the moves that precede a step's rows."""
        for row in step.rows:
            if row.move is not None:
                self.move(row.move.pairs(row.seq.table, self._kv.block_size), row.move.delta)

    @torch.inference_mode()
    def move(self, pairs: Sequence[tuple[int, int]], delta: int) -> None:
        """Copies slots (source, destination) of all layers, to positions that are later by `delta`. What stays in its
        slot is rotated there."""
        self._kv.copy_slots([pair for pair in pairs if pair[0] != pair[1]])
        if delta:
            slots = torch.tensor([to for _, to in pairs], device=self._kv.device)
            by = {rotation: rotation.by(delta) for _, rotation in self._rotated}
            for keys, rotation in self._rotated:
                flat = keys.flatten(0, 1)
                moved = flat[slots]
                rotate_(moved, by[rotation])
                flat[slots] = moved
