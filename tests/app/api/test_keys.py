"""`ponder keys`, and what is kept of a key."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from app.cli.documents.document_source import RemoteDocuments
from app.cli.main import cli
from app.db.account_store import Accounts
from app.db.sqlite import NameTaken, NotThere
from tests.app import postgres
from tests.app.cli.test_cli import ponder
from tests.app.cli.test_cli import serving as a_server
from tests.app.conftest import NewDatabase, Server
from tests.app.keyed import asking_for_keys, client_of
from tests.app.library import search

DATABASES = postgres.DATABASES_SLOW

pytestmark = pytest.mark.slow


def run(data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["keys", *arguments, "--data-dir", str(data)], env={"NO_COLOR": "1"})


def listed(data: Path) -> list[dict[str, Any]]:
    shown = run(data, "list", "--json")
    assert shown.exit_code == 0, shown.output
    return list(json.loads(shown.stdout)["keys"])


@pytest.fixture
def accounts(tmp_path: Path, address: str | None) -> Iterator[Accounts]:
    accounts = Accounts.open(tmp_path, address)
    yield accounts
    accounts.close()


def test_a_key_is_printed_once_and_kept_as_a_hash(tmp_path: Path) -> None:
    made = run(tmp_path, "create", "--user", "alice", "--name", "laptop", "--expires", "30d")
    key = made.stdout.strip()
    assert made.exit_code == 0 and re.fullmatch(r"ponder_[0-9a-f]{48}", key)
    (one,) = listed(tmp_path)
    assert (one["user"], one["role"], one["name"], one["state"]) == ("alice", "user", "laptop", "valid")
    assert one["prefix"] == key[:13] and one["used_at"] is None
    assert 29.9 * 86_400 < one["expires_at"] - time.time() < 30 * 86_400
    shown = run(tmp_path, "list").stdout
    assert all(word in shown for word in ("alice", "laptop", "valid", f"{key[:13]}…", one["id"]))
    files = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert key.encode() not in files and key.removeprefix("ponder_").encode() not in files


def test_a_key_is_revoked_by_its_id_or_by_how_it_begins(tmp_path: Path) -> None:
    keys = [run(tmp_path, "create", "--user", "alice").stdout.strip() for _ in range(2)]
    by_prefix = run(tmp_path, "revoke", f"{keys[0][:13]}…")
    assert by_prefix.exit_code == 0 and "of alice is revoked" in by_prefix.stdout
    assert {each["prefix"]: each["state"] for each in listed(tmp_path)} == {
        keys[0][:13]: "revoked", keys[1][:13]: "valid"
    }  # fmt: skip
    (left,) = [each["id"] for each in listed(tmp_path) if each["state"] == "valid"]
    assert run(tmp_path, "revoke", left).exit_code == run(tmp_path, "revoke", left).exit_code == 0
    refused = run(tmp_path, "revoke", "key_nope")
    assert refused.exit_code == 1 and "'key_nope'" in refused.stderr and "keys list" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--user", "Al ice"], ["--user", "'Al ice'", "small letters"]),
        (["--user", ""], ["--user", "small letters"]),
        (["--user", "a", "--role", "root"], ["--role", "'root'", "operator, user"]),
        (["--user", "a", "--expires", "soon"], ["--expires", "'soon'", "30d"]),
        (["--user", "a", "--expires", "0d"], ["--expires", "'0d'", "30d"]),
        (["--user", "a", "--expires", "999w"], ["--expires", "'999w'", "ten years"]),
        (["--user", "a", "--name", "x" * 101], ["--name", "100"]),
        (["--user", "local", "--role", "user"], ["'local'", "operator", "--role"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_accepted_makes_no_key(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    shown = run(tmp_path, "create", *arguments)
    assert shown.exit_code == 1 and all(word in shown.stderr for word in words), shown.stderr
    assert listed(tmp_path) == []


def test_use_is_noted_at_most_once_a_minute(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000.0]
    monkeypatch.setattr("app.db.account_store.time.time", lambda: now[0])
    key, text = accounts.create_key("local")

    def used() -> float | None:
        assert accounts.find(text) is not None
        return accounts.keys_of("local")[0].used_at

    assert used() == 1_000_000
    now[0] += 59
    assert used() == 1_000_000
    now[0] += 2
    assert used() == 1_000_061
    accounts.revoke(key.id)
    now[0] += 100
    assert used() == 1_000_061


def test_users_have_an_id_of_their_own(accounts: Accounts) -> None:
    assert [(each.id, each.role) for each in accounts.users()] == [("local", "operator")]
    accounts.create_user("alice", "Alice A.", "user")
    with pytest.raises(NameTaken):
        accounts.create_user("alice", "another", "user")
    assert accounts.change_user("alice", role="operator") == accounts.user("alice")
    assert (accounts.user("alice").name, accounts.user("alice").role) == ("Alice A.", "operator")
    for work in (accounts.user, accounts.revoke, accounts.change_user, accounts.create_key):
        with pytest.raises(NotThere):
            work("nobody")


def test_two_processes_may_open_a_new_directory_together(tmp_path: Path, address: str | None) -> None:
    first, second = Accounts.open(tmp_path, address), Accounts.open(tmp_path, address)
    _, text = first.create_key("local")
    assert second.find(text) is not None
    first.close()
    second.close()


def test_the_users_of_a_newer_ponder_are_left_alone(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "users.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    shown = run(tmp_path, "list")
    assert shown.exit_code == 1 and "newer Ponder" in shown.stderr


def test_keys_are_made_and_revoked_while_a_server_runs(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with a_server("--model", str(model), "--data-dir", str(data), "--auth", "keys", cwd=tmp_path) as (process, url):
        assert process.stderr is not None and "Nobody has a key yet" in process.stderr.readline()
        assert httpx.get(f"{url}/v1/models").status_code == 401
        key = ponder("keys", "create", "--user", "local", "--data-dir", str(data), cwd=tmp_path).stdout.strip()
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}) as client:
            assert client.get("/api/operator/keys").json()["keys"][0]["current"]
            assert ponder("keys", "revoke", key[:13], "--data-dir", str(data), cwd=tmp_path).returncode == 0
            assert client.get("/v1/models").status_code == 401
        refused = ponder("chat", "--url", url, cwd=tmp_path)
        assert refused.returncode == 1 and "--key" in refused.stderr


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("keyed")
    with new_database() as address, asking_for_keys(model, data, database=address) as server:
        yield server


def test_the_command_line_gets_at_documents_through_a_server_that_asks_for_keys(keyed: Server, tmp_path: Path) -> None:
    settings = keyed.app.state.ponder.settings
    shelf = RemoteDocuments(keyed.url, settings)
    accounts = Accounts.open(keyed.data, settings.database_address)
    try:
        assert [each.name for each in accounts.keys_of("local")] == ["the command line"]
        assert shelf.search("granite", 5, None, False).passages == []
        key, text = accounts.create_key("local")
        with client_of(keyed, text) as client:
            assert search(client, "granite") == []
        accounts.forget_key(key.id)
    finally:
        shelf.close()
        left = accounts.keys_of("local")
        accounts.close()
    assert left == [], "its key stays behind"
