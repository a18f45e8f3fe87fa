"""Files that are damaged or made to harm: each is refused with what was wrong, and the next file is read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from retrieval.index.chunking import ChunkShape, cut
from retrieval.library import VIEWED_S
from retrieval.parsing import parser as files
from retrieval.parsing.parsed import Parsed, Unreadable
from retrieval.parsing.parser import DEADLINE_S, Parse, Parser
from tests.retrieval import made
from tests.retrieval.words import WordEmbedder

pytestmark = pytest.mark.slow

Write = Callable[[str, str | bytes], Path]
LINES = [[f"Page {number} of a report, with a line of text." for _ in range(30)] for number in range(9)]
WHOLE = made.pdf(LINES)
BAD = {
    "encrypted.pdf": (made.pdf(LINES, encrypted=True), "encrypted. Save it without a password"),
    "truncated.pdf": (WHOLE[: len(WHOLE) // 2], "damaged or was cut off"),
    "head.pdf": (WHOLE[:9], "damaged or was cut off"),
    "pictures.pdf": (made.pdf([[], []]), "No page of the PDF has text"),
    "picture.pdf": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG picture"),
    "report.txt": (WHOLE, "content is PDF, but the name ends in .txt"),
    "program.txt": (b"\x7fELF\2\1\1" + bytes(60), "a program"),
    "bomb.docx": (made.bomb(), "would unpack to 600 MiB .* Up to 256 MiB and 200 times its size"),
    "ratio.docx": (made.bomb(300), "would unpack to 300 MiB"),
    "truncated.docx": (made.docx(("", "Text."))[:-40], "damaged or was cut off"),
    "broken.docx": (made.docx(("", "Text.")).replace(b"word/document.xml", b"word/documint.xml", 1), "damaged"),
    "old.doc": (b"\xd0\xcf\x11\xe0" + bytes(600), "before 2007 \\(.doc\\)"),
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b" \n\t\r\n", "has no text"),
    "blank.docx": (made.docx(("", " ")), "has no text"),
    "blank.xlsx": (made.xlsx(A=[[None]]), "has no text"),
    "scripts.html": (made.page(""), "no text besides scripts"),
    "markup.html": (b"<!-- -->", "no text besides scripts"),
}


@pytest.fixture(scope="module")
def in_process() -> Iterator[Parse]:
    parser = Parser()
    yield parser.parse
    parser.close()


@pytest.fixture(params=["direct", "in a process"])
def parse(request: pytest.FixtureRequest) -> Parse:
    return files.parse if request.param == "direct" else request.getfixturevalue("in_process")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_what_is_wrong(write: Write, parse: Parse, name: str) -> None:
    content, message = BAD[name]
    with pytest.raises(Unreadable, match=message):
        parse(write(name, content), name)


def test_a_pdf_with_a_broken_page_gives_the_others(write: Write, parse: Parse) -> None:
    path = write("a.pdf", WHOLE.replace(b"/Kids [7 0 R", b"/Kids [1 0 R"))  # what it calls its first page is none
    parsed = parse(path, "a.pdf")
    assert "Page 1 of" in parsed.text and parsed.faults[0].page == 1


def test_one_line_of_5_mb_is_read_and_cut_within_the_limits(write: Write, parse: Parse) -> None:
    path = write("line.txt", ("word, and (another) one; " * 200_000)[:5_000_000])
    parsed = parse(path, "line.txt")
    assert len(parsed.text) == 5_000_000
    shape, embedder = ChunkShape(), WordEmbedder()
    children = [parsed.text[chunk.start : chunk.end] for chunk in cut(parsed, embedder.pieces, shape).chunks]
    assert max(map(len, children)) <= shape.longest
    assert max(map(len, embedder.pieces(children))) <= shape.child


def test_too_much_text_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LENGTH", 1000)
    with pytest.raises(Unreadable, match="up to 1,000 are read. Split it"):
        files.parse(write("a.txt", "x" * 1001), "a.txt")
    with pytest.raises(Unreadable, match="up to 1,000 characters are read. Split it"):
        files.parse(write("a.txt", "x" * 4001), "a.txt")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("crash.txt", "crashed what reads it"),
        ("hang.txt", "longer than 5 s"),
        ("swell.txt", "more memory than a file of its size is given"),
        ("nest.txt", "nested too deeply"),
    ],
)
def test_after_a_file_that_takes_its_parser_down_the_next_is_read(write: Write, name: str, message: str) -> None:
    parser = Parser(deadline_s=5, parse=made.misbehave)
    try:
        bad = parser.submit(write(name, "x"), name)
        good = parser.submit(write("good.txt", "Good text."), "good.txt")
        with pytest.raises(Unreadable, match=message):
            parser.result(bad)
        assert parser.result(good) == Parsed("Good text.", "", "prose", "text/plain")
    finally:
        parser.close()


def test_a_parser_that_read_nothing_closes() -> None:
    Parser().close()


HARMFUL: dict[str, tuple[Callable[[], bytes], str]] = {
    "nested.docx": (made.nested_docx, "nested too deeply: more than 200 elements"),
    "attributes.html": (made.attributes, "more than 1,000 attributes"),
    "wide.xlsx": (made.wide_xlsx, "more than 16,384 columns"),
    "tall.xlsx": (made.tall_xlsx, "more than 5,000,000 cells"),
    "swelling.xlsx": (made.swelling_xlsx, "would unpack to 10\\d\\d MiB .* Up to 256 MiB"),
    "loop.pdf": (made.looping_pdf, "damaged or was cut off"),
    "deflated.pdf": (made.deflated_pdf, "needs more memory than a file of its size is given"),
    "large page.pdf": (made.huge_page_pdf, "measures 1 by 1e.08 points"),
    "pattern.pdf": (made.patterned_pdf, "longer than .* s|more memory than"),
}
DRAWN = {"large page.pdf", "pattern.pdf"}  # which are read without harm
SECONDS, PEAK = 20, 512 << 20


@pytest.mark.parametrize("name", HARMFUL)
def test_a_file_made_to_harm_ends_soon_and_small_with_a_sentence(write: Write, name: str) -> None:
    make, message = HARMFUL[name]
    path = write(name, make())
    others = psutil.Process().children(recursive=True)
    parser = Parser(deadline_s=VIEWED_S, max_deadline_s=VIEWED_S) if name in DRAWN else Parser()
    try:
        if name in DRAWN:
            parser.parse(path, name)
        else:
            parser.parse(write("good.txt", "Good."), "good.txt")  # the process is there
        with Watched(others) as watched, pytest.raises(Unreadable, match=message) as told:
            parser.result(parser.draw(path, None, 1, 1200)) if name in DRAWN else parser.parse(path, name)
        size = f"{path.stat().st_size >> 10} KiB"
        print(f"| {name} | {size} | {watched.seconds:.1f} s | {watched.peak >> 20} MiB | {told.value} |")
        assert watched.seconds < SECONDS and watched.peak <= PEAK
        assert parser.parse(write("good.txt", "Good text."), "good.txt").text == "Good text."
    finally:
        parser.close()


class Watched:
    """The time that a block takes, and the most memory that one of this process's children takes meanwhile, but for
    `others`: what earlier tests left running."""

    def __init__(self, others: Iterable[psutil.Process]) -> None:
        self.seconds, self.peak = 0.0, 0
        self._others = frozenset(others)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._begun = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._begun
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            for child in {*psutil.Process().children(recursive=True)} - self._others:
                with contextlib.suppress(psutil.Error):
                    self.peak = max(self.peak, child.memory_info().rss)


def test_a_file_has_time_and_memory_by_its_size(write: Write) -> None:
    parser = Parser(max_deadline_s=60)
    try:
        small, large = write("small.txt", "a"), write("large.txt", "a" * (10 << 20))
        assert DEADLINE_S <= parser.deadline_s(small) < DEADLINE_S + 1 < parser.deadline_s(large) <= 60
        assert parser.deadline_s(small.with_name("missing")) == DEADLINE_S
    finally:
        parser.close()
