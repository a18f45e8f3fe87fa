"""Experts in host memory beside a GPU (vLLM's `cpu_offload_gb`): how many, and their way there when they are loaded.

The last experts of every layer lie in page-locked memory, which the GPU reads; `engine.kernels.expert_slots` keeps
those used last on the device. Knows sizes and memory, nothing of kernels that run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.config import QuantizationName
from engine.errors import InvalidParameter
from engine.kernels.expert_slots import padded
from engine.kernels.matmul import Invariant
from engine.kernels.quantized import GROUP, QuantizedWeight, packed_bytes
from engine.model.linear import Dense, Linear, Packing
from engine.model.model_spec import ModelSpec

GIB = 1 << 30
_CHUNK = 64 << 20  # bytes of host memory at once: torch rounds page-locked memory up to a power of two


def slots_for(offloaded: int, per_token: int) -> int:
    """Returns a layer's slots on the device: as many as a token's experts, at most half of those that are offloaded."""
    return min(per_token, offloaded // 2)


def expert_bytes(spec: ModelSpec, dtype: torch.dtype, quantization: QuantizationName) -> int:
    """Returns the bytes of one expert's weights."""
    assert spec.experts is not None, "the model has experts"
    wide, hidden = spec.experts.intermediate_size, spec.hidden_size
    if quantization == "none":
        return padded(2 * wide * hidden * dtype.itemsize) + padded(hidden * wide * dtype.itemsize)
    bits, group = (8, 0) if quantization == "int8" else (4, GROUP)
    return packed_bytes(2 * wide, hidden, bits, group) + packed_bytes(hidden, wide, bits, group)


def gib_of(nbytes: int) -> float:
    """Returns the GiB of so many bytes or a bit more, in six digits."""
    return float(f"{nbytes / GIB * (1 + 1e-5):.6g}")


@dataclass(frozen=True, slots=True)
class ExpertOffload:
    """The `offloaded` last experts of each of `layers` layers, of `each` bytes, with `slots` on the device."""

    count: int
    layers: int
    offloaded: int
    slots: int
    each: int

    @classmethod
    def of(cls, spec: ModelSpec, each: int, gib: float) -> ExpertOffload:
        """Returns as many experts as `gib` GiB of host memory hold, of `each` bytes.

        Raises:
            InvalidParameter: they are fewer than 2 of each layer, or more than there are.
        """
        assert spec.experts is not None, "the model has experts"
        layers, count = len(spec.experts.layers), spec.experts.count
        offloaded = int(gib * GIB / (layers * each) + 1e-9)
        if offloaded < 2 or offloaded > count:
            least, most = (gib_of(number * layers * each) for number in (2, count))
            message = (
                f"cpu_offload_gb is {gib}; accepted: 0, or {least:g} to {most:g} GiB, which hold 2 to {count} experts"
            )
            raise InvalidParameter("cpu_offload_gb", f"{message} of each of the {layers} layers.")
        return cls(count, layers, offloaded, slots_for(offloaded, spec.experts.per_token), each)

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of host memory that they take."""
        return self.layers * self.offloaded * self.each

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes of the device that they leave free, less those of the slots."""
        return self.layers * (self.offloaded - self.slots) * self.each

    def packing(self, packing: Packing) -> Packing:
        """Returns the layout of weights with the experts that lie in host memory put there as they are read."""
        return replace(packing, expert=HostExperts(self.count - self.offloaded).place)


class HostExperts:
    """Page-locked memory that experts from number `first` on are moved to, one at a time."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._chunk, self._taken = torch.empty(0, dtype=torch.uint8), 0

    def place(self, index: int, linear: Linear) -> Linear:
        """Returns the projection of expert `index`, with its weight in host memory if it belongs there."""
        if index < self._first:
            return linear
        if isinstance(linear, Dense | Invariant):
            return replace(linear, weight=self._moved(linear.weight))
        assert isinstance(linear, partial) and isinstance(linear.keywords["weight"], QuantizedWeight), "see Packing"
        weight: QuantizedWeight = linear.keywords["weight"]
        low = None if weight.minimums is None else self._moved(weight.minimums)
        moved = replace(weight, packed=self._moved(weight.packed), scales=self._moved(weight.scales), minimums=low)
        return partial(linear.func, **{**linear.keywords, "weight": moved})

    def _moved(self, part: Tensor) -> Tensor:
        size = padded(part.nbytes)
        if self._taken + size > len(self._chunk):
            self._chunk = torch.empty(max(_CHUNK, size), dtype=torch.uint8, pin_memory=True)
            self._taken = 0
        memory = self._chunk[self._taken : self._taken + part.nbytes]
        self._taken += size
        return memory.view(part.dtype).view(part.shape).copy_(part)
