"""Anthropic's own client, at the servers that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.app.conftest import Server


def client_of(server: Server, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="session")
def pebble_claude(pebble: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(pebble) as client:
        yield client
