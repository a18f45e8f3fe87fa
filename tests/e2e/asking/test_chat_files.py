"""Files of a chat on the page, against the real server: dropped, pasted or chosen, read while the question is written,
shown on its message, opened, and added to the library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import MAX_UPLOAD, RealServer
from tests.e2e.test_axe import AXE, violations
from tests.e2e.test_documents_page import BEES, DAM, SIDEWAYS, drop, long_text, sources, text_file
from tests.retrieval import made

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from playwright.sync_api import FilePayload, Locator

pytestmark = [pytest.mark.browser, pytest.mark.slow]
WHEN = "When was the dam at Hollow Creek finished?"
SHOTS: Path | None = None  # a folder, where somebody is to look


@pytest.fixture
def server(documents_server: RealServer) -> RealServer:
    return documents_server


@pytest.fixture
def page(new_page: NewPage, server: RealServer) -> Page:
    page = new_page()
    page.goto(server.url)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    return page


def shot(page: Page, name: str) -> None:
    if SHOTS is not None:
        page.screenshot(path=SHOTS / f"{name}.png")


def choose(page: Page, *files: FilePayload, button: str = "Add files") -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name=button).click()
    chooser.value.set_files(list(files))


def chips(page: Page, name: str = "Files") -> Locator:
    return page.get_by_role("list", name=name).get_by_role("listitem")


def ask(page: Page, words: str = WHEN) -> None:
    page.get_by_role("textbox", name="Message").fill(words)
    page.keyboard.press("Enter")


def question(page: Page) -> Locator:
    return page.get_by_role("article", name="You")


def test_a_first_document_is_dropped_asked_cited_and_opened(page: Page, server: RealServer) -> None:
    drop(page, [("dam.txt", DAM)], release=False)
    expect(page.get_by_text("The files go with your next message")).to_be_visible()
    drop(page, [("dam.txt", DAM), ("bees.txt", BEES)])
    expect(chips(page)).to_have_count(2)
    expect(chips(page).first).to_contain_text(re.compile(r"dam\.txt.*Text · 69 bytes", re.S))
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    shot(page, "composer")
    with page.expect_request(lambda request: request.url.endswith("/runs")) as asked:
        ask(page)
    body = json.loads(asked.value.post_data or "")
    assert len(body["files"]) == 2 and "collections" not in body
    answer = page.get_by_role("article", name="Ponder")
    expect(answer).to_contain_text("1931")
    expect(chips(page)).to_have_count(2)
    expect(question(page)).to_contain_text("dam.txt")
    assert sources(server) == [] and server.http.get("/api/collections").json()["collections"] == []
    shot(page, "asked")
    assert not AXE.exists() or not violations(page)
    answer.get_by_role("button", name=re.compile(r"^Source \d")).first.click()
    expect(page.locator("mark")).to_contain_text("1931")
    page.keyboard.press("Escape")
    page.reload()
    expect(question(page).get_by_role("link", name="dam.txt")).to_be_visible()
    question(page).get_by_role("link", name="dam.txt").click()
    expect(page).to_have_url(re.compile(r"/documents/\d+$"))
    expect(page.get_by_role("region", name="Text of the document")).to_contain_text("finished in 1931")
    page.get_by_role("link", name="All documents").click()
    expect(page.get_by_text("No documents yet")).to_be_visible()


def test_a_question_waits_for_its_files_and_goes_by_itself(page: Page, server: RealServer) -> None:
    choose(page, text_file("long.txt", f"{long_text(400)}\n\n{DAM}"))
    expect(chips(page)).to_contain_text(re.compile("sending|being read"))
    ask(page)
    expect(page.get_by_text("Your message goes as soon as its files are read.")).to_be_visible()
    assert page.get_by_role("article").count() == 0
    shot(page, "waiting")
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("1931", timeout=90_000)
    expect(page.get_by_role("textbox", name="Message")).to_have_value("")


def test_a_file_that_cannot_be_read_says_why_and_is_taken_away(page: Page, server: RealServer) -> None:
    choose(page, text_file("broken.pdf", "%PDF-1.7 and no more"), text_file("dam.txt", DAM))
    bad = chips(page).filter(has_text="broken.pdf")
    expect(bad).to_contain_text("The PDF is damaged or was cut off.")
    expect(chips(page).filter(has_text="dam.txt")).to_contain_text("Text")
    ask(page)
    expect(page.get_by_text("broken.pdf cannot be answered from. Take it away to send your message.")).to_be_visible()
    shot(page, "failed")
    page.get_by_role("button", name="Take away broken.pdf").click()
    expect(chips(page)).to_have_count(1)
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("1931")


def test_what_cannot_be_attached_is_said_at_once(page: Page) -> None:
    for file, why in (
        (text_file("empty.txt", ""), "empty.txt: The file is empty."),
        (text_file("photo.png", "x", "image/png"), "photo.png: Pictures, sound and video are not read."),
        (text_file("many.zip", "x"), "many.zip: Archives are not read."),
        (text_file("large.txt", "x" * MAX_UPLOAD), "large.txt: Larger than the limit of 1 MB"),
    ):
        choose(page, file)
        expect(page.get_by_text(why)).to_be_visible()
    choose(page, *[text_file(f"{n}.txt", f"Number {n}.") for n in range(11)])
    expect(page.get_by_text("A message takes 10 files.")).to_be_visible()
    expect(chips(page)).to_have_count(10)


def test_an_edited_question_keeps_its_files_and_another_chat_has_none(page: Page, server: RealServer) -> None:
    choose(page, text_file("dam.txt", DAM))
    ask(page)
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("1931")
    page.get_by_role("button", name="Edit the question").click()
    with page.expect_request(lambda request: request.url.endswith("/runs")) as asked:
        page.get_by_role("textbox", name="Your question").fill("What is the dam at Hollow Creek built of?")
        page.keyboard.press("Enter")
    assert len(json.loads(asked.value.post_data or "")["files"]) == 1
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("granite")
    expect(question(page)).to_contain_text("dam.txt")
    choose(page, text_file("bees.txt", BEES))
    expect(chips(page).filter(has_text="bees.txt")).to_be_visible()
    page.get_by_role("link", name="New chat").or_(page.get_by_role("button", name="New chat")).first.click()
    expect(page.get_by_role("list", name="Files")).to_have_count(0)


def test_a_file_is_added_to_the_library_by_the_keyboard(page: Page, server: RealServer) -> None:
    choose(page, text_file("dam.txt", DAM))
    ask(page)
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("1931")
    keep = page.get_by_role("button", name="Add dam.txt to the library")
    keep.focus()
    page.keyboard.press("Enter")
    sheet = page.get_by_role("dialog", name="Add dam.txt to the library")
    expect(sheet.get_by_label("Into the collection")).to_be_visible()
    shot(page, "library")
    sheet.get_by_label("Into the collection").select_option("A new collection…")
    sheet.get_by_label("Name of the collection").fill("Dams")
    page.keyboard.press("Enter")
    expect(page.get_by_text("dam.txt is in “Dams”.")).to_be_visible()
    expect(keep).to_be_focused()
    assert sources(server) == ["dam.txt"]


def test_an_imported_chat_says_that_it_has_none_of_its_files(page: Page, server: RealServer) -> None:
    said = {"created_at": 1.0, "thinking": ""}
    messages = [
        {
            "id": "0",
            "parent_id": None,
            "role": "user",
            "content": "q",
            "files": [{"name": "a.pdf", "bytes": 9}],
            **said,
        },
        {"id": "1", "parent_id": "0", "role": "assistant", "content": "a", **said},
    ]
    chat = {"title": "t", "created_at": 1.0, "updated_at": 2.0, "leaf_id": "1", "messages": messages}
    sent = {"format": "ponder.chats", "version": 1, "chats": [chat]}
    (number,) = server.http.post("/api/chats/import", json=sent).json()["chat_ids"]
    page.goto(f"{server.url}/c/{number}")
    expect(chips(page)).to_contain_text("an imported chat has the names of its files alone")
    assert page.get_by_role("button", name=re.compile("to the library")).count() == 0
    server.http.delete(f"/api/chats/{number}")


def test_files_fit_a_phone_and_the_dark_and_speak_german(new_page: NewPage, server: RealServer, watch: Watch) -> None:
    page = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True, locale="de-DE",
                    color_scheme="dark", reduced_motion="reduce")  # fmt: skip
    page.goto(server.url)
    pdf = {"name": f"{'sehr-langer-name-' * 5}.pdf", "mimeType": "application/pdf", "buffer": made.pdf([[DAM], [BEES]])}
    broken = text_file("kaputt.pdf", "%PDF-1.7 and no more")
    choose(page, pdf, broken, button="Dateien hinzufügen")  # type: ignore[arg-type]
    expect(chips(page, "Dateien").first).to_contain_text("2 Seiten")
    expect(chips(page, "Dateien").last).to_contain_text("damaged")
    shot(page, "phone")
    assert not page.evaluate(SIDEWAYS)
    assert not AXE.exists() or not violations(page)
    page.get_by_role("button", name="kaputt.pdf wegnehmen").click()
    page.get_by_role("textbox", name="Nachricht").fill(WHEN)
    page.get_by_role("button", name="Senden").click()
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("1931")
    shot(page, "phone-asked")
    assert not page.evaluate(SIDEWAYS)
    assert not AXE.exists() or not violations(page)
    page.get_by_role("button", name=re.compile("in die Bibliothek aufnehmen")).click()
    expect(page.get_by_role("dialog")).to_be_visible()
    shot(page, "phone-library")
    assert not AXE.exists() or not violations(page)
