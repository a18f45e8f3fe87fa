"""Runs steps of a decoder on its Triton kernels: decodes from CUDA graphs, all else eagerly.

What a step is made of is packed on the host, copied once, and nothing here waits for the device: the logits that `run`
returns are being computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch import KVCache
from engine.batching import Batching, Layout
from engine.gpu.graphs import Pool, Recorded
from engine.gpu.limits import decode_rooms, ladder, of_coded
from engine.gpu.packing import Cutter, DeviceStep, Packed, Parts, room_of
from engine.gpu.staging import Staging
from engine.kernels.drawn import fill_drawn
from engine.kernels.work import Work
from engine.kv.coded import CodedCache
from engine.models.decoder import Decoder
from engine.step import Step


@dataclass(frozen=True, slots=True)
class _Rung:
    """Decodes of up to so many rows: where they are packed on the device, and their graph."""

    packed: Packed
    memory: Tensor
    token_ids: Tensor  # as the step in `memory` has them
    wanted: Tensor  # rows whose logits are wanted, as it has them
    recorded: Recorded


class GpuRunner:
    """A decoder and its paged cache. `max_blocks` is how many blocks a sequence may have.

    With `graphs`, decodes of up to `max_rows` rows are recorded at once, from the largest on, so that the smaller ones
    find their memory made.
    """

    queues = True

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache | CodedCache,
        device: torch.device,
        *,
        max_rows: int,
        max_blocks: int,
        graphs: bool = True,
    ) -> None:
        assert decoder.on_gpu, "the Triton kernels do not run this decoder"
        self.vocab_size = decoder.spec.vocab_size
        self.replayed = 0  # steps that came from a graph
        self._decoder = decoder
        self._kv = kv
        self._device = device
        self._batching = Batching(kv.block_size)
        model = decoder.packed_for
        self._model = replace(model, limits=of_coded(model.limits)) if isinstance(kv, CodedCache) else model
        self._cutter = Cutter(self._model, kv.block_size)
        self._staging = Staging(device)
        self._rungs: list[_Rung] = []
        pool = Pool(device)
        # of whichever graph ran last: each would keep its own otherwise
        self._logits = torch.empty(max_rows if graphs else 0, self.vocab_size, device=device)
        parts: Parts | None = None
        for rows in reversed(ladder(max_rows)) if graphs else ():
            for room in reversed(decode_rooms(rows, model.windows, self._model.limits, max_blocks)):
                parts = parts or Parts.like(room, self._model, device)
                self._rungs.append(self._rung(Packed(room), parts, pool))
        self._rungs.reverse()
        self._parts = parts  # kept: graphs know it by its address alone

    def run(self, step: Step) -> Tensor:
        """See `engine.runner.Runner`. What is returned is good until the next step."""
        self._kv.copy_blocks([row.copy for row in step.rows if row.copy is not None])
        laid = self._batching.lay(step)
        works = self._cutter.works(laid)
        rung = self._rung_for(laid, works)
        if rung is None:
            sent = self._sent(laid, works)
            if step.drawn is not None:
                fill_drawn(sent.token_ids, step.drawn)
            return self._decoder.forward_step(sent, self._kv)
        used = rung.packed.fill(laid, works, self._staging.take(rung.packed.size))
        self._staging.send(used, rung.memory)
        if step.drawn is not None:
            fill_drawn(rung.token_ids, step.drawn)
        self.replayed += 1
        logits = rung.recorded.replay()
        if len(laid.wanted) == len(laid.tokens):
            return logits[: len(laid.wanted)]
        return logits.index_select(0, rung.wanted[: len(laid.wanted)])

    def _sent(self, laid: Layout, works: list[Work]) -> DeviceStep:
        packed = Packed(room_of(laid, works))
        used = packed.fill(laid, works, self._staging.take(packed.size))
        memory = torch.empty(packed.size, dtype=torch.int32, device=self._device)
        self._staging.send(used, memory)
        return packed.views(memory, self._model)

    def _rung_for(self, laid: Layout, works: list[Work]) -> _Rung | None:
        """The least graph that holds a step; None for what is no decode, or needs more pieces than any has."""
        rows = len(laid.contexts)
        if len(laid.tokens) != rows:
            return None
        for rung in self._rungs:
            room = rung.packed.room
            fits = room.tokens >= rows and len(works[0].blocks) <= room.blocks
            if fits and all(has.holds(work) for has, work in zip(room.work, works, strict=True)):
                return rung
        return None

    def _rung(self, packed: Packed, parts: Parts, pool: Pool) -> _Rung:
        memory = torch.zeros(packed.size, dtype=torch.int32, device=self._device)
        step = packed.views(memory, self._model, parts)
        every = torch.arange(packed.room.tokens, dtype=torch.int32, device=self._device)
        whole = DeviceStep(step.token_ids, step.positions, step.slots, every, step.pieces)
        out = self._logits[: packed.room.tokens]
        recorded = Recorded(lambda: self._decoder.forward_step(whole, self._kv, out), self._device, pool)
        return _Rung(packed, memory, step.token_ids, step.logits_at, recorded)
