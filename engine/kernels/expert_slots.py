"""Slots on the device for a layer's experts that lie in host memory: a cache of those used last, kept by the device.

As in offloading runtimes for mixtures (Eliseev & Mazur 2023): experts that tokens of a step chose come to slots, in
place of those used least recently. Here kernels decide so and read the host's page-locked memory themselves, whose
addresses hold on the device, too (unified addressing): no step waits for the host, and CUDA graphs hold. Where a step
chose more experts than there are slots, the products read the rest where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.experts import ExpertWeights

ALIGNMENT = 16  # bytes: parts begin at a multiple of it, and memory for them ends at one


def padded(nbytes: int) -> int:
    """Returns the bytes that a part takes, in a slot and in host memory."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class ExpertSlots:
    """Slots for the experts of a layer from number `first` on, whose parts lie in host memory.

    On the device: `slot_of` has each expert's slot or -1, `expert_of` each slot's expert or -1, `used` the count of
    steps (`clock`) when a slot was used last, and `tables` (parts, experts) the addresses that products read.
    """

    def __init__(self, weights: Sequence[ExpertWeights], first: int, slots: int, device: torch.device) -> None:
        tables = [table for each in weights for table in each.tables]
        parts = [part for each in weights for part in each.parts()]
        self._first, self.slots = first, slots
        self._homes = torch.stack(tables)
        self.tables = self._homes.clone()
        sizes = [padded(part.nbytes) for part in parts]
        self._memory = [torch.empty(slots * size, dtype=torch.uint8, device=device) for size in sizes]
        self._sizes = torch.tensor(sizes, device=device)
        self._bases = torch.tensor([each.data_ptr() for each in self._memory], device=device)
        self.slot_of = torch.full((self._homes.shape[1],), -1, dtype=torch.int32, device=device)
        self.expert_of = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self.used = torch.zeros(slots, dtype=torch.int32, device=device)
        self.clock = torch.zeros(1, dtype=torch.int32, device=device)
        self.admitted = torch.full((slots,), -1, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the slots."""
        return sum(each.nbytes for each in self._memory)

    def served(self, weights: Sequence[ExpertWeights]) -> list[ExpertWeights]:
        """Returns the weights with the addresses that the slots keep."""
        rows = iter(self.tables)
        return [replace(each, tables=tuple(next(rows) for _ in each.tables)) for each in weights]

    def admit(self, starts: Tensor) -> None:
        """Brings a step's experts to slots: those that have tokens, which begin at `starts` (experts + 1) int32. On
        CPU tensors only under Triton's interpreter."""
        from triton import next_power_of_2

        from engine.kernels.gpu.expert_slots import FETCH_BLOCK, FETCH_PROGRAMS, admit_kernel, fetch_kernel

        parts, experts = self._homes.shape
        admit_kernel[(1,)](
            *(starts, self.slot_of, self.expert_of, self.used, self.clock, self.tables, self._homes, self._bases),
            *(self._sizes, self.admitted, experts, self._first, self.slots),
            parts=parts,
            block_experts=next_power_of_2(experts),
            block_slots=next_power_of_2(self.slots),
        )
        fetch_kernel[self.slots, parts, FETCH_PROGRAMS](
            *(self.admitted, self._homes, self._bases, self._sizes, experts),
            programs=FETCH_PROGRAMS,
            block=FETCH_BLOCK,
        )


def admit_torch(
    counts: Sequence[int], first: int, expert_of: Sequence[int], used: Sequence[int], clock: int
) -> tuple[list[int], list[int]]:
    """The reference of `ExpertSlots.admit`: returns the slots' experts, and when they were used, after a step whose
    experts have `counts` tokens."""
    owners, last, now = list(expert_of), list(used), clock + 1
    wanted = [expert for expert, count in enumerate(counts) if count and expert >= first]
    last = [now if owner in wanted else then for owner, then in zip(owners, last, strict=True)]
    for expert in (each for each in wanted if each not in expert_of):
        place = min(range(len(owners)), key=lambda slot: last[slot])
        if last[place] < now:
            owners[place], last[place] = expert, now
    return owners, last
