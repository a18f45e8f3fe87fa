"""Tests what a model may write, whole on the page of the real server, under its Content Security Policy: hostile
markup, fences and formulas that never close, right-to-left and Chinese text, on a desk and on a phone.

The model is a real checkpoint whose words are known (`scripted_model`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

from tests.e2e.support.real_pages import (
    ask,
    opened,
    reply,
    settled,
    shown,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HOSTILE = """\
<script>window.owned = 1</script>

<img src=x onerror='window.owned = 2'> <svg onload='window.owned = 3'></svg>

![beacon](https://example.org/beacon.png) [go](javascript:window.owned=4) <https://example.org/plain>

<iframe src='https://example.org/frame'></iframe><form action='https://example.org/form'><input name=q></form>

<a href='//example.org/ping' ping='https://example.org/ping2'>ping</a>

<style>@import 'https://example.org/s.css';</style>

```"><img src=https://example.org/fence.png onerror=window.owned=5>
x
```

<base href='https://example.org/'><meta http-equiv='refresh' content='0;url=https://example.org/away'>

$\\href{javascript:window.owned=6}{x}$ and $\\includegraphics{https://example.org/tex.png}$

The end of it."""
FENCE = "Look:\n\n```python\ndef never(closed):\n    return '<b>not bold</b>'"
FORMULA = "So it is $\\frac{1}{2} and so on\n\n$$\\sum_{i=0"
HEBREW = "שלום עולם, זה טקסט מימין לשמאל."
ARABIC = "مرحبا بالعالم، هذا نص من اليمين."
CHINESE = "你好，世界。今天我们来谈谈大坝。"
JAPANESE = "これは日本語の文章です。ダムは1931年に完成しました。"
TONGUES = (
    f"{HEBREW}\n\n{ARABIC}\n\n{CHINESE}\n\n- {JAPANESE}\n\n| 名前 | قيمة |\n|---|---|\n| ダム | ١٩٣١ |\n\nThat is all."
)
TEXTS = {"hostile": HOSTILE, "fence": FENCE, "formula": FORMULA, "tongues": TONGUES}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("words")
    model = write_scripted(folder / "model", TEXTS, letters=3)
    with running(folder, "--model", str(model), "--dtype", "float32") as server:
        yield server


@pytest.fixture
def page(new_page: NewPage, server: RealServer) -> Page:
    page = new_page()
    page.goto(server.url)
    return page


def test_what_is_hostile_neither_runs_nor_calls_out(page: Page, server: RealServer, watch: Watch) -> None:
    reports: list[str] = []
    page.on("console", lambda message: reports.append(message.text))
    server.turn(step_s=0.003)  # so that each half of it stands on the page for a while
    ask(page, "hostile <script>window.owned=7</script> <img src=x onerror=window.owned=8>")
    settled(page)
    server.turn()
    assert "The end of it." in shown(page)
    for _ in range(2):
        assert page.evaluate("window.owned") is None
        assert page.locator("article img, article script, article iframe, article form, article style").count() == 0
        assert (
            page.locator("article [onerror], article [onload], article base, article meta, article [ping]").count() == 0
        )
        links = page.locator("article a").evaluate_all("links => links.map(link => link.href)")
        assert not [link for link in links if not link.startswith(("https://example.org/", server.url))], links
        page.reload()  # and from what the chat keeps; its title, too, has the question's words
        settled(page)
    assert page.url.startswith(server.url)
    assert watch.hosts == {server.url.removeprefix("http://")}
    assert not [text for text in reports if "Content Security Policy" in text], reports


def test_a_fence_that_never_closes_is_code_to_its_end(page: Page, server: RealServer) -> None:
    server.turn(step_s=0.01)
    ask(page, "fence please")
    expect(reply(page).get_by_role("figure")).to_contain_text("def never(closed):")
    settled(page)
    server.turn()
    expect(reply(page).get_by_role("figure").locator("code")).to_have_text(
        "def never(closed):\n    return '<b>not bold</b>'"
    )
    expect(reply(page).locator(".hljs-keyword").first).to_have_text("def")


def test_a_formula_that_never_closes_loses_no_letter(page: Page, server: RealServer) -> None:
    ask(page, "formula please")
    settled(page)
    for piece in ("So it is", "frac", "and so on", "sum_{i=0"):
        assert piece in shown(page)


@pytest.mark.parametrize("phone", [False, True], ids=["desk", "phone"])
def test_every_script_reads_its_own_way(new_page: NewPage, server: RealServer, phone: bool) -> None:
    options = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True} if phone else {}
    page = new_page(**options)
    chat, run = server.ask(f"tongues {HEBREW}")
    opened(page, server, chat)
    settled(page)
    for text in (HEBREW, ARABIC, CHINESE, JAPANESE, "١٩٣١", "That is all."):
        assert text in shown(page)
    assert server.snapshot(run)["answer"] == TONGUES
    way = "node => getComputedStyle(node).direction"
    for text, direction in ((HEBREW, "rtl"), (ARABIC, "rtl"), (CHINESE, "ltr"), ("That is all.", "ltr")):
        assert reply(page).get_by_text(text, exact=True).evaluate(way) == direction, text
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
