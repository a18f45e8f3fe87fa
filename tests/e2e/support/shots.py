"""Pictures of the page for the docs, of a real server with the bundled model: `python -m tests.e2e.support.shots
docs/img`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from playwright.sync_api import Page, expect, sync_playwright

from tests.e2e.conftest import ARGS
from tests.e2e.support.real_pages import ask, reply, settled, wishes
from tests.e2e.support.real_server import PEBBLE, RealServer, add, running
from tests.retrieval import made

REPORT = [
    ["THE DAM AT ORSK", "", "A report to the council of the valley, second edition", "", "",
     "1. The valley", "", "The valley of the upper Orsk is eleven miles long and has two villages.",
     "In spring the river rises by four metres and more.", "", "2. Before the dam", "",
     "Floods took the bridge at Lower Orsk three times, the last time in 1924.",
     "The council asked for plans in the autumn of that year."],
    ["3. The work", "", "Work on the dam at Orsk began in 1928.", "The dam of Orsk was finished in 1931.",
     "The city of Orsk paid for the dam.", "", "It is 96 metres high and 402 metres long at its crest.",
     "Two hundred people worked on it, most of them from the valley.", "", "4. The lake", "",
     "The lake behind the dam was full in the spring of 1933.", "It holds forty million cubic metres of water."],
]  # fmt: skip


def welcome(page: Page, _: RealServer) -> None:
    expect(page.locator(".starters button").first).to_be_visible()


def answer(page: Page, _: RealServer) -> None:
    page.locator(".starters button").first.click()
    settled(page)
    page.get_by_role("button", name="Thought").last.click()


def tree(page: Page, server: RealServer) -> None:
    wishes(page, strategy="tree", options={"beam": 4, "depth": 5, "samples": 3, "seed": 4})
    ask(page, "Use 4, 6 and 9 to make 33.")
    settled(page)


def cited(page: Page, server: RealServer) -> None:
    wishes(page, collections="all", sampling={"temperature": 0})
    ask(page, "When was the dam of Orsk finished?")
    settled(page)
    reply(page).locator("button.cite").first.click()
    expect(page.locator(".box").first).to_be_visible()


def operator(page: Page, server: RealServer) -> None:
    page.goto(f"{server.url}/operator")
    expect(page.get_by_role("heading", name="Operator")).to_be_visible()
    for number in range(12):
        body = {"model": "default", "messages": [{"role": "user", "content": f"Count to {number + 9}."}]}
        server.http.post("/v1/chat/completions", json={**body, "max_tokens": 200}, timeout=60)
    page.wait_for_timeout(2500)


SHOTS: dict[str, Callable[[Page, RealServer], None]] = {
    "welcome": welcome, "answer": answer, "tree": tree, "cited": cited, "operator": operator,
}  # fmt: skip


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=30_000)
    with tempfile.TemporaryDirectory() as data, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS.split())
        with running(Path(data), "--model", str(PEBBLE)) as server:
            server.http.timeout = httpx.Timeout(60)
            add(server, "The dam at Orsk.pdf", made.pdf(REPORT, "The dam at Orsk"))
            for name, bring in SHOTS.items():
                for scheme in ("light", "dark"):
                    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
                    page = context.new_page()
                    page.goto(server.url)
                    page.evaluate("document.fonts.ready")
                    bring(page, server)
                    time.sleep(0.5)  # what moves has arrived
                    page.screenshot(path=folder / f"{name}-{scheme}.png")
                    context.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
