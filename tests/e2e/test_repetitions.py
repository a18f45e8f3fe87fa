"""Answers that repeat themselves, and messages that cannot be shown: the chat that they are in stays readable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
from playwright.sync_api import expect

from app.runs.events import AnswerDone
from tests.e2e.support.fake_server import FakeServer, answer

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.e2e.conftest import Watch

pytestmark = pytest.mark.slow

BREAKS_ONE_OBSERVER = """
const Real = window.IntersectionObserver;
let broken = false;
window.IntersectionObserver = class extends Real {
  constructor(...given) {
    if (!broken) { broken = true; throw new Error("broken on purpose"); }
    super(...given);
  }
};
"""


@pytest.mark.parametrize("unit", ["1. ", "> ", "- > 1. ", "[*a ", "<div>"])
def test_an_answer_that_repeats_itself_is_shown_streamed_and_stored(page: Page, fake: FakeServer, unit: str) -> None:
    text = f"Here it begins.\n\n{unit * 1500}\n\nHere it ends."
    fake.play(answer(*(text[at : at + 400] for at in range(0, len(text), 400))))
    page.get_by_role("textbox", name="Message").fill("Repeat")
    page.keyboard.press("Enter")
    said = page.get_by_role("article", name="Ponder")
    expect(said).to_contain_text("Here it ends.")
    page.reload()
    expect(said).to_contain_text("Here it begins.")
    expect(said).to_contain_text("Here it ends.")


@pytest.mark.parametrize(
    ("finish", "said"), [("repetition", "the answer repeated itself"), ("sources", "longer than its sources")]
)
def test_it_is_said_why_an_answer_was_ended(
    page: Page, fake: FakeServer, finish: Literal["repetition", "sources"], said: str
) -> None:
    fake.play([AnswerDone(text=each.text, finish_reason=finish) if isinstance(each, AnswerDone) else each
               for each in answer("The dam, the dam, the dam")])  # fmt: skip
    page.get_by_role("textbox", name="Message").fill("Where?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Ponder")).to_contain_text(said)


def test_a_message_that_cannot_be_shown_takes_no_other_with_it(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expected = True  # the page writes why into the console
    for text in ("First, *with* form.", "Second, *with* form."):
        fake.play(answer(text))
        page.get_by_role("textbox", name="Message").fill("Say")
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="Ponder").last).to_contain_text(text.replace("*", ""))
    page.add_init_script(BREAKS_ONE_OBSERVER)
    page.reload()
    expect(page.get_by_text("This message could not be shown.")).to_have_count(1)
    expect(page.locator("pre", has_text="with* form.")).to_have_count(1)
    expect(page.get_by_role("article", name="Ponder")).to_have_count(1)
