"""How batches were made before continuous batching and mixed steps: here to be measured against."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from engine.policies.chunks import Chunks
from engine.policies.policy import Policy, Turn, each, parted
from engine.sequence import SequenceState


class Exclusive(Policy):
    """A step reads prompts or writes answers, never both: whoever writes halts while anybody reads."""

    def __init__(self, ageing_s: float, chunks: Chunks) -> None:
        super().__init__(ageing_s, chunks)
        self._read = 0

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[Turn]:
        decodes, prefills = parted(running)
        self._read = 0
        yield from each(prefills)
        yield from each(self._line(waiting, now))
        if self._read == 0:
            self._closed(running)
            yield from each(decodes)

    def charged(self, seq: SequenceState, tokens: int) -> None:
        self._read += tokens

    def _line(self, waiting: Collection[SequenceState], now: float) -> list[SequenceState]:
        """Who may join, in order."""
        return sorted(waiting, key=lambda seq: (self.lifted(seq, now), seq.arrival))

    def _closed(self, running: Collection[SequenceState]) -> None:
        """Nobody else joins in this step."""


class Static(Exclusive):
    """A batch is what waits when nothing runs, and nobody joins it until all of it is done.

    What is done costs nothing more, where padded batches go on computing it: a comparison with this flatters them.
    """

    def __init__(self, ageing_s: float, chunks: Chunks, places: int) -> None:
        """`places`: sequences of a batch."""
        super().__init__(ageing_s, chunks)
        self._places = places
        self._batch: set[int] = set()

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[Turn]:
        self._batch &= {seq.id for seq in (*running, *waiting)}
        if not self._batch:
            self._batch = {seq.id for seq in super()._line(waiting, now)[: self._places]}
        yield from super().turns(running, waiting, now)

    def _line(self, waiting: Collection[SequenceState], now: float) -> list[SequenceState]:
        return [seq for seq in super()._line(waiting, now) if seq.id in self._batch]

    def _closed(self, running: Collection[SequenceState]) -> None:
        self._batch = {seq.id for seq in running}  # for the others there was no room: they are the next batch
