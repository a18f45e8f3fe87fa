"""Attention over paged keys and values: one kernel for every piece (see `engine.kernels.work`), and one that merges.

Online softmax (Milakov & Gimelshein 2018) over tiles of keys, as in FlashAttention-2 (Dao 2023), in powers of two. The
query heads that share a K/V head are rows of one tile, so K and V are read once for all of them. Tiles that every row
sees whole are computed without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.kernels.gpu import tuned
from engine.kernels.gpu.dots import dot
from engine.kernels.gpu.variants import Variant

LOG2E = 1.4426950408889634


@triton.jit
def widened(codes, like, fp8: tl.constexpr):
    """Dequantizes 8-bit codes to `like`'s type: int8, or e4m3 by its bits, which works on every generation."""
    if fp8:
        bits = codes.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # the same number times 2^-8, in fp16
        return (half.to(tl.float16, bitcast=True) * 256.0).to(like)
    return codes.to(tl.float32).to(like)


@triton.jit
def _tiles(
    total, largest, weight, q, oldest, last_key, keys, values, key_scales, value_scales, table, head,
    low, high, end_key, factor, softcap,
    block_stride, token_stride, head_stride, scale_block_stride, scale_token_stride,
    block_size: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr,
    masked: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, quantized: tl.constexpr, fp8: tl.constexpr,
    branched: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Adds keys `low` to `high` to the running sums: `total` (rows, padded), `largest` and `weight` (rows,)."""
    component = tl.arange(0, padded)
    real = component < width
    for start in tl.range(low, high, tile, num_stages=stages):
        key = start + tl.arange(0, tile)
        known = key < end_key
        block = tl.load(table + key // block_size, mask=known, other=0).to(tl.int64)
        within = key % block_size
        if branched:  # keys of a branch have slots of their own: see `engine.kernels.work.Rows.listed`
            begin = tl.load(table - 2)
            own = known & (key >= begin)
            slot = tl.load(table + tl.load(table - 1) + key - begin, mask=own, other=0)
            block = tl.where(own, (slot // block_size).to(tl.int64), block)
            within = tl.where(own, slot % block_size, within)
        place = block * block_stride + within * token_stride + head * head_stride
        where = place[:, None] + component[None, :]
        if masked or padded != width:
            k = tl.load(keys + where, mask=known[:, None] & real[None, :], other=0)
        else:
            k = tl.load(keys + where)
        if quantized:
            k = widened(k, q.dtype, fp8)
        scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], tile], dtype=tl.float32))
        if quantized:
            scale_at = block * scale_block_stride + within * scale_token_stride + head
            scores *= tl.load(key_scales + scale_at, mask=known, other=0.0)[None, :]
        sharpness = factor
        if capped:  # c * tanh(s / c), with tanh(x) = 2 sigmoid(2x) - 1; `factor` is scale / c
            scores = 2.0 * tl.sigmoid(2.0 * factor * scores) - 1.0
            sharpness = softcap
        if masked:
            seen = (key[None, :] <= last_key[:, None]) & known[None, :]
            if windowed:
                seen &= key[None, :] >= oldest[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1) * sharpness)
        base = tl.where(higher == float("-inf"), 0.0, higher) if masked else higher  # a row may have seen nothing yet
        # An explicit fma: the compiler would fuse product and difference only in tiles without a mask, and a query's
        # kind of tile depends on the batch.
        p = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + sharpness, tl.broadcast_to(-base[:, None], scores.shape)))
        shrink = tl.exp2(largest - base)
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None]
        if masked or padded != width:
            v = tl.load(values + where, mask=known[:, None] & real[None, :], other=0)
        else:
            v = tl.load(values + where)
        if quantized:
            p *= tl.load(value_scales + scale_at, mask=known, other=0.0)[None, :]
            v = widened(v, q.dtype, fp8)
        total = dot(p.to(q.dtype), v, total)
        largest = higher
    return total, largest, weight


@triton.jit
def _with_sink(weight, largest, sink):
    """Adds a sink's logit to a softmax's denominator: `weight` is in units of 2^`largest`. An explicit fma, so that a
    query has the same bits whether its keys were cut into parts or not."""
    return weight + tl.exp2(tl.fma(sink, tl.zeros_like(sink) + 1.4426950408889634, -largest))


@triton.jit
def attend_kernel(
    out, parts, part_weights, query, keys, values, key_scales, value_scales, sinks,
    pieces, order, positions, last_keys, tables,
    factor, softcap, window,
    query_stride, out_stride,
    block_stride, token_stride, head_stride, scale_block_stride, scale_token_stride,
    group: tl.constexpr, block_size: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
    rows: tl.constexpr, tile: tl.constexpr,
    windowed: tl.constexpr, chunked: tl.constexpr, capped: tl.constexpr, quantized: tl.constexpr, fp8: tl.constexpr,
    branched: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """One program is one piece and one K/V head: `rows` rows of (query, head of the group).

    `factor` is the scores' scale times log2(e), or over the softcap where there is one, which is times log2(e) then. A
    sink joins here where a query has one piece, else when its parts are merged.
    """
    piece = pieces + tl.program_id(0) * 6
    count = tl.load(piece + 1)
    if count == 0:  # a launch may be larger than its number of pieces
        return
    head = tl.program_id(1)
    first_query, table = tl.load(piece), tables + tl.load(piece + 2)
    first_key, end_key, slot = tl.load(piece + 3), tl.load(piece + 4), tl.load(piece + 5)

    at = tl.arange(0, rows)
    nth, of_group = at // group, at % group
    there = nth < count
    token = tl.load(order + first_query + nth, mask=there, other=0)
    at_query = tl.load(positions + token, mask=there, other=-1)
    last_key = tl.load(last_keys + token, mask=there, other=-1)  # its position, or later: of an image's tokens
    heads = head * group + of_group
    component = tl.arange(0, padded)
    place = token.to(tl.int64)[:, None] * query_stride + heads[:, None] * width + component[None, :]
    used = there[:, None] & (component < width)[None, :]
    q = tl.load(query + place, mask=used, other=0)

    total = tl.zeros([rows, padded], dtype=tl.float32)
    largest = tl.full([rows], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([rows], dtype=tl.float32)
    # every query of the piece sees all keys from `clear_from` to `clear_to`: between them no mask is needed
    oldest = at_query - window + 1  # the first key that a query sees through its window
    if chunked:
        oldest = at_query - at_query % window
    nearest = tl.min(tl.where(there, last_key, 2147483647), 0)
    clear_to = tl.minimum(nearest + 1, end_key)
    clear_from = first_key
    if windowed:
        clear_from = tl.maximum(first_key, tl.max(tl.where(there, oldest, 0), 0))
        clear_from = first_key + tl.cdiv(clear_from - first_key, tile) * tile
        clear_from = tl.minimum(clear_from, end_key)
        total, largest, weight = _tiles(
            total, largest, weight, q, oldest, last_key, keys, values, key_scales, value_scales, table, head,
            first_key, clear_from, end_key, factor, softcap,
            block_stride, token_stride, head_stride, scale_block_stride, scale_token_stride,
            block_size, width, padded, tile, True, windowed, capped, quantized, fp8, branched, stages,
        )  # fmt: skip
        clear_to = tl.maximum(clear_to, clear_from)
    clear_to = clear_from + tl.maximum(clear_to - clear_from, 0) // tile * tile
    total, largest, weight = _tiles(
        total, largest, weight, q, oldest, last_key, keys, values, key_scales, value_scales, table, head,
        clear_from, clear_to, end_key, factor, softcap,
        block_stride, token_stride, head_stride, scale_block_stride, scale_token_stride,
        block_size, width, padded, tile, False, windowed, capped, quantized, fp8, branched, stages,
    )  # fmt: skip
    total, largest, weight = _tiles(
        total, largest, weight, q, oldest, last_key, keys, values, key_scales, value_scales, table, head,
        clear_to, end_key, end_key, factor, softcap,
        block_stride, token_stride, head_stride, scale_block_stride, scale_token_stride,
        block_size, width, padded, tile, True, windowed, capped, quantized, fp8, branched, stages,
    )  # fmt: skip

    total = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    some = weight > 0.0
    log_weight = tl.where(some, largest + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
    if slot < 0:
        if sinks is not None:  # as a merge of one part does it
            one = tl.full([rows], 1.0, dtype=tl.float32)
            total = total / _with_sink(one, log_weight, tl.load(sinks + heads))[:, None]
        place = token.to(tl.int64)[:, None] * out_stride + heads[:, None] * width + component[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=used)
    else:
        part = (slot + nth).to(tl.int64) * (group * tl.num_programs(1)) + heads
        tl.store(parts + part[:, None] * width + component[None, :], total, mask=used)
        tl.store(part_weights + part, log_weight, mask=there)


@triton.jit
def merge_kernel(
    out, parts, part_weights, sinks, merged, starts, of_token, out_stride, heads,
    width: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """One program merges one head of one query from its parts, in their order."""
    nth, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(starts + nth), tl.load(starts + nth + 1)
    if first == end:
        return
    token = tl.load(merged + nth).to(tl.int64)
    component = tl.arange(0, padded)
    real = component < width
    largest = float("-inf")
    for at in range(first, end):
        largest = tl.maximum(largest, tl.load(part_weights + tl.load(of_token + at).to(tl.int64) * heads + head))
    total = tl.zeros([padded], dtype=tl.float32)
    weight = 0.0
    for at in range(first, end):
        part = tl.load(of_token + at).to(tl.int64) * heads + head
        share = tl.exp2(tl.load(part_weights + part) - largest)
        total += share * tl.load(parts + part * width + component, mask=real, other=0.0)
        weight += share
    if sinks is not None:
        weight = _with_sink(weight, largest, tl.load(sinks + head))
    place = token * out_stride + head * width + component
    tl.store(out + place, (total / weight).to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The launch shape of a piece: `rows` of a tile of queries, `tile` keys at a time."""

    rows: int
    tile: int
    warps: int
    stages: int


def padded_to(width: int) -> int:
    """Components of a head as a tile holds them: a power of two, 16 or more."""
    return max(16, triton.next_power_of_2(width))


def shape_for(width: int, rows: int, element_bytes: int) -> AttentionShape:
    """Returns the shape tuned for this device, or by rule."""
    return AttentionShape(
        *tuned.shape("attention", (padded_to(width), rows, element_bytes), ruled(width, rows, element_bytes))
    )


def ruled(width: int, rows: int, element_bytes: int) -> tuple[int, int, int, int]:
    """Returns tiles that keep enough bytes in flight from memory: by Little's law 4.8 TB/s at 0.8 us want 30 KB on each
    of 132 multiprocessors.

    A key is found by its block, so the compiler spreads the loads of a tile over two stages: five stages are two tiles
    in flight, three are one (2 * tile * width * element_bytes bytes each). Quantized K/V is widened in registers, of
    which many queries leave few: there tiles are small and warps many, or it spills.
    """
    padded = padded_to(width)
    quantized = element_bytes == 1
    tile = 64 if padded <= 128 else 32 if padded <= 256 or (rows <= 16 and not quantized) else 16
    if padded > 256 and rows > 16:  # 64 rows of 512 sums are half of the registers
        return 64, tile, 8, 3
    if rows <= 16:
        return 16, tile, 4, 3 if quantized or padded > 128 else 5
    if quantized:
        return 128 if padded <= 128 and rows >= 128 else 64, 32, 8, 5
    stages = 3 if rows == 64 or padded > 128 else 5
    if padded <= 128 and rows >= 128:
        return 128, tile, 8, stages
    return 64, tile, 4 if padded <= 128 else 8, stages


def variants() -> list[Variant]:
    """Head sizes, tiles, groups, block sizes, windows, chunks, softcaps, sinks and 8-bit caches."""
    widths = (32, 64, 80, 96, 128, 192, 256, 512)
    found = [_variant(f"attention d{width} rows{rows}", width, rows) for width in widths for rows in (16, 64, 128)]
    for rows in (16, 64, 128):
        found += [
            _variant(f"attention d128 rows{rows} fp16", 128, rows, dtype="fp16"),
            _variant(f"attention d128 rows{rows} int8", 128, rows, codes="i8"),
            _variant(f"attention d128 rows{rows} fp8", 128, rows, codes="u8"),
            _variant(f"attention d64 rows{rows} window block32", 64, rows, windowed=True, block_size=32),
            _variant(
                f"attention d256 rows{rows} window softcap int8", 256, rows, windowed=True, capped=True, codes="i8"
            ),
            _variant(f"attention d512 rows{rows} window int8", 512, rows, windowed=True, codes="i8"),
            _variant(f"attention d128 rows{rows} group1 block64", 128, rows, group=1, block_size=64),
            _variant(f"attention d128 rows{rows} branched", 128, rows, branched=True),
            _variant(
                f"attention d64 rows{rows} window int8 branched", 64, rows, windowed=True, codes="i8", branched=True
            ),
            _variant(f"attention d64 rows{rows} group8 sinks", 64, rows, group=8, sinks=True),
            _variant(f"attention d64 rows{rows} group8 window sinks", 64, rows, group=8, windowed=True, sinks=True),
            _variant(f"attention d64 rows{rows} sinks int8 branched", 64, rows, codes="i8", branched=True, sinks=True),
            _variant(f"attention d128 rows{rows} group5 chunks", 128, rows, group=5, windowed=True, chunked=True),
        ]
    merge = {
        "out": "*bf16", "parts": "*fp32", "part_weights": "*fp32", "merged": "*i32", "starts": "*i32",
        "of_token": "*i32", "out_stride": "i32", "heads": "i32",
    }  # fmt: skip
    for width in (64, 128, 256, 512):
        plain = {"width": width, "padded": padded_to(width)}
        found.append(Variant(f"attention merge d{width}", merge_kernel, merge, {**plain, "sinks": None}, 1))
        if width == 64:
            sinks = {**merge, "sinks": "*fp32"}
            found.append(Variant(f"attention merge d{width} sinks", merge_kernel, sinks, plain, 1))
    return found


def _variant(
    name: str,
    width: int,
    rows: int,
    *,
    dtype: str = "bf16",
    codes: str | None = None,
    group: int = 4,
    block_size: int = 16,
    windowed: bool = False,
    chunked: bool = False,
    capped: bool = False,
    branched: bool = False,
    sinks: bool = False,
) -> Variant:
    shape = shape_for(width, rows, 1 if codes else 2)
    types = {
        "out": f"*{dtype}", "parts": "*fp32", "part_weights": "*fp32", "query": f"*{dtype}",
        "keys": f"*{codes or dtype}", "values": f"*{codes or dtype}",
        "pieces": "*i32", "order": "*i32", "positions": "*i32", "last_keys": "*i32", "tables": "*i32",
        "factor": "fp32", "softcap": "fp32", "window": "i32",
        "query_stride": "i32", "out_stride": "i32",
        "block_stride": "i32", "token_stride": "i32", "head_stride": "i32",
        "scale_block_stride": "i32", "scale_token_stride": "i32",
    }  # fmt: skip
    constants: dict[str, object] = {
        "group": group, "block_size": block_size, "width": width, "padded": padded_to(width),
        "rows": shape.rows, "tile": shape.tile, "windowed": windowed, "chunked": chunked, "capped": capped,
        "quantized": codes is not None, "fp8": codes == "u8", "branched": branched, "stages": shape.stages,
    }  # fmt: skip
    if sinks:
        types["sinks"] = "*fp32"
    else:
        constants["sinks"] = None
    if codes is None:
        constants |= {"key_scales": None, "value_scales": None}
    else:
        types |= {"key_scales": "*fp32", "value_scales": "*fp32"}
    strides = frozenset({"query_stride", "out_stride", "block_stride", "token_stride", "head_stride"})
    return Variant(name, attend_kernel, types, constants, shape.warps, shape.stages, strides)
