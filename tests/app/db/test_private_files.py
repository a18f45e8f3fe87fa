"""The data directory as another user of the machine finds it: closed, whatever its files were before."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from app.db.account_store import Accounts
from app.db.store import Store
from retrieval import Library, Text
from tests.app.cli.test_cli import ponder, serving
from tests.app.library import DAM, add
from tests.retrieval.words import WordEmbedder

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """The files that group or others have a right to."""
    paths = [folder, *folder.rglob("*")]
    return [str(each) for each in paths if not each.is_symlink() and stat.S_IMODE(each.stat().st_mode) & 0o077]


async def old_data(folder: Path) -> None:
    """A data directory as earlier versions left it, in a folder that was made beforehand."""
    folder.mkdir(mode=0o755)
    await (await Store.open(folder)).close()
    Accounts.open(folder).close()
    with Library.open(folder / "documents", WordEmbedder()) as library:
        library.add("local", library.collection("local").id, [Text("a", DAM)])
    (folder / "kv").mkdir(mode=0o755)
    (folder / "server.log").write_text("a log")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


async def test_a_server_closes_what_was_there_and_what_it_makes(tmp_path: Path, model: Path) -> None:
    data, outside = tmp_path / "data", tmp_path / "outside.txt"
    await old_data(data)
    outside.write_text("nobody's business")
    outside.chmod(0o644)
    (data / "link").symlink_to(outside)
    with closing(sqlite3.connect(data / "users.db")) as reader:  # which keeps its -wal and -shm where they are
        reader.execute("INSERT INTO users (id, name, role, created_at) VALUES ('ana', 'ana', 'user', 0.0)")
        reader.commit()
        assert {"users.db-wal", "users.db-shm"} <= {Path(each).name for each in open_to_others(data)}
        flags = ("--data-dir", str(data), "--kv-disk-bytes", "16MiB", "--engine", "process", "--api-workers", "2")
        with serving("--model", str(model), *flags, cwd=tmp_path) as (_, url):
            assert open_to_others(data) == []
            with httpx.Client(base_url=url, timeout=60) as http:
                add(http, "dam.txt", DAM)
                chat = http.post("/api/chats").json()["id"]
                http.post(f"/api/chats/{chat}/runs", json={"content": "hi", "max_tokens": 4})
                assert http.post("/v1/completions", json={"model": "default", "prompt": "hi" * 50}).status_code == 200
            assert open_to_others(data) == []
            assert {"ponder.db-wal", "documents.db-wal"} <= {each.name for each in data.rglob("*")}
            assert list((data / "documents/files").iterdir())
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644


def test_a_command_closes_the_directory_and_what_it_makes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    made = ponder("keys", "create", "--user", "ana", "--data-dir", str(data), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert open_to_others(data) == [] and (data / "users.db").is_file()
