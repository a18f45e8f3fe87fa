"""Log-probabilities of chosen tokens and of the likeliest: Triton kernels and their torch reference.

No log-softmax of a whole row is ever written. A row's numbers depend on that row alone, to the bit. Knows nothing of
requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of n tokens: `chosen` (n,) fp32, and of each row's k likeliest `values` (n, k) fp32 and
    `tokens` (n, k) int64."""

    chosen: Tensor
    values: Tensor
    tokens: Tensor


def logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Computes log-probabilities of `tokens[i]` in row `rows[i]`, and of that row's `k` likeliest, the likeliest first.

    `logits` is (m, vocabulary) of any floating type, its last dimension contiguous; `rows` (n,) int32, which may have
    repeats, and `tokens` (n,) int64 are on its device. Where k exceeds the vocabulary, all tokens are returned.
    """
    return (logprobs_triton if logits.is_cuda else logprobs_torch)(logits, rows, tokens, k)


def logprobs_triton(logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """The kernels; on CPU tensors only under Triton's interpreter. See `logprobs`."""
    from engine.kernels.gpu.logprobs import CHUNK, chosen_kernel, chunks_kernel

    count, vocabulary = len(rows), logits.shape[1]
    chunks = -(-vocabulary // CHUNK)
    floats = logits.new_empty(count, 2, chunks, dtype=torch.float32)
    totals, chosen = (logits.new_empty(count, dtype=torch.float32) for _ in range(2))  # apart, so both are aligned
    if count:
        stride = logits.stride(0)
        chunks_kernel[chunks, count](logits, rows, floats, vocabulary, stride, chunks, chunk=CHUNK, num_stages=1)
        max_chunks = 1 << (chunks - 1).bit_length()
        chosen_kernel[count,](
            logits,
            rows,
            tokens,
            floats,
            totals,
            chosen,
            stride,
            chunks,
            max_chunks=max_chunks,
            num_warps=1,
            num_stages=1,
        )
    return Logprobs(chosen, *_likeliest(logits, rows, totals, k))


def logprobs_torch(logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """The torch reference. See `logprobs`."""
    asked = logits.index_select(0, rows).float()
    largest = asked.amax(-1, keepdim=True)
    totals = torch.logsumexp((asked - largest).double(), -1).float()
    chosen = (asked.gather(1, tokens[:, None]) - largest).squeeze(1) - totals
    return Logprobs(chosen, *_likeliest(logits, rows, totals, k))


def _likeliest(logits: Tensor, rows: Tensor, totals: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns each row's `k` likeliest. `totals` are logarithms of sums of exponentials, relative to the largest
    logit."""
    if not k:
        return totals.new_empty(len(rows), 0), rows.new_empty(len(rows), 0, dtype=torch.int64)
    values, tokens = torch.topk(logits.index_select(0, rows).float(), min(k, logits.shape[1]))
    return (values - values[:, :1]) - totals[:, None], tokens  # equal to `chosen` for the same token, to the bit
