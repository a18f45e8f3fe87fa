"""The attention kernel, its torch reference and their pieces, against plain attention of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import attention
from engine.kernels.attention import Pieces
from engine.kernels.work import MIN_KEYS, SHARED_KEYS, AttentionWork, Rows, WorkLimits, cut, grown
from engine.kv_cache.quantized_cache import Coding, QuantizedCache, QuantizedLayer
from tests.engine.kernels.examples import examples

BOUND = {torch.float32: 2e-3, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # of the largest number of a result
RUNS = {"kernel": attention.attend_triton, "twin": attention.attend_torch}


@dataclass
class Case:
    rows: Rows
    query: Tensor
    cache: Tensor | QuantizedLayer
    positions: Tensor


def case(
    shapes: Sequence[tuple[int, int]],
    device: str,
    *,
    shared: int = 0,
    block_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    coding: Coding | None = None,
    seed: int = 0,
) -> Case:
    """Rows of (queries, context), the first `shared` blocks of all of them the same; blocks are in no order."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for _, context in shapes]
    total = sum(counts) + 1
    free = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    common = [free.pop() for _ in range(min(shared, *counts))] if shared else []
    tables = np.zeros((len(shapes), max(counts) + 1), dtype=np.int64)
    for row, count in enumerate(counts):
        own = common + [free.pop() for _ in range(count - len(common))]
        tables[row, :count] = own
    starts = np.concatenate([[0], np.cumsum([queries for queries, _ in shapes])])
    contexts = np.array([context for _, context in shapes])
    positions = np.concatenate([np.arange(context - queries, context) for queries, context in shapes])
    values = torch.randn(2, total, block_size, kv_heads, width, generator=generator)
    cache: Tensor | QuantizedLayer
    if coding is None:
        cache = values.to(device, dtype)
        cache[:, 0] = float("nan")  # keys in no row's context must not be seen
        for row, count in enumerate(counts):
            cache[:, tables[row, count - 1], (contexts[row] - 1) % block_size + 1 :] = float("nan")
    else:
        whole = QuantizedCache(1, total, block_size, kv_heads, width, torch.float32, "cpu", coding).layers()[0]
        whole.store(torch.arange(total * block_size), values.view(2, -1, kv_heads, width))
        cache = QuantizedLayer(whole.codes.to(device), whole.scales.to(device))
    query = torch.randn(len(positions), heads + 3, width, generator=generator)[:, :heads]  # rows do not follow closely
    return Case(
        Rows(starts, contexts, tables, block_size),
        query.to(device, dtype),
        cache,
        torch.tensor(positions, dtype=torch.int32, device=device),
    )


def on(device: str, work: AttentionWork, heads: int, width: int, *, large_tile: int = 64, spare: int = 0) -> Pieces:
    """Pieces as tensors, with room for `spare` more of each kind, and nothing but NaN where parts will be."""

    def moved(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate([array, np.zeros((spare, *array.shape[1:]), array.dtype)])).to(device)

    starts = np.concatenate([work.starts, np.full(spare, work.starts[-1], work.starts.dtype)])
    return Pieces(
        moved(work.blocks),
        moved(work.small) if len(work.small) + spare else None,
        moved(work.large) if len(work.large) + spare else None,
        moved(work.order),
        moved(work.merged),
        torch.from_numpy(starts).to(device),
        moved(work.parts),
        torch.full((work.slots + spare, heads, width), float("nan"), device=device),
        torch.full((work.slots + spare, heads), float("nan"), device=device),
        large_tile,
    )


