"""Takes the pictures of docs/first-minutes.md, of the real server and model: `python -m bench.page.filmstrip`.

A newcomer's first five minutes, in one browser. Each frame presses what the page in docs/ says, and fails where what
should come of it is not on the screen.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from bench.page.browsing import browser
from hatch_build import build_page
from tests.e2e.support.real_pages import ask, reply, settled
from tests.e2e.support.real_server import PEBBLE, running
from tests.e2e.test_documents_page import drop

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/img"
DESK, PHONE = (1040, 720), (390, 780)  # CSS pixels
MAX_BYTES = 60_000  # of a picture
PATIENCE_MS = 60_000  # the first document loads the embedder
BEES = "Bees of the upper valley\n\nThe hives stand on the slope. The beekeeper Lena Moor counted forty hives in 1988."


def welcome(page: Page) -> None:
    page.get_by_role("button", name="Ask a document").wait_for()


def starter(page: Page) -> None:
    page.locator(".starters button").first.click()
    settled(page)
    page.get_by_role("button", name="Thought").last.click()
    page.get_by_role("region", name="What the model thought").wait_for()


def sample(page: Page) -> None:
    page.get_by_role("button", name="Ask a document").click()
    _answered(page)
    page.get_by_role("button", name=re.compile(r"^Source \d")).first.click()
    page.locator("mark").first.wait_for()


def dropped(page: Page) -> None:
    drop(page, [("bees.txt", BEES)])
    page.get_by_role("list", name="Files").get_by_role("listitem").wait_for()
    ask(page, "Who counted the hives?")
    _answered(page)
    reply(page).get_by_role("button", name=re.compile(r"^Source \d")).first.wait_for()


def tool(page: Page) -> None:
    page.get_by_role("button", name="Call a tool").click()
    _answered(page)
    page.locator(".calls").first.wait_for()


def settings(page: Page) -> None:
    """The chat of the frame before: its settings are its own."""
    page.get_by_role("button", name=re.compile("^Strategy")).click()
    page.get_by_role("dialog").first.wait_for()


def phone(page: Page) -> None:
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    page.reload()
    _answered(page)


FRAMES: dict[str, Callable[[Page], None]] = {
    "1-welcome": welcome, "2-starter": starter, "3-sample": sample, "4-dropped": dropped, "5-tool": tool,
    "6-settings": settings, "7-phone": phone,
}  # fmt: skip
GO_ON = {"1-welcome", "6-settings", "7-phone"}  # where the frame before was


def film(folder: Path = FOLDER) -> list[Path]:
    """Returns the pictures it took, as WebP.

    Raises:
        RuntimeError: a picture takes more than `MAX_BYTES`.
    """
    taken = []
    with (
        tempfile.TemporaryDirectory() as data,
        running(Path(data), "--model", str(PEBBLE)) as server,
        browser() as chromium,
    ):
        page = chromium.new_page(color_scheme="light", viewport={"width": DESK[0], "height": DESK[1]})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(server.url)
        for name, bring in FRAMES.items():
            if name not in GO_ON:
                page.goto(server.url)
                page.get_by_role("button", name="Ask a document").wait_for()
            bring(page)
            page.evaluate("document.fonts.ready")
            page.wait_for_timeout(700)  # what moves has arrived
            taken.append(_keep(page.screenshot(), folder / f"first-minutes-{name}.webp"))
    return taken


def _answered(page: Page) -> None:
    reply(page).wait_for()
    page.locator("article[aria-busy=false][aria-label=Ponder]").last.wait_for()
    settled(page)


def _keep(picture: bytes, file: Path) -> Path:
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").save(file, "WEBP", quality=80, method=6)
    if (size := file.stat().st_size) > MAX_BYTES:
        raise RuntimeError(f"{file.name} has {size} bytes; at most {MAX_BYTES} are wanted.")
    return file


if __name__ == "__main__":
    build_page(ROOT / "web")
    for each in film():
        print(f"{each.relative_to(ROOT)}: {each.stat().st_size} bytes", file=sys.stderr)
