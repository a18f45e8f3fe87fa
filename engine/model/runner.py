"""Runs the model's forward pass over a step: rows become a ragged batch, the model gives logits.

`Runner` is the protocol that the core depends on; tests put a fake behind it. A block that is saved from a GPU is
gathered in the order of the steps, at the speed of the GPU's memory, so it may be overwritten right after. The copy to
host memory takes long and is on a stream of its own. `tilewise` runs one sequence and 16 positions at a time, for
kernels whose sums depend on the number of rows, as torch's do. The shapes of a call then depend on its positions alone
(padding tokens fill the gaps), so a token has the same arithmetic in any step. Slow: a step costs as many passes as it
touches tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import cycle
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.core.step import Step
from engine.kernels.blocks import block_nbytes, gather_blocks
from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.block_tensors import BlockTensors
from engine.kv_cache.chunk_reuse.kv_moves import KVMover
from engine.kv_cache.layer_parts import LayerParts
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.kv_cache.transfers import at_once
from engine.model.batch import Batch, Batching, Branches, Features, KVCache

if TYPE_CHECKING:
    from engine.model.decoder import Decoder
    from engine.multimodal.encoder_cache import EncoderCache


BYTES = 16 << 20  # of each of two buffers on the GPU: one is filled while the other is copied


class Saving:
    """Offloads blocks of a cache given as its tensors, see `engine.kernels.blocks`. The buffers come with the first
    block."""

    def __init__(self, cache: Sequence[Tensor]) -> None:
        self._cache = cache
        self._stream = torch.cuda.Stream(cache[0].device)
        self._saved = torch.cuda.Event()
        self._rows = max(1, BYTES // block_nbytes(cache))
        self._halves: Iterator[tuple[Tensor, torch.cuda.Event]] | None = None

    def save(self, pairs: Sequence[tuple[int, Tensor]]) -> None:
        """Queues copies of blocks to rows of bytes, after the current stream's work so far.

        Its later work may overwrite the blocks. The rows are page-locked, unless this may wait.
        """
        here = torch.cuda.current_stream(self._cache[0].device)
        for first in range(0, len(pairs), self._rows):
            some = pairs[first : first + self._rows]
            half, copied = self._next_half()
            here.wait_event(copied)
            gather_blocks(self._cache, [block for block, _ in some], half[: len(some)])
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                for row, (_, target) in zip(half, some, strict=False):
                    target.copy_(row, non_blocking=True)
                copied.record()
        self._saved.record(self._stream)

    def _next_half(self) -> tuple[Tensor, torch.cuda.Event]:
        """A buffer, and the event of its last copies."""
        if self._halves is None:
            shape = (2, self._rows, block_nbytes(self._cache))
            halves = torch.empty(shape, dtype=torch.uint8, device=self._cache[0].device)
            self._halves = cycle([(half, torch.cuda.Event()) for half in halves])
        return next(self._halves)

    def save_layers(
        self, parts: LayerParts, blocks: Sequence[int], layers: range, row: Tensor
    ) -> Callable[[], None]:  # fmt: skip
        """Queues a copy of layers of blocks to the beginning of a row of bytes, after the current stream's work so far;
        returns a wait for it. Its later work may overwrite the blocks."""
        device = self._cache[0].device
        gathered = torch.empty(len(row), dtype=torch.uint8, device=device)
        parts.read(blocks, layers, gathered)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            row.copy_(gathered, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._stream)

        def wait(_kept: Tensor = gathered) -> None:  # its memory is given to others after the copy
            arrived.synchronize()

        return wait

    def wait(self) -> None:
        """Waits until all saved blocks have arrived."""
        self._saved.synchronize()

    def queued(self) -> Callable[[], None]:
        """Returns a wait, for any thread, until the current stream and this one have finished all work queued by
        now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._cache[0].device))
        done = torch.cuda.Event(blocking=True)  # a step may take long, and its waiter need not spin
        done.record(self._stream)
        return done.synchronize


TILE = 16  # positions; tile t of a sequence holds positions 16 t to 16 t + 15


