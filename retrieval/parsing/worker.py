"""Parsing in a process of its own: a file that crashes, hangs or swells its parser harms nothing else.

The process lives on for the next file; one that overstays its time or dies is replaced.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as Overdue
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from retrieval.parsing import files
from retrieval.parsing.parsed import Box, Page, Parsed, Unreadable

MEMORY = 4 << 30  # bytes of address space
FILES_EACH = 200  # that one process parses before it is replaced, for what its libraries do not give back
T = TypeVar("T")
Parse = Callable[[Path, str], Parsed]  # as `files.parse`; a function that another process can import


class Parser:
    """`workers` processes, started at the first file. `deadline_s` counts from when a process takes the file up."""

    def __init__(self, workers: int = 1, deadline_s: float = 300.0, *, parse: Parse = files.parse) -> None:
        self._deadline_s = deadline_s
        self._parse = parse
        self._pool = ProcessPool(
            max_workers=workers,
            max_tasks=FILES_EACH,
            initializer=_limit,
            initargs=(MEMORY,),
            context=get_context("spawn"),
        )

    def submit(self, path: Path, name: str) -> ProcessFuture[Parsed]:
        """A future of what `files.parse` gives; `result` takes it."""
        return self._pool.schedule(self._parse, args=(path, name), timeout=self._deadline_s)

    def boxes(self, path: Path, pages: Sequence[Page], start: int, end: int) -> list[Box]:
        """The rectangles that the characters `start` to `end` of a PDF's text take on these pages.

        Raises:
            Unreadable: as `result`, or the file is not the one that was read.
        """
        return self.result(self._pool.schedule(_boxes, args=(path, pages, start, end), timeout=self._deadline_s))

    def sizes(self, path: Path) -> list[tuple[float, float]]:
        """Width and height of each page of a PDF, in points.

        Raises:
            Unreadable: as `result`.
        """
        return self.result(self._pool.schedule(_sizes, args=(path,), timeout=self._deadline_s))

    def draw(self, path: Path, page: int, width: int) -> ProcessFuture[bytes]:
        """A future of a page of a PDF as a PNG, as `pdf.draw` gives it; `result` takes it."""
        return self._pool.schedule(_draw, args=(path, page, width), timeout=self._deadline_s)

    def result(self, future: ProcessFuture[T]) -> T:
        """
        Raises:
            Unreadable: it could not be parsed, in time, in memory and without a crash.
        """
        try:
            made: T = future.result()
        except Overdue:
            raise Unreadable(f"Reading the file took longer than {self._deadline_s:g} s and was given up.") from None
        except ProcessExpired:
            raise Unreadable(
                f"The file crashed what reads it: it is damaged, needs more than {MEMORY >> 30} GiB of memory, or is "
                "made to harm."
            ) from None
        except MemoryError:
            raise Unreadable(f"Reading the file takes more than {MEMORY >> 30} GiB of memory. Split it.") from None
        except RecursionError:
            raise Unreadable("The file is nested too deeply to be read.") from None
        return made

    def parse(self, path: Path, name: str) -> Parsed:
        """Both at once."""
        return self.result(self.submit(path, name))

    def close(self) -> None:
        """Ends the processes; what they are reading is given up."""
        self._pool.stop()
        self._pool.join()


def _boxes(path: Path, pages: Sequence[Page], start: int, end: int) -> list[Box]:
    from retrieval.parsing import pdf

    return [box for page in pages for box in pdf.boxes(path, page, start, end)]


def _sizes(path: Path) -> list[tuple[float, float]]:
    from retrieval.parsing import pdf

    return pdf.sizes(path)


def _draw(path: Path, page: int, width: int) -> bytes:
    from retrieval.parsing import pdf

    return pdf.draw(path, page, width)


def _limit(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
