"""Runs a step on a GPU: one copy there, one CUDA graph, one copy back.

Decodes are replayed from CUDA graphs, with drafts and without, so that a step costs one launch and not hundreds; all
else, and steps in which a row has an adapter, runs eagerly on the decoder's Triton kernels. A graph knows no rows: its
tokens attend by pieces, so one graph serves all steps of as many tokens, whatever part of each row is a draft. Its
inputs must stay at their recorded addresses, and its result is overwritten by the next replay. Steps travel from two
host buffers: one is written while the other is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.step import Step
from engine.kernels.sampled_tokens import fill_sampled
from engine.kernels.work import AttentionWork
from engine.kv_cache.chunk_reuse.kv_moves import KVMover
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.model.batch import Batching, BatchLayout, KVCache
from engine.model.decoder import Decoder
from engine.model.gpu_batch import (
    Cutter,
    DeviceStep,
    Packed,
    Parts,
    blocks_of,
    capacity_of,
    decode_shapes,
    draft_shape,
    draft_sizes,
    graph_sizes,
    limits_for_quantized,
    with_last_keys,
)

if TYPE_CHECKING:
    from engine.multimodal.encoder_cache import EncoderCache


class Pool:
    """Memory that several graphs share, and a stream on which each is tried first: libraries keep memory for every
    stream that they have seen."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.memory: Any = torch.cuda.graph_pool_handle() if cuda else None  # Any: torch has no public name for it
        self.aside: Any = torch.cuda.Stream(device) if cuda else None


class Recorded:
    """`compute`, recorded on `device`; elsewhere than on CUDA it is called again each time.

    It keeps nothing that `compute` reads or writes: its owner must. Graphs of one `pool` share the memory of their
    intermediate results, so only one of them may be replayed at a time.
    """

    def __init__(self, compute: Callable[[], Tensor], device: torch.device, pool: Pool | None = None) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._graph: Any = None  # torch.cuda.CUDAGraph, which has no types
        self._result: Tensor | None = None
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            pool = pool or Pool(device)
            pool.aside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(pool.aside):  # first calls compile or choose kernels, which cannot be recorded
                compute()
            torch.cuda.current_stream(device).wait_stream(pool.aside)
            self._graph = torch.cuda.CUDAGraph()
            # other threads, of engines that serve already, may go on allocating and waiting meanwhile
            with torch.cuda.graph(self._graph, pool=pool.memory, capture_error_mode="thread_local"):
                self._result = compute()
        self._compute = None

    def replay(self) -> Tensor:
        """Runs it on the current stream, without waiting. The result is valid until the next replay."""
        if self._compute is not None:
            return self._compute()
        assert self._result is not None
        self._graph.replay()
        return self._result


_BUFFERS = 2