def expected(
    made: Case, *, scale: float, window: int | None, softcap: float | None, chunked: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One token after the other, in double precision."""
    rows, query = made.rows, made.query.double().cpu()
    out = torch.zeros(query.shape, dtype=torch.float64)
    if isinstance(made.cache, QuantizedLayer):
        read = torch.empty(2 * made.cache.shape[1], made.cache.shape[2:].numel(), device=made.cache.codes.device)
        made.cache.gather(torch.arange(2 * made.cache.shape[1], device=read.device), read)
        cache = read.view(made.cache.shape).double().cpu()
    else:
        cache = made.cache.double().cpu()
    group = query.shape[1] // cache.shape[3]
    for row, table in enumerate(rows.tables):
        keys, values = cache[:, table].flatten(1, 2).repeat_interleave(group, 2)
        for token in range(rows.starts[row], rows.starts[row + 1]):
            position = int(made.positions[token])
            first = 0 if window is None else max(0, position - window + 1)
            if window is not None and chunked:
                first = position - position % window
            scores = torch.einsum("hd,khd->hk", query[token], keys[first : position + 1]) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().cpu()[:, None]], 1)
            weights = scores.softmax(-1)[:, : position + 1 - first]
            out[token] = torch.einsum("hk,khd->hd", weights, values[first : position + 1])
    return out


def assert_attends_as_plain(
    made: Case, limits: WorkLimits, run: str, *, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, spare: int = 0,
) -> AttentionWork:  # fmt: skip
    work = cut(made.rows, limits, window)
    heads, width = made.query.shape[1:]
    pieces = on(made.query.device.type, work, heads, width, large_tile=limits.large_tile, spare=spare)
    scale = width**-0.5
    poisoned = torch.full(
        (len(made.query), heads, width), float("nan"), dtype=made.query.dtype, device=made.query.device
    )
    found = RUNS[run](
        made.query, made.cache, pieces, made.positions, scale=scale, window=window, chunked=limits.chunked,
        softcap=softcap, sinks=sinks, out=poisoned,
    )  # fmt: skip
    wanted = expected(made, scale=scale, window=window, softcap=softcap, chunked=limits.chunked, sinks=sinks)
    error = (found.double().cpu() - wanted).abs().max() / wanted.abs().max()
    assert error < BOUND[made.query.dtype], f"relative error {error}"
    return work


ragged = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 5, 17, 40]), st.integers(0, 210)).map(lambda row: (row[0], row[0] + row[1])),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@examples(25)
@given(
    shapes=ragged,
    block_size=st.sampled_from([16, 32, 64]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (8, 1), (5, 5), (20, 1)]),
    width=st.sampled_from([32, 64, 80, 96]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    window=st.sampled_from([None, None, 5, 70]),
    softcap=st.sampled_from([None, None, 2.0]),
    sink=st.booleans(),
    chunked=st.booleans(),
    pieces=st.sampled_from([1, 4, 64]),
    seed=st.integers(0, 1000),
)
def test_any_rows_come_out_as_plain_attention(
    run: str, device: str, shapes: list[tuple[int, int]], block_size: int, heads: tuple[int, int], width: int,
    dtype: torch.dtype, window: int | None, softcap: float | None, sink: bool, chunked: bool, pieces: int, seed: int,
) -> None:  # fmt: skip
    made = case(
        shapes, device, block_size=block_size, heads=heads[0], kv_heads=heads[1], width=width, dtype=dtype, seed=seed
    )
    limits = WorkLimits(heads[0] // heads[1], pieces, chunked=chunked)
    assert_attends_as_plain(
        made, limits, run, window=window, softcap=softcap, sinks=sinks_of(heads[0], device) if sink else None
    )


def sinks_of(heads: int, device: str) -> Tensor:
    """Some that take most of a query's weight, some that take next to none."""
    return (torch.randn(heads, generator=torch.Generator().manual_seed(heads)) * 4 + 2).to(device)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("shapes", "shared"), [([(1, 300), (1, 90), (20, 200)], 0), ([(1, 400), (1, 397)], 24)])
def test_a_sink_joins_the_denominator_once(run: str, shapes: list[tuple[int, int]], shared: int, device: str) -> None:
    """However many parts a query's keys are in, and one that outweighs them all leaves nothing."""
    made = case(shapes, device, shared=shared, dtype=torch.float16)
    for pieces in (1, 64):
        work = assert_attends_as_plain(made, WorkLimits(2, pieces), run, sinks=sinks_of(4, device))
        assert pieces == 1 or (len(work.merged) and max(np.diff(work.starts)) > 1)
    sinks = torch.tensor([0.0, 1e30, -1e30, torch.finfo(torch.float32).max], device=device)
    pieces_of = on(device, cut(made.rows, WorkLimits(2, 4)), 4, 32)
    found = RUNS[run](made.query, made.cache, pieces_of, made.positions, scale=0.2, sinks=sinks)
    plain = RUNS[run](made.query, made.cache, pieces_of, made.positions, scale=0.2)
    assert not found[:, 1].any() and not found[:, 3].any() and not found.isnan().any()
    assert torch.equal(found[:, 2], plain[:, 2]) and not torch.equal(found[:, 0], plain[:, 0])


