"""`paged` against `reference` on random ragged batches: one test holds the two together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.attention import BATCHED_QUERIES, AttentionPlan, paged, reference
from engine.model.batch import Batch, KVCache

WIDTH = 16
# (query tokens, context length) of each row
SHAPES: dict[str, Sequence[tuple[int, int]]] = {
    "one decode": [(1, 37)],
    "equal decodes": [(1, 40)] * 5,
    "decodes of like length": [(1, 33), (1, 47), (1, 60)],
    "decodes of all lengths": [(1, 1), (1, 2), (1, 15), (1, 16), (1, 17), (1, 64), (1, 200), (1, 333)],
    "long decodes": [(1, 300), (1, 40), (1, 270), (1, 301)],
    "more than is gathered at once": [(1, 17 * 900 - 5 * i) for i in range(4)],
    "first prefill": [(50, 50)],
    "short prefill": [(2, 2)],
    "later chunk": [(20, 90)],
    "few queries": [(3, 20), (3, 45), (2, 80), (8, 8), (8, 31)],
    "border of batched queries": [(BATCHED_QUERIES, 70), (BATCHED_QUERIES + 1, 70), (BATCHED_QUERIES + 1, 9)],
    "mixed": [(1, 100), (30, 30), (1, 7), (4, 64), (25, 140), (1, 300), (4, 90)],
}


def make_batch(
    shapes: Sequence[tuple[int, int]],
    block_size: int,
    *,
    shuffled: bool = True,
    shift: int = 0,
    seed: int = 0,
) -> tuple[Batch, int]:
    """A batch of these rows, and how many blocks it needs. With `shift`, queries stand that far before each other."""
    counts = [-(-context // block_size) for _, context in shapes]
    free = list(range(1, sum(counts) + 1))
    if shuffled:
        random.Random(seed).shuffle(free)
    width = max(counts) + 2
    tables = [[free.pop(0) for _ in range(count)] + [0] * (width - count) for count in counts]
    starts, positions = [0], list[int]()
    for queries, context in shapes:
        step = 1 + shift if queries > 1 and context >= (queries - 1) * (1 + shift) + 1 else 1
        positions += [context - 1 - step * i for i in range(queries)][::-1]
        starts.append(len(positions))
    tokens = torch.zeros(len(positions), dtype=torch.long)
    batch = Batch(
        tokens,
        torch.tensor(positions),
        tokens,
        tuple(starts),
        tuple(context for _, context in shapes),
        torch.tensor(tables),
        tokens[:1],
    )
    return batch, sum(counts) + 1


def plan_for(
    batch: Batch,
    cache: Tensor,
    window: int | None,
    group_heads: int,
    *,
    maskless: bool = True,
    windowed_images: bool = False,
) -> AttentionPlan:
    """A plan over a cache of one layer, (2, blocks, block_size, kv_heads, head_dim)."""
    _, blocks, block_size, kv_heads, width = cache.shape
    kv = KVCache(1, blocks, block_size, kv_heads, width, cache.dtype, cache.device)
    windows = (None, window)
    return AttentionPlan(
        batch, kv, windows, group_heads=group_heads, maskless=maskless, windowed_images=windowed_images
    )


def both(
    batch: Batch,
    blocks: int,
    *,
    block_size: int,
    heads: int,
    kv_heads: int,
    window: int | None,
    softcap: float | None,
    sinks: bool = False,
    windowed_images: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the results of `paged` and `reference` for random queries, keys and values."""
    torch.manual_seed(blocks)
    cache = torch.randn(2, blocks, block_size, kv_heads, WIDTH)
    query = torch.randn(len(batch.positions), heads, WIDTH)
    options = {"maskless": softcap is None, "windowed_images": windowed_images}
    plan = plan_for(batch, cache, window, heads // kv_heads, **options)
    logits = torch.randn(heads) if sinks else None
    found = paged(query, cache, plan, window=window, scale=0.3, softcap=softcap, sinks=logits)
    return found, reference(query, cache, plan, window=window, scale=0.3, softcap=softcap, sinks=logits)


@pytest.mark.parametrize(
    ("softcap", "sinks"),
    [(None, False), (1.5, False), (None, True), (1.5, True)],
    ids=["plain", "softcap", "sinks", "softcap_sinks"],
)
@pytest.mark.parametrize("window", [None, 5, 24], ids=["whole", "window5", "window24"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=[name.replace(" ", "_") for name in SHAPES])
def test_paged_equals_reference(
    shapes: Sequence[tuple[int, int]], window: int | None, softcap: float | None, sinks: bool
) -> None:
    for block_size, heads, kv_heads, shuffled in ((16, 6, 2, True), (4, 2, 2, False)):
        batch, blocks = make_batch(shapes, block_size, shuffled=shuffled)
        found, expected = both(
            batch,
            blocks,
            block_size=block_size,
            heads=heads,
            kv_heads=kv_heads,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_queries_need_not_be_neighbours(window: int | None) -> None:
    batch, blocks = make_batch([(4, 60), (10, 90), (1, 5)], 8, shift=3)
    found, expected = both(batch, blocks, block_size=8, heads=4, kv_heads=2, window=window, softcap=None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shuffled", [True, False])
def test_keys_before_the_first_are_attended_to_by_none(shuffled: bool) -> None:
    shapes = [(1, 100), (1, 100), (4, 64), (25, 140), (1, 300), (1, 3), (39, 41)]
    batch, blocks = make_batch(shapes, 8, shuffled=shuffled)
    sizes: dict[str, Any] = {"block_size": 8, "heads": 4, "kv_heads": 2, "window": None, "softcap": None}
    whole, _ = both(batch, blocks, **sizes)
    found, expected = both(replace(batch, first_key=2), blocks, **sizes)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - whole).abs().amax((1, 2)).min() > 1e-5


@pytest.mark.parametrize("windowed_images", [False, True])
@pytest.mark.parametrize("window", [None, 5, 24, 500])
def test_tokens_of_images_attend_to_later_ones(window: int | None, windowed_images: bool) -> None:
    batch, blocks = make_batch([(1, 60), (6, 40), (30, 90), (33, 33)], 8)
    images = torch.zeros(len(batch.positions), dtype=torch.bool)
    last = batch.positions.clone()
    for row, start, end in ((1, 34, 38), (2, 65, 80), (3, 0, 9), (3, 20, 33)):
        within = torch.arange(len(last)) >= batch.query_starts[row]
        within &= torch.arange(len(last)) < batch.query_starts[row + 1]
        within &= (batch.positions >= start) & (batch.positions < end)
        last[within] = end - 1
        images |= within
    images &= last > batch.positions
    sizes: dict[str, Any] = {"block_size": 8, "heads": 4, "kv_heads": 2, "window": window, "softcap": None}
    causal, _ = both(batch, blocks, **sizes)
    found, expected = both(replace(batch, last_keys=last), blocks, **sizes, windowed_images=windowed_images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    moved = (found - causal).abs().amax((1, 2)) > 1e-4
    assert torch.equal(moved, images if window is not None or not windowed_images else torch.zeros_like(images))


def test_rows_without_queries_are_passed_over() -> None:
    batch, blocks = make_batch([(1, 20), (0, 9), (12, 30)], 8)
    found, expected = both(batch, blocks, block_size=8, heads=4, kv_heads=2, window=None, softcap=None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 24])
def test_a_row_does_not_depend_on_the_others(window: int | None) -> None:
    shapes = SHAPES["mixed"]
    batch, blocks = make_batch(shapes, 16)
    torch.manual_seed(1)
    cache, query = torch.randn(2, blocks, 16, 2, WIDTH), torch.randn(len(batch.positions), 4, WIDTH)
    attend = partial(paged, window=window, scale=0.25)
    plan = plan_for(batch, cache, window, 2)
    together = attend(query, cache, plan)
    for row, (_, context) in enumerate(shapes):
        span = slice(batch.query_starts[row], batch.query_starts[row + 1])
        alone = Batch(
            batch.token_ids[span],
            batch.positions[span],
            batch.slots[span],
            (0, span.stop - span.start),
            (context,),
            batch.block_tables[row : row + 1],
            batch.logits_at,
        )
        plan = plan_for(alone, cache, window, 2)
        torch.testing.assert_close(attend(query[span], cache, plan), together[span], rtol=1e-4, atol=1e-5)


def test_stale_values_of_other_sequences_do_not_leak() -> None:
    batch, blocks = make_batch([(1, 18), (1, 30)], 16)
    cache, query = torch.randn(2, blocks, 16, 2, WIDTH), torch.randn(2, 4, WIDTH)
    plan = plan_for(batch, cache, None, 2)
    before = paged(query, cache, plan, window=None, scale=0.25)
    cache[:, 0] = 1e4  # the null block
    for row, context in enumerate(batch.context_lens):
        cache[:, batch.block_tables[row, (context - 1) // 16], context % 16 :] = -1e4
    torch.testing.assert_close(paged(query, cache, plan, window=None, scale=0.25), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_paged_on_cuda_equals_the_cpu(window: int | None, softcap: float | None) -> None:
    batch, blocks = make_batch(SHAPES["mixed"], 16)
    cache, query = torch.randn(2, blocks, 16, 2, WIDTH), torch.randn(len(batch.positions), 4, WIDTH)
    results = []
    for device in ("cpu", "cuda"):
        moved = Batch(
            batch.token_ids.to(device),
            batch.positions.to(device),
            batch.slots.to(device),
            batch.query_starts,
            batch.context_lens,
            batch.block_tables.to(device),
            batch.logits_at.to(device),
        )
        plan = plan_for(moved, cache.to(device), window, 2, maskless=softcap is None)
        results.append(paged(query.to(device), cache.to(device), plan, window=window, scale=0.3, softcap=softcap).cpu())
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)
