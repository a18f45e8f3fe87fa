"""Steps of sequences that nobody scheduled: their blocks lie in no order, as in a pool that has been used for long."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from bench.gpu.rows import Missing
from engine.core.request import SequenceState
from engine.core.step import Row, Step
from engine.model.batch import KVCache
from engine.model.decoder import Decoder
from engine.model.gpu_runner import GpuRunner
from engine.model.model_spec import ModelSpec

BLOCK = 16  # tokens of K/V


def sequences(count: int, context: int, vocabulary: int, *, shared: int = 0, seed: int = 1) -> list[SequenceState]:
    """Sequences of `context` tokens, the first `shared` of them in the same blocks.

    Steps that one runner runs one after the other want different seeds: to a runner the same id is the same sequence
    with a grown block table.
    """
    draw = random.Random(seed)
    each, common = -(-context // BLOCK), shared // BLOCK
    free = list(range(1, blocks_of(count, context, shared) + 1))
    draw.shuffle(free)
    beginning = [free.pop() for _ in range(common)]
    made = []
    for id in range(1, count + 1):
        tokens = [draw.randrange(vocabulary) for _ in range(context)]
        seq = SequenceState(id + 1000 * seed, tokens, b"", id)
        seq.table = beginning + [free.pop() for _ in range(each - common)]
        made.append(seq)
    return made


def blocks_of(count: int, context: int, shared: int = 0) -> int:
    """That so many sequences take."""
    return shared // BLOCK + count * (-(-context // BLOCK) - shared // BLOCK)


def decode(seqs: Sequence[SequenceState]) -> Step:
    """The last token of each, to be run."""
    rows = []
    for seq in seqs:
        seq.kv_len = len(seq) - 1
        rows.append(Row(seq, seq.kv_len, 1, seq.kv_len))
    return Step(rows, len(rows))


def prefill(seqs: Sequence[SequenceState]) -> Step:
    """All tokens of each; the last one's logits are wanted."""
    rows = [Row(seq, 0, len(seq), len(seq) - 1) for seq in seqs]
    return Step(rows, sum(row.count for row in rows))


def cache_for(spec: ModelSpec, blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Full of random numbers: products with zeros take less power, and so less time."""
    kv = KVCache(spec.layers, blocks + 1, BLOCK, spec.kv_heads, spec.head_dim, dtype, device)
    for layer in kv.layers():
        layer.normal_()
    return kv


def runner_for(
    decoder: Decoder, kv: KVCache, device: torch.device, *, rows: int, context: int, graphs: bool = True
) -> GpuRunner:
    """With graphs of up to `rows` decodes."""
    return GpuRunner(decoder, kv, device, max_rows=rows, max_blocks=-(-context // BLOCK), graphs=graphs)


def graph_of(runner: GpuRunner, step: Step) -> Callable[[], object]:
    """Returns a function that replays a decode's graph alone, its step lying where the graph reads it.

    Raises:
        Missing: no graph fits it.
    """
    with torch.inference_mode():
        runner.run(step)
    laid = runner._batching.lay(step)
    for row, table in zip(step.rows, laid.tables, strict=True):
        blocks = -(-row.end // BLOCK)
        assert table[:blocks].tolist() == row.seq.table[:blocks], "the runner reads blocks of another sequence"
    graph = runner._graph_for(laid, runner._cutter._works)
    if graph is None:
        raise Missing(f"a graph for {len(step.rows)} such rows")
    return graph.recorded.replay


def forward_of(runner: GpuRunner, step: Step) -> Callable[[], object]:
    """Returns a function that runs a step that has been packed and sent already: its launches, and no more of the
    host's work.
    """
    laid = runner._batching.lay(step)
    sent = runner._sent(laid, runner._cutter.works(laid))
    return lambda: runner._decoder.forward_step(sent, runner._kv)
