"""Host memory below a GPU: what of it is locked."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from engine.kv.host import HostTier
from tests.pretended import Machine


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
