"""Adapters that are ready to be added to a step's rows by the kernels in C++ (`engine/kernels/cpu/linear.h`), bfloat16.

As in `resident`, a set is immutable; matrices that the set before it has packed already are shared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.kernels.cpu.binding import LowRankStruct, UpdatesStruct, alternating, pointer
from engine.model.adapters.peft_checkpoint import Adapter, LinearName, LowRank, TargetRows

_BLOCK = 32  # columns of an output
_LINEARS: tuple[LinearName, ...] = ("qkv", "o", "gate_up", "down")


class _PackedLinear:
    """The updates of one linear by one adapter; it owns the memory that its structures point to."""

    def __init__(self, updates: list[tuple[TargetRows, LowRank]]) -> None:
        self._matrices: list[tuple[Tensor, Tensor]] = []
        structs = []
        for place, update in updates:
            a, b, first = _packed(place, update)
            self._matrices.append((a, b))
            structs.append(LowRankStruct(pointer(a), pointer(b), len(a), first, len(b)))
        self._parts = (LowRankStruct * len(structs))(*structs)
        self.struct = UpdatesStruct(self._parts, len(structs))


def _packed(place: TargetRows, update: LowRank) -> tuple[Tensor, Tensor, int]:
    """Returns A (rank, in), B as (blocks, rank, 32), and the column of the output at which its blocks begin."""
    columns, first, wide = _columns(place)
    placed = torch.zeros(wide, update.b.shape[1])
    placed[columns - first] = update.b
    blocks = placed.view(-1, _BLOCK, placed.shape[1]).transpose(1, 2).to(torch.bfloat16).contiguous()
    return update.a.to(torch.bfloat16).contiguous(), blocks, first


def _columns(place: TargetRows) -> tuple[Tensor, int, int]:
    """Returns the columns of the output that a projection has, the first one of its blocks, and their width."""
    columns = torch.arange(place.first, place.stop)
    if place.linear == "gate_up":  # see `TiledWeight`
        columns = alternating(torch.arange(place.out)).argsort()[columns]
    first = int(columns.min()) // _BLOCK * _BLOCK
    return columns, first, -(-(int(columns.max()) + 1 - first) // _BLOCK) * _BLOCK


def packed_bytes(places: Mapping[str, TargetRows], adapter: Adapter, dtype: torch.dtype) -> int:
    """Returns the bytes of an adapter's matrices as they are packed, in `dtype`."""
    sizes = (
        (update.a.numel(), _columns(places[name])[2] * update.b.shape[1]) for name, update in adapter.updates.items()
    )
    return dtype.itemsize * sum(a + b for a, b in sizes)


_PackedUpdates = dict[tuple[int, LinearName], _PackedLinear]


class PackedAdapters:
    """Resident adapters by slot. `table` is an array of `UpdatesStruct`: slots, layers, and the layer's linears."""

    def __init__(
        self,
        places: Mapping[str, TargetRows],
        layers: int,
        adapters: Mapping[int, Adapter],
        before: PackedAdapters | None = None,
    ) -> None:
        """`places` has all projections that adapters may change, `adapters` the resident ones by slot, and `before`
        the ones that were resident until now: of these no updates are read."""
        known: dict[str, _PackedUpdates] = {} if before is None else before._packed
        self._packed: dict[str, _PackedUpdates] = {
            each.digest: known[each.digest] if each.digest in known else _linears(places, each)
            for each in adapters.values()
        }
        slots, row = max(adapters, default=-1) + 1, layers * len(_LINEARS)
        self.table = (UpdatesStruct * (slots * row))()
        self._slots = {slot: adapter.digest for slot, adapter in adapters.items()}
        for slot, digest in self._slots.items():
            if before is not None and before._slots.get(slot) == digest:
                self.table[slot * row : (slot + 1) * row] = before.table[slot * row : (slot + 1) * row]
                continue
            for (layer, linear), packed in self._packed[digest].items():
                self.table[slot * row + layer * len(_LINEARS) + _LINEARS.index(linear)] = packed.struct


def _linears(places: Mapping[str, TargetRows], adapter: Adapter) -> _PackedUpdates:
    updates: dict[tuple[int, LinearName], list[tuple[TargetRows, LowRank]]] = {}
    for name, update in adapter.updates.items():
        place = places[name]
        updates.setdefault((place.layer, place.linear), []).append((place, update))
    return {linear: _PackedLinear(each) for linear, each in updates.items()}
