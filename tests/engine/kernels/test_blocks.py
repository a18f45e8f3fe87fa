"""Blocks as bytes: copied within a cache, gathered to rows, scattered back. Kernels and torch references against
indexing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import blocks as b
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.model.batch import KVCache
from engine.model.runner import Saving

BLOCKS = 9
BOTH = [
    pytest.param((b.copy_blocks_torch, b.gather_blocks_torch, b.scatter_blocks_torch), id="twin"),
    pytest.param((b.copy_blocks_triton, b.gather_blocks_triton, b.scatter_blocks_triton), id="kernel"),
]
Three = tuple[Callable[..., None], Callable[..., None], Callable[..., None]]
Shapes = list[tuple[tuple[torch.dtype, tuple[int, ...]], int]]
Moves = tuple[list[int], list[int]]

caches = st.lists(
    st.tuples(
        st.sampled_from(
            [(torch.bfloat16, (4, 2, 8)), (torch.float32, (2, 3)), (torch.int8, (3, 1, 7)), (torch.int8, (5001,))]
        ),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=2,
)
pairs = st.lists(st.integers(0, BLOCKS - 1), max_size=5).flatmap(
    lambda sources: st.tuples(
        st.just(sources),
        st.lists(st.integers(0, BLOCKS - 1), min_size=len(sources), max_size=len(sources), unique=True),
    )
)


def made(shapes: Shapes, device: str) -> list[torch.Tensor]:
    """Tensors of random bytes, (layers, 2, blocks, ...)."""
    generator = torch.Generator().manual_seed(len(shapes))
    found = []
    for (dtype, shape), layers in shapes:
        codes = torch.randint(-100, 100, (layers, 2, BLOCKS, *shape), generator=generator)
        found.append(codes.to(dtype).to(device))
    return found


@pytest.mark.parametrize("three", BOTH)
@settings(max_examples=20)
@given(shapes=caches, moves=pairs)
def test_all_sources_are_read_before_any_is_overwritten(
    three: Three, shapes: Shapes, moves: Moves, device: str
) -> None:
    cache = made(shapes, device)
    wanted = [each.clone() for each in cache]
    for old, new in zip(cache, wanted, strict=True):
        for source, destination in zip(*moves, strict=True):
            new[:, :, destination] = old[:, :, source]
    three[0](cache, list(zip(*moves, strict=True)))
    assert all(map(torch.equal, cache, wanted))


@pytest.mark.parametrize("three", BOTH)
@settings(max_examples=20)
@given(shapes=caches, moves=pairs)
def test_rows_hold_what_blocks_hold_and_give_it_back(three: Three, shapes: Shapes, moves: Moves, device: str) -> None:
    _, gather, scatter = three
    cache = made(shapes, device)
    sources, destinations = moves
    rows = torch.full((len(sources), b.block_nbytes(cache)), 255, dtype=torch.uint8, device=device)
    gather(cache, sources, rows)
    for row, block in zip(rows, sources, strict=True):
        assert row.equal(torch.cat([each[:, :, block].reshape(-1).view(torch.uint8) for each in cache]))
    wanted = [each.clone() for each in cache]
    for old, new in zip(cache, wanted, strict=True):
        for source, destination in zip(sources, destinations, strict=True):
            new[:, :, destination] = old[:, :, source]
    scatter(cache, destinations, rows)
    assert all(map(torch.equal, cache, wanted))


@pytest.mark.parametrize("three", BOTH)
def test_a_destination_comes_once(three: Three, device: str) -> None:
    with pytest.raises(ValueError, match="destination twice"):
        three[0](made([((torch.int8, (4,)), 1)], device), [(1, 2), (3, 2)])


@pytest.mark.parametrize("kind", [KVCache, QuantizedCache])
def test_rows_are_those_of_the_caches(kind: type[KVCache] | type[QuantizedCache], device: str) -> None:
    cache = kind(2, BLOCKS, 4, 2, 16, torch.float32, device)
    for at, each in enumerate(cache.tensors):
        each.copy_(torch.arange(each.numel()).view(each.shape) % (97 + at))
    row = torch.empty(cache.block_nbytes, dtype=torch.uint8)
    rows = torch.empty(2, cache.block_nbytes, dtype=torch.uint8, device=device)
    b.gather_blocks_triton(cache.tensors, [7, 2], rows)
    for block, gathered in zip((7, 2), rows, strict=True):
        cache.read_block(block, row)
        assert row.equal(gathered.cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="saving on a stream of its own needs a GPU")
def test_what_is_saved_is_what_the_blocks_held_then(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = made([((torch.bfloat16, (16, 8, 128)), 3)], "cuda")
    monkeypatch.setattr("engine.model.runner.BYTES", 2 * b.block_nbytes(cache))  # of seven, two at a time
    saving = Saving(cache)
    rows = torch.zeros(7, b.block_nbytes(cache), dtype=torch.uint8, pin_memory=True)
    wanted = [cache[0][:, :, block].cpu().reshape(-1).view(torch.uint8) for block in range(7)]
    saving.save([(block, rows[6 - block]) for block in range(7)])
    cache[0].zero_()
    saving.wait()
    assert all(map(torch.equal, rows.flip(0), wanted))
