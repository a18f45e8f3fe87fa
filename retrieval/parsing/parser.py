"""Parses files in processes of their own: one that crashes, hangs or swells its parser harms nothing else.

A process lives on for the next file; one that overstays its time or dies is replaced. A file has as much time and
memory as its size earns it, so that a small one that is made to harm ends soon. `parse` detects a file's kind and calls
the parser for it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as Overdue
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from retrieval.parsing import markdown, safe_open, sniff
from retrieval.parsing import markdown as text
from retrieval.parsing.parsed import MAX_LENGTH, Box, Kind, Parsed, ParsedPage, Unreadable

TITLE = 300  # characters of its title: longer ones are cut
_KINDS: dict[str, Kind] = {
    sniff.MARKDOWN: "markdown",
    sniff.CSV: "table",
    sniff.CODE: "code",
    sniff.PLAIN: "prose",
}


def parse(path: Path, name: str) -> Parsed:
    """The text of a file that was called `name`.

    Raises:
        Unreadable: it is empty, encrypted, damaged, too large, or of a kind that is not read.
    """
    media_type = sniff.media_type(path, name)
    parsed = _parsed(path, media_type)
    if not parsed.text.strip():
        raise Unreadable("The file has no text.")
    if len(parsed.text) > MAX_LENGTH:
        raise Unreadable(
            f"The file has {len(parsed.text):,} characters of text; up to {MAX_LENGTH:,} are read. Split it."
        )
    return replace(parsed, title=parsed.title[:TITLE])


def _parsed(path: Path, media_type: str) -> Parsed:
    if media_type == sniff.PDF:
        from retrieval.parsing import pdf

        return pdf.parse(path)
    if media_type in (sniff.DOCX, sniff.PPTX, sniff.XLSX):
        from retrieval.parsing import office  # takes a second to import

        return office.parse(path, media_type)
    if (size := path.stat().st_size) > 4 * MAX_LENGTH:  # no encoding takes more than 4 bytes a character
        raise Unreadable(f"The file has {size >> 20} MiB of text; up to {MAX_LENGTH:,} characters are read. Split it.")
    data = path.read_bytes()
    if media_type == sniff.HTML:
        from retrieval.parsing import html

        return html.parse(data)
    decoded, faults = text.decode(data)
    title = markdown.title(decoded) if media_type == sniff.MARKDOWN else ""
    return Parsed(decoded, title, _KINDS[media_type], media_type, (), faults)


MEMORY = 448 << 20  # bytes that reading a small file may take, its libraries included
MEMORY_PER_BYTE = 6  # of the file, beyond that
MAX_MEMORY = 4 << 30
DEADLINE_S = 15.0  # for a small file
DEADLINE_S_PER_BYTE = 4.0 / (1 << 20)  # beyond that
FILES_EACH = 200  # that one process parses before it is replaced, as its libraries leak memory
T = TypeVar("T")
Parse = Callable[[Path, str], Parsed]  # as `files.parse`; a function that another process can import


class Parser:
    """`workers` processes, started at the first file.

    A file's time counts from when a process takes it up: `deadline_s` and a little for each byte, up to
    `max_deadline_s`.
    """

    def __init__(
        self, workers: int = 1, deadline_s: float = DEADLINE_S, *, max_deadline_s: float = 300.0,
        parse: Parse = parse,
    ) -> None:  # fmt: skip
        self._deadline_s, self._max_deadline_s = deadline_s, max(deadline_s, max_deadline_s)
        self._parse = parse
        self._pool = ProcessPool(max_workers=workers, max_tasks=FILES_EACH, context=get_context("spawn"))

    def deadline_s(self, path: Path) -> float:
        """Seconds that reading the file may take."""
        return min(self._max_deadline_s, self._deadline_s + DEADLINE_S_PER_BYTE * _size(path))

    def submit(self, path: Path, name: str, root: Path | None = None) -> ProcessFuture[Parsed]:
        """A future of the parsed file; `result` takes it. Here and below, links from `root` on are not followed."""
        return self._begin(self._parse, path, root, name)

    def boxes(
        self, path: Path, root: Path | None, pages: Sequence[ParsedPage], start: int, end: int
    ) -> ProcessFuture[list[Box]]:
        """A future of the rectangles that the characters `start` to `end` of a PDF's text take on these pages."""
        return self._begin(_boxes, path, root, pages, start, end)

    def sizes(self, path: Path, root: Path | None) -> ProcessFuture[list[tuple[float, float]]]:
        """A future of the width and height of each page of a PDF, in points."""
        return self._begin(_sizes, path, root)

    def draw(self, path: Path, root: Path | None, page: int, width: int) -> ProcessFuture[bytes]:
        """A future of a page of a PDF as a PNG, rendered by `pdf.draw`."""
        return self._begin(_draw, path, root, page, width)

    def _begin(self, work: Callable[..., T], path: Path, root: Path | None, *arguments: object) -> ProcessFuture[T]:
        return self._pool.schedule(_within, args=(work, path, root, *arguments), timeout=self.deadline_s(path))

    def result(self, future: ProcessFuture[T]) -> T:
        """
        Raises:
            Unreadable: it could not be parsed, in time, in memory and without a crash.
            OSError: it could not be opened.
        """
        try:
            made: T = future.result()
        except Overdue as error:
            deadline_s = float(error.args[1])  # as pebble has it
            raise Unreadable(
                f"Reading the file took longer than {deadline_s:.0f} s, which is all that a file of its size is given. "
                "Split it, or save it in a simpler form."
            ) from None
        except ProcessExpired:
            raise Unreadable(
                "The file crashed what reads it: it is damaged, needs more memory than a file of its size is given, or "
                "is made to harm."
            ) from None
        except MemoryError:
            raise Unreadable(
                "Reading the file takes more memory than a file of its size is given. Split it, or save it in a "
                "simpler form."
            ) from None
        except RecursionError:
            raise Unreadable("The file is nested too deeply to be read.") from None
        return made

    def parse(self, path: Path, name: str, root: Path | None = None) -> Parsed:
        """Both at once."""
        return self.result(self.submit(path, name, root))

    def close(self) -> None:
        """Ends the processes and gives up the files they are reading."""
        self._pool.stop()
        self._pool.join()


