"""Runs one step on the device: rows become a ragged batch, the model gives logits. Knows nothing of jobs or text.

`Runner` is the protocol that the core depends on; tests put a fake behind it, later issues a second device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import NULL_BLOCK, Batch, KVCache
from engine.kv.int8 import Int8Cache
from engine.scheduler import Step

if TYPE_CHECKING:
    from engine.models.decoder import Decoder


class Runner(Protocol):
    """What the core needs of a device."""

    vocab_size: int

    def run(self, step: Step) -> Tensor:
        """Logits, fp32, (wanted positions of all rows in order, vocabulary)."""
        ...


class CacheStore:
    """The paged cache as tiers below it see it (`engine.kv.tiers.BlockStore`).

    On a GPU, saving is queued before the step on the same stream, and loading runs on a stream of the worker's own.
    """

    def __init__(self, kv: KVCache | Int8Cache, device: torch.device) -> None:
        self._kv = kv
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._saved = torch.cuda.Event() if self._cuda else None

    def save(self, pairs: list[tuple[int, Tensor]]) -> None:
        for block, row in pairs:
            self._kv.read_block(block, row)
        if self._saved is not None:
            self._saved.record()

    def saved(self) -> None:
        if self._saved is not None:
            self._saved.synchronize()

    @torch.inference_mode()
    def load(self, block: int, payload: Tensor | memoryview) -> None:
        row = payload if isinstance(payload, Tensor) else torch.frombuffer(payload, dtype=torch.uint8)
        if self._stream is None:
            self._kv.write_block(block, row)
            return
        with torch.cuda.stream(self._stream):
            self._kv.write_block(block, row)
        self._stream.synchronize()


class ModelRunner:
    """A decoder and its paged cache."""

    def __init__(self, decoder: Decoder, kv: KVCache | Int8Cache, device: torch.device) -> None:
        self.vocab_size = decoder.spec.vocab_size
        self._decoder = decoder
        self._kv = kv
        self._device = device

    def run(self, step: Step) -> Tensor:
        self._kv.copy_blocks([row.copy for row in step.rows if row.copy is not None])
        return self._decoder.forward(make_batch(step, self._kv.block_size, self._device), self._kv)


def make_batch(step: Step, block_size: int, device: torch.device | str = "cpu") -> Batch:
    """The step's tensors. Tokens whose K/V exists already write to the null block."""
    rows = step.rows
    tables = np.full((len(rows), max(-(-row.end // block_size) for row in rows)), NULL_BLOCK, dtype=np.int64)
    tokens: list[int] = []
    wanted: list[int] = []
    starts = [0]
    for index, row in enumerate(rows):
        blocks = -(-row.end // block_size)
        tables[index, :blocks] = row.seq.table[:blocks]
        first = starts[-1] - row.start  # position p of this row is token first + p of the batch
        wanted.extend(range(first + max(row.start, row.logits_from), first + row.end))
        tokens.extend(row.seq.tokens[row.start : row.end])
        starts.append(starts[-1] + row.count)
    counts = np.array([row.count for row in rows])
    row_of = np.repeat(np.arange(len(rows)), counts)
    offsets = np.array([row.start for row in rows]) - np.array(starts[:-1])
    positions = np.arange(len(tokens)) + offsets[row_of]
    slots = tables[row_of, positions // block_size] * block_size + positions % block_size
    cached = np.array([row.seq.kv_len for row in rows])[row_of]
    slots = np.where(positions < cached, NULL_BLOCK * block_size + positions % block_size, slots)

    def tensor(values: np.ndarray | list[int]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    return Batch(
        token_ids=tensor(tokens),
        positions=tensor(positions),
        slots=tensor(slots),
        query_starts=tuple(starts),
        context_lens=tuple(row.end for row in rows),
        block_tables=tensor(tables),
        logits_at=tensor(wanted),
    )