class Staging:
    """Page-locked on CUDA. Grows to the largest step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(_BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._turn = 0

    def take(self, size: int) -> NDArray[np.int32]:
        """Returns a buffer of `size` numbers. Waits until its last contents have been copied."""
        self._turn = (self._turn + 1) % _BUFFERS
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._cuda)
        return self._buffers[self._turn].numpy()

    def send(self, size: int, into: Tensor) -> None:
        """Starts copying the first `size` numbers of the buffer taken last."""
        into[:size].copy_(self._buffers[self._turn][:size], non_blocking=True)
        if self._cuda:
            event = self._sent[self._turn]
            if event is None:
                event = self._sent[self._turn] = torch.cuda.Event()
            event.record()


@dataclass(frozen=True, slots=True)
class _RecordedGraph:
    """Steps of up to so many tokens, with branches of token trees or without: their packing on the device, and their
    graph."""

    packed: Packed
    branched: bool
    memory: Tensor
    token_ids: Tensor  # as the step in `memory` has them
    wanted: Tensor  # rows whose logits are needed, as it has them
    recorded: Recorded


class GpuRunner:
    """A decoder and its paged cache. `max_blocks` is the number of blocks that a sequence may have.

    With `graphs`, decodes of up to `max_rows` rows are recorded at once, from the largest on, so that the smaller ones
    find their memory made; and so are steps whose rows have up to `draft_width` tokens each with their drafts, if that
    is more than one, and token trees among them with `trees`.
    """

    queues = True

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache | QuantizedCache,
        device: torch.device,
        *,
        max_rows: int,
        max_blocks: int,
        graphs: bool = True,
        draft_width: int = 1,
        trees: bool = False,
        images: EncoderCache | None = None,
        mover: KVMover | None = None,
    ) -> None:
        assert decoder.on_gpu, "the Triton kernels do not run this decoder"
        self.vocab_size = decoder.spec.vocab_size
        self.replayed = 0  # steps that came from a graph
        self._decoder = decoder
        self._kv, self._mover = kv, mover
        self._device = device
        self._batching = Batching(kv.block_size, device, images, decoder.image_token, kv.groups)
        model = decoder.packed_for.grouped(kv.groups)
        self._model = model.limited(limits_for_quantized) if isinstance(kv, QuantizedCache) else model
        self._cutter = Cutter(self._model, kv.block_size)
        self._staging = Staging(device)
        self._graphs: list[_RecordedGraph] = []
        pool = Pool(device)
        shape = (self._model.kinds, max_blocks)
        shapes = [(each, False) for rows in graph_sizes(max_rows) for each in decode_shapes(rows, *shape)]
        for tokens in draft_sizes(max_rows, draft_width) if draft_width > 1 else ():
            kinds = (False, True) if trees else (False,)
            shapes += [(draft_shape(tokens, draft_width, *shape, branched=each), each) for each in kinds]
        # of as many tokens those of decodes alone come first: they are smaller
        shapes = sorted(shapes, key=lambda each: each[0].tokens) if graphs else []
        most = max((capacity.tokens for capacity, _ in shapes), default=0)
        # of the graph that ran last: each would keep its own otherwise
        self._logits = torch.empty(most, self.vocab_size, device=device)
        # kept: graphs know it by its address alone
        self._parts = Parts.like([capacity for capacity, _ in shapes], self._model, device) if shapes else None
        for capacity, branched in reversed(shapes):
            self._graphs.append(self._record(Packed(capacity), branched, pool))
        self._graphs.reverse()

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `engine.model.runner.TreeRunner`. The next step on the stream comes after it."""
        self._kv.copy_slots(pairs)

    def run(self, step: Step) -> Tensor:
        """See `engine.model.runner.Runner`. The result is valid until the next step."""
        self._kv.copy_blocks([pair for row in step.rows for pair in row.copies])
        if self._mover is not None:
            self._mover.run(step)
        laid = self._batching.lay(step)
        works = self._cutter.works(laid)
        graph = self._graph_for(laid, works, layerwise=step.save_kv_layer is not None)
        if graph is None:
            sent = replace(self._sent(laid, works), save_kv_layer=step.save_kv_layer)
            if step.sampled is not None:
                fill_sampled(sent.token_ids, step.sampled)
            return self._decoder.forward_step(sent, self._kv, features=self._batching.features(laid))
        used = graph.packed.fill(laid, works, self._staging.take(graph.packed.size))
        self._staging.send(used, graph.memory)
        if step.sampled is not None:
            fill_sampled(graph.token_ids, step.sampled)
        self.replayed += 1
        logits = graph.recorded.replay()
        if len(laid.wanted) == len(laid.tokens):
            return logits[: len(laid.wanted)]
        return logits.index_select(0, graph.wanted[: len(laid.wanted)])

    def _sent(self, laid: BatchLayout, works: list[AttentionWork]) -> DeviceStep:
        packed = Packed(capacity_of(laid, works))
        used = packed.fill(laid, works, self._staging.take(packed.size))
        memory = torch.empty(packed.size, dtype=torch.int32, device=self._device)
        self._staging.send(used, memory)
        step = with_last_keys(packed.views(memory, self._model, branched=laid.branches is not None), laid)
        return replace(step, adapters=(laid.adapters, tuple(laid.starts))) if laid.adapters else step

    def _graph_for(
        self, laid: BatchLayout, works: list[AttentionWork], *, layerwise: bool = False
    ) -> _RecordedGraph | None:
        """Returns the smallest graph that holds a step; None where most of its tokens are prompts', of which no logits
        are wanted, or prompts' K/V is sent `layerwise`, it has images or adapters, or needs more pieces than any graph
        has."""
        tokens, branched = len(laid.tokens), laid.branches is not None
        reads = tokens > len(laid.contexts) and (layerwise or 2 * len(laid.wanted) < tokens)
        if reads or laid.images[0] or laid.adapters or laid.last_keys is not None:
            return None
        blocks = len(blocks_of(works))
        for graph in self._graphs:
            capacity = graph.packed.capacity
            fits = capacity.tokens >= tokens and graph.branched == branched and blocks <= capacity.blocks
            if fits and all(has.holds(work) for has, work in zip(capacity.work, works, strict=True)):
                return graph
        return None

    def _record(self, packed: Packed, branched: bool, pool: Pool) -> _RecordedGraph:
        memory = torch.zeros(packed.size, dtype=torch.int32, device=self._device)
        step = packed.views(memory, self._model, self._parts, branched=branched)
        every = torch.arange(packed.capacity.tokens, dtype=torch.int32, device=self._device)
        whole = replace(step, logits_at=every)
        out = self._logits[: packed.capacity.tokens]
        recorded = Recorded(lambda: self._decoder.forward_step(whole, self._kv, out), self._device, pool)
        return _RecordedGraph(packed, branched, memory, step.token_ids, step.logits_at, recorded)
