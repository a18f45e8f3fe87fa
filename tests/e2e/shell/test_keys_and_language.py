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


SPEECH = """
window.spoken = [];
speechSynthesis.speak = (said) => window.spoken.push(said);
speechSynthesis.cancel = () => window.spoken.push("cancelled");
window.SpeechRecognition = window.webkitSpeechRecognition = class extends EventTarget {
    start() { window.hearing = this; }
    stop() { this.dispatchEvent(new Event("end")); }
    hear(words) {
        const results = [Object.assign([{ transcript: words }], { isFinal: true })];
        this.dispatchEvent(Object.assign(new Event("result"), { results, resultIndex: 0 }));
    }
    fail(error) { this.dispatchEvent(Object.assign(new Event("error"), { error })); }
};
"""


def test_an_answer_is_read_aloud_by_sentences_without_its_code(new_page: NewPage, fake: FakeServer) -> None:
    fake.play(answer("It is **red**. So is that.\n\n```python\nprint(1)\n```\n"))
    page = new_page()
    page.add_init_script(SPEECH)
    page.goto(fake.url)
    page.get_by_role("textbox", name="Message").fill("Which colour?")
    page.keyboard.press("Enter")
    button = page.get_by_role("button", name="Read aloud")
    button.click()
    assert page.evaluate("spoken.map(each => each.text)") == ["It is red.", "So is that."]
    page.get_by_role("button", name="Stop reading").click()
    assert page.evaluate("spoken.at(-1)") == "cancelled"
    button.click()
    page.evaluate("spoken.at(-1).onend()")
    expect(button).to_be_visible()


def test_a_message_is_dictated_and_what_fails_is_said(new_page: NewPage, fake: FakeServer) -> None:
    page = new_page()
    page.add_init_script(SPEECH)
    page.goto(fake.url)
    box = page.get_by_role("textbox", name="Message")
    box.fill("Please,")
    button = page.get_by_role("button", name="Dictate")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    page.evaluate("hearing.hear('tell me a tale')")
    expect(box).to_have_value("Please, tell me a tale")
    page.evaluate("hearing.fail('not-allowed')")
    expect(page.get_by_text("the microphone is not allowed")).to_be_visible()
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
