"""A device that needs no model: its K/V cache holds (position, token) pairs, and it checks every one that it reads.

The next token is a fixed function of the tokens that it *finds in the cache*, so a wrong block table, a lost copy or a
second writer shows as a failed assertion or a wrong token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from engine.core.request import SequenceState
from engine.core.step import Step
from engine.core.token_tree import path_to
from engine.kernels.sampled_tokens import fill_sampled
from engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.transfers import at_once
from engine.model.batch import Batch, Batching
from engine.speculation.proposer import DraftTokens, Proposer

VOCAB = 4


def next_token(tokens: Sequence[int]) -> int:
    """Returns the fake model's token after `tokens`. Token 0 is its end of sequence and is rare."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=2).digest()
    return 0 if digest[0] < 8 else 1 + digest[1] % 3


class FakeStates:
    """Recurrent states that are the tokens they stand for: a row must begin where its state ends."""

    block_nbytes = 1 + 63

    def __init__(self, slots: BlockPool) -> None:
        self._slots = slots
        self._states: list[list[int]] = [[] for _ in range(slots.total + 1)]

    def advance(self, step: Step) -> None:
        copied = [(row.state_copy[1], self._states[row.state_copy[0]]) for row in step.rows if row.state_copy]
        for slot, state in copied:
            self._states[slot] = state
        advanced = [row.state for row in step.rows]
        assert NULL_BLOCK not in advanced and len(set(advanced)) == len(advanced), "two rows advance one state"
        for row in step.rows:
            assert not self._slots.is_shared(row.state), "a shared state is advanced"
            assert not self._slots.is_published(row.state), "a checkpoint is advanced"
            assert self._states[row.state] == row.seq.tokens[: row.start], "a row begins at another state"
            self._states[row.state] = [*row.seq.tokens[: row.end], *row.draft]

    def save(self, pairs: list[tuple[int, torch.Tensor]]) -> None:
        for slot, row in pairs:
            state = self._states[slot]
            row.zero_()
            row[: len(state) + 1] = torch.tensor([len(state), *state])

    def saved(self) -> None:
        pass

    def queued(self) -> Callable[[], None]:
        return at_once

    def load(self, block: int, payload: torch.Tensor | memoryview) -> None:
        assert self._slots._references[block] == 1 and self._slots._content[block] is None, "a state in use is loaded"
        length, *state = list(payload.tolist())
        self._states[block] = state[:length]


