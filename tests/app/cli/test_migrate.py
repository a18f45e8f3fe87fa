"""`ponder migrate`: every table of chats and users, copied from SQLite into PostgreSQL without loss, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Boolean, Column, Connection, Engine, LargeBinary, Table, text
from sqlalchemy import Text as TextType
from sqlalchemy.types import Double
from typer.testing import CliRunner, Result

from app.cli.main import cli
from app.config import LOCAL_USER
from app.db.account_store import Accounts
from app.db.connection import transaction
from app.db.migrations import Chain, open_database
from app.db.postgres import postgres_engine
from app.db.run_store import Place
from app.db.store import Store
from app.db.tables import BIG, CHATS, USERS, texts, users
from retrieval import Given, Library, Query, Text
from tests.app import postgres
from tests.retrieval.conftest import admit
from tests.retrieval.words import WordEmbedder

pytestmark = pytest.mark.slow

ROWS = 3  # of each table
CHAINS: dict[Chain, Any] = {"chats": CHATS, "users": USERS}
FILES: dict[Chain, str] = {"chats": "ponder.db", "users": "users.db"}


@pytest.fixture
def address(postgres_address: str) -> Iterator[str]:
    with postgres.schema(postgres_address) as address:
        yield address


def migrate(data: Path, address: str) -> Result:
    return CliRunner().invoke(cli, ["migrate", "--from", str(data), "--to", address])


def value(column: Column[Any], n: int) -> object:
    """Returns what a column's row `n` has: of the kinds that two databases may take differently."""
    kind = column.type
    if isinstance(kind, Boolean):
        return bool(n % 2)
    if isinstance(kind, TextType):
        return f"{column.table.name}.{column.name} {n} \0 \ufdd0 é\u0301 漢 '\\ {{}} %s :x"
    if isinstance(kind, LargeBinary):
        return bytes(range(256)) * (n + 1)
    if isinstance(kind, Double):
        return 1795780169.0758370 + n / 7
    return (2**41 if kind is BIG else 7) + n


def fill(data: Path) -> None:
    """Puts rows into every table; references lead to the row of the same number."""
    data.mkdir(exist_ok=True)
    for chain, declared in CHAINS.items():
        db = open_database(data / FILES[chain], chain, 5)
        with transaction(db):
            for table in declared.sorted_tables:
                if table is not texts:  # its triggers fill it
                    db.execute(table.insert(), [row_of(table, n) for n in range(ROWS)])
            for table in declared.sorted_tables:
                assert len(held(db, table)) >= ROWS, table.name
        db.close()


def row_of(table: Table, n: int) -> dict[str, object]:
    row = {column.name: value(column, n) for column in table.c}
    for column in table.c:
        for key in column.foreign_keys:
            row[column.name] = value(key.column, n)
    return row


def held(db: Connection, table: Table) -> list[tuple[object, ...]]:
    found = db.execute(table.select().with_only_columns(*(each for each in table.c if each is not texts.c.id))).all()
    plain = [tuple(int(each) if isinstance(each, bool) else each for each in row) for row in found]
    return sorted(plain, key=repr)


def everything(place: Path | str) -> dict[str, list[tuple[object, ...]]]:
    found: dict[str, list[tuple[object, ...]]] = {}
    for chain, declared in CHAINS.items():
        db = open_database(place if isinstance(place, str) else place / FILES[chain], chain, 5)
        with transaction(db):
            found |= {table.name: held(db, table) for table in declared.sorted_tables}
        db.close()
    return found


def test_every_table_is_copied_without_loss(tmp_path: Path, address: str) -> None:
    data = tmp_path / "data"
    fill(data)
    before = everything(data)
    done = migrate(data, address)
    assert done.exit_code == 0, done.output
    counts = dict(line.split(": ") for line in done.stdout.splitlines() if ": " in line and "rows are" not in line)
    assert counts == {name: str(len(rows)) for name, rows in before.items()}
    assert everything(address) == before == everything(data)
    assert len(before) == len(CHATS.tables) + len(USERS.tables)


