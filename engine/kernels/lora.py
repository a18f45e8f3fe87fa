"""Low-rank adapters (Hu et al. 2021), many in one batch: y += scale * (x @ A.T) @ B.T, by rows or by runs of rows.

As in Punica and S-LoRA (Chen et al. 2023, Sheng et al. 2023): no matrix is added to the weights, and rows of different
adapters, or of none, share a step. The idea: two kernels, to the rank and back, with a middle in float32; a decode
gives every token its adapter, a prefill runs of tokens that share one and go through tensor cores. Kernels find an
adapter's matrices by their addresses, so that each lies where it was put, with a rank of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of a linear layer: `matrices` has the A (rank, in) and B (out, rank) of each, None of one without an
    update of this layer. Each has its own rank: nothing is padded.

    `pointers` (2, adapters) int64 has the addresses of the As and Bs, `ranks` is (adapters,) int32, 0 for none, and
    `scales` (adapters,) float32. All matrices are contiguous, of one type, and on one device with these.
    """

    matrices: tuple[tuple[Tensor, Tensor] | None, ...]
    pointers: Tensor
    ranks: Tensor
    scales: Tensor
    rank: int  # the largest


def pack(pairs: Sequence[tuple[Tensor, Tensor, float] | None]) -> Adapters:
    """Packs adapters of any ranks: each A (rank, in), B (out, rank) and scale, usually alpha / rank; None for one that
    does not update the layer. Contiguous matrices are kept where they are."""
    matrices = tuple(None if each is None else (each[0].contiguous(), each[1].contiguous()) for each in pairs)
    device = next(a.device for a, _ in filter(None, matrices))
    ranks = [0 if each is None else len(each[0]) for each in matrices]
    addresses = [[0 if each is None else each[part].data_ptr() for each in matrices] for part in (0, 1)]
    return Adapters(
        matrices,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.tensor(ranks, dtype=torch.int32, device=device),
        torch.tensor([0.0 if each is None else each[2] for each in pairs], device=device),
        max(ranks),
    )


def add_by_token(y: Tensor, x: Tensor, adapters: Adapters, which: Tensor) -> None:
    """Adds to row i of `y` (tokens, out) the output of adapter `which[i]` for row i of `x` (tokens, in), in place.

    `which` is (tokens,) int32; -1: no adapter, and the row of y is left alone. x, y and the adapters are of one type of
    16 or 32 bits, the last dimension of x and y contiguous.
    """
    (add_by_token_triton if y.is_cuda else add_by_token_torch)(y, x, adapters, which)


def add_by_run(y: Tensor, x: Tensor, adapters: Adapters, starts: Tensor, which: Tensor, longest: int) -> None:
    """Does the same where rows `starts[i]` to `starts[i + 1]` have adapter `which[i]`.

    `starts` is (runs + 1,) int32, `which` (runs,) int32. `longest` is the rows of the longest run, or more.
    """
    (add_by_run_triton if y.is_cuda else add_by_run_torch)(y, x, adapters, starts, which, longest)


def add_by_token_torch(y: Tensor, x: Tensor, adapters: Adapters, which: Tensor) -> None:
    """The torch reference, which runs on a CPU: the rows of an adapter together. See `add_by_token`."""
    for adapter in sorted(set(which.tolist()) - {-1}):
        if (matrices := adapters.matrices[adapter]) is None:
            continue
        a, b = matrices
        rows = (which == adapter).nonzero().squeeze(1)
        added = x[rows].float() @ a.float().T @ b.float().T * adapters.scales[adapter]
        y[rows] = (y[rows].float() + added).to(y.dtype)


def add_by_run_torch(y: Tensor, x: Tensor, adapters: Adapters, starts: Tensor, which: Tensor, longest: int) -> None:
    """The torch reference. See `add_by_run`."""
    add_by_token_torch(y, x, adapters, which.repeat_interleave((starts[1:] - starts[:-1]).long()))


def add_by_token_triton(y: Tensor, x: Tensor, adapters: Adapters, which: Tensor) -> None:
    """The kernels; on CPU tensors only under Triton's interpreter. See `add_by_token`."""
    from engine.kernels.gpu.lora import BLOCK_OUT, SPLITS, block_rank, expand_kernel, shrink_block, shrink_kernel

    (tokens, width), rank, height = x.shape, adapters.rank, y.shape[1]
    if not tokens:
        return
    tile = block_rank(rank)
    middle = x.new_empty(SPLITS, tokens, rank, dtype=torch.float32)
    shrink_kernel[tokens, SPLITS](
        *(x, adapters.pointers[0], adapters.ranks, which, middle, tokens, width, rank, x.stride(0)),
        block_rank=tile,
        block=shrink_block(tile),
        splits=SPLITS,
    )
    expand_kernel[tokens, -(-height // BLOCK_OUT)](
        *(middle, adapters.pointers[1], adapters.ranks, adapters.scales, which, y, tokens, height, rank, y.stride(0)),
        block_rank=tile,
        block=BLOCK_OUT,
        splits=SPLITS,
    )


def add_by_run_triton(y: Tensor, x: Tensor, adapters: Adapters, starts: Tensor, which: Tensor, longest: int) -> None:
    """The kernels; on CPU tensors only under Triton's interpreter. See `add_by_run`."""
    from engine.kernels.gpu.lora import BLOCK_TOKENS, RUN_BLOCK, block_rank, expand_runs_kernel, shrink_runs_kernel

    rank, width, height = adapters.rank, x.shape[1], y.shape[1]
    tiles, runs = -(-longest // BLOCK_TOKENS), len(which)
    if not tiles or not runs:
        return
    tile = block_rank(rank)
    middle = x.new_empty(len(x), rank, dtype=torch.float32)
    shrink_runs_kernel[tiles, runs](
        *(x, adapters.pointers[0], adapters.ranks, starts, which, middle, width, rank, x.stride(0)),
        block_rank=tile,
        block=RUN_BLOCK,
        block_tokens=BLOCK_TOKENS,
    )
    expand_runs_kernel[tiles, runs, -(-height // RUN_BLOCK)](
        *(middle, adapters.pointers[1], adapters.ranks, adapters.scales, starts, which, y, height, rank, y.stride(0)),
        block_rank=tile,
        block=RUN_BLOCK,
        block_tokens=BLOCK_TOKENS,
    )
