"""Chats that grow past the model's context: the page says above which message nothing is seen any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import NewPage
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

from tests.e2e.support.real_pages import ask, settled

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CONTEXT = 512
FORGOTTEN = "The model no longer sees what was said above."
LONG = " ".join(f"word{at}" for at in range(24))  # about a token a letter


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("endless")
    model = write_scripted(folder / "model", {"red": "The answer is red."})
    with running(
        folder, "--model", str(model), "--dtype", "float32", "--context-shift", "--max-model-len", str(CONTEXT)
    ) as started:
        yield started


def test_a_line_says_from_where_on_the_model_sees_a_long_chat(new_page: NewPage, server: RealServer) -> None:
    page: Page = new_page()
    page.goto(server.url)
    for number in range(2):
        ask(page, f"red {number} {LONG}")
        settled(page)
    line = page.get_by_text(FORGOTTEN)
    expect(line).to_have_count(0)  # all of it is seen
    for number in range(2, 5):
        ask(page, f"red {number} {LONG}")
        settled(page)
    expect(line).to_have_count(1)
    for _ in range(2):  # as it was asked, and as it is read again
        said = page.locator(".forgotten, article").all_inner_texts()
        at = next(place for place, text in enumerate(said) if FORGOTTEN in text)
        assert any("red 0" in text for text in said[:at])
        assert "red 4" in " ".join(said[at:]) and said[at + 1].count("red ") >= 1, (
            "a question is the first that is seen"
        )
        page.reload()
        expect(line).to_have_count(1)