async def test_a_server_goes_on_with_what_was_copied(tmp_path: Path, address: str) -> None:
    data = tmp_path / "data"
    store = await Store.open(data)
    made = [(await store.chats.create(LOCAL_USER))["id"] for _ in range(3)]
    for at, chat in enumerate(made):
        await store.runs.begin(LOCAL_USER, chat, f"run_{at}", Place(f"The dam of granite {at}", at_leaf=True), {})
    same = {"updated_at": 5.0}  # so that the order of insertion tells them apart
    for chat in reversed(made):
        await store.chats.change(LOCAL_USER, chat, same)
    listed = await store.chats.of(LOCAL_USER, limit=2)
    rest = await store.chats.of(LOCAL_USER, limit=2, before=listed[1])
    newest = [run["id"] for run in await store.overview.newest_runs(2)]
    accounts = Accounts.open(data)
    _, key = accounts.create_key(LOCAL_USER)
    accounts.close()
    await store.close()
    assert (await asyncio.to_thread(migrate, data, address)).exit_code == 0
    store = await Store.open(data, address)
    assert await store.chats.of(LOCAL_USER, limit=2) == listed
    assert await store.chats.of(LOCAL_USER, limit=2, before=listed[1]) == rest
    assert [run["id"] for run in await store.overview.newest_runs(2)] == newest
    indexed = await store.database.rows(text("SELECT count(*) AS n FROM texts WHERE words IS NULL"))
    assert indexed == [{"n": 0}]
    assert {found.chat_id for found in await store.search.find(LOCAL_USER, "granite", 9)} == set(made)
    again = await store.chats.create(LOCAL_USER)
    assert again["id"] in [chat["id"] for chat in (await store.chats.of(LOCAL_USER, limit=9))[0]]
    await store.close()
    accounts = Accounts.open(data, address)
    assert accounts.find(key) is not None
    accounts.close()


def test_a_database_with_something_in_it_is_refused(tmp_path: Path, address: str) -> None:
    data = tmp_path / "data"
    fill(data)
    accounts = Accounts.open(tmp_path / "other", address)
    accounts.create_user("ana", "Ana", "user")
    accounts.close()
    done = migrate(data, address)
    assert done.exit_code == 1 and "not empty: users has 1 rows" in done.stderr and "accepted" in done.stderr.lower()
    assert [row[0] for row in everything(address)["users"]] == ["ana", LOCAL_USER]
    assert everything(address)["chats"] == []


