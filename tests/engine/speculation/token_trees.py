"""Token trees on a decoder: the logits and K/V of a tree's tokens in one step, and those of each path by itself."""

from __future__ import annotations

import random
from itertools import count

import torch
from torch import Tensor

from engine.core.request import SequenceState
from engine.core.step import Row, Step
from engine.core.token_tree import path_to
from engine.kv_cache.quantized_cache import Coding, QuantizedCache
from engine.model.batch import KVCache
from engine.model.decoder import Decoder
from engine.model.runner import ModelRunner

# in preorder: several children of the root, of tokens below it, a branch of three, and siblings at the end
PARENTS = (-1, 0, 1, 2, 2, 1, 0, 6, 7, 6, -1, 10, 10, -1)


class TreeSteps:
    """Sequences of one prompt of `length` tokens on one cache of `block_size`."""

    def __init__(
        self,
        decoder: Decoder,
        length: int,
        block_size: int,
        *,
        coding: Coding | None = None,
        deterministic: bool = False,
    ) -> None:
        spec, blocks = decoder.spec, -(-(length + len(PARENTS) + 1) // block_size)
        self._draw = random.Random(length)
        self._size, self._blocks = block_size, blocks
        self._ids = count(1)
        self._free = list(range(1, 1 + 2 * blocks))
        self._draw.shuffle(self._free)
        shape = (len(self._free) + 1, block_size)
        self.kv: KVCache | QuantizedCache = (
            KVCache.of(spec, *shape, decoder.dtype, decoder.device)
            if coding is None
            else QuantizedCache(
                spec.layers, *shape, spec.kv_heads, spec.head_dim, decoder.dtype, decoder.device, coding
            )
        )
        self.runner = ModelRunner(decoder, self.kv, decoder.device, deterministic=deterministic)
        self.prompt = [self._draw.randrange(3, 256) for _ in range(length)]
        self.draft = tuple(self._draw.sample(range(3, 256), len(PARENTS)))

    def sequence(self, tokens: list[int] | None = None) -> SequenceState:
        """Returns a sequence of which all but the prompt's last token has K/V."""
        table, self._free = self._free[: self._blocks], self._free[self._blocks :]
        seq = SequenceState(next(self._ids), list(tokens or self.prompt), b"", 1, table=table)
        end = len(self.prompt) - 1
        if end:
            self.runner.run(Step([Row(seq, 0, end, end)], end))
        seq.kv_len = end
        return seq

    def tree(self, *others: Row) -> tuple[SequenceState, Tensor]:
        """Returns a sequence behind whose prompt the tree ran in one step, and the logits, (1 + tokens, vocab)."""
        seq, end = self.sequence(), len(self.prompt) - 1
        rows = [*others, Row(seq, end, 1, end, draft=self.draft, parents=PARENTS)]
        return seq, self.runner.run(Step(rows, sum(row.width for row in rows)))[-len(PARENTS) - 1 :]

    def path(self, node: int) -> tuple[SequenceState, Tensor]:
        """Returns a sequence that goes on with the tokens up to `node`, and the logits after the prompt and each."""
        tokens = [self.draft[at] for at in path_to(PARENTS, node)]
        seq, end = self.sequence([*self.prompt, *tokens]), len(self.prompt) - 1
        return seq, self.runner.run(Step([Row(seq, end, 1 + len(tokens), end)], 1 + len(tokens)))

    def release(self, *seqs: SequenceState) -> None:
        """Gives the blocks of sequences to later ones."""
        self._free += [block for seq in seqs for block in seq.table]

    def slots(self, seq: SequenceState, positions: list[int]) -> list[int]:
        return [seq.table[at // self._size] * self._size + at % self._size for at in positions]

    def stored(self, seq: SequenceState, end: int) -> list[Tensor]:
        """Returns all K/V of the positions before `end`."""
        slots = self.slots(seq, list(range(end)))
        return [part.flatten(2, 3)[:, :, slots].clone() for part in self.kv.tensors]


def compare(steps: TreeSteps, *, exact: bool, tolerance: float = 0.0) -> None:
    """Asserts that a tree's tokens have the logits of their paths, and their K/V once it has moved."""
    for node in range(len(PARENTS)):
        path, length = path_to(PARENTS, node), len(steps.prompt)
        seq, found = steps.tree()
        alone, expected = steps.path(node)
        ours = found[[0, *(1 + at for at in path)]]
        moves = zip(
            steps.slots(seq, [length + at for at in path]),
            steps.slots(seq, [length + at for at in range(len(path))]),
            strict=True,
        )
        steps.runner.move_kv([(source, to) for source, to in moves if source != to])
        kv = zip(steps.stored(seq, length + len(path)), steps.stored(alone, length + len(path)), strict=True)
        if exact:
            assert torch.equal(ours, expected), f"token {node} of the tree"
            assert all(torch.equal(one, other) for one, other in kv), f"K/V of token {node}"
        else:
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
        steps.release(seq, alone)
