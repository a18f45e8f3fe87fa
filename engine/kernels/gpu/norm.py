"""The residual sum and the norm after it: one program a token, which holds its whole row."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.variants import Variant


@triton.jit
def less_mean(row, real, count):
    """Returns a row, (block,) float32, less the mean of its `count` real numbers; the others are zeros."""
    return tl.where(real, row - tl.sum(row, 0) / count, 0.0)


@triton.jit
def add_and_norm_kernel(
    x, delta, out, weight, delta_weight, hidden, x_stride, delta_stride, eps, delta_eps, multiplier,
    centred: tl.constexpr, delta_centred: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """See `norm.add_and_norm`. `out` is closely packed."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    real = at < hidden
    row = tl.load(x + token * x_stride + at, mask=real, other=0.0)
    wide = row.to(tl.float32)
    if delta is not None:
        added = tl.load(delta + token * delta_stride + at, mask=real, other=0.0).to(tl.float32)
        if delta_weight is not None:
            if delta_centred:
                added = less_mean(added, real, hidden)
            size = tl.rsqrt(tl.sum(added * added, 0) / hidden + delta_eps)
            added = added * size * tl.load(delta_weight + at, mask=real, other=0.0)
        row = (wide + multiplier * added).to(row.dtype)
        tl.store(x + token * x_stride + at, row, mask=real)
        wide = row.to(tl.float32)
    if weight is not None:
        if centred:
            wide = less_mean(wide, real, hidden)
        size = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
        normed = wide * size * tl.load(weight + at, mask=real, other=0.0)
        tl.store(out + token * hidden + at, normed.to(row.dtype), mask=real)


def shape_for(hidden: int) -> tuple[int, int]:
    """Numbers that a program holds, and its warps: 16 numbers a thread, up to 32 warps."""
    block = triton.next_power_of_2(hidden)
    return block, min(32, max(1, block // 512))


def variants() -> list[Variant]:
    """Small and large rows, with all parts, with the norm alone, and less the mean."""
    found = []
    types = {
        "x": "*bf16", "out": "*bf16", "weight": "*fp32", "hidden": "i32", "x_stride": "i32", "delta_stride": "i32",
        "eps": "fp32", "delta_eps": "fp32", "multiplier": "fp32",
    }  # fmt: skip
    divisible = frozenset({"hidden", "x_stride", "delta_stride"})
    for hidden in (576, 4096, 8192):
        block, warps = shape_for(hidden)
        for parts in ("norm", "add", "both norms", "centred", "add centred"):
            delta = {"delta": "*bf16"} if parts in ("add", "both norms", "add centred") else {}
            after = {"delta_weight": "*fp32"} if parts == "both norms" else {}
            centred = {"centred": parts.endswith("centred"), "delta_centred": False}
            constants = {"block": block, "delta": None, "delta_weight": None, **centred}
            left = {name: value for name, value in constants.items() if name not in delta | after}
            found.append(
                Variant(f"norm {parts} {hidden}", add_and_norm_kernel, types | delta | after, left, warps, 1, divisible)
            )
    return found
