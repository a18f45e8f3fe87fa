"""Configurations of engines that exchange K/V."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import EngineConfig
from engine.config import KVTransferConfig
from engine.kv_cache import kv_connector, tcp_transport
from tests.engine.kv_apart import SIZE, free_port


@pytest.fixture
def plain(random_model: Path) -> EngineConfig:
    return EngineConfig(str(random_model), dtype="float32", block_size=SIZE, kv_blocks=200, max_batch_tokens=16)


@pytest.fixture
def transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KVTransferConfig:
    """Configuration that the engines of a test share. Nobody waits for what never comes: a test says by itself when its
    request is there."""
    monkeypatch.setattr(kv_connector, "GRACE_S", 0.2)
    monkeypatch.setattr(tcp_transport, "HEARTBEAT_S", 0.05)
    (tmp_path / "secret").write_text("sixteen bytes or more\n")
    return KVTransferConfig("kv_both", str(tmp_path / "secret"), kv_port=free_port(), peers=("127.0.0.1",))
