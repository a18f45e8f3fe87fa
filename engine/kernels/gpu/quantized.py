"""Linear layers on weights of 8 and 4 bits, which are widened in registers.

Weights come as `quantized.QuantizedWeight.packed`, (blocks, out, 32) words: a program reads a block of columns as one
run of memory. Plane p of a word, its p-th 4 or 8 bits, belongs to column `32 * p + word` of the block, so that x is
read in runs as well, and a group of 32, 64 or 128 columns is 1, 2 or 4 planes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.dots import dot
from engine.kernels.gpu.variants import Variant

WORDS = tl.constexpr(32)  # of a row in a block
SLOTS = tl.constexpr(16)  # rows that the threads of a program read at once
REPEATS = {1: 4, 2: 2}  # rows of a slot by tokens: x is widened once for them, as far as registers go
BLOCK_ROWS = 64  # outputs of a program on tensor cores
STAGES = {16: 3, 32: 3, 64: 2}  # blocks on their way to it, by its tokens, whose x takes the shared memory
SUM_BLOCK = 256
FORMS = ((8, 0, "*fp32", False), (4, 64, "*bf16", False), (4, 128, "*fp16", True), (8, 32, "*fp16", False))


def gemm_warps(block_tokens: int) -> int:
    """Of a program on tensor cores: four would spill the sums of more tokens."""
    return 8 if block_tokens > 16 else 4


@triton.jit
def _plane(words, plane: tl.constexpr, bits: tl.constexpr, group: tl.constexpr, scale, low, zero, fused: tl.constexpr):
    """Plane `plane` of words (rows, words) times `scale` (rows,) and `low` (rows,) more, or as integers where `group`
    is 0; float32, exact.

    Bits set below a fitting exponent are a float already, so that a mask and a fused multiplication by the scale widen
    a weight, where shifting, masking and converting would take more: at four bits arithmetic, not memory, limits a
    kernel. Between bits 8 and 23 nothing is rounded on the way: 16 bits times the 8 of a bfloat16. A scale of more bits
    (not `fused`) takes a subtraction more.
    """
    shift: tl.constexpr = plane * bits
    at: tl.constexpr = 8 if bits == 8 else shift + 8 if shift < 8 else shift if shift < 20 else shift - 12
    field: tl.constexpr = ((1 << bits) - 1) << at
    offset: tl.constexpr = (1 << (23 - at)) + (1 << (bits - 1))
    if shift > at:
        words = words >> (shift - at)
    if shift < at:
        words = words << (at - shift)
    value = ((words & field) | (zero + ((150 - at) << 23))).to(tl.float32, bitcast=True)
    if group == 0:
        return value - offset
    elif fused:
        return value * scale[:, None] + (scale * -offset)[:, None]
    else:
        return (value - offset) * scale[:, None] + low[:, None]


@triton.jit
def small_gemm_kernel(
    x,
    packed,
    scales,
    minimums,  # of groups, or None
    bias,
    out,
    height,  # out features
    width,  # in features
    blocks,
    x_stride,
    bits: tl.constexpr,
    group: tl.constexpr,  # columns of a scale, or 0: one scale a row
    tokens: tl.constexpr,
    splits: tl.constexpr,
    repeats: tl.constexpr,
    whole: tl.constexpr,  # rows, columns and runs end where programs, blocks and splits do: nothing is masked
):
    """One program computes `repeats * SLOTS / splits` outputs of all tokens, without tensor cores.

    `splits` of its slots share a row, a run of blocks each, and add up at the end: few outputs keep many bytes in
    flight without a second pass. The next words are on their way while the last are multiplied.
    """
    planes: tl.constexpr = 32 // bits
    fused: tl.constexpr = scales.dtype.element_ty == tl.bfloat16 and minimums is None
    each: tl.constexpr = SLOTS // splits
    together: tl.constexpr = planes if group == 0 else group // WORDS  # planes of a scale
    slot = tl.arange(0, SLOTS)
    word = tl.arange(0, WORDS)[None, :]
    run = tl.cdiv(blocks, splits)
    block = slot // each * run
    end = tl.minimum(block + run, blocks)
    # Zero, which the compiler cannot know: with the exponent in a register, mask and exponent are one instruction
    # (LOP3); both constant, they would be two.
    zero = tl.minimum(slot + width, 0)[:, None]
    first = tl.program_id(0) * (repeats * each) + slot % each
    places = packed + (block * height + first)[:, None] * WORDS + word
    columns = x + (block * (WORDS * planes))[:, None] + word
    of_groups = block * (planes // together) * height + first
    words, acc = (), ()
    for i in tl.static_range(repeats):
        if whole:
            words += (tl.load(places + i * each * WORDS),)
        else:
            inside = (first + i * each < height) & (block < blocks)
            words += (tl.load(places + i * each * WORDS, mask=inside[:, None], other=0),)
    for _ in tl.static_range(tokens * repeats):
        acc += (tl.zeros((SLOTS, WORDS), tl.float32),)
    for step in tl.range(run):
        places += height * WORDS
        following = ()
        for i in tl.static_range(repeats):
            if whole:
                following += (tl.load(places + i * each * WORDS, mask=(block + step + 1 < end)[:, None], other=0),)
            else:
                inside = (first + i * each < height) & (block + step + 1 < end)
                following += (tl.load(places + i * each * WORDS, mask=inside[:, None], other=0),)
        column = ((block + step) * (WORDS * planes))[:, None] + word
        for group_at in tl.static_range(planes // together):
            factors, lows = (), ()
            for i in tl.static_range(repeats):
                if group == 0:
                    factors += (0,)
                elif whole:
                    factors += (tl.load(scales + of_groups + i * each).to(tl.float32),)
                else:
                    inside = (first + i * each < height) & (block + step < blocks)
                    factors += (tl.load(scales + of_groups + i * each, mask=inside, other=0.0).to(tl.float32),)
                if minimums is None:
                    lows += (tl.zeros((SLOTS,), tl.float32),)
                else:
                    inside = (first + i * each < height) & (block + step < blocks)
                    lows += (tl.load(minimums + of_groups + i * each, mask=inside, other=0.0).to(tl.float32),)
            for plane in tl.static_range(group_at * together, (group_at + 1) * together):
                given = ()
                for token in tl.static_range(tokens):
                    places_of = columns + token * x_stride + plane * WORDS
                    if whole:
                        given += (tl.load(places_of).to(tl.float32),)
                    else:
                        known = column + plane * WORDS < width
                        given += (tl.load(places_of, mask=known, other=0.0).to(tl.float32),)
                summed = ()
                for i in tl.static_range(repeats):
                    weight = _plane(words[i], plane, bits, group, factors[i], lows[i], zero, fused)
                    for token in tl.static_range(tokens):
                        summed += (acc[i * tokens + token] + weight * given[token],)
                acc = summed
            of_groups += height
        columns += WORDS * planes
        words = following
    for i in tl.static_range(repeats):
        row = tl.program_id(0) * (repeats * each) + i * each + tl.arange(0, each)
        for token in tl.static_range(tokens):
            sums = tl.sum(tl.sum(acc[i * tokens + token], axis=1).reshape(splits, each), axis=0)
            sums = finished(sums, row, row < height, scales, bias, group == 0)
            tl.store(out + token * height + row, sums.to(out.dtype.element_ty), mask=row < height)


@triton.jit
def finished(sums, rows, inside, scales, bias, per_row: tl.constexpr):
    """Finishes sums (..., rows) with the row's scale and its bias."""
    if per_row:
        sums *= tl.load(scales + rows, mask=inside, other=0.0)
    if bias is not None:
        sums += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    return sums


