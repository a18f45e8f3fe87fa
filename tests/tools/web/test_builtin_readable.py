"""Reading pages that anybody may have made: what takes the extractor too long or too much leaves the page's words."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tools.web.readable import PageReader

PROSE = "".join(f"<p>In the year {1900 + each} the dam of the valley was raised by a metre.</p>" for each in range(20))
GOOD = f"<html><head><title>A  dam</title></head><body><nav>Menu</nav><article>{PROSE}</article></body></html>"
SLOW = "<html><body>" + "<p>word" * 60_000  # takes the extractor ten seconds and more
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@pytest_asyncio.fixture
async def reader() -> AsyncIterator[PageReader]:
    made = PageReader(timeout_s=1)
    yield made
    made.close()


def workers() -> set[int]:
    """The processes that this one has started to work for it."""
    found = set[int]()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"tools.workers.worker" in (each / "cmdline").read_bytes():
                    found.add(int(each.name))
    return found


async def read(reader: PageReader, page: str) -> str:
    return (await reader.read(page.encode(), "text/html")).text


async def test_a_page_is_its_main_text_and_its_title(reader: PageReader) -> None:
    reading = await reader.read(GOOD.encode(), "text/html")
    assert reading.title == "A dam" and not reading.cut
    assert "In the year 1919 the dam" in reading.text and "Menu" not in reading.text and "<p>" not in reading.text


@linux
async def test_a_page_that_is_made_to_be_slow_keeps_its_words_and_costs_a_process(reader: PageReader) -> None:
    before = workers()
    assert "1919" in await read(reader, GOOD)
    (first,) = workers() - before
    text = await read(reader, SLOW)
    assert text.count("word") == 60_000
    assert first not in workers(), "it was killed rather than waited for"
    assert "1919" in await read(reader, GOOD)


@linux
async def test_a_page_that_swells_keeps_its_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    reader = PageReader(timeout_s=60, memory_bytes=24 << 20)
    try:
        text = await read(reader, SLOW)
        assert text.count("word") == 60_000 and "was not found" in caplog.text and "longer" not in caplog.text
        assert "1919" in await read(reader, GOOD)
    finally:
        reader.close()


@pytest.mark.parametrize("tag", ["div", "b", "ul><li", "table><tr><td", "blockquote", "font><i", "svg", "template"])
async def test_a_page_without_a_bottom_is_read_and_so_is_the_next(reader: PageReader, tag: str) -> None:
    deep = await read(reader, f"<html><body><p>at the top</p>{f'<{tag}>' * 40_000}at the bottom")
    assert "at the top" in deep or "at the bottom" in deep
    assert "1919" in await read(reader, GOOD)


async def test_text_that_is_no_page_needs_no_process(reader: PageReader) -> None:
    before = workers() if sys.platform == "linux" else set()
    assert (await reader.read(b"<p>as it is</p>\0", "text/plain")).text == "<p>as it is</p>"
    assert (workers() if sys.platform == "linux" else set()) == before
