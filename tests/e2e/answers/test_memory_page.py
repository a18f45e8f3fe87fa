"""Memory on the page: a fact that was kept is told and taken back, and the notes are read, changed and erased."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.runs.events import MemoryKept, NoteKept
from tests.e2e.conftest import NewPage
from tests.e2e.support.fake_server import FakeServer, answer
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

from tests.e2e.support.real_pages import ask, reply, settled
from tests.e2e.test_axe import violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("memory")
    model = write_scripted(folder / "model", {"red": "The answer is red."})
    with running(folder, "--model", str(model), "--dtype", "float32") as server:
        yield server


@pytest.fixture
def page(new_page: NewPage, server: RealServer) -> Page:
    server.http.delete("/api/memory")
    server.http.patch("/api/memory", json={"enabled": True})
    page = new_page(reduced_motion="reduce")
    page.goto(server.url)
    return page


def notes(server: RealServer) -> list[str]:
    return [note["text"] for note in server.http.get("/api/memory").json()["notes"]]


def shot(page: Page, name: str) -> None:
    """Takes a picture where PONDER_SHOTS names a folder."""
    if folder := os.environ.get("PONDER_SHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def test_a_fact_of_a_message_is_told_and_taken_back_also_later(page: Page, server: RealServer) -> None:
    ask(page, "red as what? I live in Lyon.")
    settled(page)
    ask(page, "red again? I moved to Lisbon.")
    kept = reply(page).get_by_role("status").filter(has_text="Remembered for later chats:")
    expect(kept).to_contain_text("I moved to Lisbon, instead of “I live in Lyon”")
    shot(page, "memory-kept")
    page.reload()
    settled(page)
    kept.get_by_role("button", name="Undo: I moved to Lisbon").click()
    expect(reply(page).get_by_text("Taken back.")).to_be_visible()
    assert notes(server) == ["I live in Lyon"]
    assert not violations(page)


def test_notes_are_read_changed_and_erased(page: Page, server: RealServer) -> None:
    ask(page, "red as what? My name is Ana Lopez.")
    settled(page)
    page.get_by_role("link", name="Memory").first.click()
    listed = page.get_by_role("list", name="1 note")
    expect(listed).to_contain_text("from your message")
    listed.get_by_role("link", name="From “red as what? My name is Ana Lopez”").click()
    expect(reply(page)).to_contain_text("The answer is red.")
    page.go_back()
    page.get_by_role("textbox", name="New note").fill("I prefer short answers")
    page.get_by_role("button", name="Add a note").click()
    expect(page.get_by_role("list", name="2 notes")).to_be_visible()
    page.get_by_role("button", name="Change “My name is Ana Lopez”").click()
    page.get_by_role("textbox", name="Note", exact=True).fill("My name is Bo")
    page.keyboard.press("Enter")
    page.get_by_text("1 earlier text").click()
    expect(page.get_by_role("list", name="2 notes")).to_contain_text("My name is Ana Lopez")
    assert notes(server) == ["I prefer short answers", "My name is Bo"]
    assert not violations(page)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        shot(page, f"memory-{scheme}")
    page.set_viewport_size({"width": 360, "height": 740})
    shot(page, "memory-phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Erase “My name is Bo”").click()
    expect(page.get_by_role("list", name="1 note")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Export notes").click()
    assert [note["text"] for note in json.loads(Path(download.value.path()).read_text())["notes"]] == notes(server)
    page.get_by_role("button", name="Erase all notes").click()
    expect(page.get_by_role("alert")).to_contain_text("Erase the note?")
    page.get_by_role("button", name="Erase all", exact=True).click()
    expect(page.get_by_text("Nothing is remembered.")).to_be_visible()
    assert notes(server) == []
    page.get_by_role("checkbox", name="Remember things about me").uncheck()
    expect(page.get_by_role("textbox", name="New note")).to_have_count(0)
    assert server.http.get("/api/memory").json()["enabled"] is False


def test_the_page_is_german_too(new_page: NewPage, server: RealServer) -> None:
    server.http.patch("/api/memory", json={"enabled": True})
    server.http.post("/api/memory", json={"text": "Ich wohne in Wien"})
    page = new_page(locale="de-DE")
    page.goto(f"{server.url}/memory")
    expect(page.get_by_role("heading", name="Gedächtnis")).to_be_visible()
    expect(page.get_by_role("list", name="1 Notiz")).to_contain_text("von dir geschrieben")
    server.http.delete("/api/memory")


def test_a_full_memory_says_so(new_page: NewPage, fake: FakeServer) -> None:
    page = new_page()
    page.goto(fake.url)
    kept = MemoryKept(notes=[NoteKept(number=1, text="I live in Lyon", replaced=None)], full=True)
    told = answer("The end.")
    fake.play([*told[:-1], kept, told[-1]])
    ask(page, "What now?")
    expect(page.get_by_text("There is no room for more notes.")).to_be_visible()
