"""Tests what was acknowledged is there after a loss of power, whatever of the unsynced writes reached the disk."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.db.account_store import Accounts
from app.sequences import persistence
from retrieval import Library, Query
from tests.app import lost_writes
from tests.app.conftest import serving
from tests.app.gate import GatedEmbedder
from tests.app.lost_writes import Losing, left_over, moments
from tools.builtin.notes import Notebook
from tools.grants import SqliteGrants
from tools.journal import SqliteJournal

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.skipif(
        shutil.which("gcc") is None or sys.platform != "linux",
        reason="no gcc: writes are recorded by a library that is compiled here, for Linux",
    ),
    pytest.mark.slow,
]


@dataclass(frozen=True)
class Recorded:
    """Writes of a server, and the replies that its users had meanwhile."""

    root: str
    log: Path
    told: list[tuple[dict[str, Any], int]]

    def after(self, count: int, folder: Path, losing: Losing, seed: int) -> None:
        left_over(self.log, count, self.root, folder, losing, random.Random(seed))


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    data, log = folder / "data", folder / "log"
    data.mkdir()
    environment = {
        **os.environ, "LD_PRELOAD": str(lost_writes.compile_shim(folder)), "LOST_WRITES_ROOT": str(data),
        "LOST_WRITES_LOG": str(log),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.app.lost_writes", str(model), str(data)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return Recorded(str(data), log, [(json.loads(text), at) for text, at in moments(log)])


def _missing(folder: Path, told: list[dict[str, Any]]) -> Iterator[str]:
    """Yields what of all that users were told is not so any more."""
    chats = dict[str, str]()
    runs, events = set[str](), set[tuple[str, int]]()
    if (folder / "ponder.db").exists():
        db = sqlite3.connect(folder / "ponder.db")
        try:
            chats = dict(db.execute("SELECT id, title FROM chats"))
            runs = {row[0] for row in db.execute("SELECT id FROM runs")}
            events = set(db.execute("SELECT run_id, seq FROM events"))
        except sqlite3.OperationalError:
            pass  # no tables: everything is missing
        db.close()
    with Library.open(folder / "documents", GatedEmbedder()) as library:
        for user in library.store.database.rows("SELECT DISTINCT owner FROM collections"):
            for job in library.ingest.jobs.of(user[0]):
                library.ingest.wait(job, 60)
        rows = library.store.database.rows("SELECT source, file FROM documents")
        files = {row["source"]: Path(row["file"]) for row in rows}
        texts = {source: path.read_text() if path.exists() else "" for source, path in files.items()}
        found = {hit.passage.source for hit in library.search(Query("local", "the dam at Hollow Creek", 50)).hits}
    accounts = Accounts.open(folder)
    keys = {key.id: key.state for key in accounts.keys_of()}
    accounts.close()
    notes = {note.text for note in Notebook(folder / "notes.db").all("ana")}
    grants = SqliteGrants(folder / "permissions.db")
    refused = {grant.tool for grant in grants.of_user("ana")}
    grants.close()
    journal = SqliteJournal(folder / "calls.db")
    sequences = persistence.file_of(folder).read_text() if persistence.file_of(folder).exists() else ""
    last_sequences = [each["text"] for each in told if each["kind"] == "sequences"]
    for each in told:
        match each["kind"]:
            case "chat":
                held = each["id"] in chats
            case "title":
                held = chats.get(each["id"]) == each["title"]
            case "run":
                held = each["id"] in runs
            case "event":
                held = (each["run"], each["seq"]) in events
            case "upload":
                held = texts.get(each["source"]) == each["text"]
            case "document":
                held = each["source"] in found
            case "key":
                held = each["id"] in keys
            case "revoked":
                held = keys.get(each["id"]) == "revoked"
            case "note":
                held = each["text"] in notes
            case "grant":
                held = each["tool"] in refused
            case "call":
                held = journal.look("run", each["id"], "print") is not None
            case _:
                held = sequences in last_sequences[last_sequences.index(each["text"]) :]
        if not held:
            yield json.dumps(each)[:120]
    journal.close()


def _sampled(recorded: Recorded) -> list[int]:
    """Returns which moments are tried: all but most of the events of runs, which are many and alike."""
    chosen = list[int]()
    events = 0
    for number, (what, _) in enumerate(recorded.told):
        events += what["kind"] == "event"
        if what["kind"] != "event" or events % 7 == 1:
            chosen.append(number)
    return chosen


@pytest.mark.parametrize("losing", ["everything", "some"])
def test_what_was_acknowledged_survives_a_loss_of_power(recorded: Recorded, tmp_path: Path, losing: Losing) -> None:
    kinds = {what["kind"] for what, _ in recorded.told}
    assert len(kinds) == 12, kinds
    for number in _sampled(recorded):
        left = tmp_path / f"left-{number}"
        recorded.after(recorded.told[number][1], left, losing, number)
        told = [what for what, _ in recorded.told[: number + 1]]
        assert not list(_missing(left, told)), (number, told[-1])


def test_a_server_starts_on_what_a_loss_of_power_left(recorded: Recorded, tmp_path: Path, model: Path) -> None:
    last = max(number for number, (what, _) in enumerate(recorded.told) if what["kind"] == "upload")
    recorded.after(recorded.told[last][1], tmp_path / "left", "some", 1)
    chats = [what for what, _ in recorded.told[: last + 1] if what["kind"] == "title"]
    with (
        serving(model, tmp_path / "left", GatedEmbedder(), sandbox=False) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for chat in chats:
            assert http.get(f"/api/chats/{chat['id']}").json()["title"] == chat["title"]
        server.until(lambda _: len(http.get("/api/documents").json()["documents"]) == 3)
        text = next(what["text"] for what, _ in recorded.told[: last + 1] if what["kind"] == "upload")
        newest, *_, oldest = http.get("/api/documents").json()["documents"]
        assert newest["source"] != oldest["source"] == "dam0.txt"
        assert http.get(f"/api/documents/{oldest['id']}/file").text == text
