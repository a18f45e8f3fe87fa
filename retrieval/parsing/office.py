"""Parses Word, PowerPoint and Excel files as Markdown.

An archive that would unpack to too much is not unpacked. Sheets are read through openpyxl: each is a heading and
tables, a row a line, values as a reader sees them.
"""

from __future__ import annotations

import datetime as dt
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import openpyxl
from markitdown import StreamInfo
from markitdown.converters import DocxConverter, PptxConverter

from retrieval.parsing import html, markdown
from retrieval.parsing import html as markup
from retrieval.parsing.html import MAX_CELLS
from retrieval.parsing.markdown import clean
from retrieval.parsing.parsed import MAX_LENGTH, Parsed, ParsedPage, Unreadable
from retrieval.parsing.sniff import DOCX, PPTX, XLSX

Value = object  # a cell of openpyxl's: a number, a text, a date, a truth value, or None


class TooMuchText(Exception):
    """The sheets have more text, or more cells, than are read."""


def text(path: Path) -> str:
    """The sheets with content, as Markdown.

    Raises:
        TooMuchText: see there.
    """
    book = openpyxl.load_workbook(path, read_only=True, data_only=True)  # the values that formulas last had
    try:
        made, left, cells = list[str](), MAX_LENGTH, 0
        for sheet in book.worksheets:
            sheet.reset_dimensions()  # the file's own dimensions may be wrong
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


UNPACKED = 256 << 20  # bytes an archive may unpack to
RATIO = 200  # how many times its size
SMALL = 16 << 20  # an archive that unpacks to less may have any ratio
_NAMES = {DOCX: "DOCX", PPTX: "PPTX", XLSX: "XLSX"}
_TITLES = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => h2:fresh"
_SLIDE = re.compile(r"<!-- Slide number: (\d+) -->\n?")
_GAP = re.compile(r"\n{3,}")


def parse(path: Path, media_type: str) -> Parsed:
    """
    Raises:
        Unreadable: as `check_archive`, or the converter could not read it.
    """
    check_archive(path)
    markup.check_archive(path, sheets=media_type == XLSX)
    try:
        text = _converted(path, media_type)
    except (MemoryError, RecursionError):
        raise
    except TooMuchText:
        raise Unreadable(
            f"The sheets have more than {markup.MAX_CELLS:,} cells, empty ones between others included, or more than "
            f"{MAX_LENGTH:,} characters. Split them."
        ) from None
    except Exception as error:  # the converters let errors of their libraries through, of many kinds
        raise Unreadable(
            f"The file is damaged: it could not be read as {_NAMES[media_type]} ({_brief(error)}). "
            "Open it elsewhere, save it anew and send that."
        ) from None
    text = html.without_images(clean(text))
    pages = tuple[ParsedPage, ...]()
    if media_type == PPTX:
        text, pages = _slides(text)
    title = "" if media_type == XLSX else markdown.title(text)
    return Parsed(text, title, "markdown", media_type, pages)


def check_archive(path: Path) -> None:
    """
    Raises:
        Unreadable: it is encrypted, damaged, or would unpack to much more than a document has.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise Unreadable(f"The file is damaged or was cut off: {error}.") from None
    if any(member.flag_bits & 1 for member in members):
        raise Unreadable("The file is encrypted. Save it without a password and send it again.")
    unpacked, packed = sum(member.file_size for member in members), max(1, path.stat().st_size)
    if unpacked > UNPACKED or (unpacked > SMALL and unpacked > RATIO * packed):
        raise Unreadable(
            f"The file would unpack to {unpacked >> 20} MiB from {packed >> 10} KiB. Up to {UNPACKED >> 20} MiB and "
            f"{RATIO} times its size are unpacked."
        )


def _converted(path: Path, media_type: str) -> str:
    if media_type == XLSX:
        return text(path)
    converter = DocxConverter() if media_type == DOCX else PptxConverter()
    options = {**html.PLAIN, "style_map": _TITLES} if media_type == DOCX else {}
    with path.open("rb") as file:
        made: str = converter.convert(file, StreamInfo(extension="." + _NAMES[media_type].lower()), **options).markdown
    return made


def _slides(text: str) -> tuple[str, tuple[ParsedPage, ...]]:
    """The text without the marks of its slides, and where each begins."""
    parts = _SLIDE.split(text)
    made, pages = [_GAP.sub("\n\n", parts[0]).lstrip()], list[ParsedPage]()
    start = len(made[0])
    for number, body in zip(parts[1::2], parts[2::2], strict=True):
        made.append(_GAP.sub("\n\n", body).strip() + "\n\n")
        pages.append(ParsedPage(int(number), start, start + len(made[-1])))
        start += len(made[-1])
    return "".join(made), tuple(pages)


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
