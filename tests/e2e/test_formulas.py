"""Formulas in answers: set by KaTeX when there is one, the source where they are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.e2e.support.fake_server import FakeServer, Gate, answer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.slow

TEXT = (
    "Euler: $e^{i\\pi} + 1 = 0$, for \\$5 or $5 and $10.\n\n$$\n\\sum_{i=1}^n i = \\frac{n(n+1)}{2}\n$$\n\n"
    "Not TeX: $\\nonsense{$. Not trusted: $\\href{javascript:alert(1)}{x}$ $\\includegraphics{https://a.example/b.png}$\n\n"
    "$$\nnever closed"
)


def ask(page: Page) -> Locator:
    page.get_by_role("textbox", name="Message").fill("Mathematics")
    page.keyboard.press("Enter")
    return page.get_by_role("article", name="Ponder")


def test_formulas_are_set_as_they_come(page: Page, fake: FakeServer) -> None:
    half = TEXT.index("\\frac")
    fake.play(answer(*(TEXT[i : i + 3] for i in range(0, half, 3)), Gate("half"), TEXT[half - half % 3 + 3 :]))
    answered = ask(page)
    expect(answered.locator(".formula.set math")).to_have_count(1)  # what a screen reader reads
    expect(answered.locator(".formula.open")).to_contain_text("\\sum")  # its end has not come
    fake.open("half")
    expect(answered.locator(".formula.set.display math")).to_have_count(1)
    expect(answered).to_contain_text("for $5 or $5 and $10.")
    expect(answered).to_contain_text("$$ never closed")
    assert answered.locator("a, img").count() == 0
    page.reload()
    expect(answered.locator(".formula.set math")).not_to_have_count(0)


def test_katex_is_fetched_with_the_first_formula_alone(page: Page, fake: FakeServer) -> None:
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    page.reload()
    fake.play(answer("It costs $5 or $6."))
    expect(ask(page)).to_contain_text("$6")
    assert fetched and not [url for url in fetched if "katex" in url.lower()]
    fake.play(answer("$x$"))
    expect(ask(page).last.locator(".formula.set math")).to_have_count(1)
    assert [url for url in fetched if "katex" in url.lower()]
