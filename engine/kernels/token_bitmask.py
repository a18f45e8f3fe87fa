"""Applies token bitmasks to logits: the Triton kernel and its torch reference, of one signature.

The kernel reads 4 bytes for every 32 logits and writes only where a bit is 0, so most of a loose mask costs its bits
alone. Knows nothing of grammars.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FEW_WORDS = 64  # of 32 tokens, up to which allowed tokens are picked one by one
_FEW_FORBIDDEN = 0.15  # of the vocabulary, up to which forbidden tokens are
_KEPT_MASKS = 64


def apply_token_bitmask(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """Sets `logits[rows[i], t]` to -inf where bit `t % 32` of `bits[i, t // 32]` is 0, in place.

    `logits` is (n, vocabulary) of any floating type, its last dimension contiguous; `bits` is (m, words) int32; `rows`
    is (m,) int64, without repeats. All on one device. NaNs may stay.
    """
    (apply_token_bitmask_triton if logits.is_cuda else apply_token_bitmask_torch)(logits, bits, rows)


def apply_token_bitmask_torch(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """The torch reference. See `apply_token_bitmask`."""
    if logits.is_cpu and logits.dtype == torch.float32:
        _forbid_numpy(logits.detach().numpy(), bits.contiguous().numpy(), rows.tolist())
        return
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    forbidden = ((bits[:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[1]] == 0
    for row, where in zip(rows.tolist(), forbidden, strict=True):
        logits[row].masked_fill_(where, float("-inf"))


def _forbid_numpy(logits: NDArray[np.float32], bits: NDArray[np.int32], rows: list[int]) -> None:
    """Applies masks in numpy. Few allowed tokens, as within a key, are the only logits read; few forbidden ones of a
    repeated mask, as within a string, the only ones written."""
    for row, packed in zip(rows, bits, strict=True):
        some = np.flatnonzero(packed)
        if len(some) <= _FEW_WORDS:
            _keep_only(logits[row], some, packed[some])
        elif (forbidden := _scratch.forbidden(packed, logits.shape[1])) is not None:
            logits[row][forbidden] = -np.inf
        else:
            _limit(logits[row], packed)


def _keep_only(row: NDArray[np.float32], some: NDArray[np.int64], words: NDArray[np.int32]) -> None:
    """Forbids all but the tokens of these words' bits; `some` are the words' places."""
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(-1, 32).nonzero()
    tokens = some[allowed[0]] * 32 + allowed[1]
    tokens = tokens[tokens < len(row)]
    kept = row[tokens]
    row.fill(-np.inf)
    row[tokens] = kept


def _limit(row: NDArray[np.float32], packed: NDArray[np.int32]) -> None:
    """Looks each byte of bits up as upper limits of eight logits. A mask of bools takes two to three times as long to
    make and apply."""
    if len(_scratch.limits) < 4 * len(packed):  # kept: fresh memory would cost more than the work
        _scratch.limits = np.empty((4 * len(packed), 8), dtype=np.float32)
    limits = _scratch.limits[: 4 * len(packed)]
    np.take(_LIMITS, packed.view(np.uint8), axis=0, out=limits, mode="clip")  # clip: the others would go through a copy
    np.minimum(row, limits.reshape(-1)[: len(row)], out=row)


_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_LIMITS = np.where(_BYTES == 1, np.inf, -np.inf).astype(np.float32)  # (256, 8)


class _Scratch(threading.local):
    """Buffers that one thread keeps from mask to mask."""

    def __init__(self) -> None:
        self.limits: NDArray[np.float32] = np.empty((0, 8), dtype=np.float32)
        self._seen: OrderedDict[tuple[int, bytes], NDArray[np.int64] | None] = OrderedDict()

    def forbidden(self, packed: NDArray[np.int32], vocabulary: int) -> NDArray[np.int64] | None:
        """Returns the tokens that a mask forbids, from the second time it comes, if they are few."""
        key = vocabulary, packed.tobytes()
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _KEPT_MASKS:
                self._seen.popitem(last=False)
            return None
        self._seen.move_to_end(key)
        if self._seen[key] is None:
            found = np.flatnonzero(np.unpackbits(packed.view(np.uint8), count=vocabulary, bitorder="little") == 0)
            self._seen[key] = found if len(found) <= _FEW_FORBIDDEN * vocabulary else _MANY
        known = self._seen[key]
        return None if known is _MANY else known


_MANY = np.empty(0, dtype=np.int64)
_scratch = _Scratch()


def apply_token_bitmask_triton(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """The kernel; on CPU tensors only under Triton's interpreter. See `apply_token_bitmask`."""
    from engine.kernels.gpu.token_bitmask import BLOCK, apply_token_bitmask_kernel

    vocabulary = logits.shape[1]
    grid = (len(rows), -(-vocabulary // BLOCK))
    apply_token_bitmask_kernel[grid](logits, bits, rows, vocabulary, logits.stride(0), bits.stride(0), block=BLOCK)
