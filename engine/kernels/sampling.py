"""Samples a token for every row of a step on the device: the Triton kernels and their torch reference, of one
signature.

No vocabulary is sorted, and a row's sample depends on that row alone, to the bit. Knows logits and numbers; nothing of
sequences or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORDS = 8  # of 32 bits, for the parameters of a row
GREEDY_BELOW = 1e-5  # a temperature this low would overflow the division, and means the likeliest token anyway


def pack(
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    keys: Sequence[int] | NDArray[np.uint64],
) -> NDArray[np.int32]:
    """Packs the parameters of rows for `sample`, (rows, WORDS) int32; keys are of 64 bits, without sign.

    The words: 1 / temperature (fp32; 0 is greedy), top_k, top_p (fp32), min_p's distance below the largest logit
    (fp32), the key's low and high half, and two of padding.
    """
    warmth = np.asarray(temperature, dtype=np.float64)
    greedy = warmth < GREEDY_BELOW
    warmth = np.where(greedy, 1.0, warmth)
    packed = np.zeros((len(warmth), WORDS), dtype=np.int32)
    floats = packed.view(np.float32)
    with np.errstate(divide="ignore"):
        floats[:, 0] = np.where(greedy, 0.0, 1 / warmth)
        floats[:, 3] = warmth * np.log(np.asarray(min_p, dtype=np.float64))
    packed[:, 1] = np.minimum(np.asarray(top_k, dtype=np.int64), 2**31 - 1)
    floats[:, 2] = top_p
    packed[:, 4:6] = np.asarray(keys, dtype="<u8").view("<i4").reshape(-1, 2)
    return packed


def sample(logits: Tensor, parameters: Tensor) -> Tensor:
    """Samples a token for each row, (rows,) int64.

    `logits` is (rows, vocabulary) of any floating type, its last dimension contiguous; -inf is never sampled, unless a
    row has nothing else: then its first token is; +inf wins. `parameters` is (rows, WORDS) int32, see `pack`.

    A greedy row takes the first of its largest logits. Every other one samples from the softmax of logits /
    temperature, restricted to the tokens that all of these keep, in vLLM's order: min-p, those at least min_p times as
    likely as the likeliest; top-k, those no less likely than the k-th likeliest; top-p, those where all tokens likelier
    than it have together less than top_p of the mass that the two before kept. Tokens of one logit are kept all or
    none.

    Sampling is by Gumbel-max: the largest of logit / temperature - log(-log(1 - u)) wins. Token t's u is word t % 4 of
    Philox4x32-10 (Salmon et al. 2011) with the row's key for the counter t // 4, plus 0.5, over 2**32.
    """
    return (sample_triton if logits.is_cuda else sample_torch)(logits, parameters)


def adjust(logits: Tensor, entries: Tensor, starts: Tensor) -> None:
    """Changes single logits in place, in four stages: a bias is added; a positive logit is divided and any other
    multiplied (Keskar et al. 2019, CTRL); penalties are added; banned tokens become -inf.

    `entries` is (n, 2) int32, a token and the bits of an fp32 number each (unused for a ban). Those of row r's stage s
    are `starts[4 * r + s]` to `starts[4 * r + s + 1]`, `starts` being (4 * rows + 1,) int32. A stage has no token of a
    row twice.
    """
    (adjust_triton if logits.is_cuda else adjust_torch)(logits, entries, starts)


# -- the kernels


def sample_triton(logits: Tensor, parameters: Tensor) -> Tensor:
    """The kernels; on CPU tensors only under Triton's interpreter. See `sample`."""
    from engine.kernels.gpu import sampling as gpu

    assert parameters.is_contiguous() and logits.stride(1) == 1
    rows, vocabulary = logits.shape
    chunks = -(-vocabulary // gpu.CHUNK)
    blocks = chunks * (gpu.CHUNK // gpu.BLOCK)
    floats = logits.new_empty(rows, 3 * chunks + blocks, dtype=torch.float32)
    winners = logits.new_empty(rows, chunks, dtype=torch.int32)
    hot = logits.new_empty(rows, blocks, dtype=torch.int32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    if rows:
        sizes = (vocabulary, logits.stride(0), chunks)
        fixed = {"chunk": gpu.CHUNK, "each": gpu.BLOCK}
        gpu.race_kernel[chunks, rows](
            logits, parameters, floats, winners, *sizes, **fixed, num_warps=gpu.RACE_WARPS, num_stages=1
        )
        gpu.settle_kernel[rows,](
            logits,
            parameters,
            floats,
            winners,
            hot,
            tokens,
            *sizes,
            max_chunks=1 << (chunks - 1).bit_length(),
            **fixed,
            tile=gpu.TILE,
            num_warps=gpu.SETTLE_WARPS,
            num_stages=1,
            maxnreg=gpu.SETTLE_REGISTERS,
        )
    return tokens


def adjust_triton(logits: Tensor, entries: Tensor, starts: Tensor) -> None:
    """The kernel; on CPU tensors only under Triton's interpreter. See `adjust`."""
    from engine.kernels.gpu.sampling import adjust_kernel

    if len(logits):
        adjust_kernel[len(logits),](logits, entries, starts, logits.stride(0), block=1024, num_stages=1)


# -- the torch references


def sample_torch(logits: Tensor, parameters: Tensor) -> Tensor:
    """The torch reference. See `sample`."""
    tokens = []
    for row, words in zip(logits.float(), parameters, strict=True):
        scale = float(words.view(torch.float32)[0])
        if scale > 0 and bool(row.max().isfinite()):
            scores = (row.double() - row.max()) * scale + gumbel(
                int(words[4:6].view(torch.int64)), len(row), row.device
            )
            tokens.append(scores.masked_fill(~kept_torch(row, words), -torch.inf).argmax())
        else:
            tokens.append((row == row.max()).long().argmax())
    return torch.stack(tokens) if tokens else logits.new_empty(0, dtype=torch.int64)


def kept_torch(row: Tensor, words: Tensor) -> Tensor:
    """Returns the tokens of one row of fp32 logits that the filters leave, (vocabulary,) bool. See `sample`."""
    scale, _, top_p, reach = words[:4].view(torch.float32).tolist()
    top_k = int(words[1])
    ordered, ids = row.sort(descending=True, stable=True)
    masses = torch.exp((ordered.double() - ordered[0]) * scale)
    kept = (ordered > -torch.inf) & (ordered >= ordered[0] + reach)
    if top_k:
        kept &= ordered >= ordered[min(top_k, len(row)) - 1]
    masses = masses.masked_fill(~kept, 0.0)
    if top_p < 1:
        likelier = (masses.cumsum(0) - masses)[torch.searchsorted(-ordered, -ordered)]  # of those with the same logit
        kept &= likelier < top_p * masses.sum()
    return torch.empty_like(kept).scatter_(0, ids, kept)


def gumbel(key: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns the Gumbel numbers of the first `count` tokens for a key, fp64."""
    u = (philox(key, -(-count // 4)).reshape(-1)[:count] + 0.5) * 2.0**-32
    return torch.from_numpy(-np.log(-np.log1p(-u))).to(device)


def philox(key: int, count: int) -> NDArray[np.uint64]:
    """Computes Philox4x32-10 of the counters 0 to count - 1, (count, 4), each of 32 bits."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    first = np.arange(count, dtype=np.uint64)
    second = third = fourth = np.zeros_like(first)
    keys = np.array([key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF], dtype=np.uint64)
    for _ in range(10):
        one, two = first * np.uint64(0xD2511F53), third * np.uint64(0xCD9E8D57)
        first, third = (two >> half) ^ second ^ keys[0], (one >> half) ^ fourth ^ keys[1]
        second, fourth = two & low, one & low
        keys = (keys + np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)) & low
    return np.stack([first, second, third, fourth], axis=1)


def adjust_torch(logits: Tensor, entries: Tensor, starts: Tensor) -> None:
    """The torch reference. See `adjust`."""
    bounds = starts.tolist()
    for row in range(len(logits)):
        for stage, (first, last) in enumerate(zip(bounds[4 * row : 4 * row + 4], bounds[4 * row + 1 :], strict=False)):
            tokens, values = entries[first:last, 0].long(), entries[first:last, 1].view(torch.float32)
            x = logits[row, tokens].float()
            if stage == 1:
                x = torch.where(x > 0, x / values, x * values)
            else:
                x = x + values if stage != 3 else torch.full_like(x, -torch.inf)
            logits[row, tokens] = x.to(logits.dtype)
