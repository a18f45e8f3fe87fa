"""A server that asks for keys, and clients of its users."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from app.db.account_store import Accounts
from app.db.accounts import Role
from tests.app.conftest import Server, serving
from tests.app.gate import GatedEmbedder


@contextmanager
def asking_for_keys(model: Path, data: Path, **changed: Any) -> Iterator[Server]:
    with serving(model, data, GatedEmbedder(), auth="keys", **changed) as server:
        server.app.dependency_overrides.clear()  # here users are who their keys say
        yield server


def key_of(server: Server, user: str, role: Role | None = None, expires_s: float | None = None) -> str:
    """A new key, made as `ponder keys` does it: beside the server."""
    return beside(server, lambda accounts: _made(accounts, user, role, expires_s))


def beside(server: Server, work: Callable[[Accounts], str]) -> str:
    accounts = Accounts.open(server.data, server.app.state.ponder.settings.database_address)
    try:
        return work(accounts)
    finally:
        accounts.close()


def client_of(server: Server, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def _made(accounts: Accounts, user: str, role: Role | None, expires_s: float | None) -> str:
    accounts.ensure_user(user, role)
    return accounts.create_key(user, "a test", expires_s)[1]
