"""Files of tools in the database: names, types, versions, limits, and whose they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from app.db import artifact_store
from app.db.artifact_store import MAX_NAME, clean_name, media_type_of
from app.db.sqlite import NotThere
from app.db.store import Store
from app.db.tables import artifacts
from tests.app import postgres
from tools.context import FileContent

DATABASES = postgres.DATABASES

PNG = b"\x89PNG\r\n\x1a\n..."


@pytest.fixture
async def store(tmp_path: Path, address: str | None) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path, address)
    yield store
    await store.close()


async def chat_of(store: Store, user: str = "ana") -> str:
    chat = await store.chats.create(user)
    return str(chat["id"])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("../../etc/passwd", "etc_passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        (".htaccess", "htaccess"),
        ('a"; filename="b.exe', "a_; filename=_b.exe"),
        ("a\r\nSet-Cookie: x.csv", "aSet-Cookie_ x.csv"),
        ("out/table.csv", "out_table.csv"),
        ("\u202egnp.exe", "gnp.exe"),
        ("…", "…"),
        ("/", "file"),
        ("Grüße.csv", "Grüße.csv"),
        ("x" * 200 + ".svg", "x" * (MAX_NAME - 4) + ".svg"),
    ],
)
def test_a_name_is_one_plain_component(given: str, kept: str) -> None:
    assert clean_name(given) == kept


@given(st.text(max_size=300))
def test_no_name_leaves_its_folder_or_its_header(name: str) -> None:
    kept = clean_name(name)
    assert 0 < len(kept) <= MAX_NAME and kept.isprintable() and not kept.startswith(".")
    assert not set(kept) & set('/\\"\r\n\0') and clean_name(kept) == kept


@pytest.mark.parametrize(
    ("name", "content", "media_type"),
    [
        ("a.csv", b"a,b\n1,2\n", "text/csv"),
        ("a.CSV", "ä".encode(), "text/csv"),
        ("a.csv", b"\xff\xfe", "application/octet-stream"),
        ("a.html", b"<p>", "text/html"),
        ("a.html", b"\0", "application/octet-stream"),
        ("a.png", PNG, "image/png"),
        ("a.png", b"<html><script>", "application/octet-stream"),
        ("a.svg", b"<svg/>", "image/svg+xml"),
        ("a.js", b"alert(1)", "text/plain"),
        ("a.exe", b"MZ", "application/octet-stream"),
        ("html", b"<p>", "text/html"),
    ],
)
def test_a_type_is_what_the_bytes_bear_out(name: str, content: bytes, media_type: str) -> None:
    assert media_type_of(name, content) == media_type


async def test_the_same_name_again_is_a_new_version_and_the_same_bytes_are_not(store: Store) -> None:
    chat, other = await chat_of(store), await chat_of(store)
    artifacts = store.artifacts
    first = await artifacts.keep(chat, "run_1", "c1", [FileContent("a.csv", b"1"), FileContent("b.csv", b"1")])
    again = await artifacts.keep(chat, "run_1", "c2", [FileContent("a.csv", b"1")])
    second = await artifacts.keep(chat, "run_2", "c1", [FileContent("a.csv", b"2")])
    back = await artifacts.keep(chat, "run_3", "c1", [FileContent("a.csv", b"1")])
    beside = await artifacts.keep(other, "run_4", "c1", [FileContent("a.csv", b"1")])
    assert [each.version for each in (*first.kept, *again.kept, *second.kept, *back.kept)] == [1, 1, 1, 2, 3]
    assert again.kept == first.kept[:1] and beside.kept[0].version == 1
    listed = await artifacts.of("ana", chat)
    assert [(each["name"], each["version"]) for each in listed] == [
        ("a.csv", 1), ("b.csv", 1), ("a.csv", 2), ("a.csv", 3)
    ]  # fmt: skip
    assert not {"content", "digest"} & set(listed[0])
    assert (await artifacts.get("ana", second.kept[0].id))["content"] == b"2"


async def test_nobody_else_finds_it_and_it_goes_with_its_chat(store: Store) -> None:
    chat, his = await chat_of(store), await chat_of(store, "bob")
    (kept,) = (await store.artifacts.keep(chat, "r", "c", [FileContent("a.csv", b"1")])).kept
    for missing in (store.artifacts.get("bob", kept.id), store.artifacts.of("bob", chat)):
        with pytest.raises(NotThere):
            await missing
    await store.deleted.delete("chat", "ana", chat)
    with pytest.raises(NotThere):
        await store.artifacts.get("ana", kept.id)
    await store.deleted.restore("chat", "ana", chat)
    assert (await store.artifacts.get("ana", kept.id))["content"] == b"1"
    await store.deleted.delete("chat", "ana", chat)
    await store.deleted.purge(0)
    gone = await store.artifacts.keep(chat, "r", "c", [FileContent("a.csv", b"1")])
    assert gone.kept == () and gone.refused == ("a.csv is not kept: its chat is gone.",)
    await store.artifacts.keep(his, "r", "c", [FileContent("a.csv", b"1")])
    await store.delete_user("bob")
    assert await store.database.rows(select(artifacts.c.id)) == []


@pytest.mark.parametrize(
    ("limit", "why"),
    [("MAX_CHAT_FILES", "the chat has 2 files"), ("MAX_CHAT_BYTES", "a new chat"), ("MAX_USER_BYTES", "all chats")],
)
async def test_what_passes_a_limit_is_refused_with_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: str, why: str
) -> None:
    chat = await chat_of(store)
    monkeypatch.setattr(artifact_store, limit, 2)
    files = [FileContent(f"{number}.txt", b"x") for number in range(3)]
    made = await store.artifacts.keep(chat, "r", "c", files)
    assert [each.name for each in made.kept] == ["0.txt", "1.txt"]
    (refused,) = made.refused
    assert refused.startswith("2.txt is not kept: ") and why in refused
