"""Slots for experts in host memory: the experts that are in them after each step, and what products read."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.expert_slots import ExpertSlots, admit_torch
from engine.kernels.experts import ExpertWeights, expert_weights, mix_triton, parts_of
from engine.kernels.quantized import packed_bytes, quantize
from tests.engine.kernels.examples import examples


def of_host(count: int, rows: int, width: int, bits: int, device: str, seed: int) -> ExpertWeights:
    """Experts in page-locked memory, where there is a device that reads it."""
    made = torch.randn(count, rows, width, generator=torch.Generator().manual_seed(seed)).to(torch.float16)
    weights = [each.pin_memory() if device == "cuda" else each.contiguous() for each in made]
    if bits < 16:
        return expert_weights([quantize(each.float(), bits, 64 if bits == 4 else 0) for each in weights], torch.float16)
    return expert_weights(weights, torch.float16, torch.device(device))


def starts_of(counts: list[int], device: str) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


@examples(12)
@given(
    count=st.integers(3, 11), data=st.data(), slots=st.integers(1, 4),
    steps=st.integers(1, 6), bits=st.sampled_from([16, 8, 4]),
)  # fmt: skip
def test_experts_used_last_are_in_the_slots(
    device: str, count: int, data: st.DataObject, slots: int, steps: int, bits: int
) -> None:
    if device == "cuda" and bits < 16:
        bits = 16  # these are not page-locked
    first = data.draw(st.integers(0, count - 1), label="first")
    weights = of_host(count, 6, 40, bits, device, 0), of_host(count, 5, 30, bits, device, 1)
    held = ExpertSlots(weights, first, slots, torch.device(device))
    owners, used = [-1] * slots, [0] * slots
    for step in range(steps):
        counts = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count), label="counts")
        held.admit(starts_of(counts, device))
        owners, used = admit_torch(counts, first, owners, used, step)
        assert held.expert_of.tolist() == owners and held.used.tolist() == used
        slot_of = [owners.index(expert) if expert in owners else -1 for expert in range(count)]
        assert held.slot_of.tolist() == slot_of
        if device == "cuda":
            continue
        parts = [part for each in weights for part in zip(*map(parts_of, each.weights), strict=True)]
        for part, row in zip(parts, held.tables.tolist(), strict=True):
            for expert, address in enumerate(row):
                assert (address == part[expert].data_ptr()) == (slot_of[expert] < 0)
                nbytes = part[expert].nbytes
                home = ctypes.string_at(part[expert].data_ptr(), nbytes)
                assert ctypes.string_at(address, nbytes) == home


def test_products_read_slots_and_host_memory_alike(device: str) -> None:
    """With two slots for five experts, in steps that choose some and all of them."""
    opens, closes = of_host(6, 32, 24, 16, device, 2), of_host(6, 24, 16, 16, device, 3)
    slots = ExpertSlots((opens, closes), 1, 2, torch.device(device))
    opened, closed = slots.served((opens, closes))
    draw = torch.Generator().manual_seed(4)
    for tokens in (1, 9, 1, 2, 1):
        x = torch.randn(tokens, 24, generator=draw).to(device, torch.float16)
        chosen = torch.rand(tokens, 6, generator=draw).topk(2).indices.int().to(device)
        weights = torch.rand(tokens, 2, generator=draw).to(device)
        found = mix_triton(x, opened, closed, weights, chosen, "silu", admit=slots.admit)
        assert torch.equal(found, mix_triton(x, opens, closes, weights, chosen, "silu"))
    assert slots.clock.item() == 5 and -1 not in slots.expert_of.tolist()


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 64)])
def test_packed_experts_take_as_much_as_is_said(bits: int, group: int) -> None:
    for rows, width in ((6, 40), (32, 256), (1, 700)):
        made = quantize(torch.randn(rows, width), bits, group)
        assert 0 <= packed_bytes(rows, width, bits, group) - made.nbytes < 16
