"""Fills sampled tokens into a step's token ids."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.variants import Variant

BLOCK = 128  # tokens of one program


@triton.jit(do_not_specialize=["tokens"])  # their number differs by step
def fill_sampled_kernel(token_ids, sampled, tokens, block: tl.constexpr):
    """See `sampled_tokens.fill_sampled` for the arguments."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    token = tl.load(token_ids + at, mask=at < tokens, other=0)
    unknown = token < 0
    found = tl.load(sampled + (-1 - token), mask=unknown, other=0)
    tl.store(token_ids + at, found.to(token_ids.dtype.element_ty), mask=unknown)


def variants() -> list[Variant]:
    """Lists the engine's types."""
    types = {"token_ids": "*i32", "sampled": "*i64", "tokens": "i32"}
    return [Variant("sampled tokens", fill_sampled_kernel, types, {"block": BLOCK}, warps=1, stages=1)]
