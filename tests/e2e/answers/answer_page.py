"""Helpers for tests of an answer on the page: ask for it, find its parts, and events that it is made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.runs.events import AnswerDelta, AnswerDone, Event, SourceShown, ThinkingStarted
from tests.e2e.support.fake_server import answer
from tests.e2e.support.told import call, dam, found, support

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

WRITE = call("write_file", '{"path": "plan.md"}')
PREVIEW = 'write_file(\n  path = "plan.md"\n)'
ENDED = answer("Done.")


def reply(page: Page) -> Locator:
    return page.get_by_role("article", name="Ponder").last


def ask(page: Page, words: str = "Go on") -> None:
    box = page.get_by_role("textbox", name="Message")
    box.fill(words)
    box.press("Enter")


def card(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=f"Call of {name}")


def started(most: int | None, waits: int = 0) -> ThinkingStarted:
    return ThinkingStarted(started_at=time.time(), max_tokens=most, waits=waits)


def fraction(bar: Locator) -> float:
    return float(bar.evaluate("bar => bar.position"))


SENTENCES = (
    "The dam was finished in **1931**, two years late. [S1]",
    "It cost more than planned. [unsupported]",
    "The minutes say nothing. [S2]",
)
CITED = f"🌊 {SENTENCES[0]} {SENTENCES[1]}\n\n- {SENTENCES[2]}"


def cited() -> tuple[Sequence[Event], list[SourceShown]]:
    sources, passage = dam()
    return [
        found("answer", sources),
        AnswerDelta(text=CITED),
        support(1, CITED, SENTENCES[0], "supported", [passage]),
        support(2, CITED, SENTENCES[1], "unsupported", []),
        support(3, CITED, SENTENCES[2], "elsewhere", [sources[1]]),
        AnswerDone(text=CITED, finish_reason="stop"),
    ], sources
