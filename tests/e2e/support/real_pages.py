"""Helpers for tests of the real server's page: actions on it, and what it shows."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from playwright.sync_api import expect

from tests.e2e.support.real_server import RealServer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def box(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message")


def reply(page: Page) -> Locator:
    return page.get_by_role("article", name="Ponder").last


def ask(page: Page, words: str) -> None:
    box(page).fill(words)
    box(page).press("Enter")


def opened(page: Page, server: RealServer, chat: str) -> Page:
    page.goto(f"{server.url}/c/{chat}")
    return page


def settled(page: Page) -> None:
    """Wait until the last answer is whole."""
    expect(reply(page)).to_have_attribute("aria-busy", "false", timeout=30_000)


def shown(page: Page) -> str:
    """The text of the last answer, white space made one."""
    return " ".join(" ".join(reply(page).locator(".prose").all_inner_texts()).split())


def elapsed(page: Page) -> float:
    """The seconds that the last answer says it has been thought about."""
    said = reply(page).locator("time").inner_text()
    minutes, seconds = re.fullmatch(r"(?:(\d+) min )?([\d.]+) s", said).groups()  # type: ignore[union-attr]
    return 60 * int(minutes or 0) + float(seconds)


def wishes(page: Page, **settings: Any) -> None:
    """Returns how the page asks for its next answers, as if a person had set it: see lib/asking/settings.ts."""
    page.evaluate("settings => localStorage.setItem('ponder.settings', settings)", json.dumps(settings))
    page.reload()
