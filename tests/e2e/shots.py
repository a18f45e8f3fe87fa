"""Pictures of the page for the docs, of a server that runs: `python -m tests.e2e.shots URL docs/img`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from tests.e2e.conftest import ARGS


def main(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS.split())
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 800})
            page.goto(url)
            starter = page.locator(".starters button").first
            expect(starter).to_be_visible()
            page.evaluate("document.fonts.ready")
            page.screenshot(path=folder / f"welcome-{scheme}.png")
            starter.click()
            reply = page.get_by_role("article", name="Ponder").last
            expect(reply).to_have_attribute("aria-busy", "false", timeout=120_000)
            if (thought := page.get_by_role("button", name="Thought")).count():
                thought.last.click()
            page.screenshot(path=folder / f"answer-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