def tilewise(
    forward: Callable[[Batch, KVCache | QuantizedCache], Tensor], batch: Batch, kv: KVCache | QuantizedCache
) -> Tensor:
    """Returns `forward`'s logits of `batch`, with K/V written alike: (len(logits_at), vocab)."""
    wanted = set(batch.logits_at.tolist())
    found: dict[int, Tensor] = {}  # token of the batch -> its logits
    for row, context in enumerate(batch.context_lens):
        first, end = batch.query_starts[row], batch.query_starts[row + 1]
        offset = context - end  # position of token t is t + offset
        while first < end:
            start, stop = _bounds(batch, row, first + offset)
            last = min(end, _next_start(batch, row, first + offset, stop) - offset)
            logits = forward(_tile(batch, kv.block_size, row, range(start, stop), first, last, offset), kv)
            found.update((t, logits[t + offset - start]) for t in range(first, last) if t in wanted)
            first = last
    order = [found[token] for token in batch.logits_at.tolist()]
    if order:
        return torch.stack(order)
    return torch.empty(0, 0, device=batch.positions.device)


def _bounds(batch: Batch, row: int, position: int) -> tuple[int, int]:
    """Returns the positions of the tile of a token: those of its image, if its tokens attend to each other."""
    for at, start, end in batch.mutual:
        if at == row and start <= position < end:
            return start, end
    start = position // TILE * TILE
    return start, start + TILE


def _next_start(batch: Batch, row: int, position: int, stop: int) -> int:
    """Returns where such an image begins behind a position, if before `stop`, else that."""
    return min([start for at, start, _ in batch.mutual if at == row and position < start < stop], default=stop)


