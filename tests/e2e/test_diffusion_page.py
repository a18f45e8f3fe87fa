"""Masked diffusion on the page: masks fill pass by pass, each pass can be looked at again, and others see no such page.

The model is a random one: what it writes says nothing, and its passes are as any model's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_server import FakeServer
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted
from tests.engine.diffusion.conftest import random_model
from training.diffusion.byte_tokenizer import byte_tokenizer
from training.diffusion.pair import export_pair

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

from tests.e2e.test_axe import violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]

GAP = "one two th______ur five"
COUNTED = """() => {  // how many places are masked, at each change
    window.counts = [];
    const count = () => {
        const now = document.querySelectorAll(".masked").length;
        if (document.querySelector(".cells") !== null && window.counts.at(-1) !== now) window.counts.push(now);
    };
    new MutationObserver(count).observe(document.body, { childList: true, subtree: true, attributes: true });
}"""

HELD = r"""() => {  // events after the first two passes wait for `window.go`
    const plain = window.fetch;
    window.fetch = async (...args) => {
        const reply = await plain(...args);
        if (args[0] !== "/api/diffusion") return reply;
        const events = (await reply.text()).split(/(?<=\n\n)/), encoder = new TextEncoder();
        const rest = events.indexOf(events.filter((each) => each.includes('"pass"'))[1]) + 1;
        const held = new Promise((go) => { window.go = go; });
        return new Response(new ReadableStream({
            async start(stream) {
                stream.enqueue(encoder.encode(events.slice(0, rest).join("")));
                await held;
                stream.enqueue(encoder.encode(events.slice(rest).join("")));
                stream.close();
            },
        }));
    };
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("diffusion")
    model = write_scripted(folder / "model", {"red": "The answer is red."})
    export_pair(random_model(), byte_tokenizer(), folder / "gaps", diffuses=True)
    with running(
        folder, "--model", str(model), "--dtype", "float32", "--diffusion-model", str(folder / "gaps")
    ) as started:
        yield started


def opened(page: Page, server: RealServer) -> Page:
    page.goto(server.url)
    page.get_by_role("link", name="Masked diffusion").click()
    expect(page.get_by_role("heading", name="Masked diffusion")).to_be_visible()
    return page


def fill(page: Page, text: str) -> None:
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Fill").click()


def shot(page: Page, name: str) -> None:
    """Takes a picture in both themes where PONDER_SHOTS names a folder."""
    if folder := os.environ.get("PONDER_SHOTS"):
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=str(Path(folder) / f"{name}-{scheme}.png"), full_page=True)


def test_masks_fill_pass_by_pass(new_page: NewPage, server: RealServer) -> None:
    page = opened(new_page(), server)
    page.evaluate(COUNTED)
    fill(page, GAP)
    expect(page.get_by_text("6 of 6 passes · 1.0 tokens a pass")).to_be_visible()
    assert page.evaluate("window.counts") == [6, 5, 4, 3, 2, 1, 0]
    expect(page.get_by_role("status").filter(has_text="Filled in 6 passes: one two th")).to_be_attached()
    expect(page.locator(".unmasked")).to_have_count(6)
    expect(page.locator(".unmasked").first).to_have_attribute("title", re.compile(r": \d+%, pass [1-6]$"))


def test_each_pass_is_looked_at_again_by_keyboard(new_page: NewPage, server: RealServer) -> None:
    page = opened(new_page(reduced_motion="reduce"), server)
    page.get_by_label("Places a pass").fill("2")
    fill(page, GAP)
    expect(page.get_by_text("3 of 3 passes · 2.0 tokens a pass")).to_be_visible()
    shot(page, "diffusion-filled")
    slider = page.get_by_role("slider", name="Pass")
    slider.press("ArrowLeft")
    expect(page.locator(".masked")).to_have_count(2)
    expect(slider).to_have_attribute("aria-valuetext", "2 of 3 passes")
    shot(page, "diffusion-pass")
    slider.press("Home")
    expect(page.locator(".masked")).to_have_count(6)
    assert page.get_by_role("img").get_attribute("aria-label") == f"6 masked places: {GAP}"
    assert not violations(page)
    page.get_by_role("button", name="Play").click()
    expect(page.locator(".masked")).to_have_count(0)
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_a_pass_that_is_looked_at_stays_while_others_come(new_page: NewPage, server: RealServer) -> None:
    page = opened(new_page(reduced_motion="reduce"), server)
    page.evaluate(HELD)
    page.get_by_label("Places a pass").fill("2")
    fill(page, GAP)
    expect(page.get_by_text("2 of 2 passes")).to_be_visible()
    page.get_by_role("slider", name="Pass").press("ArrowLeft")
    page.evaluate("window.go()")
    expect(page.get_by_text("1 of 3 passes · 2.0 tokens a pass")).to_be_visible()
    expect(page.locator(".masked")).to_have_count(4)


def test_a_threshold_fills_more_at_once_and_refusals_are_told(
    new_page: NewPage, server: RealServer, watch: Watch
) -> None:
    page = new_page(reduced_motion="reduce", viewport={"width": 360, "height": 700})
    page.goto(f"{server.url}/diffusion")
    page.get_by_label("All that are likely enough").check()
    page.get_by_label("Least probability").fill("0")
    fill(page, GAP)
    expect(page.get_by_text("1 of 1 pass · 6.0 tokens a pass")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    shot(page, "diffusion-narrow")
    watch.expect_errors()
    fill(page, "9" * 65)
    expect(page.get_by_role("alert")).to_contain_text("this model accepts at most 64")


def test_a_server_without_such_a_model_shows_no_way_there(new_page: NewPage, fake: FakeServer) -> None:
    page = new_page()
    page.goto(fake.url)
    expect(page.get_by_role("link", name="Memory")).to_be_visible()
    expect(page.get_by_role("link", name="Masked diffusion")).to_have_count(0)
    page.goto(f"{fake.url}/diffusion")
    expect(page.get_by_text("This server has no masked-diffusion model")).to_be_visible()
