"""One Redis for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app import postgres
from tests.app.cluster.redis_server import RedisServer, redis_server


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def schema(postgres_address: str) -> Iterator[str]:
    """The address of a new database in PostgreSQL."""
    with postgres.schema(postgres_address) as address:
        yield address
