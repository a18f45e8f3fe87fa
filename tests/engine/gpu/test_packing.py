"""A step survives being packed: it comes out of the array as it went in, at its own capacity and at a larger one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.kernels.work import QUERIES, WorkLimits
from engine.model.batch import BatchLayout
from engine.model.gpu_batch import (
    MAX_DRAFT_TOKENS,
    RESIDENT,
    Cutter,
    LayerKind,
    Packed,
    PackedModel,
    blocks_of,
    capacity_of,
    decode_shapes,
    draft_shape,
    draft_sizes,
    graph_sizes,
    works_of,
)
from engine.model.gpu_runner import Staging

BLOCK = 16


def model_of(windows: Sequence[int | None], limits: WorkLimits) -> PackedModel:
    """A model with a layer of each window."""
    return PackedModel(tuple(LayerKind(window, 32, limits) for window in windows), tuple(range(len(windows))), 4)


def laid_out(contexts: list[int], shared: int) -> BatchLayout:
    count = max(-(-context // BLOCK) for context in contexts)
    tables = 1 + np.arange(len(contexts) * count).reshape(len(contexts), count)
    tables[:, :shared] = tables[0, :shared]
    positions = np.array(contexts) - 1
    rows = list(range(len(contexts)))
    slots = tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK
    return BatchLayout([7 + row for row in rows], positions, slots, [*rows, len(rows)], contexts, tables, rows)


@settings(max_examples=40)
@given(
    contexts=st.lists(st.integers(1, 900), min_size=1, max_size=9), shared=st.integers(0, 20),
    windows=st.sampled_from([(None,), (None, 100), (64,)]), deterministic=st.booleans(), spare=st.integers(0, 5),
)  # fmt: skip
def test_decodes_are_unpacked_as_they_were(
    contexts: list[int], shared: int, windows: tuple[int | None, ...], deterministic: bool, spare: int
) -> None:
    limits = WorkLimits(2, 12, fixed_keys=1024 if deterministic else None, cascade=not deterministic)
    model = model_of(windows, limits)
    laid = laid_out(contexts, shared)
    works = works_of(laid, BLOCK, model)
    capacities = [capacity_of(laid, works), *decode_shapes(len(contexts) + spare, model.kinds, 60)]
    assert any(all(r.holds(w) for r, w in zip(capacity.work, works, strict=True)) for capacity in capacities[1:])
    for capacity in capacities:
        if not all(r.holds(w) for r, w in zip(capacity.work, works, strict=True)):
            continue
        packed = Packed(capacity)
        host = np.full(packed.size, -9, dtype=np.int32)  # of a step before
        used = packed.fill(laid, works, host)
        host[used:] = -9
        step = packed.views(torch.from_numpy(host), model)
        count = len(contexts)
        assert step.token_ids.tolist() == laid.tokens + [0] * (capacity.tokens - count)
        assert step.positions[:count].tolist() == laid.positions.tolist()
        assert step.slots.tolist() == laid.slots.tolist() + [0] * (capacity.tokens - count)
        for pieces, work in zip(step.pieces, works, strict=True):
            for found, wanted in ((pieces.small, work.small), (pieces.large, work.large)):
                if found is None:
                    assert not len(wanted)
                    continue
                assert found[: len(wanted)].tolist() == wanted.tolist()
                assert not found[len(wanted) :, QUERIES].any(), "what is beyond has no queries"
            assert pieces.blocks[: len(work.blocks)].tolist() == work.blocks.tolist()
            assert pieces.merged[: len(work.merged)].tolist() == work.merged.tolist()
            assert pieces.of_token[: len(work.parts)].tolist() == work.parts.tolist()
            starts = pieces.starts.tolist()
            assert starts[: len(work.starts)] == work.starts.tolist()
            assert set(starts[len(work.starts) :]) <= {work.starts[-1]}, "what is merged beyond has no parts"
            assert len(pieces.parts) >= work.slots


def test_layers_of_a_group_find_its_tables_and_slots() -> None:
    """Among the blocks of all groups, packed closely or as in a graph, and once they have grown."""
    limits = WorkLimits(2, 12)
    kinds = (LayerKind(None, 32, limits), LayerKind(40, 32, limits, 1), LayerKind(40, 32, limits, 2))
    model = PackedModel(kinds, (1, 0, 2, 1), 4)
    cutter = Cutter(model, BLOCK)
    for contexts in ([300, 70, 20], [301, 71, 21]):
        laid = laid_out(contexts, 2)
        others = np.stack([laid.tables + 1000, laid.tables + 2000]), np.stack([laid.slots + 1, laid.slots + 2])
        laid = replace(laid, windowed=others, follows=contexts[0] == 301)
        works = cutter.works(laid)
        for capacity in (capacity_of(laid, works), *decode_shapes(5, kinds, 20)):
            assert capacity.tables == 3 and len(blocks_of(works)) <= capacity.blocks
            packed = Packed(capacity)
            host = np.full(packed.size, -9, dtype=np.int32)
            packed.fill(laid, works, host)
            step = packed.views(torch.from_numpy(host), model)
            assert step.slots[:3].tolist() == laid.slots.tolist()
            for layer, table in enumerate((1, 0, 2, 1)):
                assert step.layer_slots[layer][:3].tolist() == (laid.slots + table).tolist()
                pieces, work = step.pieces[layer], works[table]
                assert pieces.small is not None
                for (_, queries, first, low, high, _), row in zip(
                    pieces.small.tolist(), work.small_rows.tolist(), strict=False
                ):
                    found = pieces.blocks[first + low // BLOCK : first - (-high // BLOCK)].tolist()
                    wanted = laid.tables[row, low // BLOCK : -(-high // BLOCK)] + 1000 * table
                    assert queries == 1 and found == wanted.tolist()


@pytest.mark.parametrize("rows", [2, 4, 16, 64, 256])
@pytest.mark.parametrize("prefix", [256, 1024, 4096, 16_384])
def test_branches_of_one_prefix_have_a_graph(rows: int, prefix: int) -> None:
    for kv_heads, group in ((8, 4), (2, 8)):
        limits = WorkLimits(group, RESIDENT * 132 // kv_heads, large_tile=128)
        laid = laid_out([prefix + 128] * rows, prefix // BLOCK)
        model = model_of((None,), limits)
        works = works_of(laid, BLOCK, model)
        capacity = decode_shapes(rows, model.kinds, (prefix + 128) // BLOCK)[-1]
        assert len(works[0].large) and capacity.work[0].holds(works[0]), limits


@settings(max_examples=200)
@example(  # branches of one token each, all of the longest context
    rows=[(63, 1)] * 8, shared=0, group=4, large_tile=64, pieces=9, windows=(None,), kind="plain", branched=True
)
@given(
    rows=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 33)), min_size=1, max_size=24),
    shared=st.integers(0, 40), group=st.sampled_from([1, 2, 4, 8, 16, 64]), large_tile=st.sampled_from([64, 128]),
    pieces=st.integers(1, 60), windows=st.sampled_from([(None,), (None, 100), (64,)]),
    kind=st.sampled_from(["cascade", "plain", "deterministic"]), branched=st.booleans(),
)  # fmt: skip
def test_every_mix_of_decodes_and_drafts_has_a_graph(
    rows: list[tuple[int, int]], shared: int, group: int, large_tile: int, pieces: int,
    windows: tuple[int | None, ...], kind: str, branched: bool,
) -> None:  # fmt: skip
    """With a longest draft of 32 tokens. Each row is a context before it, and its tokens in the step."""
    fixed = 1024 if kind == "deterministic" else None
    limits = WorkLimits(group, pieces, large_tile, fixed_keys=fixed, cascade=kind == "cascade")
    contexts = [before + width for before, width in rows]
    laid = laid_out(contexts, min(shared, *(before // BLOCK for before, _ in rows)))
    starts = np.cumsum([0, *(width for _, width in rows)])
    tokens = int(starts[-1])
    branches = None
    if branched:  # each row's last tokens lie at slots of their own
        slots = np.arange(33 * len(rows)).reshape(len(rows), 33)
        branches = tuple(before for before, _ in rows), slots
    laid = replace(laid, tokens=[7] * tokens, starts=starts.tolist(), wanted=list(range(tokens)), branches=branches)
    model = model_of(windows, limits)
    works = works_of(laid, BLOCK, model)
    size = next(each for each in draft_sizes(24, 33) if each >= min(tokens, MAX_DRAFT_TOKENS))
    if tokens > size:
        return  # a step as large as that runs without a graph
    max_blocks = -(-max(contexts) // BLOCK)
    capacity = draft_shape(size, 33, model.kinds, max_blocks, branched=branched)
    assert all(has.holds(work) for has, work in zip(capacity.work, works, strict=True)), (capacity.work, works)
    assert len(works[0].blocks) <= capacity.blocks


def test_graphs_of_drafts_are_few_and_end_at_the_most() -> None:
    assert draft_sizes(1, 9) == (2, 4, 8, 9)
    assert draft_sizes(3, 4) == (2, 4, 8, 12)
    assert draft_sizes(256, 9) == (2, 4, 8, 16, 32, 64, 128, 256)


def test_the_ladder_ends_at_the_most_and_wastes_little() -> None:
    for most in (1, 3, 64, 100, 256, 1000):
        steps = graph_sizes(most)
        assert steps[-1] == most and list(steps) == sorted(set(steps)) and len(steps) < 30
    assert all(b <= 2 * a for a, b in zip(graph_sizes(512), graph_sizes(512)[1:], strict=False))


def test_staging_sends_what_was_written_last() -> None:
    staging, into = Staging(torch.device("cpu")), torch.zeros(6, dtype=torch.int32)
    for value in (1, 2, 3):
        staging.take(4)[:4] = value
        staging.send(4, into)
        assert into.tolist() == [value] * 4 + [0, 0]
    staging.take(100)[:6] = 9
    staging.send(6, into)
    assert into.tolist() == [9] * 6