class FakeRunner:
    """Stands where the model's runner stands; see the module. `states`: of a model with recurrent layers."""

    vocab_size = VOCAB

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        queues: bool = False,
        states: FakeStates | None = None,
        groups: KVGroups | None = None,
    ) -> None:
        self.queues = queues
        self._groups = groups
        self._states = states
        self._given = torch.empty(0, VOCAB)
        self._pool = pool
        self._size = block_size
        self._batching = Batching(block_size, groups=groups)
        self._cache: list[tuple[int, int] | None] = [None] * ((pool.total + 1) * block_size)
        self.batches: list[list[tuple[int, int]]] = []  # (sequence id, tokens run) of every step
        self.followed = 0  # steps that were told before the tokens of the one before were known
        self.races: list[
            int
        ] = []  # blocks that were loaded while somebody used them: an error would only fail the load

    def run(self, step: Step) -> torch.Tensor:
        self._given.fill_(torch.nan)  # a step's result is valid until the next one
        self.batches.append([(row.seq.id, row.count) for row in step.rows])
        if self._states is not None:
            self._states.advance(step)
        copies = [(target, self._block(source)) for row in step.rows for source, target in row.copies]
        for target, content in copies:
            self._cache[target * self._size : (target + 1) * self._size] = content
        moved = [
            (to, cell, row.move.delta)
            for row in step.rows if row.move is not None
            for source, to in row.move.pairs(row.seq.table, self._size)
            if (cell := self._cache[source]) is not None
        ]  # fmt: skip
        for slot, (position, token), delta in moved:
            assert not self._pool.is_shared(slot // self._size), "a shared block is written to"
            assert self._pool._content[slot // self._size] is None, "a block that can be found is written to"
            self._cache[slot] = (position + delta, token)
        batch = self._batching.make(step)
        assert (step.sampled is not None) == any(row.sampled_at is not None for row in step.rows)
        if step.sampled is not None:
            self.followed += 1
            fill_sampled(batch.token_ids, step.sampled.cpu())
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        seen = [batch.of_table(table) for table in range(1 + len(batch.windowed))]
        written = [slot for each in seen for slot in each.slots.tolist() if slot // self._size != NULL_BLOCK]
        assert len(written) == len(set(written)), "two tokens of one step write to one slot"
        for each in seen:
            for slot, token, position in zip(each.slots.tolist(), tokens, positions, strict=True):
                block = slot // self._size
                if block != NULL_BLOCK:
                    assert not self._pool.is_shared(block), "a shared block is written to"
                    assert self._pool._content[block] is None, "a block that can be found is written to"
                    self._cache[slot] = (position, token)
        logits: dict[int, torch.Tensor] = {}
        starts = list(accumulate((row.width for row in step.rows), initial=0))
        for index, (first, end) in enumerate(pairwise(batch.query_starts)):
            for at in range(first, end):  # every query reads, whether its logits are wanted or not
                of = next(i for i, start in enumerate(starts[1:]) if at < start)
                row = step.rows[of]
                if (node := at - starts[of] - row.count) >= 0:
                    known = row.seq.tokens + [row.draft[each] for each in path_to(row.parents, node)]
                else:
                    known = row.seq.tokens[: positions[at] + 1]
                known += tokens[at : at + 1] if row.sampled_at is not None else []
                for table, each in enumerate(seen):
                    self._read(self._places(each, index, len(known)), known, windowed=table > 0)
                logits[at] = torch.nn.functional.one_hot(torch.tensor(next_token(known)), VOCAB).float() * 8
        rows = [logits[at] for at in batch.logits_at.tolist()]
        self._given = torch.stack(rows) if rows else torch.empty(0, VOCAB)
        return self._given

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        found = [self._cache[source] for source, _ in pairs]
        for (_, to), cell in zip(pairs, found, strict=True):
            assert not self._pool.is_shared(to // self._size), "a shared block is written to"
            self._cache[to] = cell

    @property
    def block_nbytes(self) -> int:
        return self._size * 4

    def save(self, pairs: list[tuple[int, torch.Tensor]]) -> None:
        for block, row in pairs:
            cells = [(-1, -1) if cell is None else cell for cell in self._block(block)]
            row.view(torch.int16).copy_(torch.tensor(cells, dtype=torch.int16).flatten())

    def saved(self) -> None:
        pass

    def queued(self) -> Callable[[], None]:
        return at_once

    def load(self, block: int, payload: torch.Tensor | memoryview) -> None:
        if self._pool._references[block] != 1 or self._pool._content[block] is not None:
            self.races.append(block)
        data = payload if isinstance(payload, torch.Tensor) else torch.frombuffer(payload, dtype=torch.uint8)
        cells = data.view(torch.int16).view(-1, 2).tolist()
        self._cache[block * self._size : (block + 1) * self._size] = [None if p < 0 else (p, t) for p, t in cells]

    def _places(self, batch: Batch, row: int, count: int) -> list[int]:
        """Returns the slots of the first `count` positions that a row of a batch reads."""
        table = batch.block_tables[row].tolist()
        places = [table[p // self._size] * self._size + p % self._size for p in range(count)]
        if batch.branches is not None:
            begin = batch.branches.starts[row]
            places[begin:] = batch.branches.slots[row, : max(0, count - begin)].tolist()
        return places

    def _read(self, places: list[int], known: list[int], *, windowed: bool) -> None:
        """Checks that the cache holds the last tokens of `known` that its last one sees."""
        last, first = len(known) - 1, 0
        if windowed and self._groups is not None:
            window = self._groups.window
            first = max(0, last - last % window if self._groups.chunked else last - window + 1)
        found = [self._cache[place] for place in places[first:]]
        assert found == list(enumerate(known))[first:], "the cache holds something else than the sequence's tokens"

    def _block(self, block: int) -> list[tuple[int, int] | None]:
        return self._cache[block * self._size : (block + 1) * self._size]


class PlantedProposer(Proposer):
    """Proposes the fake model's own tokens, or another one in `wrong` of 256 places, chosen by the text; in half of
    them both, the right one as a branch."""

    name = "planted"

    def __init__(self, wrong: int) -> None:
        self._wrong = wrong

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        text, tokens, parents, last = list(seq.tokens), list[int](), list[int](), -1
        while len(tokens) < budget:
            token = next_token(text)
            mark, both = hashlib.blake2b(bytes(text), digest_size=2, key=b"planted").digest()
            other = [1 + token % 3] if mark < self._wrong else []
            these = [*other, token][: budget - len(tokens)] if both % 2 else other or [token]
            tokens += these
            parents += [last] * len(these)
            last = len(tokens) - 1
            text.append(tokens[-1])
        return DraftTokens(tuple(tokens), (0.9,) * budget, tuple(parents))


class Letters:
    """A detokeniser for which token n is the n-th letter."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + t) for t in token_ids)

    def flush(self) -> str:
        return ""