@pytest.mark.parametrize("window", [None, 40])
def test_a_sink_leaves_the_same_bits_beside_any_others(window: int | None, device: str) -> None:
    """A query whose keys are one part by itself is in a tile of several parts beside others."""
    made = case([(40, 140)], device, dtype=torch.float16)
    limits, sinks = WorkLimits(2, 8, fixed_keys=128), sinks_of(4, device)

    def attended(first: int, end: int) -> Tensor:
        rows = replace(made.rows, starts=np.array([0, end - first]), contexts=np.array([100 + end]))
        work = cut(rows, limits, window)
        return attention.attend_triton(
            made.query[first:end], made.cache, on(device, work, 4, 32), made.positions[first:end], scale=0.2,
            window=window, sinks=sinks,
        )  # fmt: skip

    together = attended(0, 40)
    for first, end in ((3, 4), (27, 28), (39, 40), (20, 35)):
        assert torch.equal(attended(first, end), together[first:end]), (first, end)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("fixed", [None, 128])
def test_chunks_end_where_they_do_for_every_query(run: str, fixed: int | None, device: str) -> None:
    """A tile of queries that crosses a border, decodes at both sides of one, and pieces that grew over it."""
    made = case([(50, 170), (1, 160), (1, 161), (5, 82)], device, dtype=torch.float16)
    assert_attends_as_plain(made, WorkLimits(2, 8, fixed_keys=fixed, chunked=True), run, window=80)
    if fixed is None:
        contexts = np.array([158, 240])
        grew = case([(1, 164), (1, 246)], device, dtype=torch.float16)
        limits = WorkLimits(2, 8, chunked=True)
        work = cut(replace(grew.rows, contexts=contexts), limits, 80)
        for _ in range(6):
            contexts = contexts + 1
            work = grown(work, replace(grew.rows, contexts=contexts))
        found = RUNS[run](
            grew.query, grew.cache, on(device, work, 4, 32), grew.positions, scale=32**-0.5, window=80, chunked=True
        )
        wanted = expected(grew, scale=32**-0.5, window=80, softcap=None, chunked=True)
        assert (found.double().cpu() - wanted).abs().max() < 2e-3 * wanted.abs().max()


def test_chunks_are_read_from_their_own_beginning() -> None:
    """A decode reads no key before its chunk but those of a tile's beginning."""
    rows = Rows(np.array([0, 1, 2]), np.array([300, 1025]), np.zeros((2, 80), dtype=np.int64), 16)
    assert cut(rows, WorkLimits(2, 1, chunked=True), 256).small[:, 3].tolist() == [256, 1024]
    assert sorted(cut(rows, WorkLimits(2, 1), 256).small[:, 3].tolist()) == [0, 768]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("width", [32, 64, 128, 192, 256, 512])
