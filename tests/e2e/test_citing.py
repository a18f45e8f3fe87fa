"""Tests what an answer cites, opened in its document: beside the conversation or over it, as text or as a page with
boxes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from app.runs.events import AnswerDelta, AnswerDone, CitationRef, SourceShown, ToolSource
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_documents import PASSAGE
from tests.e2e.support.fake_server import FakeServer, Script, answer
from tests.e2e.support.real_server import RealServer, add
from tests.e2e.support.told import call, dam, found, result, support
from tests.retrieval import made

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.browser, pytest.mark.slow]

STORY = (
    "Work on the dam at Orsk began in 1928. The dam of Orsk was finished in 1931. The city of Orsk paid for the dam."
)
QUESTION = "When was the dam of Orsk finished?"
FROM_ALL = """localStorage.setItem(
    "ponder.settings", JSON.stringify({ collections: "all", sampling: { temperature: 0 } })
)"""


def ask(page: Page, words: str) -> Locator:
    """The answer, when it is whole."""
    page.get_by_role("textbox", name="Message").fill(words)
    page.keyboard.press("Enter")
    reply = page.get_by_role("article", name="Ponder").last
    expect(reply).to_have_attribute("aria-busy", "false", timeout=30_000)
    return reply


def asking(new_page: NewPage, url: str, **options: object) -> Page:
    """A new chat that answers from all documents."""
    page = new_page(**options)
    page.add_init_script(FROM_ALL)
    page.goto(url)
    return page


def example(new_page: NewPage, url: str, name: str) -> tuple[Page, Locator]:
    """Presses an example of the first screen; returns the page and the answer."""
    page = new_page()
    page.goto(url)
    page.get_by_role("button", name=name).click()
    return page, page.get_by_role("article", name="Ponder").last


def panel(page: Page) -> Locator:
    return page.get_by_role("dialog", name=re.compile("^Passage of "))


def told(source: SourceShown, sources: list[SourceShown]) -> Script:
    """An answer of one sentence that rests on a source."""
    text = "It was. [S1]"
    said = support(1, text, text, "supported", [source])
    return [found("answer", sources), AnswerDelta(text=text), said, AnswerDone(text=text, finish_reason="stop"),
            answer("")[-1]]  # fmt: skip


# -- against the real server


def test_the_sample_document_is_added_and_asked_by_one_press(new_page: NewPage, documents_server: RealServer) -> None:
    page, reply = example(new_page, documents_server.url, "Ask a document")
    expect(reply).to_contain_text("Ana Brandt")
    reply.locator("button.cite").first.click()
    expect(panel(page)).to_contain_text("Ana Brandt")
    page.keyboard.press("Escape")
    expect(page.get_by_text("From Sample")).to_be_visible()
    page.get_by_role("link", name="New chat").click()
    expect(page.get_by_text("From Sample")).to_have_count(0)
    page.get_by_role("button", name="Ask a document").click()  # once more: it is there, and not added again
    expect(page.get_by_role("article", name="Ponder").last).to_contain_text("Ana Brandt")
    assert len(documents_server.http.get("/api/documents").json()["documents"]) == 1


def test_a_sum_is_worked_out_by_the_calculator_by_one_press(new_page: NewPage, documents_server: RealServer) -> None:
    _, reply = example(new_page, documents_server.url, "Call a tool")
    expect(reply).to_contain_text("417 * 23")
    expect(reply).to_contain_text("9591")


def test_a_citation_opens_its_passage_beside_the_answer(new_page: NewPage, documents_server: RealServer) -> None:
    add(documents_server, "orsk.md", f"# Orsk\n\nA town in the hills.\n\n{STORY}\n\nIt has nine towers.")
    page = asking(new_page, documents_server.url)
    reply = ask(page, QUESTION)
    mark = reply.locator("button.cite").first
    mark.click()
    marked = panel(page).locator("mark")
    expect(marked).to_be_visible()
    cited = marked.inner_text()
    assert cited in STORY
    expect(panel(page).get_by_role("region", name="The passage")).to_contain_text(STORY)
    beside, prose = panel(page).bounding_box(), reply.bounding_box()
    assert beside is not None and prose is not None and prose["x"] + prose["width"] <= beside["x"]
    page.get_by_role("textbox", name="Message").fill("one may go on writing")
    panel(page).get_by_role("link", name="Open the document").click()
    expect(page).to_have_url(re.compile(r"/documents/\d+\?start=\d+&end=\d+$"))
    expect(page.locator("main mark")).to_have_text(cited)
    expect(page.locator("main mark")).to_be_in_viewport()
    page.go_back()
    expect(reply.locator("button.cite").first).to_be_visible()


def test_a_citation_of_a_pdf_opens_its_page_with_the_boxes(new_page: NewPage, documents_server: RealServer) -> None:
    pages = [["Nothing to see here."], ["", "", "", *STORY.replace(". ", ".\n").split("\n")]]
    add(documents_server, "orsk.pdf", made.pdf(pages))
    page = asking(new_page, documents_server.url)
    ask(page, QUESTION).locator("button.cite").first.click()
    picture = panel(page).get_by_role("img", name="Page 2 of 2")
    expect(picture).to_be_visible()
    expect(picture).to_have_js_property("complete", True)
    assert picture.evaluate("image => image.naturalWidth") > 0
    box = panel(page).locator(".box").first
    expect(box).to_be_in_viewport()
    cited = panel(page).locator(".heard").inner_text()
    drawn = made.drawn(pages, cited.split()[0])
    sheet, shown = picture.bounding_box(), box.bounding_box()
    assert sheet is not None and shown is not None
    bottom = made.HEIGHT * (1 - (shown["y"] + shown["height"] - sheet["y"]) / sheet["height"])
    assert min(abs(bottom - each.baseline) for each in drawn) < 6  # points
    panel(page).get_by_role("button", name="Text").click()
    expect(panel(page).locator("mark")).to_have_text(cited)


def test_a_document_deleted_since_is_said_to_be_gone(
    new_page: NewPage, documents_server: RealServer, watch: Watch
) -> None:
    watch.expect_errors()
    number = add(documents_server, "orsk.txt", STORY)
    page = asking(new_page, documents_server.url)
    mark = ask(page, QUESTION).locator("button.cite").first
    assert documents_server.http.delete(f"/api/documents/{number}").status_code == 204
    mark.click()
    expect(panel(page).get_by_role("note")).to_contain_text("This document was deleted since.")
    assert panel(page).locator("mark").inner_text() in STORY
    expect(panel(page).get_by_role("link")).to_have_count(0)


# -- of every kind, by a script


def test_a_document_that_changed_since_is_said_to_have(page: Page, fake: FakeServer) -> None:
    sources, source = dam()
    fake.world.documents[1].text = fake.world.documents[1].text.replace("1931", "1932")
    fake.play(told(source, sources))
    ask(page, "When?").locator("button.cite").click()
    expect(panel(page).get_by_role("note")).to_contain_text("This document has changed since.")
    expect(panel(page).locator("mark")).to_have_text("The dam was finished in 1931, two years late.")


def test_another_citation_takes_the_place_of_the_first_and_the_focus_goes_back(page: Page, fake: FakeServer) -> None:
    sources, source = dam()
    fake.play(told(source, sources))
    reply = ask(page, "When?")
    reply.locator("button.cite").click()
    expect(panel(page)).to_have_accessible_name("Passage of The dam in the valley.pdf")
    other = reply.get_by_role("button", name="Minutes")
    other.click()
    expect(panel(page)).to_have_accessible_name("Passage of Minutes")
    expect(panel(page)).to_contain_text("Nothing.")
    page.keyboard.press("Escape")
    expect(panel(page)).to_have_count(0)
    expect(other).to_be_focused()


def test_a_source_of_a_call_opens_in_its_document(page: Page, fake: FakeServer) -> None:
    text = "The dam was finished in 1931, two years late."
    start = 1000 + PASSAGE.index(text)
    place = ToolSource(
        title="The dam in the valley.pdf", url=None, text=text, document=1, page=12, start=start, end=start + len(text)
    )
    of_the_web = ToolSource(
        title="A page", url="http://127.0.0.1/", text=None, document=None, page=None, start=None, end=None
    )
    done = result("search_documents", "[S1] It was.").model_copy(update={"sources": [place, of_the_web]})
    fake.play([call("search_documents", '{"query": "dam"}'), done], answer("In 1931."))
    reply = ask(page, "When?")
    reply.get_by_role("button", name="search_documents").click()
    expect(reply.get_by_role("link", name="A page")).to_be_visible()
    reply.get_by_role("button", name="The dam in the valley.pdf").click()
    expect(panel(page).locator("mark")).to_have_text(text)
    expect(panel(page).get_by_role("region", name="The passage")).to_contain_text("402 metres long.")
    expect(panel(page)).to_contain_text("page 12")


def test_on_a_phone_the_passage_is_a_sheet_over_the_answer(fake: FakeServer, new_page: NewPage) -> None:
    page = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page.goto(fake.url)
    sources, source = dam()
    fake.play(told(source, sources))
    ask(page, "When?").locator("button.cite").tap()
    expect(panel(page).locator("mark")).to_be_in_viewport()
    sheet = panel(page).bounding_box()
    assert sheet is not None and sheet["width"] == 360 and sheet["y"] > 60
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    page.touchscreen.tap(180, 30)
    expect(panel(page)).to_have_count(0)


def test_a_passage_in_another_script_runs_its_own_way(page: Page, fake: FakeServer) -> None:
    text = "تم الانتهاء من السد في عام 1931."
    fake.world.documents[1].title = "كتاب"
    fake.world.documents[1].text = text
    source = SourceShown(label="S1", document=1, title="كتاب", page=None, start=0, end=len(text), text=text, score=0.9)
    fake.play(told(source, [source]))
    ask(page, "متى؟").locator("button.cite").click()
    shown = panel(page).locator("mark")
    expect(shown).to_have_text(text)
    assert shown.evaluate("mark => getComputedStyle(mark.parentElement).direction") == "rtl"


def test_a_refusal_quotes_what_is_nearest_and_cites_nothing(page: Page, fake: FakeServer) -> None:
    sources, near = dam()
    fake.play([found("none", sources, [near]), *answer("I don't know.")])
    reply = ask(page, "Who painted it?")
    expect(reply.get_by_role("heading", name="The nearest passages")).to_be_visible()
    expect(reply.get_by_role("blockquote")).to_have_text(near.text)
    expect(reply.locator(".cite, .cited")).to_have_count(0)
    reply.get_by_role("button", name="The dam in the valley.pdf").click()
    expect(panel(page)).to_contain_text("402 metres long.")


def test_a_supported_sentence_that_does_not_answer_says_so(page: Page, fake: FakeServer) -> None:
    sources, source = dam()
    grounds, delta, said, *end = told(source, sources)
    assert isinstance(said, CitationRef)
    fake.play([grounds, delta, said.model_copy(update={"answers": 0.12}), *end])
    expect(ask(page, "Who painted it?")).to_contain_text("may not answer")
