"""Copies blocks of bytes between two places, each with strides of its own."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.variants import Variant

PIECE = 2048  # words that one program copies


@triton.jit
def copy_kernel(
    source,
    destination,
    pairs,
    words,
    source_block,
    source_part,
    destination_block,
    destination_part,
    piece: tl.constexpr,
):
    """One program copies `piece` of the `words` that one part (a layer's keys or values) of one block has.

    `pairs` is (n, 2) int32: source block and destination block. Strides are in words.
    """
    pair = tl.program_id(0)
    index = tl.program_id(1)
    at = tl.program_id(2) * piece + tl.arange(0, piece)
    inside = at < words
    start = tl.load(pairs + 2 * pair).to(tl.int64) * source_block + index.to(tl.int64) * source_part
    end = tl.load(pairs + 2 * pair + 1).to(tl.int64) * destination_block + index.to(tl.int64) * destination_part
    tl.store(destination + end + at, tl.load(source + start + at, mask=inside), mask=inside)


def variants() -> list[Variant]:
    """Of words of 8, 4 and 1 bytes; the first are for caches of usual sizes."""
    strides = ("source_block", "source_part", "destination_block", "destination_part")
    sizes = dict.fromkeys(strides, "i64") | {"words": "i32"}
    return [
        Variant(
            f"blocks copy {word}",
            copy_kernel,
            {"source": f"*{word}", "destination": f"*{word}", "pairs": "*i32", **sizes},
            {"piece": PIECE},
            stages=1,
            divisible=frozenset({*strides, "words"}),
        )
        for word in ("i64", "i32", "i8")
    ]
