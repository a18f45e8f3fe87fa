"""The product of activations and a weight, one order of summation for any number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from engine.kernels.gpu.dots import dot
from engine.kernels.gpu.variants import Variant


@triton.jit(do_not_specialize=["tokens"])  # one program for any number of them: it is the same bits then
def multiply_kernel(
    x, weight, bias, out, tokens, rows, width, x_stride, weight_stride,
    block_tokens: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """One program is one tile of the result. Programs that follow one another share a tile of the weight."""
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_width)
    of_x = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    of_weight = weight + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    some_x, some_weight = (token < tokens)[:, None], (row < rows)[:, None]
    total = tl.zeros([block_tokens, block_rows], dtype=tl.float32)
    for start in range(0, width, block_width):
        if whole:
            a = tl.load(of_x, mask=some_x, other=0.0)
            b = tl.load(of_weight, mask=some_weight, other=0.0)
        else:
            inside = (start + column < width)[None, :]
            a = tl.load(of_x, mask=some_x & inside, other=0.0)
            b = tl.load(of_weight, mask=some_weight & inside, other=0.0)
        total = dot(a, tl.trans(b), total)
        of_x += block_width
        of_weight += block_width
    if bias is not None:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    place = out + token.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=some_x & (row < rows)[None, :])


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """A tile: of tokens, rows of the weight and columns at a time."""

    tokens: int
    rows: int
    width: int
    warps: int
    stages: int


def shape_for(rows: int, width: int) -> MatmulShape:
    """By the weight alone: narrow tiles where wide ones would leave multiprocessors without work in a decode."""
    block_width = 64 if width >= 64 else max(16, triton.next_power_of_2(width))
    return MatmulShape(64, 32 if rows <= 8192 else 128, block_width, 4, 4)


def variants() -> list[Variant]:
    """Both widths of tile, with a bias and without, and widths that fill no tile."""
    types = {
        "x": "*bf16", "weight": "*bf16", "out": "*bf16", "tokens": "i32", "rows": "i32", "width": "i32",
        "x_stride": "i32", "weight_stride": "i32",
    }  # fmt: skip
    found = []
    for rows, width, bias in ((4096, 4096, False), (28672, 4096, False), (6144, 4096, True), (4096, 1000, False)):
        shape = shape_for(rows, width)
        constants: dict[str, object] = {
            "block_tokens": shape.tokens, "block_rows": shape.rows, "block_width": shape.width,
            "whole": width % shape.width == 0,
        }  # fmt: skip
        optional = {"bias": "*bf16"} if bias else {}
        found.append(
            Variant(
                f"matmul invariant {width} to {rows}{' bias' if bias else ''}", multiply_kernel, types | optional,
                constants if bias else constants | {"bias": None}, shape.warps, shape.stages,
                frozenset({"rows", "x_stride", "weight_stride"}),
            )
        )  # fmt: skip
    return found
