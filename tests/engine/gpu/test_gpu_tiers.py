"""Host memory below a GPU: when blocks may be written, and the locked memory."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from engine.kv_cache.block_pool import BlockContent
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.transfers import load
from engine.model.batch import KVCache
from engine.model.runner import CacheStore
from tests.pretended import Machine

CUDA = torch.device("cuda")


def test_a_block_comes_up_after_all_that_the_device_was_told_before(machine: Machine | None) -> None:
    cache = KVCache(2, 4, 4, 2, 8, torch.float32, CUDA)
    host = HostTier(2, cache.block_nbytes, pinned=True)
    host.row(1).fill_(7)
    store = CacheStore(cache, CUDA)
    store.save([(0, host.row(0))])  # so that nothing is compiled meanwhile
    store.saved()
    if machine is None:
        torch.cuda._sleep(50_000_000)  # a step that takes its time
    store.save([(2, host.row(0))])  # the block's content is offloaded,
    cache.data[:, :, 2].fill_(3.0)  # and its former holder writes to it once more
    loaded = load(store, None, BlockContent(b"digest", b"root"), 2, host.row(1), store.queued())
    assert loaded.error is None
    assert host.row(0).view(torch.float32).eq(0).all(), "what went down has arrived: it was queued before"
    torch.cuda.synchronize()
    assert cache.data[:, :, 2].view(torch.uint8).eq(7).all()
    host.close()


def test_a_layer_is_saved_as_it_was_when_that_was_queued(machine: Machine | None) -> None:
    """Each save has a wait of its own: the first layer is sent while the second is computed."""
    cache, blocks = KVCache(2, 6, 4, 2, 8, torch.float32, CUDA), (4, 1, 3)
    store, host = CacheStore(cache, CUDA), HostTier(2, 3 * cache.block_nbytes // 2, pinned=True)
    host.data.fill_(9)
    cache.data[0, :, list(blocks)] = 5.0
    first = store.save_layers(blocks, range(1), host.row(0))
    cache.data[0, :, list(blocks)] = 6.0  # of the next step
    cache.data[1, :, list(blocks)] = 7.0
    second = store.save_layers(blocks, range(1, 2), host.row(1))
    first()
    assert host.row(0).view(torch.float32).eq(5).all()
    second()
    assert host.row(1).view(torch.float32).eq(7).all()
    store.load_layers((2, 5, 1), range(1, 2), host.row(0).numpy().data)
    torch.cuda.synchronize()
    assert cache.data[1, :, [2, 5, 1]].eq(5).all() and cache.data[1, :, [3, 4]].eq(7).all()
    host.close()


def test_a_tier_has_the_bytes_that_it_may_have_and_copies_wait_for_nobody(machine: Machine | None) -> None:
    host = HostTier(5, 600, pinned=True)
    assert host.data.untyped_storage().nbytes() == 3000
    assert host.row(3).is_pinned()
    host.close()
    host.close()
    assert not host.row(3).is_pinned(), "others may have the memory"


def test_a_tier_that_nobody_closes_unlocks_its_memory(machine: Machine | None) -> None:
    host = HostTier(5, 600, pinned=True)
    kept = host.data
    del host
    assert not kept.is_pinned()


def test_memory_that_cannot_be_locked_is_used_as_it_is(
    machine: Machine | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = SimpleNamespace(cudaHostRegister=lambda address, nbytes, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refused)
    with caplog.at_level(logging.WARNING):
        host = HostTier(5, 600, pinned=True)
    assert "3000 bytes of host memory could not be page-locked (CUDA error 2)" in caplog.text
    assert host.row(0).fill_(1).sum() == 600 and not host.row(0).is_pinned()
    host.close()
