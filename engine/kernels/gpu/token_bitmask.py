"""Sets the logits of tokens that a bitmask forbids to -inf."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.variants import Variant

BLOCK = 1024  # logits that one program looks at


@triton.jit
def apply_token_bitmask_kernel(logits, bits, rows, vocabulary, logits_stride, bits_stride, block: tl.constexpr):
    """One program looks at `block` logits of one row. See `token_bitmask.apply_token_bitmask` for the arguments."""
    index = tl.program_id(0)
    row = tl.load(rows + index)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < vocabulary
    word = tl.load(bits + index * bits_stride + at // 32, mask=inside, other=-1)
    forbidden = ((word >> (at % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + at, float("-inf"), mask=inside & forbidden)


def variants() -> list[Variant]:
    """Of logits in fp32, as the model gives them, and in bf16."""
    types = {"bits": "*i32", "rows": "*i64", "vocabulary": "i32", "logits_stride": "i32", "bits_stride": "i32"}
    return [
        Variant(
            f"mask {dtype}", apply_token_bitmask_kernel, {"logits": f"*{dtype}", **types}, {"block": BLOCK}, stages=1
        )
        for dtype in ("fp32", "bf16")
    ]
