"""Low-rank updates of many adapters in one batch: to the rank and back, for single tokens and for runs of them."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.dots import dot
from engine.kernels.gpu.variants import Variant

BLOCK_IN = 256  # columns of x that a program reads at once
BLOCK_OUT = 128  # outputs of a program
SPLITS = 8  # of the sum over columns: a token alone would leave most of the device idle
BLOCK_TOKENS = 32  # of a run in a program
RUN_BLOCK = 64  # columns or outputs that it has at once
MIN_RANK = 16  # of a tile: less, tensor cores do not take


@triton.jit
def shrink_kernel(
    x,
    a,
    ranks,
    which,
    middle,
    tokens,
    width,
    rank,
    x_stride,
    block_rank: tl.constexpr,
    block: tl.constexpr,
    splits: tl.constexpr,
):
    """One token times the A of its adapter, at address `a[adapter]`, over a part of the columns, to `middle` (splits,
    tokens, rank)."""
    token, split = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(which + token).to(tl.int64)
    if adapter >= 0:
        matrix, own = tl.load(a + adapter).to(tl.pointer_type(x.dtype.element_ty)), tl.load(ranks + adapter)
        row = tl.arange(0, block_rank)
        part = tl.cdiv(tl.cdiv(width, splits), block) * block
        sums = tl.zeros((block_rank, block), tl.float32)
        for start in tl.range(split * part, tl.minimum(split * part + part, width), block):
            column = start + tl.arange(0, block)
            states = tl.load(x + token * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
            mask = (row < own)[:, None] & (column < width)[None, :]
            weight = tl.load(matrix + row[:, None] * width + column[None, :], mask=mask, other=0.0)
            sums += weight.to(tl.float32) * states[None, :]
        tl.store(middle + (split * tokens + token) * rank + row, tl.sum(sums, axis=1), mask=row < rank)


@triton.jit
def expand_kernel(
    middle,
    b,
    ranks,
    scales,
    which,
    y,
    tokens,
    height,
    rank,
    y_stride,
    block_rank: tl.constexpr,
    block: tl.constexpr,
    splits: tl.constexpr,
):
    """Adds to `block` outputs of one token the parts of its `middle` times the B of its adapter, at address
    `b[adapter]`."""
    token = tl.program_id(0)
    adapter = tl.load(which + token).to(tl.int64)
    if adapter >= 0:
        matrix, own = tl.load(b + adapter).to(tl.pointer_type(y.dtype.element_ty)), tl.load(ranks + adapter)
        column = tl.arange(0, block_rank)
        row = tl.program_id(1) * block + tl.arange(0, block)
        states = tl.zeros((block_rank,), tl.float32)
        for split in tl.static_range(splits):
            states += tl.load(middle + (split * tokens + token) * rank + column, mask=column < rank, other=0.0)
        mask = (row < height)[:, None] & (column < own)[None, :]
        weight = tl.load(matrix + row[:, None] * own + column[None, :], mask=mask, other=0.0)
        added = tl.sum(weight.to(tl.float32) * states[None, :], axis=1) * tl.load(scales + adapter)
        place = y + token * y_stride + row
        before = tl.load(place, mask=row < height, other=0.0).to(tl.float32)
        tl.store(place, (before + added).to(y.dtype.element_ty), mask=row < height)


@triton.jit
def shrink_runs_kernel(
    x,
    a,
    ranks,
    starts,
    which,
    middle,
    width,
    rank,
    x_stride,
    block_rank: tl.constexpr,
    block: tl.constexpr,
    block_tokens: tl.constexpr,
):
    """`block_tokens` tokens of a run times the A of its adapter, to `middle` (tokens, rank)."""
    run = tl.program_id(1)
    adapter = tl.load(which + run).to(tl.int64)
    first = tl.load(starts + run) + tl.program_id(0) * block_tokens
    end = tl.load(starts + run + 1)
    if (adapter >= 0) & (first < end):
        matrix, own = tl.load(a + adapter).to(tl.pointer_type(x.dtype.element_ty)), tl.load(ranks + adapter)
        token = first + tl.arange(0, block_tokens)
        row = tl.arange(0, block_rank)
        sums = tl.zeros((block_tokens, block_rank), tl.float32)
        for start in tl.range(0, width, block):
            column = start + tl.arange(0, block)
            mask = (token < end)[:, None] & (column < width)[None, :]
            states = tl.load(x + token[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
            mask = (row < own)[:, None] & (column < width)[None, :]
            weight = tl.load(matrix + row[:, None] * width + column[None, :], mask=mask, other=0.0)
            sums = dot(states, tl.trans(weight.to(states.dtype)), sums)
        mask = (token < end)[:, None] & (row < rank)[None, :]
        tl.store(middle + token[:, None] * rank + row[None, :], sums, mask=mask)


@triton.jit
def expand_runs_kernel(
    middle,
    b,
    ranks,
    scales,
    starts,
    which,
    y,
    height,
    rank,
    y_stride,
    block_rank: tl.constexpr,
    block: tl.constexpr,
    block_tokens: tl.constexpr,
):
    """Adds to `block_tokens` tokens of a run and `block` outputs `middle` times the B of its adapter.

    The middle stays in float32, which tensor cores round to 10 bits behind the point; B is exact in that.
    """
    run = tl.program_id(1)
    adapter = tl.load(which + run).to(tl.int64)
    first = tl.load(starts + run) + tl.program_id(0) * block_tokens
    end = tl.load(starts + run + 1)
    if (adapter >= 0) & (first < end):
        matrix, own = tl.load(b + adapter).to(tl.pointer_type(y.dtype.element_ty)), tl.load(ranks + adapter)
        token = first + tl.arange(0, block_tokens)
        column = tl.arange(0, block_rank)
        row = tl.program_id(2) * block + tl.arange(0, block)
        mask = (token < end)[:, None] & (column < rank)[None, :]
        states = tl.load(middle + token[:, None] * rank + column[None, :], mask=mask, other=0.0)
        mask = (row < height)[:, None] & (column < own)[None, :]
        weight = tl.load(matrix + row[:, None] * own + column[None, :], mask=mask, other=0.0)
        added = dot(states, tl.trans(weight.to(tl.float32)), tl.zeros((block_tokens, block), tl.float32))
        added *= tl.load(scales + adapter)
        place = y + token[:, None] * y_stride + row[None, :]
        mask = (token < end)[:, None] & (row < height)[None, :]
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (before + added).to(y.dtype.element_ty), mask=mask)


def variants() -> list[Variant]:
    """For ranks up to 16 and up to 64."""
    pointers = dict.fromkeys("xy", "*bf16") | dict.fromkeys("ab", "*i64") | {"scales": "*fp32", "middle": "*fp32"}
    types = pointers | dict.fromkeys(("ranks", "which", "starts"), "*i32")
    types |= dict.fromkeys(("tokens", "width", "height", "rank", "x_stride", "y_stride"), "i32")
    divisible = frozenset({"width", "height", "x_stride", "y_stride", "rank"})
    made = []
    for rank in (16, 64):
        tokenwise = {"block_rank": rank, "splits": SPLITS}
        runwise = {"block_rank": rank, "block_tokens": BLOCK_TOKENS}
        for name, kernel, constants in (
            ("shrink", shrink_kernel, {**tokenwise, "block": shrink_block(rank)}),
            ("expand", expand_kernel, {**tokenwise, "block": BLOCK_OUT}),
            ("shrink runs", shrink_runs_kernel, {**runwise, "block": RUN_BLOCK}),
            ("expand runs", expand_runs_kernel, {**runwise, "block": RUN_BLOCK}),
        ):
            used = {each: types[each] for each in kernel.arg_names if each in types}
            made.append(Variant(f"lora {name} rank {rank}", kernel, used, constants, divisible=divisible))
    return made


def shrink_block(rank: int) -> int:
    """Columns at once: sums of a rank by these are in registers."""
    return BLOCK_IN if rank <= 16 else 64


def block_rank(rank: int) -> int:
    """The rank of a tile."""
    return max(MIN_RANK, triton.next_power_of_2(rank))
