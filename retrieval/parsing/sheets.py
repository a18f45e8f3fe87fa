"""XLSX through openpyxl: each sheet a heading and tables in Markdown, a row a line, values as a reader sees them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from pathlib import Path

import openpyxl

from retrieval.parsing.markup import MAX_CELLS
from retrieval.parsing.parsed import LONGEST

Value = object  # what openpyxl gives for a cell: a number, a text, a date, a truth value, or None


class TooMuchText(Exception):
    """The sheets have more text, or more cells, than are read."""


def text(path: Path) -> str:
    """The sheets that hold anything, as Markdown.

    Raises:
        TooMuchText: see there.
    """
    book = openpyxl.load_workbook(path, read_only=True, data_only=True)  # the values that formulas last had
    try:
        made, left, cells = list[str](), LONGEST, 0
        for sheet in book.worksheets:
            sheet.reset_dimensions()  # what the file says of them may be wrong
            lines = list[str]()
            for line in _lines(sheet.iter_rows(values_only=True)):
                lines.append(line)
                left, cells = left - len(line), cells + line.count(" | ") + 1
                if left < 0 or cells > MAX_CELLS:
                    raise TooMuchText
            if rows := "\n".join(lines):
                made.append(f"## {' '.join(sheet.title.split())}\n\n{rows}")
        return "\n\n".join(made)
    finally:
        book.close()


def _lines(rows: Iterable[tuple[Value, ...]]) -> Iterator[str]:
    """A row of texts alone that follows an empty row begins another table."""
    width, apart = 0, True
    for row in rows:
        cells = [_shown(value) for value in row]
        while cells and not cells[-1]:
            cells.pop()
        if not cells:
            apart = True
            continue
        head = not width or (apart and len(cells) > 1 and all(isinstance(value, str) for value in row[: len(cells)]))
        apart = False
        if head and width:
            yield ""
        width = len(cells) if head else width
        yield f"| {' | '.join(cells + [''] * (width - len(cells)))} |"
        if head:
            yield "|" + " --- |" * width


def _shown(value: Value) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.15g}"
        case dt.datetime() if value.time() == dt.time():
            return value.date().isoformat()
        case dt.datetime():
            return value.isoformat(" ")
    return " ".join(str(value).split()).replace("|", "\\|")
