"""The server with the scripted model, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.app.conftest import Server
from tests.clients.scripted_model import Requests, scripted_server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Requests]]:
    with scripted_server(tmp_path_factory.mktemp("scripted")) as served:
        yield served


@pytest.fixture(scope="session")
def http(scripted: tuple[Server, Requests]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted[0].url, timeout=60) as client:
        yield client
