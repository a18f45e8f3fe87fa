"""A device's slots for experts that lie in host memory: which expert is in which, and its way there."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.variants import Variant

FETCH_PROGRAMS = 32  # of a slot and a part
FETCH_BLOCK = 4096  # words of 32 bits that a program copies at once


@triton.jit
def admit_kernel(
    starts, slot_of, expert_of, used, clock, tables, homes, bases, sizes, admitted, experts, first, slots,
    parts: tl.constexpr, block_experts: tl.constexpr, block_slots: tl.constexpr,
):  # fmt: skip
    """One program gives the slots used least recently to a step's experts that have none, and writes their addresses.
    See `expert_slots.ExpertSlots` for the arguments; `admitted` gets the expert that comes to each slot, or -1."""
    each, slot = tl.arange(0, block_experts), tl.arange(0, block_slots)
    known, real = each < experts, slot < slots
    begins = tl.load(starts + each, mask=known, other=0)
    ends = tl.load(starts + each + 1, mask=known, other=0)
    wanted = known & (each >= first) & (ends > begins)
    now = tl.load(clock) + 1
    tl.store(clock, now)
    held = tl.load(slot_of + each, mask=known, other=-1)
    owner = tl.load(expert_of + slot, mask=real, other=-1)
    last = tl.load(used + slot, mask=real, other=now)  # beyond the slots there is no room
    asked = (owner[:, None] == each[None, :]) & wanted[None, :]
    last = tl.where(tl.sum(asked.to(tl.int32), 1) > 0, now, last)
    missing = (wanted & (held < 0)).to(tl.int32)
    comes = tl.full([block_slots], -1, dtype=tl.int32)
    for _ in tl.range(slots):
        expert = tl.min(tl.where(missing > 0, each, block_experts), 0)
        oldest = tl.min(last, 0)
        place = tl.min(tl.where(last == oldest, slot, block_slots), 0)
        fits = (expert < experts) & (oldest < now)
        gone = tl.sum(tl.where(slot == place, owner, 0), 0)
        held = tl.where(fits & (each == gone), -1, held)
        held = tl.where(fits & (each == expert), place, held)
        missing = tl.where(each == expert, 0, missing)
        taken = fits & (slot == place)
        owner = tl.where(taken, expert, owner)
        last = tl.where(taken, now, last)
        comes = tl.where(taken, expert, comes)
    tl.store(slot_of + each, held, mask=known)
    tl.store(expert_of + slot, owner, mask=real)
    tl.store(used + slot, last, mask=real)
    tl.store(admitted + slot, comes, mask=real)
    for part in tl.static_range(parts):
        home = tl.load(homes + part * experts + each, mask=known, other=0)
        address = tl.load(bases + part) + held.to(tl.int64) * tl.load(sizes + part)
        tl.store(tables + part * experts + each, tl.where(held >= 0, address, home), mask=known)


@triton.jit
def fetch_kernel(admitted, homes, bases, sizes, experts, programs: tl.constexpr, block: tl.constexpr):
    """Copies a share of one part of the expert that comes to a slot, if one does. Sizes are multiples of 16 bytes."""
    slot, part = tl.program_id(0), tl.program_id(1)
    expert = tl.load(admitted + slot)
    if expert >= 0:
        size = tl.load(sizes + part)
        source = tl.multiple_of(tl.load(homes + part * experts + expert).to(tl.pointer_type(tl.int32)), 16)
        target = tl.multiple_of((tl.load(bases + part) + slot * size).to(tl.pointer_type(tl.int32)), 16)
        words = size // 16 * 4  # so that the compiler knows that four are masked alike, and copies 16 bytes at once
        for start in tl.range(tl.program_id(2) * block, words, programs * block):
            at = start + tl.arange(0, block)
            tl.store(target + at, tl.load(source + at, mask=at < words, other=0), mask=at < words)


def variants() -> list[Variant]:
    """Two parts of an expert in 16 bits, and six of one in 4 bits with minimums."""
    types = dict.fromkeys(("starts", "slot_of", "expert_of", "used", "clock", "admitted"), "*i32")
    types |= dict.fromkeys(("tables", "homes", "bases", "sizes"), "*i64")
    types |= dict.fromkeys(("experts", "first", "slots"), "i32")
    found = []
    for parts in (2, 6):
        constants = {"parts": parts, "block_experts": 128, "block_slots": 8}
        found.append(Variant(f"expert slots admit {parts} parts", admit_kernel, types, constants))
    names = ("admitted", "homes", "bases", "sizes", "experts")
    constants = {"programs": FETCH_PROGRAMS, "block": FETCH_BLOCK}
    found.append(Variant("expert slots fetch", fetch_kernel, {name: types[name] for name in names}, constants))
    return found
