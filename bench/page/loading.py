"""Measures the bytes the first screen loads, and how soon it is painted."""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING

from bench.page.browsing import Json, browser, scripted, spread

if TYPE_CHECKING:
    from playwright.sync_api import Page, Response

TEXTS = {"tale": "A short tale, told once."}
PAINT = """() => new Promise((resolve) => {
    const seen = () => performance.getEntriesByName("first-contentful-paint")[0];
    if (seen()) return resolve(seen().startTime);
    new PerformanceObserver(() => seen() && resolve(seen().startTime)).observe({ type: "paint", buffered: true });
})"""


def _loaded(page: Page, url: str) -> list[Response]:
    loaded: list[Response] = []
    page.on("response", lambda response: loaded.append(response))
    page.goto(url, wait_until="networkidle")
    return loaded


def size() -> Json:
    """Bytes of scripts and styles, as they are and gzipped: those that the page's own HTML asks for, which make the
    first screen, and those fetched afterwards in advance.
    """
    made: Json = {}
    with scripted(TEXTS) as server, browser() as chromium:
        page = chromium.new_page()
        html = re.sub(r'<template id="answers">.*?</template>', "", server.http.get("/").text)
        for response in _loaded(page, server.url):
            kind = response.request.resource_type
            if kind not in ("script", "stylesheet"):
                continue
            body = response.body()
            when = "initial" if response.url.split("/", 3)[3] in html else "then"
            row = made.setdefault(when, {}).setdefault(kind, {"files": 0, "bytes": 0, "gzipped_bytes": 0})
            row["files"] += 1
            row["bytes"] += len(body)
            row["gzipped_bytes"] += len(gzip.compress(body, 9, mtime=0))
    return made


def first_paint(n: int = 20) -> Json:
    """Milliseconds from asking for the page to its first contentful paint, each time in a browser that has nothing."""
    first, interactive = [], []
    with scripted(TEXTS) as server, browser() as chromium:
        for _ in range(n + 1):
            context = chromium.new_context()
            page = context.new_page()
            page.goto(server.url)
            first.append(float(page.evaluate(PAINT)))
            page.get_by_role("button", name="tale", exact=True).wait_for()
            interactive.append(float(page.evaluate("performance.now()")))
            context.close()
    # The first one finds the server's caches cold, and Chromium's code too.
    shown = {"first_contentful_paint_ms": spread(first[1:]), "starters_shown_ms": spread(interactive[1:])}
    return {**shown, "cold_ms": first[0]}
