"""PDF through PDFium: text page by page, and the boxes of a span when someone wants to see it.

A page's text has one character for each of PDFium's, only line ends are told apart (a space within a paragraph, a
newline at its end): so a span of the text is a span of the page, and nothing but the pages' starts needs keeping.
PDFium is not safe in threads and can crash on a broken file: this runs in the process that parses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pypdfium2

from retrieval.parsing.parsed import Fault, Page, Parsed, Unreadable
from retrieval.parsing.sniff import PDF

SHORT = 0.75  # of a page's usual line: a line that is shorter and ends a sentence ends its paragraph
_SENTENCE_ENDS = (".", "!", "?", ":", '"', "”", ")")


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on a page, in points from the page's lower left corner; `width` and `height` are the page's."""

    page: int
    left: float
    bottom: float
    right: float
    top: float
    width: float
    height: float


def _opened(path: Path) -> pypdfium2.PdfDocument:
    try:
        return pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower() or "security" in str(error).lower():
            raise Unreadable("The PDF is encrypted. Save it without a password and send it again.") from None
        raise Unreadable(f"The PDF is damaged or was cut off: {error}") from None


def parse(path: Path, most_pages: int = 5000) -> Parsed:
    """
    Raises:
        Unreadable: it is encrypted or damaged, has too many pages, or none of its pages has text.
    """
    pdf = _opened(path)
    try:
        if len(pdf) > most_pages:
            raise Unreadable(f"The PDF has {len(pdf)} pages; up to {most_pages} are read. Split it.")
        texts, pages, faults, start = list[str](), list[Page](), list[Fault](), 0
        for number in range(1, len(pdf) + 1):
            try:
                text = _page_text(pdf, number - 1)
            except pypdfium2.PdfiumError as error:
                faults.append(Fault(f"The page could not be read: {error}", number))
                text = ""
            if not text.strip() and not (faults and faults[-1].page == number):
                faults.append(Fault("The page has no text: is it a picture? Pictures are not read.", number))
            pages.append(Page(number, start, start + len(text)))
            texts.append(text)
            start += len(text) + 1
        if not any(text.strip() for text in texts):
            raise Unreadable("No page of the PDF has text: they are pictures, perhaps scans. Pictures are not read.")
        title = (pdf.get_metadata_dict().get("Title") or "").strip()
        return Parsed("\f".join(texts), title, "prose", PDF, tuple(pages), tuple(faults))
    finally:
        pdf.close()


def _page_text(pdf: pypdfium2.PdfDocument, index: int) -> str:
    """As many characters as PDFium counts on the page."""
    page = pdf[index]
    text = page.get_textpage()
    try:
        return _flowed(_characters(text))
    finally:
        text.close()
        page.close()


def _characters(text: pypdfium2.PdfTextPage) -> str:
    """One character for each of PDFium's UTF-16 units, so that its numbers are ours."""
    raw: str = text.get_text_range()
    if any(ord(character) > 0xFFFF for character in raw):
        raw = "".join(c if ord(c) <= 0xFFFF else c + "\u200b" for c in raw)
    return raw.replace("\ufffe", "\u00ad").replace("\x02", "\u00ad")


def _flowed(raw: str) -> str:
    """Line ends within a paragraph become spaces; the length stays."""
    lines = raw.split("\n")
    bodies = [line.rstrip("\r") for line in lines]
    lengths = [len(body.strip()) for body in bodies if body.strip()]
    usual = median(lengths) if lengths else 0
    made = []
    for at, (line, body) in enumerate(zip(lines, bodies, strict=True)):
        stripped = body.rstrip()
        short = len(stripped) < SHORT * usual
        ends = not stripped or (short and (stripped.endswith(_SENTENCE_ENDS) or _begins_new(bodies, at + 1)))
        last = at == len(lines) - 1
        made.append(body + " " * (len(line) - len(body)) + ("" if last else "\n" if ends else " "))
    return "".join(made)


def _begins_new(lines: list[str], at: int) -> bool:
    """Whether the line after a short one looks like the start of something: a capital, a digit or a bullet."""
    following = lines[at].lstrip() if at < len(lines) else ""
    return not following or following[0].isupper() or following[0].isdigit() or following[0] in "•-–*·"


def boxes(path: Path, page: Page, start: int, end: int) -> list[Box]:
    """The rectangles, about one a line, that the characters `start` to `end` of the text take on `page`.

    Raises:
        Unreadable: as `parse`.
    """
    first, last = max(start, page.start) - page.start, min(end, page.end) - page.start
    if first >= last:
        return []
    pdf = _opened(path)
    try:
        leaf = pdf[page.number - 1]
        width, height = leaf.get_size()
        text = leaf.get_textpage()
        found = (text.get_rect(at) for at in range(text.count_rects(first, last - first)))
        return [Box(page.number, left, low, right, high, width, height) for left, low, right, high in found]
    finally:
        pdf.close()
