"""Tokens that a step samples and the next one reads, without the host in between: the kernel and its torch
reference."""

from __future__ import annotations

from torch import Tensor


def fill_sampled(token_ids: Tensor, sampled: Tensor) -> None:
    """Replaces -1 - i in `token_ids` (n,) with `sampled[i]`, in place; other tokens stay. Of any types of integers,
    both on one device, closely packed."""
    (fill_sampled_triton if token_ids.is_cuda else fill_sampled_torch)(token_ids, sampled)


def fill_sampled_torch(token_ids: Tensor, sampled: Tensor) -> None:
    """The torch reference. See `fill_sampled`."""
    unknown = token_ids < 0
    token_ids[unknown] = sampled[(-1 - token_ids[unknown]).long()].to(token_ids.dtype)


def fill_sampled_triton(token_ids: Tensor, sampled: Tensor) -> None:
    """The kernel; on CPU tensors only under Triton's interpreter. See `fill_sampled`."""
    from engine.kernels.gpu.sampled_tokens import BLOCK, fill_sampled_kernel

    assert token_ids.is_contiguous() and sampled.is_contiguous()
    fill_sampled_kernel[(-(-len(token_ids) // BLOCK),)](token_ids, sampled, len(token_ids), block=BLOCK, num_warps=1)
