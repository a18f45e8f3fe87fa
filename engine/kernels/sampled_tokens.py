"""Tokens that a step draws and the next one reads, without the host having seen them: the kernel and its twin."""

from __future__ import annotations

from torch import Tensor


def fill_sampled(token_ids: Tensor, drawn: Tensor) -> None:
    """Replaces -1 - i in `token_ids` (n,) with `drawn[i]`, in place. Of any types of integers, both on one device,
    closely packed. What is not negative stays.
    """
    (fill_sampled_triton if token_ids.is_cuda else fill_sampled_torch)(token_ids, drawn)


def fill_sampled_torch(token_ids: Tensor, drawn: Tensor) -> None:
    """The twin. See `fill_sampled`."""
    unknown = token_ids < 0
    token_ids[unknown] = drawn[(-1 - token_ids[unknown]).long()].to(token_ids.dtype)


def fill_sampled_triton(token_ids: Tensor, drawn: Tensor) -> None:
    """The kernel; on CPU tensors only under Triton's interpreter. See `fill_sampled`."""
    from engine.kernels.gpu.sampled_tokens import BLOCK, fill_sampled_kernel

    assert token_ids.is_contiguous() and drawn.is_contiguous()
    fill_sampled_kernel[(-(-len(token_ids) // BLOCK),)](token_ids, drawn, len(token_ids), block=BLOCK, num_warps=1)
