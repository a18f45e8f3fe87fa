"""Norm, rotation and the cache's write, of one head of a few tokens by each program."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.variants import Variant


@triton.jit
def rounded(x):
    """To the nearest whole number, halves to even: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def as_e4m3(x):
    """The bits of e4m3 nearest to float32 numbers of magnitude 448 at most, halves to even, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 121)  # below 2^-6 numbers have one step
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)  # three bits follow the first
    inverse = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    near = rounded(x * inverse) * step
    half = (near * 0.00390625).to(tl.float16)  # exact: times 2^-8 its bits are those of e4m3, further left
    code = half.to(tl.int16, bitcast=True)
    return (((code >> 8) & 0x80) | ((code >> 7) & 0x7F)).to(tl.uint8)


@triton.jit(do_not_specialize=["tokens"])  # one program for any number of them: it is the same bits then
def place_kernel(
    joined, keys, values, key_scales, value_scales, slots, rotation, weight, query_scale, tokens, stride, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, normed: tl.constexpr,
    centred: tl.constexpr, block: tl.constexpr, coding: tl.constexpr,
):  # fmt: skip
    """See `qkv.place`. The grid is (tokens / block, heads + 2 * kv_heads), or heads alone without keys and values, the
    first `normed` of which are normalised; the cache's slots are closely packed."""
    head = tl.program_id(1)
    token = tl.program_id(0) * block + tl.arange(0, block)
    there = token < tokens
    component = tl.arange(0, padded)
    used = there[:, None] & (component < width)[None, :]
    place = joined + token.to(tl.int64)[:, None] * stride + head * width + component[None, :]
    x = tl.load(place, mask=used, other=0.0).to(tl.float32)
    if weight is not None:
        has_norm = head < normed
        if has_norm:
            if centred:
                x = tl.where(used, x - (tl.sum(x, 1) / width)[:, None], 0.0)
            size = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
            w = tl.load(weight + head * width + component, mask=component < width, other=0.0)
            x = x * size[:, None] * w[None, :]
    if rotation is not None:
        turns = head < heads + kv_heads
        if turns:
            pair = tl.arange(0, padded // 2)
            turn = rotation + token.to(tl.int64)[:, None] * width + pair[None, :] * 2
            real = there[:, None] & (pair < width // 2)[None, :]
            cosine, sine = tl.load(turn, mask=real, other=1.0), tl.load(turn + 1, mask=real, other=0.0)
            even, odd = tl.split(tl.reshape(x, (block, padded // 2, 2)))
            x = tl.reshape(tl.join(even * cosine - odd * sine, even * sine + odd * cosine), (block, padded))
    if head < heads:
        if query_scale is not None:
            x *= tl.load(query_scale + token, mask=there, other=0.0)[:, None]
        tl.store(place, x.to(joined.dtype.element_ty), mask=used)
    else:
        slot = tl.load(slots + token, mask=there, other=0).to(tl.int64)
        is_key = head < heads + kv_heads
        of = head - heads - tl.where(is_key, 0, kv_heads)
        where = (slot * kv_heads + of)[:, None] * width + component[None, :]
        if coding == "none":
            new = x.to(keys.dtype.element_ty)
        else:
            largest = 127.0 if coding == "int8" else 448.0
            scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), largest + tl.zeros([block], tl.float32)), 1e-12)
            scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], (block, padded)))
            new = rounded(scaled).to(tl.int8) if coding == "int8" else as_e4m3(scaled)
            at = slot * kv_heads + of
            if is_key:
                tl.store(key_scales + at, scale, mask=there)
            else:
                tl.store(value_scales + at, scale, mask=there)
        if is_key:
            tl.store(keys + where, new, mask=used)
        else:
            tl.store(values + where, new, mask=used)


def shape_for(width: int) -> tuple[int, int, int]:
    """Components of a padded head, tokens of a program, and warps: about a thousand numbers. The same for any number of
    tokens: a norm is summed up in the order that the shape gives."""
    padded = max(16, triton.next_power_of_2(width))
    return padded, max(1, 1024 // padded), 4


def variants() -> list[Variant]:
    """Norms and rotations, and every kind of cache."""
    found = []
    base = {"joined": "*bf16", "slots": "*i32", "tokens": "i32", "stride": "i32", "eps": "fp32"}
    for width in (64, 80, 128, 256, 512):
        padded, block, warps = shape_for(width)
        for coding, kind in (("none", "*bf16"), ("int8", "*i8"), ("fp8", "*u8")):
            for parts in (
                "rope", "norm and rope", "neither", "centred norm", "rope and scale", "scale", "norm of values"
            ):  # fmt: skip
                optional: dict[str, str] = {}
                if coding != "none":
                    optional |= {"key_scales": "*fp32", "value_scales": "*fp32"}
                if "rope" in parts or "norm" in parts:
                    optional["rotation"] = "*fp32"
                if "norm" in parts:
                    optional["weight"] = "*fp32"
                if "scale" in parts:
                    optional["query_scale"] = "*fp32"
                if width != 128 and (parts not in ("rope", "norm and rope") or coding == "fp8"):
                    continue
                every = {"key_scales", "value_scales", "rotation", "weight", "query_scale"}
                none = dict.fromkeys(every - set(optional))
                constants = {
                    "heads": 32, "kv_heads": 8, "width": width, "padded": padded, "block": block, "coding": coding,
                    "normed": 48 if "values" in parts else 40 if "norm" in parts else 0,
                    "centred": parts == "centred norm",
                }  # fmt: skip
                types = base | optional | {"keys": kind, "values": kind}
                name, divisible = f"qkv d{width} {coding} {parts}", frozenset({"stride"})
                found.append(Variant(name, place_kernel, types, constants | none, warps, 1, divisible))
    return found
