"""A K/V store of this process, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.kv_cache.kv_store.block_images import BlockImages
from engine.kv_cache.kv_store.client import KVStoreClient
from engine.kv_cache.kv_store.server import KVStoreServer

SECRET = b"sixteen bytes or more"  # that of the fixture `transfer`
LAYOUT = b"a layout of test"
NBYTES = 100


@pytest.fixture
def store() -> Iterator[KVStoreServer]:
    server = KVStoreServer(BlockImages(64 << 20), SECRET, "127.0.0.1", 0)
    yield server
    server.close()
    server.images.check()


def client_of(
    *ports: int, secret: bytes = SECRET, layout: bytes = LAYOUT, lookup_timeout_s: float = 5.0
) -> KVStoreClient:
    addresses = [("127.0.0.1", port) for port in ports]
    return KVStoreClient(addresses, secret, layout, NBYTES, timeout_s=5.0, lookup_timeout_s=lookup_timeout_s)
