"""Shortcuts, the sheet that lists them, and the page's second language."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import NewPage
from tests.e2e.support.fake_server import FakeServer, Gate, answer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.slow


def box(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message")


def ask(page: Page, fake: FakeServer, text: str) -> None:
    fake.play(answer("Yes."))
    box(page).fill(text)
    box(page).press("Enter")
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("Yes.")


def test_keys_go_between_chats_and_to_the_message_box(page: Page, fake: FakeServer) -> None:
    ask(page, fake, "First")
    page.keyboard.press("Control+Shift+O")
    expect(page).to_have_url(f"{fake.url}/")
    ask(page, fake, "Second")
    expect(page.get_by_role("link", name="Second")).to_be_visible()
    questions = page.get_by_role("article", name="You")
    page.keyboard.press("Alt+ArrowDown")
    expect(questions).to_have_text(["First"])
    page.keyboard.press("Alt+ArrowDown")  # there is none below
    expect(questions).to_have_text(["First"])
    page.keyboard.press("Alt+ArrowUp")
    expect(questions).to_have_text(["Second"])
    page.get_by_role("link", name="First").focus()
    page.keyboard.press("Shift+Escape")
    expect(box(page)).to_be_focused()


def test_escape_in_the_help_closes_it_and_stops_nothing(page: Page, fake: FakeServer) -> None:
    fake.play([Gate("go"), *answer("Yes.")])
    box(page).fill("Go on")
    box(page).press("Enter")
    page.keyboard.press("Control+/")
    help = page.get_by_role("dialog", name="Keys and language")
    expect(help).to_contain_text("Stop the answer")
    page.keyboard.press("Escape")
    expect(help).to_have_count(0)
    expect(box(page)).to_be_focused()
    fake.open("go")
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("Yes.")


def test_the_language_is_the_browsers_until_another_is_chosen(fake: FakeServer, new_page: NewPage) -> None:
    page = new_page(locale="de-AT")
    page.goto(fake.url)
    expect(page.get_by_role("heading", level=1)).to_have_text("Frag, und sieh beim Denken zu.")
    expect(page.locator("html")).to_have_attribute("lang", "de")
    draft = page.get_by_role("textbox", name="Nachricht")
    draft.fill("Halb geschrieben")
    page.get_by_role("button", name="Tasten und Sprache").click()
    page.get_by_label("Sprache", exact=True).select_option(label="English")
    expect(page.get_by_role("heading", level=1)).to_have_text("Ask, and watch it think.")
    page.get_by_role("button", name="Close").click()
    expect(box(page)).to_have_value("Halb geschrieben")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("Ask, and watch it think.")
    page.keyboard.press("Control+/")
    page.get_by_label("Language", exact=True).select_option(label="As the browser")
    expect(page.get_by_role("heading", level=1)).to_have_text("Frag, und sieh beim Denken zu.")


def test_an_answer_in_german_has_german_numbers(fake: FakeServer, new_page: NewPage) -> None:
    page = new_page(locale="de")
    page.goto(fake.url)
    fake.play(answer("Ja."))
    page.get_by_role("textbox", name="Nachricht").fill("Ja?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Tempo und Größe dieser Antwort").click()
    expect(page.get_by_role("article", name="Ponder")).to_contain_text("Tokens/s")
    expect(page.get_by_role("article", name="Du")).to_have_text("Ja?")
