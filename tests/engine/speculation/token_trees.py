"""Token trees on a decoder: the logits and K/V of a tree's tokens in one step, and those of each path by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from engine.core.request import SequenceState
from engine.core.step import Row, Step
from engine.core.token_tree import path_to
from engine.kv_cache.quantized_cache import Coding, QuantizedCache
from engine.model.batch import KVCache
from engine.model.decoder import Decoder
from engine.model.gpu_runner import GpuRunner
from engine.model.runner import ModelRunner, TreeRunner
from tests.engine.model.stepping import apart

# in preorder: several children of the root and of tokens below it, and branches of one token and of three
PARENTS = (-1, 0, 1, 2, 2, 1, 0, 6, 7, 6, -1, 10, 10, 10, -1)


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
        self._free = list(range(1, 1 + 4 * blocks))
        self._draw.shuffle(self._free)
        shape = (len(self._free) + 1, block_size)
        self.kv: KVCache | QuantizedCache = (
            KVCache.of(spec, *shape, decoder.dtype, decoder.device)
            if coding is None
            else QuantizedCache(
                spec.layers, *shape, spec.kv_heads, spec.head_dim, decoder.dtype, decoder.device, coding
            )
        )
        self.runner: TreeRunner = (
            GpuRunner(decoder, self.kv, decoder.device, max_rows=1, max_blocks=blocks, graphs=False)
            if decoder.on_gpu
            else ModelRunner(decoder, self.kv, decoder.device, deterministic=deterministic)
        )
        self.prompt = [self._draw.randrange(3, 256) for _ in range(length)]
        self.draft = tuple(self._draw.sample(range(3, 256), len(PARENTS)))
        self._first: SequenceState | None = None
        self._first = self.sequence()

    def sequence(self, tokens: Sequence[int] = (), like: SequenceState | None = None) -> SequenceState:
        """Returns a sequence of the prompt and `tokens`: all but the prompt's last token has K/V. All K/V is copied
        from the sequence `like` if given, else from the one that has read the prompt."""
        table, self._free = self._free[: self._blocks], self._free[self._blocks :]
        seq, end = SequenceState(next(self._ids), [*self.prompt, *tokens], b"", 1, table=table), len(self.prompt) - 1
        like = like or self._first
        if like is not None:
            self.kv.copy_blocks(list(zip(like.table, seq.table, strict=True)))
        elif end:
            self.runner.run(Step([Row(seq, 0, end, end)], end))
        seq.kv_len = end
        return seq

    def tree(self) -> tuple[SequenceState, Tensor]:
        """Returns a sequence behind whose prompt the tree ran in one step, and the logits, (1 + tokens, vocab)."""
        seq, end = self.sequence(), len(self.prompt) - 1
        row = Row(seq, end, 1, end, draft=self.draft, parents=PARENTS)
        return seq, self.runner.run(Step([row], row.width)).clone()

    def path(self, node: int) -> tuple[SequenceState, Tensor]:
        """Returns a sequence that goes on with the tokens up to `node`, and the logits after the prompt and each, all
        in one step."""
        tokens = [self.draft[at] for at in path_to(PARENTS, node)]
        seq, end = self.sequence(tokens), len(self.prompt) - 1
        return seq, self.runner.run(Step([Row(seq, end, 1 + len(tokens), end)], 1 + len(tokens))).clone()

    def release(self, *seqs: SequenceState) -> None:
        """Gives the blocks of sequences to later ones."""
        self._free += [block for seq in seqs for block in seq.table]

    def slots(self, seq: SequenceState, positions: list[int]) -> list[int]:
        return [seq.table[at // self._size] * self._size + at % self._size for at in positions]

    def stored(self, seq: SequenceState, end: int) -> list[Tensor]:
        """Returns all K/V of the positions before `end`."""
        slots = self.slots(seq, list(range(end)))
        return [part.flatten(2, 3)[:, :, slots].clone() for part in self.kv.tensors]


def assert_paths_alike(steps: TreeSteps, *, tolerance: float = 0.0) -> None:
    """Asserts that a tree's tokens have the logits of their paths, and their K/V once it has moved: to the bit, unless
    there is a tolerance."""
    tree, found = steps.tree()
    for node in sorted(set(range(len(PARENTS))) - set(PARENTS)):  # those on which none follows
        path, length = path_to(PARENTS, node), len(steps.prompt)
        seq = steps.sequence(like=tree)
        alone, expected = steps.path(node)
        ours = found[[0, *(1 + at for at in path)]]
        sources = steps.slots(seq, [length + at for at in path])
        places = steps.slots(seq, [length + at for at in range(len(path))])
        steps.runner.move_kv([each for each in zip(sources, places, strict=True) if each[0] != each[1]])
        kv = zip(steps.stored(seq, length + len(path)), steps.stored(alone, length + len(path)), strict=True)
        if tolerance:
            assert apart(ours, expected) < tolerance
        else:
            assert torch.equal(ours, expected), f"token {node} of the tree"
            assert all(torch.equal(one, other) for one, other in kv), f"K/V of token {node}"
        steps.release(seq, alone)
