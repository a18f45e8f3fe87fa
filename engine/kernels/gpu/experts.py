"""A mixture of experts: scores of a router, the choice of experts, and products of tokens sorted by expert.

As in MegaBlocks (Gale et al. 2023) and vLLM's fused_moe: one launch multiplies all experts, a program being a block of
an expert's tokens and a block of its columns. Blocks are not laid out anywhere: each program finds its own from where
experts begin among the sorted tokens, so that the host knows no number of them. Programs beyond the last block end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from engine.kernels.gpu.dots import dot
from engine.kernels.gpu.gated import combined
from engine.kernels.gpu.quantized import FORMS, finished, gemm_warps, products
from engine.kernels.gpu.variants import Variant

ROUTER_TOKENS, ROUTER_ROWS, ROUTER_WIDTH = 16, 16, 64  # of a router's tile
ROUTER_SPLITS = 8  # of its sum: a token alone would leave most of the device idle
SUM_BLOCK = 1024
SCALES = {"*fp32": "float32", "*bf16": "bfloat16", "*fp16": "float16"}


@triton.jit(do_not_specialize=["tokens"])
def router_kernel(
    x, weight, parts, tokens, rows, width, x_stride,
    splits: tl.constexpr, block_tokens: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """Writes parts of the scores to `parts` (splits, tokens, rows): a weight in 16 bits is exact, one of 32 is
    multiplied as such."""
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    split = tl.program_id(2)
    some_x, some_weight = (token < tokens)[:, None], (row < rows)[:, None]
    of_x = x + token.to(tl.int64)[:, None] * x_stride
    run = tl.cdiv(tl.cdiv(width, splits), block_width) * block_width
    total = tl.zeros([block_tokens, block_rows], dtype=tl.float32)
    for start in tl.range(split * run, tl.minimum(split * run + run, width), block_width):
        column = start + tl.arange(0, block_width)
        inside = (column < width)[None, :]
        a = tl.load(of_x + column[None, :], mask=some_x & inside, other=0.0).to(weight.dtype.element_ty)
        b = tl.load(weight + row[:, None] * width + column[None, :], mask=some_weight & inside, other=0.0)
        total = dot(a, tl.trans(b), total, "ieee")
    place = parts + (split * tokens + token).to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(place, total, mask=some_x & (row < rows)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    parts, bias, selection_bias, factors, weights, chosen, tokens, experts, rows, min_weight, scaling,
    splits: tl.constexpr, per_token: tl.constexpr, block_chosen: tl.constexpr, block: tl.constexpr,
    sigmoid: tl.constexpr, normalised: tl.constexpr, groups: tl.constexpr, groups_per_token: tl.constexpr,
    summed: tl.constexpr, shared: tl.constexpr, by_logits: tl.constexpr,
):  # fmt: skip
    """One program chooses the experts of one token, by their scores or `by_logits`. Of equal ones the first expert's
    counts as larger. `factors` multiply the weights of experts once they are normalised.

    `shared`: 0 for none; 1: a shared expert has a weight of 1, after those of the chosen ones; 2: it has the sigmoid of
    the last row's score.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    real = at < experts
    logits = tl.zeros([block], dtype=tl.float32)
    for split in tl.static_range(splits):
        logits += tl.load(parts + (split * tokens + token) * rows + at, mask=real, other=0.0)
    if bias is not None:
        logits += tl.load(bias + at, mask=real, other=0.0)
    if sigmoid:
        scores = tl.sigmoid(logits)
    else:
        logits = tl.where(real, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    ranked = logits if by_logits else scores
    if selection_bias is not None:
        ranked += tl.load(selection_bias + at, mask=real, other=0.0)
    ranked = tl.where(real, ranked, float("-inf"))
    if groups > 1:
        ranked = _of_best_groups(ranked, at, experts // groups, groups, groups_per_token, summed, block)
    place = tl.arange(0, block_chosen)
    found = tl.zeros([block_chosen], dtype=tl.int32)
    taken = tl.zeros([block_chosen], dtype=tl.float32)
    for pick in tl.range(per_token):
        best = tl.min(tl.where(ranked == tl.max(ranked, 0), at, block), 0)
        best = tl.minimum(best, experts - 1)  # of scores that are no numbers: still an expert, within the weights
        found = tl.where(place == pick, best, found)
        taken = tl.where(place == pick, tl.sum(tl.where(at == best, scores, 0.0), 0), taken)
        ranked = tl.where(at == best, float("-inf"), ranked)
    if normalised:
        taken = taken / (tl.sum(taken, 0) + min_weight)
    if factors is not None:
        taken *= tl.load(factors + found, mask=place < per_token, other=0.0)
    ways: tl.constexpr = per_token + (shared > 0)
    tl.store(weights + token * ways + place, taken * scaling, mask=place < per_token)
    tl.store(chosen + token * per_token + place, found, mask=place < per_token)
    if shared == 1:
        tl.store(weights + token * ways + per_token, 1.0)
    if shared == 2:
        gate = 0.0
        for split in tl.static_range(splits):
            gate += tl.load(parts + (split * tokens + token) * rows + experts)
        tl.store(weights + token * ways + per_token, tl.sigmoid(gate))


@triton.jit
def _of_best_groups(
    ranked, at, size, groups: tl.constexpr, groups_per_token: tl.constexpr, summed: tl.constexpr, block: tl.constexpr
):
    """Returns the scores with −inf outside of the best groups of `size` neighbours, by their `summed` best."""
    group = at // size
    sums = tl.full([block], float("-inf"), dtype=tl.float32)
    for each in tl.range(groups):
        rest = tl.where(group == each, ranked, float("-inf"))
        total = tl.max(rest, 0)
        for _ in tl.static_range(summed - 1):
            first = tl.min(tl.where(rest == tl.max(rest, 0), at, block), 0)
            rest = tl.where(at == first, float("-inf"), rest)
            total += tl.max(rest, 0)
        sums = tl.where(group == each, total, sums)
    kept = tl.full([block], float("-inf"), dtype=tl.float32)
    for _ in tl.range(groups_per_token):
        best = tl.min(tl.where(sums == tl.max(sums, 0), group, block), 0)
        kept = tl.where(group == best, ranked, kept)
        sums = tl.where(group == best, float("-inf"), sums)
    return kept


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(chosen, order, starts, pairs, block: tl.constexpr):
    """One program puts one expert's pairs of token and expert into `order`, as they come, and says in `starts` where it
    began. It counts those of the experts before it by itself."""
    expert = tl.program_id(0)
    at = tl.arange(0, block)
    before = tl.zeros([block], dtype=tl.int32)
    for start in tl.range(0, pairs, block):
        each = tl.load(chosen + start + at, mask=start + at < pairs, other=expert)
        before += (each < expert).to(tl.int32)
    first = tl.sum(before, 0)
    tl.store(starts + expert, first)
    for start in tl.range(0, pairs, block):
        each = tl.load(chosen + start + at, mask=start + at < pairs, other=-1)
        mine = (each == expert).to(tl.int32)
        tl.store(order + first + tl.cumsum(mine, 0) - 1, start + at, mask=mine > 0)
        first += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, first)


@triton.jit
def _block_of(starts, experts, block_tokens: tl.constexpr, block_experts: tl.constexpr):
    """Returns this program's expert, and the first and the end of its sorted pairs. Beyond the last block the expert is
    none that there is."""
    each = tl.arange(0, block_experts)
    firsts = tl.load(starts + each, mask=each < experts, other=0)
    ends = tl.load(starts + each + 1, mask=each < experts, other=0)
    blocks = tl.cdiv(ends - firsts, block_tokens)
    block = tl.program_id(0)
    passed = tl.cumsum(blocks, 0) <= block
    expert = tl.sum(passed.to(tl.int32), 0)
    mine = each == expert
    before = tl.sum(tl.where(passed, blocks, 0), 0)
    first = tl.sum(tl.where(mine, firsts, 0), 0) + (block - before) * block_tokens
    return expert, first, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _matrix(table, expert, kind: tl.constexpr):
    """Returns the pointer to an expert's numbers, which begin at a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(table + expert).to(tl.pointer_type(kind)), 16)


@triton.jit
def _bias_of(bias, expert, width, row, inside):
    """Returns some rows of an expert's bias, (1, rows) float32; `bias` is (experts, width)."""
    return tl.load(bias + expert.to(tl.int64) * width + row, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gated(
    gate, up, bias, factors, expert, row, rows, inside, pair, given,
    per_token: tl.constexpr, ways: tl.constexpr, activation: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr,
):  # fmt: skip
    """Finishes the first product of pairs: `factors` (tokens, ways) multiply what an expert reads, which is to multiply
    its product, then comes its bias, then the gate."""
    if factors is not None:
        at = (pair // per_token).to(tl.int64) * ways + pair % per_token
        factor = tl.load(factors + at, mask=given, other=0.0)[:, None]
        gate, up = gate * factor, up * factor
    if bias is not None:
        gate += _bias_of(bias, expert, 2 * rows, row, inside)
        up += _bias_of(bias, expert, 2 * rows, rows + row, inside)
    return combined(gate, up, activation, alpha, limit)


@triton.jit
def expert_gate_up_kernel(
    x, weight, bias, factors, order, starts, out, experts, rows, width, x_stride,
    per_token: tl.constexpr, ways: tl.constexpr, activation: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr,
    block_experts: tl.constexpr, block_tokens: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Multiplies tokens by their experts' gates and ups: one program is a tile of `out` (pairs, rows), as they are
    sorted. `weight` has the addresses of matrices (2 * rows, width), `bias` is (experts, 2 * rows); `factors` see
    `_gated`."""
    expert, first, end = _block_of(starts, experts, block_tokens, block_experts)
    if expert < experts:
        matrix = _matrix(weight, expert, x.dtype.element_ty)
        at = first + tl.arange(0, block_tokens)
        pair = tl.load(order + at, mask=at < end, other=0)
        row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
        column = tl.arange(0, block_width)
        of_x = x + (pair // per_token).to(tl.int64)[:, None] * x_stride + column[None, :]
        of_gate = matrix + row[:, None] * width + column[None, :]
        of_up = matrix + (rows + row)[:, None] * width + column[None, :]
        some_x, some_weight = (at < end)[:, None], (row < rows)[:, None]
        gate = tl.zeros([block_tokens, block_rows], dtype=tl.float32)
        up = tl.zeros([block_tokens, block_rows], dtype=tl.float32)
        for start in range(0, width, block_width):
            if whole:
                a = tl.load(of_x, mask=some_x, other=0.0)
                b = tl.load(of_gate, mask=some_weight, other=0.0)
                c = tl.load(of_up, mask=some_weight, other=0.0)
            else:
                inside = (start + column < width)[None, :]
                a = tl.load(of_x, mask=some_x & inside, other=0.0)
                b = tl.load(of_gate, mask=some_weight & inside, other=0.0)
                c = tl.load(of_up, mask=some_weight & inside, other=0.0)
            gate = dot(a, tl.trans(b), gate, "ieee")
            up = dot(a, tl.trans(c), up, "ieee")
            of_x += block_width
            of_gate += block_width
            of_up += block_width
        made = _gated(
            gate, up, bias, factors, expert, row, rows, row < rows, pair, at < end, per_token, ways, activation, alpha,
            limit,
        )  # fmt: skip
        place = out + at.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(place, made.to(out.dtype.element_ty), mask=some_x & (row < rows)[None, :])


@triton.jit
def expert_down_kernel(
    x, weight, bias, order, starts, out, experts, rows, width,
    block_experts: tl.constexpr, block_tokens: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Multiplies sorted pairs `x` (pairs, width) by their experts' matrices (rows, width): one program is a tile of
    `out` (pairs, rows), where they were before they were sorted."""
    expert, first, end = _block_of(starts, experts, block_tokens, block_experts)
    if expert < experts:
        matrix = _matrix(weight, expert, x.dtype.element_ty)
        at = first + tl.arange(0, block_tokens)
        pair = tl.load(order + at, mask=at < end, other=0)
        row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
        column = tl.arange(0, block_width)
        of_x = x + at.to(tl.int64)[:, None] * width + column[None, :]
        of_weight = matrix + row[:, None] * width + column[None, :]
        some_x, some_weight = (at < end)[:, None], (row < rows)[:, None]
        total = tl.zeros([block_tokens, block_rows], dtype=tl.float32)
        for start in range(0, width, block_width):
            if whole:
                a = tl.load(of_x, mask=some_x, other=0.0)
                b = tl.load(of_weight, mask=some_weight, other=0.0)
            else:
                inside = (start + column < width)[None, :]
                a = tl.load(of_x, mask=some_x & inside, other=0.0)
                b = tl.load(of_weight, mask=some_weight & inside, other=0.0)
            total = dot(a, tl.trans(b), total, "ieee")
            of_x += block_width
            of_weight += block_width
        if bias is not None:
            total += _bias_of(bias, expert, rows, row, row < rows)
        place = out + pair.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=some_x & (row < rows)[None, :])


@triton.jit
def quantized_gate_up_kernel(
    x, packed, scales, minimums, bias, factors, order, starts, out, experts, rows, width, x_stride,
    scale_type: tl.constexpr, bits: tl.constexpr, group: tl.constexpr, per_token: tl.constexpr, ways: tl.constexpr,
    activation: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, block_experts: tl.constexpr,
    block_tokens: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """`expert_gate_up_kernel` on weights of 8 or 4 bits: the tables have the addresses of `QuantizedWeight`'s parts."""
    expert, first, end = _block_of(starts, experts, block_tokens, block_experts)
    if expert < experts:
        words, steps = _matrix(packed, expert, tl.int32), _matrix(scales, expert, scale_type)
        lows = None if minimums is None else _matrix(minimums, expert, tl.float32)
        at = first + tl.arange(0, block_tokens)
        given = at < end
        pair = tl.load(order + at, mask=given, other=0)
        row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
        inside = row < rows
        zero = tl.minimum(row + width, 0)[:, None]  # see small_gemm_kernel
        blocks = tl.cdiv(width, 1024 // bits)
        of_x = (pair // per_token).to(tl.int64) * x_stride
        gate = tl.zeros((block_tokens, block_rows), tl.float32)
        gate = products(
            x, of_x, given, words, steps, lows, row, inside, 0, blocks, 2 * rows, width, zero, gate, bits, group
        )
        up = tl.zeros((block_tokens, block_rows), tl.float32)
        up = products(
            x, of_x, given, words, steps, lows, rows + row, inside, 0, blocks, 2 * rows, width, zero, up, bits,
            group,
        )  # fmt: skip
        gate = finished(gate, row[None, :], inside[None, :], steps, None, group == 0)
        up = finished(up, (rows + row)[None, :], inside[None, :], steps, None, group == 0)
        made = _gated(
            gate, up, bias, factors, expert, row, rows, inside, pair, given, per_token, ways, activation, alpha, limit,
        )  # fmt: skip
        place = out + at.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(place, made.to(out.dtype.element_ty), mask=given[:, None] & inside[None, :])


@triton.jit
def quantized_down_kernel(
    x, packed, scales, minimums, bias, order, starts, out, experts, rows, width,
    scale_type: tl.constexpr, bits: tl.constexpr, group: tl.constexpr, block_experts: tl.constexpr,
    block_tokens: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """`expert_down_kernel` on weights of 8 or 4 bits: the tables have the addresses of `QuantizedWeight`'s parts."""
    expert, first, end = _block_of(starts, experts, block_tokens, block_experts)
    if expert < experts:
        words, factors = _matrix(packed, expert, tl.int32), _matrix(scales, expert, scale_type)
        lows = None if minimums is None else _matrix(minimums, expert, tl.float32)
        at = first + tl.arange(0, block_tokens)
        given = at < end
        pair = tl.load(order + at, mask=given, other=0)
        row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
        inside = row < rows
        zero = tl.minimum(row + width, 0)[:, None]  # see small_gemm_kernel
        blocks = tl.cdiv(width, 1024 // bits)
        of_x = at.to(tl.int64) * width
        total = tl.zeros((block_tokens, block_rows), tl.float32)
        total = products(
            x, of_x, given, words, factors, lows, row, inside, 0, blocks, rows, width, zero, total, bits, group
        )
        total = finished(total, row[None, :], inside[None, :], factors, None, group == 0)
        if bias is not None:
            total += _bias_of(bias, expert, rows, row, inside)
        place = out + pair.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=given[:, None] & inside[None, :])


@triton.jit
def expert_sum_kernel(
    made, weights, shared, out, hidden, per_token: tl.constexpr, weighted: tl.constexpr, block: tl.constexpr
):
    """Sums `block` numbers of a token over its experts, in the order in which they were chosen, and the shared one, in
    float32. Outputs that are not `weighted` are of inputs that were."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    real = at < hidden
    ways: tl.constexpr = per_token if shared is None else per_token + 1
    total = tl.zeros([block], dtype=tl.float32)
    for pick in tl.static_range(per_token):
        each = tl.load(made + (token * per_token + pick) * hidden + at, mask=real, other=0.0)
        if weighted:
            total += tl.load(weights + token * ways + pick) * each.to(tl.float32)
        else:
            total += each.to(tl.float32)
    if shared is not None:
        each = tl.load(shared + token * hidden + at, mask=real, other=0.0)
        total += tl.load(weights + token * ways + per_token) * each.to(tl.float32)
    tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """A tile of an expert's product: of its tokens, rows of its weight and columns at a time."""

    tokens: int
    rows: int
    width: int
    warps: int
    stages: int


FEW, SOME, MANY = ExpertTile(16, 32, 128, 4, 4), ExpertTile(32, 32, 128, 4, 3), ExpertTile(128, 64, 64, 8, 3)


def tile_for(pairs: int, experts: int, width: int, *, invariant: bool, quantized: bool) -> ExpertTile:
    """By the tokens of an expert on average; with `invariant` by nothing, so that a token's bits do not depend on them.

    A decode reads each expert for a token or two, and waits for its weights alone.
    """
    each = pairs / experts
    tile = SOME if invariant or (each > 8 and (each <= 48 or quantized)) else FEW if each <= 8 else MANY
    block_width = min(tile.width, max(16, triton.next_power_of_2(width)))
    warps = gemm_warps(tile.tokens) if quantized else tile.warps
    return ExpertTile(tile.tokens, tile.rows, block_width, warps, tile.stages)


def sort_block(pairs: int) -> tuple[int, int]:
    """Pairs that a program of the sort looks at in one go, and its warps."""
    return (1024, 4) if pairs <= 8192 else (4096, 8)


def variants() -> list[Variant]:
    """The layers of Qwen3-30B-A3B, of Qwen2-57B-A14B, which has a gated shared expert, of gpt-oss (clamped gates and
    biases) and of Llama 4 (scaled inputs): all tiles of products, in 16 bits, in 8 with a scale a row, in 4 with one
    for 64 columns, and as AWQ has them."""
    integers = dict.fromkeys(("tokens", "pairs", "experts", "rows", "width", "hidden", "x_stride"), "i32")
    pointers = {"x": "*bf16", "out": "*bf16", "made": "*bf16", "shared": "*bf16", "weights": "*fp32", "parts": "*fp32"}
    pointers |= dict.fromkeys(("weight", "packed", "scales", "minimums"), "*i64") | {"selection_bias": "*fp32"}
    pointers |= {"factors": "*fp32", "bias": "*bf16"}
    types = integers | pointers | dict.fromkeys(("chosen", "order", "starts"), "*i32")
    types |= {"min_weight": "fp32", "scaling": "fp32"}
    divisible = frozenset({"rows", "width", "hidden", "x_stride"})
    found = []

    def add(
        name: str, kernel: Any, constants: Mapping[str, object], warps: int = 4, stages: int = 3, **own: str
    ) -> None:  # Any: triton.JITFunction, which has no types
        known = types | own
        used = {each: known[each] for each in kernel.arg_names if each in known and each not in constants}
        found.append(Variant(f"experts {name}", kernel, used, constants, warps, stages, divisible))

    tile = {"block_tokens": ROUTER_TOKENS, "block_rows": ROUTER_ROWS, "block_width": ROUTER_WIDTH}
    for kind in ("bf16", "fp32"):
        add(f"router {kind}", router_kernel, {**tile, "splits": ROUTER_SPLITS}, weight=f"*{kind}")
    route: dict[str, object] = {"splits": ROUTER_SPLITS, "per_token": 8, "block_chosen": 8, "summed": 1}
    route |= {"by_logits": False, "bias": None, "factors": None}
    one = {"per_token": 1, "block_chosen": 1, "normalised": False, "by_logits": True}
    for name, block, warps, changed in (
        ("softmax", 128, 1, {"selection_bias": None, "groups": 1, "shared": 0}),
        ("gated shared", 64, 1, {"selection_bias": None, "groups": 1, "shared": 2}),
        ("sigmoid groups", 512, 4, {"groups": 8, "shared": 1, "sigmoid": True, "summed": 2}),
        ("by logits", 16, 1, {"selection_bias": None, "groups": 1, "shared": 1, "sigmoid": True, **one}),
    ):
        constants = {**route, "block": block, "sigmoid": False, "normalised": True, "groups_per_token": 4, **changed}
        if name == "softmax":
            kept = {each: value for each, value in constants.items() if each != "factors"}
            add("route softmax and factors", route_kernel, kept, warps)
        add(f"route {name}", route_kernel, constants, warps)
    for pairs in (8, 65_536):
        block, warps = sort_block(pairs)
        add(f"sort {block}", sort_kernel, {"block": block}, warps)
    for shared in (False, True):
        constants = {"per_token": 8, "weighted": True, "block": SUM_BLOCK, **({} if shared else {"shared": None})}
        add(f"sum{' shared' if shared else ''}", expert_sum_kernel, constants)
    add("sum of scaled inputs", expert_sum_kernel, {"per_token": 1, "weighted": False, "block": SUM_BLOCK})
    plain = {"per_token": 8, "ways": 8, "activation": "silu", "alpha": 0.0, "limit": 0.0, "bias": None, "factors": None}
    clamped = {"per_token": 4, "ways": 4, "activation": "clamped", "alpha": 1.702, "limit": 7.0, "factors": None}
    scaled = {**plain, "per_token": 1, "ways": 2}
    del scaled["factors"]
    for size in (FEW, SOME, MANY):
        tile = {"block_experts": 128, "block_tokens": size.tokens, "block_rows": size.rows}
        for whole in (True, False) if size is not SOME else (True,):
            dense = {**tile, "block_width": size.width, "whole": whole}
            name = f"tokens {size.tokens}{'' if whole else ' masked'}"
            add(f"gate and up {name}", expert_gate_up_kernel, {**dense, **plain}, size.warps, size.stages)
            add(f"down {name}", expert_down_kernel, {**dense, "bias": None}, size.warps, size.stages)
            if whole:
                add(f"clamped {name}", expert_gate_up_kernel, {**dense, **clamped}, size.warps, size.stages)
                add(f"scaled inputs {name}", expert_gate_up_kernel, {**dense, **scaled}, size.warps, size.stages)
                add(f"down biased {name}", expert_down_kernel, dense, size.warps, size.stages)
        for bits, group, scale, minimums in FORMS if size is not MANY else ():
            form: dict[str, Any] = {"bits": bits, "group": group, "scale_type": getattr(tl, SCALES[scale])}
            if not minimums:
                form["minimums"] = None
            name = f"int{bits} group {group}{' minimums' if minimums else ''} tokens {size.tokens}"
            made, warps = {**tile, **form}, gemm_warps(size.tokens)
            add(f"gate and up {name}", quantized_gate_up_kernel, {**made, **plain}, warps, size.stages)
            add(f"down {name}", quantized_down_kernel, {**made, "bias": None}, warps, size.stages)
            if not minimums:
                add(f"clamped {name}", quantized_gate_up_kernel, {**made, **clamped}, warps, size.stages)
                add(f"scaled inputs {name}", quantized_gate_up_kernel, {**made, **scaled}, warps, size.stages)
                add(f"down biased {name}", quantized_down_kernel, made, warps, size.stages)
    return found