def test_every_size_of_head(run: str, width: int, device: str) -> None:
    made = case([(1, 77), (20, 100)], device, width=width, dtype=torch.bfloat16)
    assert_attends_as_plain(made, WorkLimits(2, 4), run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("coding", ["int8", "fp8"])
@pytest.mark.parametrize("window", [None, 40])
def test_caches_of_eight_bits(run: str, coding: Coding, window: int | None, device: str) -> None:
    made = case([(1, 150), (1, 3), (18, 90)], device, dtype=torch.bfloat16, coding=coding)
    assert_attends_as_plain(made, WorkLimits(2, 8), run, window=window)


@pytest.mark.parametrize("run", RUNS)
def test_a_shared_prefix_is_read_once(run: str, device: str) -> None:
    shapes = [(1, 400), (1, 397), (1, 385), (1, 500), (30, 31)]
    made = case(shapes[:4], device, shared=24, dtype=torch.bfloat16)
    work = assert_attends_as_plain(made, WorkLimits(2, 4), run)
    assert len(work.large) >= 1 and (work.large[:, 4] <= 384).all()
    assert work.small[:, 3].min() >= 384, "each row by itself begins where the prefix ends"


@pytest.mark.parametrize("run", RUNS)
def test_a_launch_may_have_room_for_more(run: str, device: str) -> None:
    made = case([(1, 300), (1, 20), (1, 129)], device, dtype=torch.bfloat16)
    assert_attends_as_plain(made, WorkLimits(2, 6), run, spare=5)


def moved_to_slots(made: Case, begins: Sequence[int]) -> Case:
    """The same case, with the K/V of each row from a position on at slots in other blocks, and nothing where it was."""
    rows, size = made.rows, made.rows.block_size
    spare = sum(-(-int(context - begin) // size) for begin, context in zip(begins, rows.contexts, strict=True))
    quantized = isinstance(made.cache, QuantizedLayer)
    parts = [made.cache.codes, made.cache.scales] if isinstance(made.cache, QuantizedLayer) else [made.cache]
    parts = [torch.cat([part, part.new_zeros(2, spare, *part.shape[2:])], 1) for part in parts]
    free = torch.randperm(spare * size, generator=torch.Generator().manual_seed(1)) + (parts[0].shape[1] - spare) * size
    own = np.zeros((len(begins), max(int(c - b) for b, c in zip(begins, rows.contexts, strict=True))), dtype=np.int64)
    for row, (begin, context) in enumerate(zip(begins, rows.contexts.tolist(), strict=True)):
        positions = np.arange(begin, context)
        at = torch.from_numpy(rows.tables[row, positions // size] * size + positions % size)
        to, free = free[: len(at)], free[len(at) :]
        own[row, : len(at)] = to
        for part in parts:
            slots = part.flatten(1, 2)
            slots[:, to] = slots[:, at]
            slots[:, at] = 77 if quantized else float("nan")
    cache = QuantizedLayer(*parts) if quantized else parts[0]
    return Case(replace(rows, branches=(begins, own)), made.query, cache, made.positions)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("coding", [None, "int8", "fp8"])
@pytest.mark.parametrize(("window", "fixed"), [(None, None), (30, None), (None, 128)])
def test_a_branch_is_read_from_its_slots(
    run: str, coding: Coding | None, window: int | None, fixed: int | None, device: str
) -> None:
    """With the bits that it has in its blocks; a row without a branch beside it."""
    made = case([(1, 150), (3, 66), (1, 40), (18, 290)], device, dtype=torch.bfloat16, coding=coding)
    limits = WorkLimits(2, 8, fixed_keys=fixed)

    def attended(which: Case) -> Tensor:
        pieces = on(device, cut(which.rows, limits, window), 4, 32)
        pieces = replace(pieces, branched=which.rows.branches is not None)
        return RUNS[run](which.query, which.cache, pieces, which.positions, scale=0.2, window=window)

    assert torch.equal(attended(moved_to_slots(made, [147, 61, 40, 250])), attended(made))


def test_prefixes_are_found_as_deep_as_they_are_shared() -> None:
    """Two pairs below one prefix of all four: three prefixes, none read twice."""
    block = 64
    tables = np.array(
        [[1, 2, 3, 4, 5, 6, 20], [1, 2, 3, 4, 5, 6, 21], [1, 2, 7, 8, 9, 10, 22], [1, 2, 7, 8, 9, 10, 23]]
    )
    rows = Rows(np.arange(5), np.full(4, 7 * block), tables, block)
    work = cut(rows, WorkLimits(1, 1000))
    covered = {row: set[int]() for row in range(4)}
    for first, count, _, low, high, _ in [*work.large.tolist(), *work.small.tolist()]:
        for at in range(first, first + count):
            keys = set(range(low, high))
            assert not keys & covered[int(work.order[at])], "a key is met once"
            covered[int(work.order[at])] |= keys
    assert all(keys == set(range(7 * block)) for keys in covered.values())
    shared = {(count, low, high) for _, count, _, low, high, _ in work.large.tolist()}
    assert shared == {(4, 0, 128), (2, 128, 384)}


@settings(max_examples=60)
@given(data=st.data())
def test_every_query_meets_each_of_its_keys_in_one_piece(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([16, 32]))
    count = data.draw(st.integers(1, 12))
    contexts = np.array([data.draw(st.integers(1, 900)) for _ in range(count)])
    queries = np.array([min(int(c), data.draw(st.sampled_from([1, 1, 1, 3, 40]))) for c in contexts])
    tables = np.zeros((count, 60), dtype=np.int64)  # longer than they need be, as those of a step before may be
    for row in range(count):  # rows copy the beginning of an earlier one
        tables[row] = 1 + 60 * row + np.arange(60)
        if row and data.draw(st.booleans()):
            length = data.draw(st.integers(0, 60))
            tables[row, :length] = tables[data.draw(st.integers(0, row - 1)), :length]
    rows = Rows(np.concatenate([[0], np.cumsum(queries)]), contexts, tables, block)
    window = data.draw(st.sampled_from([None, 100]))
    limits = WorkLimits(
        data.draw(st.sampled_from([1, 4, 16])), data.draw(st.sampled_from([1, 20, 300])),
        fixed_keys=data.draw(st.sampled_from([None, 256])),
    )  # fmt: skip
    work = cut(rows, limits, window)
    if (queries == 1).all() and limits.fixed_keys is None:
        for _ in range(data.draw(st.integers(0, 40))):
            rows = Rows(rows.starts, rows.contexts + 1, tables, block)
            work = grown(work, rows)
        contexts = rows.contexts
    row_of = np.repeat(np.arange(count), queries)
    met: dict[int, list[int]] = {}
    slots: dict[int, list[int]] = {}
    for pieces, most in ((work.small, limits.small_queries), (work.large, limits.large_queries)):
        for first, many, table, low, high, slot in pieces.tolist():
            assert 1 <= many <= most
            for i in range(many):
                token = int(work.order[first + i])
                row = row_of[token]
                last = -(-high // block)
                assert (work.blocks[table + low // block : table + last] == tables[row, low // block : last]).all()
                met.setdefault(token, []).extend(range(low, high))
                slots.setdefault(token, []).append(-1 if slot < 0 else slot + i)
    used = [slot for each in slots.values() for slot in each if slot >= 0]
    assert sorted(used) == list(range(work.slots)), "each part has a slot of its own"
    merged = {
        token: work.parts[work.starts[i] : work.starts[i + 1]].tolist() for i, token in enumerate(work.merged.tolist())
    }
    for token, row in enumerate(row_of.tolist()):
        position = int(contexts[row] - queries[row] + token - rows.starts[row])
        low = 0 if window is None else max(0, position - window + 1)
        keys = met[token]
        assert len(keys) == len(set(keys)) and set(range(low, position + 1)) <= set(keys)
        assert max(keys) < contexts[row]
        assert sorted(merged.get(token, [-1])) == sorted(slots[token])


@pytest.mark.slow
def test_a_query_comes_out_the_same_in_every_batch(device: str) -> None:
    """Bits, with `fixed_keys`: alone, beside others, and with more of its prompt in the same step."""
    made = case([(1, 300), (1, 40), (70, 290), (1, 513)], device, dtype=torch.bfloat16)
    limits = WorkLimits(2, 7, fixed_keys=128)

    def run(rows: Rows, query: Tensor, positions: Tensor) -> Tensor:
        pieces = on(device, cut(rows, limits), *query.shape[1:])
        return attention.attend_triton(query, made.cache, pieces, positions, scale=0.2)

    together = run(made.rows, made.query, made.positions)
    for row, (first, end) in enumerate(zip(made.rows.starts[:-1], made.rows.starts[1:], strict=True)):
        for low in {first, end - 1, (first + end) // 2}:
            alone = Rows(
                np.array([0, end - low]), made.rows.contexts[row : row + 1], made.rows.tables[row : row + 1], 16
            )
            found = run(alone, made.query[low:end], made.positions[low:end])
            assert torch.equal(found, together[low:end])


def test_pieces_keep_the_device_busy_and_are_few() -> None:
    rows = Rows(np.arange(65), np.full(64, 2048), np.arange(64 * 128).reshape(64, 128), 16)
    work = cut(rows, WorkLimits(4, 66))
    assert len(work.small) == 64 and work.slots == 0, "enough rows need no cutting"
    alone = cut(Rows(np.arange(2), np.array([8192]), np.arange(512)[None], 16), WorkLimits(4, 66))
    lengths = alone.small[:, 4] - alone.small[:, 3]
    assert 60 <= len(lengths) <= 67 and lengths.max() == max(MIN_KEYS, 128)
    assert SHARED_KEYS > 0