def _tile(batch: Batch, block_size: int, row: int, tile: range, first: int, last: int, offset: int) -> Batch:
    """Tokens [first, last) of `row` as part of a whole tile; the others of the tile write to the null block.

    Logits are computed at every token: the number of the head's rows is a shape too.
    """
    device = batch.positions.device
    start, stop = tile.start, tile.stop
    within = slice(first + offset - start, last + offset - start)
    positions = torch.arange(start, stop, device=device)
    tokens = torch.zeros(len(tile), dtype=torch.int64, device=device)
    slots = NULL_BLOCK * block_size + positions % block_size
    tokens[within], slots[within] = batch.token_ids[first:last], batch.slots[first:last]
    blocks = -(-stop // block_size)
    table = torch.full((1, blocks), NULL_BLOCK, dtype=torch.int64, device=device)
    known = min(blocks, batch.block_tables.shape[1])
    table[0, :known] = batch.block_tables[row, :known]
    windowed: list[tuple[Tensor, Tensor]] = []
    for tables, written in batch.windowed:
        windowed.append((table.clone(), slots.clone()))
        windowed[-1][0][0, :known] = tables[row, :known]
        windowed[-1][1][within] = written[first:last]
    everywhere = torch.arange(len(tile), device=device)
    states, features = batch.states[row : row + 1], batch.features
    if features is not None:
        inside = (features.at >= first) & (features.at < last)
        features = Features(features.at[inside] - first + within.start, features.rows[inside])
    branches = None
    if batch.branches is not None and batch.branches.starts[row] < batch.context_lens[row]:
        branches = Branches(batch.branches.starts[row : row + 1], batch.branches.slots[row : row + 1])
    last_keys = rotary = None
    if batch.rotary is not None:
        rotary = positions.repeat(3, 1)
        rotary[:, within] = batch.rotary[:, first:last]
    if batch.last_keys is not None and (row, start, stop) in batch.mutual:
        last_keys = positions.index_put((everywhere[within],), batch.last_keys[first:last])
    return Batch(
        tokens, positions, slots, (0, len(tile)), (stop,), table, everywhere, False, states, within, features,
        windowed=tuple(windowed), branches=branches, adapters=batch.adapters[row : row + 1],
        last_keys=last_keys, rotary=rotary,
    )  # fmt: skip


class Runner(Protocol):
    """The interface of a device to the core. One that `queues` returns from `run` before the logits are computed."""

    vocab_size: int
    queues: bool

    def run(self, step: Step) -> Tensor:
        """Returns logits, fp32, (rows of logits of all rows in order, vocabulary)."""
        ...


@runtime_checkable
class TreeRunner(Runner, Protocol):
    """A runner that verifies token trees."""

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the K/V of accepted tokens from slot to slot. No step may be running."""
        ...


@runtime_checkable
class LayeredCache(Protocol):
    """A paged cache of which layers are copied one by one."""

    def layer_parts(self) -> LayerParts: ...


class CacheStore:
    """The paged cache, or the recurrent states, as offload tiers see it (`engine.kv_cache.transfers.BlockStore`).

    On a GPU, saving is queued before the step (see `Saving`), and loading runs on a stream of the worker's own: it
    waits for the work before it (`queued`), and the work after it begins when it is done.
    """

    def __init__(self, kv: BlockTensors | QuantizedCache, device: torch.device) -> None:
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

    @cached_property
    def parts(self) -> LayerParts:
        """Returns the parts of the cache's blocks by layer. Recurrent states have none."""
        assert isinstance(self._kv, LayeredCache), "states are no blocks of tokens"
        return self._kv.layer_parts()

    def save_layers(self, blocks: Sequence[int], layers: range, row: Tensor) -> Callable[[], None]:
        row = row[: len(blocks) * sum(self.parts.nbytes[layers.start : layers.stop])]
        if self._saving is not None:
            return self._saving.save_layers(self.parts, blocks, layers, row)
        self.parts.read(blocks, layers, row)
        return at_once

    @torch.inference_mode()
    def load_layers(self, blocks: Sequence[int], layers: range, payload: memoryview) -> None:
        run = torch.frombuffer(payload, dtype=torch.uint8)
        if self._stream is None:
            self.parts.write(blocks, layers, run)
            return
        with torch.cuda.stream(self._stream):
            self.parts.write(blocks, layers, run.to(self._kv.device))
        self._stream.synchronize()

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
        self,
        decoder: Decoder,
        kv: KVCache | QuantizedCache,
        device: torch.device,
        *,
        deterministic: bool = False,
        images: EncoderCache | None = None,
        mover: KVMover | None = None,
    ) -> None:
        self.vocab_size = decoder.spec.vocab_size
        self._decoder = decoder
        self._tilewise = (
            deterministic and not decoder.native
        )  # the CPU's own kernels treat every token by itself anyway
        self._kv = kv
        self._batching = Batching(kv.block_size, device, images, decoder.image_token, kv.groups)
        self._mover = mover
        self._keeping: list[Callable[[Tensor], None]] = []
        self._follow: Callable[[Step, Batch, Tensor], None] | None = None

    @property
    def keeps_states(self) -> bool:
        """Returns whether `keep_states` can be asked: it does not run tile by tile."""
        return not self._tilewise

    def keep_states(self, keep: Callable[[Tensor], None]) -> None:
        """Hands the final-normed states behind each step's logits, (rows, hidden), to `keep` too.

        Raises:
            ValueError: it runs tile by tile, where there is no row of them all.
        """
        if self._tilewise:
            raise ValueError("a deterministic runner of torch's layers has no states of a whole step")
        self._keeping.append(keep)

    def _kept(self, states: Tensor) -> None:
        for keep in self._keeping:
            keep(states)

    def follow(self, ran: Callable[[Step, Batch, Tensor], None]) -> None:
        """Hands each step and its batch, once it ran, with the final-normed states of all its tokens, (tokens, hidden),
        to `ran`."""
        self._follow = ran

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._kv.copy_slots(pairs)

    def run(self, step: Step) -> Tensor:
        self._kv.copy_blocks([pair for row in step.rows for pair in row.copies])
        if self._kv.states is not None:
            self._kv.states.copy_blocks([row.state_copy for row in step.rows if row.state_copy is not None])
        if self._mover is not None:
            self._mover.run(step)
        batch = self._batching.make(step)
        states: list[Tensor] = []  # of all tokens, in order

        def tile(of: Batch, kv: KVCache | QuantizedCache) -> Tensor:
            return self._decoder.forward(of, kv, keep_all=lambda each: states.append(each[of.within]))

        if self._tilewise:
            logits = tilewise(self._decoder.forward if self._follow is None else tile, batch, self._kv)
        else:
            keep_all = None if self._follow is None else states.append
            logits = self._decoder.forward(batch, self._kv, self._kept if self._keeping else None, keep_all)
        if self._follow is not None:
            self._follow(step, batch, torch.cat(states))
        return logits
