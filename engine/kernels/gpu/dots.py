"""The product of two tiles, which Triton's interpreter gets wrong in bfloat16: it multiplies their bit patterns."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from engine.kernels.gpu.variants import Variant

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, total, precision: tl.constexpr = "tf32"):
    """Returns `total` + a @ b, summed in float32. Both are of one type of 16 bits, or of 32, which tensor cores round
    to 10 bits behind the point unless `precision` is "ieee"."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total, input_precision=precision)


def variants() -> list[Variant]:
    """None: it is a part of others."""
    return []
