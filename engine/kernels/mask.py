"""Forbids tokens by packed bits: the Triton kernel and its twin in torch, of one signature.

The kernel reads 4 bytes for every 32 logits and writes only where a bit is 0, so most of a loose mask costs its bits
alone. Knows nothing of what the bits mean.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1024  # logits that one program looks at


def forbid(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """Set `logits[rows[i], t]` to -inf where bit `t % 32` of `bits[i, t // 32]` is 0, in place.

    `logits` is (n, vocabulary) of any floating type, its last dimension contiguous; `bits` is (m, words) int32; `rows`
    is (m,) int64, without repeats. All on one device.
    """
    (forbid_triton if logits.is_cuda else forbid_torch)(logits, bits, rows)


def forbid_torch(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """The twin. See `forbid`."""
    vocabulary = logits.shape[1]
    if bits.is_cpu:  # numpy unpacks bits eight times as fast as shifts of whole words
        unpacked = np.unpackbits(bits.contiguous().numpy().view(np.uint8), axis=1, count=vocabulary, bitorder="little")
        forbidden = torch.from_numpy(unpacked).view(torch.bool).logical_not_()
    else:
        places = torch.arange(32, dtype=torch.int32, device=bits.device)
        forbidden = ((bits[:, :, None] >> places) & 1).flatten(1)[:, :vocabulary] == 0
    if len(rows) == len(logits) and bool((rows == torch.arange(len(rows), device=rows.device)).all()):
        logits.masked_fill_(forbidden, float("-inf"))
        return
    for row, where in zip(rows.tolist(), forbidden, strict=True):
        logits[row].masked_fill_(where, float("-inf"))


def forbid_triton(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """The kernel; on CPU tensors only under Triton's interpreter. See `forbid`."""
    from engine.kernels.mask_triton import forbid_kernel

    vocabulary = logits.shape[1]
    grid = (len(rows), -(-vocabulary // _BLOCK))
    forbid_kernel[grid](logits, bits, rows, vocabulary, logits.stride(0), bits.stride(0), block=_BLOCK)
