"""A step survives being packed: it comes out of the array as it went in, at its own capacity and at a larger one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.work import QUERIES, WorkLimits
from engine.model.batch import BatchLayout
from engine.model.gpu_batch import RESIDENT, Packed, PackedModel, capacity_of, decode_shapes, graph_sizes, works_of
from engine.model.gpu_runner import Staging

BLOCK = 16


def laid_out(contexts: list[int], shared: int) -> BatchLayout:
    count = max(-(-context // BLOCK) for context in contexts)
    tables = 1 + np.arange(len(contexts) * count).reshape(len(contexts), count)
    tables[:, :shared] = tables[0, :shared]
    positions = np.array(contexts) - 1
    rows = list(range(len(contexts)))
    slots = tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK
    return BatchLayout([7 + row for row in rows], positions, slots, [*rows, len(rows)], contexts, tables, rows)


@settings(max_examples=40, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 900), min_size=1, max_size=9), shared=st.integers(0, 20),
    windows=st.sampled_from([(None,), (None, 100), (64,)]), deterministic=st.booleans(), spare=st.integers(0, 5),
)  # fmt: skip
def test_decodes_are_unpacked_as_they_were(
    contexts: list[int], shared: int, windows: tuple[int | None, ...], deterministic: bool, spare: int
) -> None:
    limits = WorkLimits(2, 12, fixed_keys=1024 if deterministic else None, cascade=not deterministic)
    model = PackedModel(windows, 4, 32, limits)
    laid = laid_out(contexts, shared)
    works = works_of(laid, BLOCK, model)
    capacities = [capacity_of(laid, works), *decode_shapes(len(contexts) + spare, windows, limits, 60)]
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
        for window, work in zip(windows, works, strict=True):
            pieces = step.pieces[window]
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


@pytest.mark.parametrize("rows", [2, 4, 16, 64, 256])
@pytest.mark.parametrize("prefix", [256, 1024, 4096, 16_384])
def test_branches_of_one_prefix_have_a_graph(rows: int, prefix: int) -> None:
    for kv_heads, group in ((8, 4), (2, 8)):
        limits = WorkLimits(group, RESIDENT * 132 // kv_heads, large_tile=128)
        laid = laid_out([prefix + 128] * rows, prefix // BLOCK)
        works = works_of(laid, BLOCK, PackedModel((None,), 4, 32, limits))
        capacity = decode_shapes(rows, (None,), limits, (prefix + 128) // BLOCK)[-1]
        assert len(works[0].large) and capacity.work[0].holds(works[0]), limits


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
