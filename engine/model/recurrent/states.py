"""States of recurrent layers, by slot, and the rows of a step that advance them.

A sequence's state is its slot in every recurrent layer: a matrix for each head in float32, and the last inputs of the
layer's causal convolution. Slot 0 is the state of no tokens and is never written. Knows nothing of sequences, nor of
the positions that states stand for (`engine.kv_cache.state_checkpoints`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.buffers import zeros
from engine.kv_cache.block_tensors import BlockTensors
from engine.model.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's states: `matrices` (slots, heads, ...) float32 and `taps` (slots, taps - 1, width), the convolution's
    inputs before the next token, the newest last."""

    matrices: Tensor
    taps: Tensor


class RecurrentStates(BlockTensors):
    """The states of all recurrent layers of a model, in `slots` slots."""

    def __init__(self, spec: ModelSpec, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        of = spec.recurrence
        assert of is not None, "the model has recurrent layers"
        pairs = -(-len(spec.recurrent_layers) // 2)  # two layers for keys and values, see `BlockTensors`
        matrices = zeros(pairs, 2, slots, *of.state_shape, dtype=torch.float32, device=device)
        taps = zeros(pairs, 2, slots, of.taps - 1, of.width, dtype=dtype, device=device)
        super().__init__([matrices, taps])

    def layers(self) -> Iterator[LayerStates]:
        """Yields each recurrent layer's states, in order."""
        matrices, taps = (each.flatten(0, 1) for each in self.tensors)
        return (LayerStates(*each) for each in zip(matrices, taps, strict=True))


def state_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes of one slot of `RecurrentStates`."""
    of = spec.recurrence
    if of is None:
        return 0
    heads, rows, columns = of.state_shape
    each = 4 * heads * rows * columns + (of.taps - 1) * of.width * dtype.itemsize
    return 2 * -(-len(spec.recurrent_layers) // 2) * each


CHUNK = 64  # tokens that a recurrence runs at once; chunks begin at multiples of it, however a prompt is cut
MIN_CHUNKED = 8  # tokens of a span; fewer are run one by one


def in_chunks(x: Tensor, position: int) -> Tensor:
    """Cuts the tokens (n, heads, ...) of a span from `position` on: (chunks, heads, CHUNK, ...), padded with zeros."""
    before = position % CHUNK
    padded = F.pad(x, (0, 0) * (x.dim() - 1) + (before, -(before + len(x)) % CHUNK))
    return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)


def out_of_chunks(chunks: Sequence[Tensor], position: int, count: int) -> Tensor:
    """Joins the chunks (heads, CHUNK, width) of a span of `count` tokens: (count, heads, width)."""
    before = position % CHUNK
    return torch.stack(list(chunks)).transpose(1, 2).flatten(0, 1)[before : before + count]


@dataclass(frozen=True, slots=True)
class RecurrentSpan:
    """Tokens `first` to `end` of a batch, of one sequence from `position` on, that advance the state in `slot`."""

    first: int
    end: int
    position: int
    slot: int


class RecurrentPlan:
    """The rows of one step: those of one token, which run together, and longer ones, a span each.

    Every row of a batch that names no slots begins at the state of no tokens, and its state is not kept. With
    `stepwise` a span is run token by token, so that its bits do not depend on the cut of a prompt into steps.
    """

    def __init__(
        self,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        states: Sequence[int],
        within: slice | None,
        device: torch.device,
        *,
        stepwise: bool = False,
    ) -> None:
        """The first four are fields of a `Batch`."""
        self.stepwise = stepwise
        self.spans: list[RecurrentSpan] = []
        single: list[tuple[int, int]] = []
        for row, context in enumerate(context_lens):
            first, end = query_starts[row], query_starts[row + 1]
            position = context - (end - first)
            if within is not None:
                first, end, position = within.start, within.stop, position + within.start
            slot = states[row] if states else 0
            if end - first == 1 and slot:
                single.append((first, slot))
            elif end > first:
                self.spans.append(RecurrentSpan(first, end, position, slot))
        self.single_tokens, self.single_slots = torch.tensor(single, dtype=torch.int64, device=device).view(-1, 2).T

    def convolve(self, x: Tensor, states: LayerStates, weights: Tensor, bias: Tensor | None) -> Tensor:
        """Runs a causal convolution of each channel, and SiLU. Advances the states' taps.

        Args:
            x: (tokens, width).
            weights: (taps, width) float32, the current token's last.
            bias: (width,) float32.

        Returns:
            (tokens, width) float32.
        """
        out = torch.zeros(x.shape, device=x.device)
        if len(self.single_tokens):
            kept = torch.cat([states.taps[self.single_slots], x[self.single_tokens][:, None]], 1)
            states.taps[self.single_slots] = kept[:, 1:]
            mixed = torch.zeros(len(kept), x.shape[1], device=x.device)
            for tap, weight in enumerate(weights):
                mixed.addcmul_(kept[:, tap].float(), weight)
            out[self.single_tokens] = mixed
        for span in self.spans:
            kept = torch.cat([states.taps[span.slot], x[span.first : span.end]])
            if span.slot:
                states.taps[span.slot] = kept[span.end - span.first :]
            exact, count = kept.float(), span.end - span.first
            mixed = out[span.first : span.end]
            for tap, weight in enumerate(weights):
                mixed.addcmul_(exact[tap : tap + count], weight)
        return F.silu(out if bias is None else out.add_(bias))