@triton.jit
def products(
    x, of_x, given, packed, scales, minimums, row, inside, first, end, height, width, zero, acc,
    bits: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Returns `acc` (tokens, rows) and the products of x, whose rows begin at `of_x`, with a weight's `row`s, over
    blocks `first` to `end`. `given` and `inside` mask the two; a scale a row is left to `finished`.

    Weights are multiplied as the integers that they are, which are exact in 16 bits, and scaled group by group.
    """
    planes: tl.constexpr = 32 // bits
    together: tl.constexpr = planes if group == 0 else group // WORDS
    word = tl.arange(0, WORDS)
    for block in tl.range(first, end):
        words = tl.load(packed + (block * height + row)[:, None] * WORDS + word[None, :], mask=inside[:, None], other=0)
        for group_at in tl.static_range(planes // together):
            part = acc if group == 0 else tl.zeros(acc.shape, tl.float32)
            total = tl.zeros((acc.shape[0],), tl.float32)  # of the group's x, for minimums
            for plane in tl.static_range(group_at * together, (group_at + 1) * together):
                column = block * (WORDS * planes) + plane * WORDS + word
                known = given[:, None] & (column < width)[None, :]
                states = tl.load(x + of_x[:, None] + column[None, :], mask=known, other=0.0)
                weight = _plane(words, plane, bits, 0, 0, 0, zero, False).to(x.dtype.element_ty)
                part = dot(states, tl.trans(weight), part)
                if minimums is not None:
                    total += tl.sum(states.to(tl.float32), axis=1)
            if group == 0:
                acc = part
            else:
                place = (block * (planes // together) + group_at) * height + row
                acc += part * tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)[None, :]
                if minimums is not None:
                    low = tl.load(minimums + place, mask=inside, other=0.0).to(tl.float32)
                    acc += total[:, None] * low[None, :]
    return acc


@triton.jit(do_not_specialize=["tokens"])
def gemm_kernel(
    x,
    packed,
    scales,
    minimums,
    bias,
    out,  # (tokens, height), or (splits, tokens, height) of float32 for `sum_kernel`
    tokens,
    height,
    width,
    blocks,
    x_stride,
    bits: tl.constexpr,
    group: tl.constexpr,
    splits: tl.constexpr,
    block_tokens: tl.constexpr,
    block_rows: tl.constexpr,
):
    """One program computes `block_tokens` by `block_rows` outputs over a run of blocks, on tensor cores."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    token = tl.program_id(1) * block_tokens + tl.arange(0, block_tokens)
    split = tl.program_id(2)
    run = tl.cdiv(blocks, splits)
    inside = row < height
    given = token < tokens
    zero = tl.minimum(row + tokens, 0)[:, None]  # see small_gemm_kernel
    acc = tl.zeros((block_tokens, block_rows), tl.float32)
    end = tl.minimum(split * run + run, blocks)
    acc = products(
        x, token * x_stride, given, packed, scales, minimums, row, inside, split * run, end, height, width, zero, acc,
        bits, group,
    )  # fmt: skip
    mask = given[:, None] & inside[None, :]
    if splits > 1:
        tl.store(out + (split * tokens + token).to(tl.int64)[:, None] * height + row[None, :], acc, mask=mask)
    else:
        acc = finished(acc, row[None, :], inside[None, :], scales, bias, group == 0)
        tl.store(out + token.to(tl.int64)[:, None] * height + row[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(
    parts, scales, bias, out, tokens, height, splits: tl.constexpr, group: tl.constexpr, block: tl.constexpr
):
    """Adds up the partial sums of `splits` programs for an output, in their order."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    token = tl.program_id(1)
    inside = row < height
    sums = tl.zeros((block,), tl.float32)
    for split in tl.static_range(splits):
        sums += tl.load(parts + (split * tokens + token) * height + row, mask=inside, other=0.0)
    sums = finished(sums, row, inside, scales, bias, group == 0)
    tl.store(out + token * height + row, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def widen_kernel(
    packed,
    scales,
    minimums,
    out,
    first,
    rows,
    height,
    width,
    bits: tl.constexpr,
    group: tl.constexpr,
    block_rows: tl.constexpr,
):
    """Writes rows `first` to `first + rows` as (rows, width) of out's type: one block of columns a program."""
    planes: tl.constexpr = 32 // bits
    together: tl.constexpr = planes if group == 0 else group // WORDS
    block = tl.program_id(1)
    at = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    row = first + at
    inside = at < rows
    word = tl.arange(0, WORDS)
    words = tl.load(packed + (block * height + row)[:, None] * WORDS + word[None, :], mask=inside[:, None], other=0)
    for plane in tl.static_range(planes):
        place = row if group == 0 else (block * (planes // together) + plane // together) * height + row
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        weight = _plane(words, plane, bits, 0, 0, 0, 0, False) * scale[:, None]
        if minimums is not None:
            weight += tl.load(minimums + place, mask=inside, other=0.0).to(tl.float32)[:, None]
        column = block * (WORDS * planes) + plane * WORDS + word
        mask = inside[:, None] & (column < width)[None, :]
        tl.store(out + at[:, None].to(tl.int64) * width + column[None, :], weight.to(out.dtype.element_ty), mask=mask)


def variants() -> list[Variant]:
    """Of every kernel: eight bits with a scale a row and four with a scale for 64 columns, as the engine has them,
    and checkpoints' own: four bits with minimums (AWQ), eight with a scale for 32 columns (Q8_0)."""
    sizes = dict.fromkeys(("tokens", "height", "width", "blocks", "x_stride"), "i32")
    types = {"x": "*bf16", "packed": "*i32", "bias": "*bf16", "out": "*bf16"} | sizes
    divisible = frozenset({"height", "width", "x_stride"})
    few = {name: kind for name, kind in types.items() if name != "tokens"}
    made = []
    for bits, group, scale_type, with_minimums in FORMS:
        kind = {"bits": bits, "group": group} | ({} if with_minimums else {"minimums": None})
        scales = {"scales": scale_type} | ({"minimums": "*fp32"} if with_minimums else {})
        form = f"int{bits}{f' group {group}' if scale_type == '*fp16' else ''}{' minimums' if with_minimums else ''}"
        for tokens, splits, whole in ((1, 1, True), (1, 8, True), (1, 8, False), (2, 8, True), (2, 8, False)):
            constants = {**kind, "tokens": tokens, "splits": splits, "repeats": REPEATS[tokens], "whole": whole}
            name = f"quantized few {form} tokens {tokens} splits {splits}{'' if whole else ' masked'}"
            made.append(Variant(name, small_gemm_kernel, few | scales, constants, divisible=divisible))
        for tokens in (16, 32, 64):
            for splits in (1, 4):
                constants = {**kind, "splits": splits, "block_tokens": tokens, "block_rows": BLOCK_ROWS}
                name = f"quantized some {form} tokens {tokens} splits {splits}"
                typed = types | scales | ({"out": "*fp32"} if splits > 1 else {})
                made.append(Variant(name, gemm_kernel, typed, constants, gemm_warps(tokens), STAGES[tokens], divisible))
        constants = {"splits": 4, "group": group, "block": SUM_BLOCK}
        typed = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16", "tokens": "i32", "height": "i32"}
        typed["scales"] = scale_type
        made.append(Variant(f"quantized sum {form}", sum_kernel, typed, constants, divisible=divisible))
        typed = {"packed": "*i32", "out": "*bf16", **dict.fromkeys(("first", "rows", "height", "width"), "i32")}
        constants = {**kind, "block_rows": BLOCK_ROWS}
        made.append(Variant(f"quantized widen {form}", widen_kernel, typed | scales, constants, divisible=divisible))
    return made
