"""Sums of exponentials of rows by chunks, and the log-probabilities of single logits."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.variants import Variant

CHUNK = 4096  # logits that one program adds up: fixed, as sums depend on it


@triton.jit
def chunks_kernel(logits, rows, floats, vocabulary, stride, chunks, chunk: tl.constexpr):
    """One program finds the largest logit of one chunk, and the sum of exponentials relative to that.

    `floats` is (n, 2, chunks): largest, sums.
    """
    index = tl.program_id(1)
    at = tl.program_id(0)
    token = at * chunk + tl.arange(0, chunk)
    line = logits + tl.load(rows + index).to(tl.int64) * stride
    x = tl.load(line + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(floats + index * 2 * chunks + at, largest)
    tl.store(floats + index * 2 * chunks + chunks + at, tl.sum(tl.exp(x - base), 0))


@triton.jit
def chosen_kernel(logits, rows, tokens, floats, totals, chosen, stride, chunks, max_chunks: tl.constexpr):
    """One program merges the chunks of one row. `totals` (n,) are relative to the largest logit, `chosen` (n,) are
    whole. `max_chunks` is a power of 2.
    """
    index = tl.program_id(0)
    at = tl.arange(0, max_chunks)
    inside = at < chunks
    largests = tl.load(floats + index * 2 * chunks + at, mask=inside, other=float("-inf"))
    sums = tl.load(floats + index * 2 * chunks + chunks + at, mask=inside, other=0.0)
    largest = tl.max(largests, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.log(tl.sum(sums * tl.exp(largests - base), 0))
    x = tl.load(logits + tl.load(rows + index).to(tl.int64) * stride + tl.load(tokens + index)).to(tl.float32)
    tl.store(totals + index, total)
    tl.store(chosen + index, (x - base) - total)


def variants() -> list[Variant]:
    """Of logits in fp32 and bf16; vocabularies of up to 131,072 and 262,144 tokens."""
    found = []
    sizes = {"stride": "i32", "chunks": "i32"}
    even = frozenset({"vocabulary", "stride"})
    for dtype in ("fp32", "bf16"):
        types = {"logits": f"*{dtype}", "rows": "*i32", "floats": "*fp32", **sizes}
        summed = {**types, "vocabulary": "i32"}
        found.append(
            Variant(f"logprobs chunks {dtype}", chunks_kernel, summed, {"chunk": CHUNK}, stages=1, divisible=even)
        )
        merged = {**types, "tokens": "*i64", "totals": "*fp32", "chosen": "*fp32"}
        found += [
            Variant(
                f"logprobs chosen {dtype} {chunks}", chosen_kernel, merged, {"max_chunks": chunks}, warps=1, stages=1
            )
            for chunks in (32, 64)
        ]
    return found
