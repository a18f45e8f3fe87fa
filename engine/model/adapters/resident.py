"""Adapters that are ready to be added to a step's rows, for torch and Triton (`engine.kernels.lora`).

As in S-LoRA (Sheng et al. 2023) no weight is changed: rows of many adapters, and of none, share a step. A set of
resident adapters is immutable, so that another thread makes the next one while steps run, and shares the matrices that
the set before it has. Knows nothing of names, sequences or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from engine.core.request import NO_ADAPTER
from engine.kernels import lora
from engine.model.adapters.peft_checkpoint import Adapter, LinearName, TargetRows
from engine.model.layers import Layer
from engine.model.linear import Linear


def adapters_of_tokens(adapters: Sequence[int], starts: Sequence[int]) -> Tensor:
    """Returns the adapter of each token of a step, (tokens,) int32, from those of its rows, which begin at `starts`."""
    counts = torch.tensor(starts).diff()
    return torch.tensor(adapters, dtype=torch.int32).repeat_interleave(counts)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of a step's rows: `which` (rows,) int32 with NO_ADAPTER for none, `starts` (rows + 1,) int32 as
    `Batch.query_starts`, and `of_tokens` (tokens,) int32; `longest` is the tokens of the longest row."""

    which: Tensor
    starts: Tensor
    of_tokens: Tensor
    longest: int

    @classmethod
    def of(cls, adapters: Sequence[int], starts: Sequence[int], device: torch.device) -> AdapterRows:
        counts = [end - first for first, end in pairwise(starts)]
        which = torch.tensor(adapters, dtype=torch.int32)
        of_tokens = adapters_of_tokens(adapters, starts).to(device, non_blocking=True)
        begins = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
        return cls(which.to(device, non_blocking=True), begins, of_tokens, max(counts))

    def add(self, y: Tensor, x: Tensor, adapters: lora.Adapters) -> None:
        """Adds the rows' updates of `x` (tokens, in) to `y` (tokens, out), in place."""
        if self.longest == 1 or not y.is_cuda:
            lora.add_by_token(y, x, adapters, self.of_tokens)
        else:
            lora.add_by_run(y, x, adapters, self.starts, self.which, self.longest)


@dataclass(frozen=True, slots=True)
class _Part:
    """The update of a projection: rows from `first` to `stop` of its linear."""

    first: int
    stop: int
    adapters: lora.Adapters


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A linear whose outputs get the updates of a step's rows."""

    linear: Linear
    parts: Sequence[_Part]
    rows: AdapterRows

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        x = x.contiguous()
        for part in self.parts:
            self.rows.add(y[:, part.first : part.stop], x, part.adapters)
        return y


_Matrices = Mapping[str, tuple[Tensor, Tensor]]  # by projection: A (rank, in), B (rows, rank)


class StackedAdapters:
    """Resident adapters by slot, each of its own rank."""

    def __init__(
        self,
        places: Mapping[str, TargetRows],
        adapters: Mapping[int, Adapter],
        dtype: torch.dtype,
        device: torch.device,
        before: StackedAdapters | None = None,
    ) -> None:
        """`places` has all projections that adapters may change, `adapters` the resident ones by slot, and `before` the
        ones that were resident until now: of these no updates are read."""
        self._device = device
        known: dict[str, _Matrices] = {} if before is None else before._held
        self._held: dict[str, _Matrices] = {
            each.digest: known.get(each.digest) or _matrices(each, dtype, device) for each in adapters.values()
        }
        slots = max(adapters, default=NO_ADAPTER) + 1
        held = [self._held[adapters[slot].digest] if slot in adapters else {} for slot in range(slots)]
        self._parts: dict[tuple[int, LinearName], list[_Part]] = {}
        for name, place in places.items():
            if any(name in each for each in held):
                packed = lora.pack([(*each[name], 1.0) if name in each else None for each in held])
                self._parts.setdefault((place.layer, place.linear), []).append(_Part(place.first, place.stop, packed))

    def applied(self, layers: Sequence[Layer], adapters: Sequence[int], starts: Sequence[int]) -> list[Layer]:
        """Returns the layers with the updates of a step's rows: `adapters` has each row's slot, or NO_ADAPTER, and
        `starts` is `Batch.query_starts`."""
        rows = AdapterRows.of(adapters, starts, self._device)
        return [
            replace(
                layer,
                qkv=self._adapted(index, "qkv", layer.qkv, rows),
                o=self._adapted(index, "o", layer.o, rows),
                gate_up=self._adapted(index, "gate_up", layer.gate_up, rows),
                down=self._adapted(index, "down", layer.down, rows),
            )
            for index, layer in enumerate(layers)
        ]

    def _adapted(self, layer: int, name: LinearName, linear: Linear, rows: AdapterRows) -> Linear:
        parts = self._parts.get((layer, name))
        return linear if parts is None else _Adapted(linear, parts, rows)


def stacked_bytes(places: Mapping[str, TargetRows], adapter: Adapter, dtype: torch.dtype) -> int:
    """Returns the bytes of an adapter's matrices as they are resident, in `dtype`."""
    return sum(dtype.itemsize * (each.a.numel() + each.b.numel()) for each in adapter.updates.values())


def _matrices(adapter: Adapter, dtype: torch.dtype, device: torch.device) -> _Matrices:
    def placed(matrix: Tensor) -> Tensor:
        return matrix.to(device, dtype).contiguous()

    return {name: (placed(each.a), placed(each.b)) for name, each in adapter.updates.items()}
