"""Runs one step on the device: rows become a ragged batch, the model gives logits. Knows nothing of jobs or text.

`Runner` is the protocol that the core depends on; tests put a fake behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.batch import KVCache
from engine.batching import Batching
from engine.kv.coded import CodedCache
from engine.kv.copies import at_once
from engine.kv.saving import Saving
from engine.models.tilewise import tilewise
from engine.step import Step

if TYPE_CHECKING:
    from engine.models.decoder import Decoder


class Runner(Protocol):
    """What the core needs of a device. One that `queues` returns from `run` before the logits are computed."""

    vocab_size: int
    queues: bool

    def run(self, step: Step) -> Tensor:
        """Logits, fp32, (wanted positions of all rows in order, vocabulary)."""
        ...


class CacheStore:
    """The paged cache as tiers below it see it (`engine.kv.copies.BlockStore`).

    On a GPU, saving is queued before the step (see `Saving`), and loading runs on a stream of the worker's own: what it
    must come after is waited for (`queued`), and what comes after it begins when it is done.
    """

    def __init__(self, kv: KVCache | CodedCache, device: torch.device) -> None:
        self._kv = kv
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._saving = Saving(kv.tensors) if cuda else None

    def save(self, pairs: list[tuple[int, Tensor]]) -> None:
        if self._saving is not None:
            self._saving.save(pairs)
            return
        for block, row in pairs:
            self._kv.read_block(block, row)

    def saved(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def queued(self) -> Callable[[], None]:
        return at_once if self._saving is None else self._saving.queued()

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

    queues = False

    def __init__(
        self, decoder: Decoder, kv: KVCache | CodedCache, device: torch.device, *, deterministic: bool = False
    ) -> None:
        self.vocab_size = decoder.spec.vocab_size
        self._decoder = decoder
        self._tilewise = deterministic and not decoder.tiled  # the CPU's own kernels treat every token by itself anyway
        self._kv = kv
        self._batching = Batching(kv.block_size, device)

    def run(self, step: Step) -> Tensor:
        self._kv.copy_blocks([row.copy for row in step.rows if row.copy is not None])
        batch = self._batching.make(step)
        if self._tilewise:
            return tilewise(self._decoder.forward, batch, self._kv)
        return self._decoder.forward(batch, self._kv)
