"""The Triton kernel of mask.py. Imported on first use: a machine without CUDA needs no Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types for it
def forbid_kernel(logits, bits, rows, vocabulary, logits_stride, bits_stride, block: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's
    """One program looks at `block` logits of one row. See `mask.forbid` for the arguments."""
    index = tl.program_id(0)
    row = tl.load(rows + index)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < vocabulary
    word = tl.load(bits + index * bits_stride + at // 32, mask=inside, other=-1)
    forbidden = ((word >> (at % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + at, float("-inf"), mask=inside & forbidden)
