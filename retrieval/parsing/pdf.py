"""PDF through PDFium: text page by page, and the boxes of a span when someone wants to see it.

The text is made from PDFium's numbered characters by a rule that is applied to each page alone: lines flow into
paragraphs, words that a hyphen broke are whole again. So `boxes` finds the characters of a span by making the page's
text once more, and nothing but the pages' starts needs keeping.
PDFium is not safe in threads, so one call at a time goes through, and it can crash on a broken file: files that nobody
has read yet are parsed in a process of their own.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterable
from pathlib import Path

import pypdfium2
from pypdfium2.raw import FPDFText_GetUnicode

from retrieval.parsing.markdown import clean
from retrieval.parsing.parsed import Box, Parsed, ParsedPage, ParseFault, Unreadable
from retrieval.parsing.sniff import PDF

SHORT = 0.75  # of a page's full line: a line that is shorter and ends a sentence ends its paragraph
MAX_PAGES = 5000
MAX_PIXELS = 16_000_000  # of the picture of a page
MAX_SIDE = 14_400.0  # points, of a rendered page: more than that no PDF may have (ISO 32000, Annex C)
_ONE = threading.Lock()
_ENCRYPTED = (4, 5)  # PDFium's errors for a password and for a kind of encryption it does not know
_HYPHEN = "\ufffe"  # where PDFium joined a word that was broken at the end of a line
_COMPOUND = re.compile(r"(?<=-)(\w+)" + _HYPHEN)  # "state-of-the-" keeps its hyphen, "inter-" was broken
_GONE = "\0"  # stands for a character that the text leaves out
_LINE_END = re.compile(r"(\r?\n)")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\xad\ufffe\uffff]")
_SENTENCE_ENDS = (".", "!", "?", ":", '"', "”", ")")
_BULLETS = "•–*·▪‣◦"


def parse(path: Path) -> Parsed:
    """
    Raises:
        Unreadable: it is encrypted or damaged, has too many pages, or none of its pages has text.
    """
    with _ONE:
        return _parsed(path)


def _parsed(path: Path) -> Parsed:
    pdf = _opened(path)
    try:
        if len(pdf) > MAX_PAGES:
            raise Unreadable(f"The PDF has {len(pdf)} pages; up to {MAX_PAGES} are read. Split it.")
        texts, pages, faults, start = list[str](), list[ParsedPage](), list[ParseFault](), 0
        for number in range(1, len(pdf) + 1):
            text, fault = _page_text(pdf, number)
            if fault:
                faults.append(fault)
            pages.append(ParsedPage(number, start, start + len(text)))
            texts.append(text)
            start += len(text) + 1
        if not any(text.strip() for text in texts):
            raise Unreadable(_nothing(faults))
        title = clean(pdf.get_metadata_dict().get("Title") or "").strip()
        return Parsed("\f".join(texts), title, "prose", PDF, tuple(pages), tuple(faults))
    finally:
        pdf.close()


def boxes(path: Path, page: ParsedPage, start: int, end: int) -> list[Box]:
    """The rectangles, about one a line, that the characters `start` to `end` of the text take on `page`.

    Raises:
        Unreadable: as `parse`, or the file is not the one that `page` is of.
    """
    first, last = max(start, page.start) - page.start, min(end, page.end) - page.start
    if first >= last:
        return []
    with _ONE:
        return _boxes(path, page, first, last)


def sizes(path: Path) -> list[tuple[float, float]]:
    """Width and height of each page as it is shown, in points.

    Raises:
        Unreadable: it is encrypted or damaged.
    """
    with _ONE:
        pdf = _opened(path)
        try:
            return [pdf.get_page_size(at) for at in range(len(pdf))]
        except pypdfium2.PdfiumError as error:
            raise Unreadable(f"The pages of the PDF could not be measured: {error}") from None
        finally:
            pdf.close()


def draw(path: Path, number: int, width: int) -> bytes:
    """Page `number` as a PNG, `width` pixels wide; narrower where it would have more than `MAX_PIXELS`.

    Raises:
        Unreadable: it is encrypted or damaged, or has no such page.
    """
    with _ONE:
        pdf = _opened(path)
        try:
            page = pdf[number - 1]
            wide, high = page.get_size()
            if not 1 <= min(wide, high) <= max(wide, high) <= MAX_SIDE:
                raise Unreadable(
                    f"Page {number} of the PDF measures {wide:g} by {high:g} points; drawn are those "
                    f"whose sides have 1 to {MAX_SIDE:g}."
                )
            scale = min(width / wide, (MAX_PIXELS / (wide * high)) ** 0.5)
            made = io.BytesIO()
            page.render(scale=scale).to_pil().save(made, "PNG", compress_level=3)
            return made.getvalue()
        except (pypdfium2.PdfiumError, IndexError, ValueError, ZeroDivisionError) as error:
            raise Unreadable(f"Page {number} of the PDF could not be drawn: {error}") from None
        finally:
            pdf.close()


def _boxes(path: Path, page: ParsedPage, first: int, last: int) -> list[Box]:
    """Of the characters `first` to `last` of the page."""
    pdf = _opened(path)
    try:
        leaf = pdf[page.number - 1]
        text = leaf.get_textpage()
        numbers = [number for number, character in enumerate(_flowed(_characters(text))) if character != _GONE]
        if len(numbers) != page.end - page.start:
            raise Unreadable("The PDF is not the one that was read. Send it again.")
        count = text.count_rects(numbers[first], numbers[last - 1] - numbers[first] + 1)
        found = [_shown(leaf, text.get_rect(at)) for at in range(count)]
        width, height = leaf.get_size()
        return [Box(page.number, *sides, width, height) for sides in _joined(found)]
    except (pypdfium2.PdfiumError, IndexError) as error:
        raise Unreadable(f"Page {page.number} of the PDF could not be read: {error}") from None
    finally:
        pdf.close()


def _opened(path: Path) -> pypdfium2.PdfDocument:
    try:
        return pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if error.err_code in _ENCRYPTED:
            raise Unreadable("The PDF is encrypted. Save it without a password and send it again.") from None
        raise Unreadable("The PDF is damaged or was cut off. Open it elsewhere, save it anew and send that.") from None


def _page_text(pdf: pypdfium2.PdfDocument, number: int) -> tuple[str, ParseFault | None]:
    try:
        page = pdf[number - 1]
        try:
            made = _flowed(_characters(page.get_textpage())).replace(_GONE, "")
        finally:
            page.close()
    except pypdfium2.PdfiumError as error:
        return "", ParseFault(f"The page could not be read: {error}", number)
    if not made.strip():
        return made, ParseFault("The page has no text: is it a picture? Pictures are not read.", number)
    return made, None


def _nothing(faults: list[ParseFault]) -> str:
    """Returns why none of the pages has text."""
    if any("could not be read" in fault.message for fault in faults):
        return "The PDF is damaged or was cut off: none of its pages can be read."
    return "No page of the PDF has text: they are pictures, perhaps scans. Pictures are not read."


def _characters(text: pypdfium2.PdfTextPage) -> str:
    """One character for each that PDFium counts, so that its numbers are ours."""
    count = text.count_chars()
    made: str = text.get_text_range() if count else ""
    if len(made) != count:  # it left some out, or two numbers are one character
        made = _paired([FPDFText_GetUnicode(text, number) for number in range(count)])
    return made


def _paired(codes: list[int]) -> str:
    """UTF-16 units as characters; a pair is its character and nothing."""
    made = [chr(code) if code < 0x110000 else "\ufffd" for code in codes]
    for at, code in enumerate(codes):
        if 0xD800 <= code < 0xDC00 and at + 1 < len(codes) and 0xDC00 <= codes[at + 1] < 0xE000:
            made[at], made[at + 1] = chr(0x10000 + ((code - 0xD800) << 10) + codes[at + 1] - 0xDC00), _GONE
        elif 0xD800 <= ord(made[at]) < 0xE000:
            made[at] = "\ufffd"
        elif code == 2:  # PDFium's code for a hyphen of its text
            made[at] = _HYPHEN
    return "".join(made)


def _flowed(raw: str) -> str:
    """As long as `raw`: line ends are two newlines after a paragraph and a space within; a removed character is
    `_GONE`.
    """
    parts = _LINE_END.split(raw)
    lines, ends = parts[::2], parts[1::2]
    widths = sorted(len(row) for line in lines for row in line.split(_HYPHEN) if row and not row.isspace())
    short = SHORT * widths[len(widths) * 3 // 4] if widths else 0.0  # most shorter lines are headings and tables
    made = []
    for at, end in enumerate(ends):
        made.append(lines[at])
        if _ends_paragraph(lines[at].rpartition(_HYPHEN)[2].rstrip(), lines[at + 1].lstrip(), short):
            made.append("\n" * len(end))
        else:
            made.append((_GONE if lines[at][-1:].isspace() else " ") + _GONE * (len(end) - 1))
    made.append(lines[-1])
    text = "".join(made)
    if _HYPHEN in text:
        text = _COMPOUND.sub(r"\1-", text)
    return _CONTROL.sub(_GONE, text)


def _ends_paragraph(row: str, following: str, short: float) -> bool:
    """Returns whether a row is a paragraph's last: a bullet follows, or it is short and either ends or something
    begins."""
    if not row or not following or following[0] in _BULLETS:
        return True
    begins = following[0].isupper() or following[0].isdigit()
    return len(row) < short and (row.endswith(_SENTENCE_ENDS) or begins)


_Sides = tuple[float, float, float, float]  # left, bottom, right, top


def _shown(page: pypdfium2.PdfPage, sides: _Sides) -> _Sides:
    """From the page's own coordinates to those of the page as it is shown: cropped, then turned."""
    low_x, low_y, high_x, high_y = page.get_bbox()
    left, bottom, right, top = sides[0] - low_x, sides[1] - low_y, sides[2] - low_x, sides[3] - low_y
    width, height = high_x - low_x, high_y - low_y
    match page.get_rotation():
        case 90:
            return bottom, width - right, top, width - left
        case 180:
            return width - right, height - top, width - left, height - bottom
        case 270:
            return height - top, left, height - bottom, right
    return left, bottom, right, top


def _joined(found: Iterable[_Sides]) -> list[_Sides]:
    """Neighbours on a line as one: some PDFs draw every word, or every letter, by itself."""
    made = list[_Sides]()
    for left, bottom, right, top in found:
        if made:
            before = made[-1]
            height = min(top - bottom, before[3] - before[1])
            level = min(top, before[3]) - max(bottom, before[1]) > height / 2
            if level and -height < left - before[2] < height:
                made[-1] = before[0], min(bottom, before[1]), max(right, before[2]), max(top, before[3])
                continue
        made.append((left, bottom, right, top))
    return made
