"""The product of a weight and one token: no tile of the matrix units would be more than a sixteenth full."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.kernels.gpu import tuned
from engine.kernels.gpu.gated import opened
from engine.kernels.gpu.variants import Variant


@triton.jit
def gemv_kernel(
    x, weight, bias, norm_weight, out, rows, width, eps, multiplier,
    activation: tl.constexpr, adds: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """One program makes `block_rows` numbers. Products are kept apart by column until the end, so that the threads need
    not synchronise while the weight comes in; see `gemv.gemv` for the arguments."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_width)
    first = weight + row.to(tl.int64)[:, None] * width + column[None, :]
    second = weight + (rows + row).to(tl.int64)[:, None] * width + column[None, :]  # of an MLP: ups lie below the gates
    total = tl.zeros([block_rows, block_width], dtype=tl.float32)
    ups = tl.zeros([block_rows, block_width], dtype=tl.float32)
    squares = tl.zeros([block_width], dtype=tl.float32)
    for start in range(0, width, block_width):
        if whole:
            w = tl.load(first + start, eviction_policy="evict_first")
            a = tl.load(x + start + column).to(tl.float32)
        else:
            inside = start + column < width
            some = (row < rows)[:, None] & inside[None, :]
            w = tl.load(first + start, mask=some, other=0.0)
            a = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        if norm_weight is not None:
            squares += a * a
            if whole:
                a *= tl.load(norm_weight + start + column)
            else:
                a *= tl.load(norm_weight + start + column, mask=inside, other=0.0)
        total += w.to(tl.float32) * a[None, :]
        if activation != "":
            if whole:
                u = tl.load(second + start, eviction_policy="evict_first")
            else:
                u = tl.load(second + start, mask=some, other=0.0)
            ups += u.to(tl.float32) * a[None, :]
    y = tl.sum(total, 1)
    up = tl.sum(ups, 1)
    if norm_weight is not None:
        size = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        y *= size
        up *= size
    real = row < rows
    if bias is not None:
        y += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)
        if activation != "":
            up += tl.load(bias + rows + row, mask=real, other=0.0).to(tl.float32)
    if activation != "":
        y = opened(y, activation) * up
    if adds:
        y = tl.load(out + row, mask=real, other=0.0).to(tl.float32) + multiplier * y
    tl.store(out + row, y.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class GemvShape:
    """Rows of the weight that a program multiplies, and columns at a time."""

    rows: int
    width: int
    warps: int
    stages: int


def shape_for(rows: int, width: int, *, gated: bool) -> GemvShape:
    """Returns the shape tuned for this device, or by rule."""
    return GemvShape(*tuned.shape("one", (rows, width, gated), ruled(rows, width, gated=gated)))


def ruled(rows: int, width: int, *, gated: bool) -> tuple[int, int, int, int]:
    """16 KiB of the weight at a time, 128 bytes a thread: eight loads of 16 bytes that wait together. Few rows, so that
    a layer of 4,096 is 512 programs, four on each of 132 multiprocessors, and none is left with a long tail."""
    block_width = min(1024, max(64, triton.next_power_of_2(width)))
    block_rows = 4 if gated else 8
    return block_rows, block_width, 4, 1


def variants() -> list[Variant]:
    """The layers of a decoder, and one that fits no tile."""
    found = []
    base = {
        "x": "*bf16", "weight": "*bf16", "out": "*bf16", "rows": "i32", "width": "i32", "eps": "fp32",
        "multiplier": "fp32",
    }  # fmt: skip
    for name, rows, width, activation, adds, out in (
        ("qkv", 6144, 4096, "", False, "*bf16"),
        ("o", 4096, 4096, "", True, "*bf16"),
        ("gate and up", 14336, 4096, "silu", False, "*bf16"),
        ("down", 4096, 14336, "", True, "*bf16"),
        ("head", 128256, 4096, "", False, "*fp32"),
        ("odd", 1001, 576, "", False, "*bf16"),
    ):
        shape = shape_for(rows, width, gated=activation != "")
        whole = rows % shape.rows == 0 and width % shape.width == 0
        constants: dict[str, object] = {
            "bias": None, "activation": activation, "adds": adds, "block_rows": shape.rows,
            "block_width": shape.width, "whole": whole,
        }  # fmt: skip
        types = base | {"out": out}
        if adds:
            constants["norm_weight"] = None
        else:
            types["norm_weight"] = "*fp32"
        divisible = frozenset({"rows", "width"}) if whole else frozenset({"width"})
        found.append(Variant(f"one token {name}", gemv_kernel, types, constants, shape.warps, shape.stages, divisible))
    return found