def _boxes(path: Path, pages: Sequence[ParsedPage], start: int, end: int) -> list[Box]:
    from retrieval.parsing import pdf

    return [box for page in pages for box in pdf.boxes(path, page, start, end)]


def _sizes(path: Path) -> list[tuple[float, float]]:
    from retrieval.parsing import pdf

    return pdf.sizes(path)


def _draw(path: Path, page: int, width: int) -> bytes:
    from retrieval.parsing import pdf

    return pdf.draw(path, page, width)


def _within(work: Callable[..., T], path: Path, root: Path | None, *arguments: object) -> T:
    """`work` on the file, within the memory limit for a file of its size. The libraries' memory does not count."""
    with safe_open.opened(path, root) as file:
        _import_parser(file)
        memory = min(MAX_MEMORY, MEMORY + MEMORY_PER_BYTE * _size(file))
        mapped, used = _pages()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + max(memory - used, memory // 4), hard))
        return work(file, *arguments)


def _import_parser(path: Path) -> None:
    try:
        found = sniff.media_type(path, "")
    except (Unreadable, OSError):  # the reader reports it
        return
    if found == sniff.PDF:
        from retrieval.parsing import pdf  # noqa: F401
    elif found in (sniff.DOCX, sniff.PPTX, sniff.XLSX):
        from retrieval.parsing import office  # noqa: F401
    elif found == sniff.HTML:
        from retrieval.parsing import html  # noqa: F401


def _pages() -> tuple[int, int]:
    """Bytes of address space, and of them those in memory."""
    size = resource.getpagesize()
    try:
        mapped, used, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:  # not Linux
        return 0, 0
    return int(mapped) * size, int(used) * size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the reader will report it
        return 0