# A database that changes what it is given, or fails in the middle, as no database should.
SPOILT = {
    "changes a text": ("folders", "BEGIN new.name = new.name || 'x'; RETURN new; END", "folders was not copied whole"),
    "loses a row": ("events", "BEGIN IF new.seq = 8 THEN RETURN NULL; END IF; RETURN new; END", "events was not"),
    "fails": ("keys", "BEGIN RAISE EXCEPTION 'no room'; END", "no room"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_copy_that_is_not_whole_leaves_nothing(how: str, tmp_path: Path, address: str) -> None:
    table, body, told = SPOILT[how]
    data = tmp_path / "data"
    fill(data)
    before = everything(data)
    for chain in CHAINS:
        db = open_database(address, chain, 5)
        if table in CHAINS[chain].tables:
            with transaction(db):
                db.exec_driver_sql(f"CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
                trigger = f"CREATE TRIGGER spoil BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION spoil()"
                db.exec_driver_sql(trigger)
        db.close()
    done = migrate(data, address)
    assert done.exit_code == 1 and told in done.stderr and "Nothing was copied" in done.stderr, done.output
    left = {name: rows for name, rows in everything(address).items() if rows}
    assert [*left] == [users.name] and len(left[users.name]) == 1  # the local user of a new database
    assert everything(data) == before


async def test_what_a_server_has_open_is_not_copied(tmp_path: Path, address: str) -> None:
    data = tmp_path / "data"
    store = await Store.open(data)
    done = await asyncio.to_thread(migrate, data, address)
    assert done.exit_code == 1 and "another Ponder (process" in done.stderr
    await store.close()
    store = await Store.open(tmp_path / "other", address)
    done = await asyncio.to_thread(migrate, data, address)
    assert done.exit_code == 1 and "another Ponder is using it" in done.stderr
    await store.close()


def test_what_cannot_be_copied_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    somewhere = "postgresql://ponder:hunter2@127.0.0.1:9/ponder"
    done = migrate(tmp_path, somewhere)
    assert done.exit_code == 1 and "has no ponder.db and no users.db" in done.stderr
    Accounts.open(tmp_path).close()
    done = migrate(tmp_path, somewhere)
    assert done.exit_code == 1 and "127.0.0.1" in done.stderr and "hunter2" not in done.output
    done = migrate(tmp_path, "mysql://ponder:hunter2@h/db")
    assert done.exit_code == 2 and "accepted: the address of a PostgreSQL database" in done.stderr
    assert "hunter2" not in done.output
    monkeypatch.delenv("PONDER_DATABASE", raising=False)
    done = CliRunner().invoke(cli, ["migrate", "--from", str(tmp_path)])
    assert done.exit_code == 1 and "--to names no database" in done.stderr


DAMS = [
    Text("orsk", "The dam of Orsk was finished in 1931, of granite.", "The dam of Orsk", {"year": 1931, "open": True}),
    Text("nul\0", "A lake and \ufdd0 more.", "T\0", {"m": "\0"}),
    *(Text(f"note{n}", f"A note on the dam, {n}: {'granite ' * n}valley.") for n in range(40)),
]


def documents(data: Path, engine: Engine | None) -> dict[str, object]:
    """Returns what users see of a library's documents, numbers and scores among it."""
    with Library.open(data / "documents", WordEmbedder(), engine=engine) as library:
        (shared,) = (each for each in library.rights.collections("ben") if each.role == "reader")
        hits = library.search(Query("ana", "granite dam", 50, repeats=True, dense_share=0.0)).hits
        (job,) = library.ingest.jobs.of("ana")
        return {
            "documents": library.store.documents("ana"),
            "texts": [library.store.text("ana", each.id) for each in library.store.documents("ana")],
            "shared": shared,
            "invited": library.rights.members("ana", shared.id),
            "folders": library.store.folders.of("ana", shared.id),
            "hits": [hit.passage for hit in hits],
            "scores": [round(hit.lexical or 0.0, 9) for hit in hits],
            "cosines": [round(hit.cosine or 0.0, 6) for hit in hits],
            "attached": library.attached("ana", ["file_1"])["file_1"].document,
            "file": library.store.file("ana", library.store.newest(shared.id).id),  # type: ignore[union-attr]
            "job": library.ingest.wait(job, 30),
        }


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A data directory with documents of every kind, and a job that no server has ended."""
    data = tmp_path / "data"
    data.mkdir()
    with Library.open(data / "documents", WordEmbedder()) as library:
        mine = library.collection("ana").id
        library.add("ana", mine, DAMS)
        admit(library, "ana", mine, "ben", "reader")
        library.rights.invite("ana", mine, "cy", "writer")
        folder = library.store.folders.enter("ana", mine, "/srv/notes")
        (tmp_path / "page.txt").write_text("A hill.")
        given = Given("notes/page.txt", tmp_path / "page.txt", {"a": 1}, folder=folder.id)
        library.ingest.wait(library.ingest.submit("ana", mine, [given]).id, 30)
        for name in ("file_1", "file_2"):
            copy = library.new_file()
            copy.write_text("An attached lake.")
            library.attach("ana", name, "lake.txt", copy)
            library.ingest.wait(library.ingest.jobs.newest(library.rights.attached("ana")[name]).id, 30)  # type: ignore[union-attr]
        library.detach("ana", ["file_2"])  # its numbers are never given again
        library.ingest.jobs.forget(library.rights.attached("ana")["file_1"])
    return data


def test_documents_are_the_same_in_postgresql(shelf: Path, address: str) -> None:
    before = documents(shelf, None)
    done = migrate(shelf, address)
    assert done.exit_code == 0, done.output
    assert f"documents: documents: {len(DAMS) + 2}" in done.output
    engine = postgres_engine(address, 30, sole=False)
    assert documents(shelf, engine) == before
    with Library.open(shelf / "documents", WordEmbedder(), engine=engine) as library:
        new = library.rights.create("ana", "new").id
        assert new > max(number for number in library.rights.attached("ana").values()) + 1  # file_2 had the next
        library.add("ana", new, [Text("more", "More of it.")])
    again = migrate(shelf, address)
    assert again.exit_code == 1 and "has documents already: collections has" in again.stderr


def test_documents_follow_chats_that_were_copied_before(shelf: Path, address: str) -> None:
    (shelf / "documents").rename(shelf.parent / "documents")
    fill(shelf)
    assert migrate(shelf, address).exit_code == 0
    (shelf.parent / "documents").rename(shelf / "documents")
    refused = migrate(shelf, address)
    assert refused.exit_code == 1 and "--documents-only" in refused.stderr
    done = CliRunner().invoke(cli, ["migrate", "--documents-only", "--from", str(shelf), "--to", address])
    assert done.exit_code == 0, done.output
    assert documents(shelf, postgres_engine(address, 30, sole=False))["hits"]


@pytest.mark.parametrize("place", ["encode_vector", "chats"])
def test_documents_that_are_not_copied_whole_are_not_copied(
    shelf: Path, address: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(shelf)
    if place == "chats":  # after the documents
        monkeypatch.setattr("app.cli.migrate_command._converted", lambda table, row: {**row, "title": "another"})
    else:
        zeros = "[" + ",".join(["0"] * WordEmbedder.size) + "]"
        monkeypatch.setattr("retrieval.postgres.postgres_database.PostgresDatabase.encode_vector", lambda *_: zeros)
    done = migrate(shelf, address)
    assert done.exit_code == 1 and "Nothing was copied" in done.stderr
    if place == "encode_vector":
        assert "The table vectors was not copied whole" in done.stderr
    monkeypatch.undo()
    assert migrate(shelf, address).exit_code == 0  # it is empty still
