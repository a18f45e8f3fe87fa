"""`ponder backup`, and a server that refuses to start on a damaged database: nothing is lost, and all is told."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from app.cli.main import cli
from app.config import BadSetting
from app.db.sqlite import DATABASES, RESTORING, refuse_damage
from tests.app.conftest import Server, serving
from tests.app.gate import GatedEmbedder
from tests.app.library import DAM, add, search

pytestmark = pytest.mark.slow


def ponder(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def filled(model: Path, tmp_path: Path) -> Iterator[tuple[Server, httpx.Client, str]]:
    """A server with a chat and a document, its client, and the chat's id."""
    with (
        serving(model, tmp_path / "data", GatedEmbedder(), sandbox=False) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        chat = str(http.post("/api/chats", json={}).json()["id"])
        http.patch(f"/api/chats/{chat}", json={"title": "The dam"}).raise_for_status()
        add(http, "dam.txt", DAM)
        yield server, http, chat


def _holds(model: Path, data: Path, chat: str) -> None:
    """A server that is started there has all of it."""
    with (
        serving(model, data, GatedEmbedder(), sandbox=False) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.get(f"/api/chats/{chat}").json()["title"] == "The dam"
        (document,) = http.get("/api/documents").json()["documents"]
        assert http.get(f"/api/documents/{document['id']}/file").text == DAM
        assert search(http, "when was the dam finished?")[0]["document"]["id"] == document["id"]


@pytest.mark.parametrize("kind", ["copy.tar.gz", "copy"])
def test_a_backup_of_a_running_server_holds_all_of_it_elsewhere(
    filled: tuple[Server, httpx.Client, str], model: Path, tmp_path: Path, kind: str
) -> None:
    server, http, chat = filled
    made = ponder("backup", "create", tmp_path / kind, "--data-dir", server.data)
    assert made.exit_code == 0, made.output
    http.delete(f"/api/chats/{chat}").raise_for_status()  # after it
    assert ponder("backup", "verify", tmp_path / kind).exit_code == 0
    for path in (tmp_path / kind, *(tmp_path / kind).rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    restored = ponder("backup", "restore", tmp_path / kind, "--data-dir", tmp_path / "elsewhere")
    assert restored.exit_code == 0, restored.output
    for path in (tmp_path / "elsewhere").rglob("*"):
        assert path.name == "lock" or path.stat().st_mode & 0o077 == 0, path
    _holds(model, tmp_path / "elsewhere", chat)


def test_what_is_made_again_and_what_a_server_holds_are_left_out(
    filled: tuple[Server, httpx.Client, str], tmp_path: Path
) -> None:
    server, _, _ = filled
    assert ponder("backup", "create", "--data-dir", server.data).exit_code == 0
    (archive,) = (server.data / "backups").iterdir()
    with tarfile.open(archive) as opened:
        names = {member.name for member in opened if member.isfile()}
    assert {"ponder.db", "documents/documents.db", "manifest.json"} <= names
    assert not [name for name in names if "index/" in name or "lock" in name or name.endswith(("-wal", "-shm"))]


def test_a_server_keeps_its_data_while_it_runs(filled: tuple[Server, httpx.Client, str], tmp_path: Path) -> None:
    server, http, chat = filled
    assert ponder("backup", "create", tmp_path / "copy", "--data-dir", server.data).exit_code == 0
    refused = ponder("backup", "restore", tmp_path / "copy", "--data-dir", server.data)
    assert refused.exit_code == 1 and "stop it first" in refused.output
    assert http.get(f"/api/chats/{chat}").status_code == 200


def _databases(folder: Path) -> None:
    (folder / "documents").mkdir(parents=True)
    for name in DATABASES:
        with closing(sqlite3.connect(folder / name)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("CREATE TABLE lines (text TEXT)")
            db.execute("CREATE INDEX words ON lines (text)")
            db.executemany("INSERT INTO lines VALUES (?)", [(f"line {n}" * 20,) for n in range(2000)])
            if name.startswith("documents"):
                db.execute("CREATE TABLE documents (file TEXT, owned INTEGER)")
                db.execute("CREATE TABLE jobs (id TEXT, status TEXT)")
                db.execute("CREATE TABLE job_files (job TEXT, path TEXT, owned INTEGER)")
            db.commit()


def _damage(path: Path, how: str) -> None:
    size = path.stat().st_size
    if how == "header":
        path.write_bytes(b"x" * 100 + path.read_bytes()[100:])
    elif how == "page":
        path.write_bytes(path.read_bytes()[: size // 2] + os.urandom(8192) + path.read_bytes()[size // 2 + 8192 :])
    elif how == "cut":
        os.truncate(path, size // 2)
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("how", ["header", "page", "cut", "empty"])
@pytest.mark.parametrize("name", DATABASES)
def test_a_damaged_database_is_named_left_alone_and_put_back(tmp_path: Path, name: str, how: str) -> None:
    data = tmp_path / "data"
    _databases(data)
    refuse_damage(data)
    assert ponder("backup", "create", "--data-dir", data).exit_code == 0
    _damage(data / name, how)
    before = (data / name).read_bytes()
    with pytest.raises(BadSetting) as refused:
        refuse_damage(data)
    assert str(data / name) in str(refused.value) and "ponder backup restore" in str(refused.value)
    assert (data / name).read_bytes() == before
    refused_copy = ponder("backup", "create", tmp_path / "copy", "--data-dir", data)
    assert refused_copy.exit_code == 1 and "is damaged" in refused_copy.output and not (tmp_path / "copy").exists()
    top = name.partition("/")[0]
    restored = ponder("backup", "restore", "--only", top, "--data-dir", data)
    assert restored.exit_code == 0, restored.output
    refuse_damage(data)
    (kept,) = (path for path in data.glob(f"{top}.damaged-*") if not path.name.endswith(("-wal", "-shm")))
    assert (kept / "documents.db" if kept.is_dir() else kept).read_bytes() == before
    assert not list(data.glob(f"{top}.replaced-*"))


def test_a_server_refuses_to_start_on_a_damaged_database(model: Path, tmp_path: Path) -> None:
    _databases(tmp_path / "data")
    _damage(tmp_path / "data/users.db", "page")
    said = ponder("serve", "--model", model, "--data-dir", tmp_path / "data", "--port", "0")
    assert said.exit_code == 1
    assert f"The database {tmp_path / 'data/users.db'} is damaged" in said.output


def test_a_first_start_that_was_cut_short_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "ponder.db").touch()
    refuse_damage(tmp_path)


@pytest.mark.parametrize("how", ["flipped", "missing", "more", "manifest"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_damaged_backup_is_told_and_not_put_back(tmp_path: Path, how: str, packed: bool) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    _databases(data)
    assert ponder("backup", "create", copy, "--data-dir", data).exit_code == 0
    if how == "flipped":
        held = bytearray((copy / "calls.db").read_bytes())
        held[len(held) // 2] ^= 1
        (copy / "calls.db").write_bytes(held)
    elif how == "missing":
        (copy / "notes.db").unlink()
    elif how == "more":
        (copy / "other.db").write_bytes(b"other")
    else:
        (copy / "manifest.json").write_text("{}")
    if packed:
        with tarfile.open(tmp_path / "copy.tar.gz", "w:gz") as archive:
            archive.add(copy, arcname="")
        copy = tmp_path / "copy.tar.gz"
    told = ponder("backup", "verify", copy)
    assert told.exit_code == 1 and "is damaged" in told.output
    before = (data / "calls.db").read_bytes()
    assert ponder("backup", "restore", copy, "--data-dir", data).exit_code == 1
    assert (data / "calls.db").read_bytes() == before and not list(data.glob("*.replaced-*"))


def test_every_cut_of_an_archive_is_told(tmp_path: Path) -> None:
    _databases(tmp_path / "data")
    archive = tmp_path / "copy.tar.gz"
    assert ponder("backup", "create", archive, "--data-dir", tmp_path / "data").exit_code == 0
    whole = archive.read_bytes()
    for part in (0, 1, len(whole) // 2, len(whole) - 1):
        archive.write_bytes(whole[:part])
        told = ponder("backup", "verify", archive)
        assert told.exit_code == 1 and "is damaged" in told.output, told.output


def test_a_restore_that_was_cut_short_is_told_and_can_be_run_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    _databases(data)
    assert ponder("backup", "create", "--data-dir", data).exit_code == 0
    (data / RESTORING).write_text("")
    shutil.move(data / "ponder.db", data / "ponder.db.replaced-1")
    with pytest.raises(BadSetting, match="did not come to its end"):
        refuse_damage(data)
    assert ponder("backup", "restore", "--data-dir", data).exit_code == 0
    refuse_damage(data)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "x.tar.zst"], "accepted: a name ending in .tar.gz"),
        (["verify", "nothing"], "is no backup"),
        (["restore"], "There is no backup in"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, words: list[str], said: str) -> None:
    _databases(tmp_path / "data")
    where = [] if words[0] == "verify" else ["--data-dir", str(tmp_path / "data")]
    told = ponder("backup", *words, *where)
    assert told.exit_code == 1 and said in " ".join(told.output.split())
