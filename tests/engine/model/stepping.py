"""Drives a decoder without an engine: sequences with block tables of their own, any mix of chunks in a step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kv_cache.quantized_cache import Coding, QuantizedCache
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder


class Stepper:
    """A pool of blocks in shuffled order, and sequences that are advanced by chunks."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        *,
        block_size: int = 16,
        seed: int = 0,
        coding: Coding | None = None,
        adapters: Sequence[int] = (),
    ) -> None:
        """`adapters`: each sequence's slot, if any has one."""
        spec = decoder.spec
        self.decoder = decoder
        self.prompts = [list(prompt) for prompt in prompts]
        self.done = [0] * len(prompts)
        self._adapters = adapters
        counts = [-(-len(prompt) // block_size) for prompt in prompts]
        free = list(range(1, sum(counts) + 1))
        if seed:  # 0: every table is a run of neighbours
            random.Random(seed).shuffle(free)
        self._tables = [[free.pop(0) for _ in range(count)] for count in counts]
        self._block_size = block_size
        self._kv: KVCache | QuantizedCache
        if coding is None:
            self._kv = KVCache.of(
                spec, sum(counts) + 1, block_size, decoder.dtype, decoder.device, slots=len(prompts) + 1
            )
        else:
            shape = (spec.layers, sum(counts) + 1, block_size, spec.kv_heads, spec.head_dim)
            self._kv = QuantizedCache(*shape, decoder.dtype, decoder.device, coding)

    def step(self, chunks: Sequence[int]) -> list[Tensor]:
        """Advance sequence i by chunks[i] tokens (0: it sits this step out); logits of those tokens, (chunk, vocab)."""
        rows = [i for i, chunk in enumerate(chunks) if chunk]
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts = [0], []
        for i in rows:
            span = range(self.done[i], self.done[i] + chunks[i])
            ids += [self.prompts[i][p] for p in span]
            positions += span
            slots += [self._tables[i][p // self._block_size] * self._block_size + p % self._block_size for p in span]
            starts.append(len(ids))
            contexts.append(span.stop)
            self.done[i] = span.stop
        width = max(len(self._tables[i]) for i in rows)
        tables = [self._tables[i] + [0] * (width - len(self._tables[i])) for i in rows]
        device = self.decoder.device
        batch = Batch(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(slots, device=device),
            tuple(starts),
            tuple(contexts),
            torch.tensor(tables, device=device),
            torch.arange(len(ids), device=device),
            states=tuple(i + 1 for i in rows),
            adapters=tuple(self._adapters[i] for i in rows if self._adapters),
        )
        logits = self.decoder.forward(batch, self._kv)
        parts = iter(logits.split([chunks[i] for i in rows]))
        return [next(parts) if chunk else logits[:0] for chunk in chunks]

    def run(self, chunk: int) -> list[Tensor]:
        """Advance all sequences together, `chunk` tokens a step, to their ends; all logits of each."""
        parts: list[list[Tensor]] = [[] for _ in self.prompts]
        while any(done < len(prompt) for done, prompt in zip(self.done, self.prompts, strict=True)):
            chunks = [min(chunk, len(p) - done) for p, done in zip(self.prompts, self.done, strict=True)]
            for part, logits in zip(parts, self.step(chunks), strict=True):
                part.append(logits)
        return [torch.cat(part) for part in parts]


def apart(found: Tensor, expected: Tensor) -> float:
    """Largest difference of two logit tensors, relative to the largest expected logit."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())
