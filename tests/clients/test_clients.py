"""Cells of the clients that are development dependencies, anew, and the documented table against the committed results.

The other clients' cells are run by `tests.clients.table`, each in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.app.conftest import Server, all_is_back
from tests.clients.cell import FEATURES
from tests.clients.scripted_model import Requests
from tests.clients.table import CLIENTS, ROOT, Client, filled, markdown, rows

ROWS = {row["module"]: row for row in rows()}
NEGOTIATED = {"anthropic_python": ["POST /v1/messages 400"]}  # `thread`: the client goes on without, as it says itself


@pytest.fixture(scope="module")
def run(scripted: tuple[Server, Requests]) -> Callable[[Client], dict[str, Any]]:
    """Runs a client's cells, once for all of its tests."""
    server, requests = scripted
    return cache(lambda client: filled(client, server.url, requests, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "feature"),
    [
        pytest.param(client, feature, id=f"{client.module}-{feature}")
        for client in CLIENTS
        if client.in_ci
        for feature in ROWS[client.module]["cells"]
    ],
)
def test_a_cell_works(run: Callable[[Client], dict[str, Any]], client: Client, feature: str) -> None:
    cell = run(client)["cells"][feature]
    assert cell["result"] == "works", cell


@pytest.mark.slow
@pytest.mark.parametrize("client", [pytest.param(each, id=each.module) for each in CLIENTS if each.in_ci])
def test_nothing_is_refused_that_a_client_sends_unasked(
    run: Callable[[Client], dict[str, Any]], scripted: tuple[Server, Requests], client: Client
) -> None:
    row = run(client)
    assert row["refused"] == NEGOTIATED.get(client.module, [])
    assert row["cells"].keys() == ROWS[client.module]["cells"].keys(), "run tests.clients.table: results.json is old"
    all_is_back(scripted[0])


def test_the_documented_table_is_that_of_the_results() -> None:
    page = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    assert markdown(rows()) in page
    for row in ROWS.values():
        assert row["refused"] == NEGOTIATED.get(row["module"], []), row["client"]
        assert row["cells"].keys() <= set(FEATURES)
        assert row["client"].partition(" (")[0].lower() in page.lower()


def test_every_client_has_its_row() -> None:
    assert [client.module for client in CLIENTS] == list(ROWS)
