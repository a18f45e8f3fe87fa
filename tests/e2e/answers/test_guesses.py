"""Tests what the page shows of speculative decoding: guessed text in its colour, and the operator's figures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from app.runs.events import AnswerDelta, AnswerDone, RunCompleted
from tests.e2e.answers.answer_page import ask, reply
from tests.e2e.conftest import NewPage
from tests.e2e.support.fake_server import USAGE, FakeServer, Gate
from tests.e2e.support.real_pages import settled, shown, wishes
from tests.e2e.support.real_server import PEBBLE, RealServer, running
from tests.e2e.test_axe import violations

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]

QUESTION = "Explain step by step how to add 27 and 58."
COLOURED = "[...(CSS.highlights.get('guessed') ?? [])].map(range => range.toString()).sort()"


def guessed(page: Page) -> list[str]:
    texts: list[str] = page.evaluate(COLOURED)
    return texts


def until_guessed(page: Page, texts: list[str]) -> None:
    page.wait_for_function(f"texts => JSON.stringify({COLOURED}) === JSON.stringify(texts.sort())", arg=texts)


def switch(page: Page, name: str = "Show guessed tokens") -> None:
    page.get_by_role("group", name="How to answer").get_by_role("button", name="Sampling").click()
    page.get_by_role("dialog").get_by_role("checkbox", name=name).click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def shot(page: Page, name: str) -> None:
    """Takes a picture for a person to look at, where one asks for it."""
    if folder := os.environ.get("PONDER_SHOTS"):
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def test_guessed_text_is_coloured_once_that_is_switched_on(page: Page, fake: FakeServer) -> None:
    first, second = "😀 It is **four**, as `2+2` says.\n\n", "```python\nprint(2 + 2)\n```\n\n> four and\n> no more\n"
    text = first + second
    fake.play([
        AnswerDelta(text=first, guessed=[2, 13, 16, 23]), Gate("more"),
        AnswerDelta(text=second, guessed=[12, 20, 28, 43]),
        AnswerDone(text=text, finish_reason="stop"), RunCompleted(usage=USAGE),
    ])  # fmt: skip
    ask(page)
    expect(reply(page)).to_contain_text("It is four, as 2+2 says.")
    assert guessed(page) == []
    switch(page)
    until_guessed(page, ["It is ", "fou", ", as ", "2"])
    fake.open("more")
    expect(reply(page).locator("code .hljs-number")).to_have_count(2)
    until_guessed(page, ["It is ", "fou", ", as ", "2", "int", "(", "2", " + ", "four and", "no"])
    shot(page, "guessed")
    assert violations(page) == {}
    page.emulate_media(color_scheme="dark")
    shot(page, "guessed-dark")
    switch(page)
    until_guessed(page, [])


def test_the_switch_is_kept_and_said_in_german(new_page: NewPage, fake: FakeServer) -> None:
    page = new_page(locale="de")
    page.goto(fake.url)
    sampling = page.get_by_role("group", name="Wie geantwortet wird").get_by_role("button", name="Sampling")
    sampling.click()
    box = page.get_by_role("dialog").get_by_role("checkbox", name="Geratene Tokens zeigen")
    expect(box).not_to_be_checked()
    box.check()
    page.reload()
    sampling.click()
    expect(box).to_be_checked()
    shot(page, "guessed-setting")
    page.keyboard.press("Escape")


# -- on the real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """The bundled model, which drafts what it has answered before."""
    folder = tmp_path_factory.mktemp("drafts")
    with running(folder, "--model", str(PEBBLE), "--speculation", "suffix") as server:
        body = {"model": "default", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        deadline = time.monotonic() + 60
        while server.http.get("/api/operator/stats").json()["models"][0]["speculation"] is None:
            assert time.monotonic() < deadline, "no draft was worth it"
            assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        yield server


def test_guessed_text_has_its_colour_after_a_reload(new_page: NewPage, server: RealServer) -> None:
    page = new_page()
    page.goto(server.url)
    wishes(page, sampling={"temperature": 0})
    switch(page)
    for _ in range(20):  # whether drafts are verified is the engine's to decide
        ask(page, QUESTION)
        settled(page)
        if found := guessed(page):
            break
        page.goto(server.url)
    assert found and all(text in shown(page) for text in found)
    shot(page, "guessed-real")
    page.reload()
    until_guessed(page, found)


def test_an_operator_sees_what_drafts_gave(new_page: NewPage, server: RealServer) -> None:
    page = new_page()
    page.goto(f"{server.url}/operator")
    drafts = page.get_by_role("region", name="Drafts")
    expect(drafts).to_contain_text("accepted")
    told = server.http.get("/api/operator/stats").json()["models"][0]["speculation"]
    expect(drafts).to_contain_text("tokens a step")
    bars = drafts.get_by_role("img")
    expect(bars.locator("i")).to_have_count(len(told["acceptance"]))
    assert (bars.get_attribute("aria-label") or "").startswith("Accepted by position in the draft: ")
    shot(page, "operator-drafts")
    assert violations(page) == {}


def test_an_operator_sees_no_drafts_where_there_were_none(
    new_page: NewPage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running(tmp_path_factory.mktemp("plain"), "--model", str(PEBBLE), "--speculation", "off") as plain:
        page = new_page()
        page.goto(f"{plain.url}/operator")
        expect(page.get_by_role("heading", name="Models")).to_be_visible()
        expect(page.get_by_role("article")).to_contain_text("KV blocks of")
        expect(page.get_by_role("region", name="Drafts")).to_have_count(0)
        page.close()
