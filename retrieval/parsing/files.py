"""A file in, its text out: looks what it is and calls the parser for it. Knows nothing of documents or owners."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from retrieval.parsing import markdown, sniff, text
from retrieval.parsing.parsed import LONGEST, Kind, Parsed, Unreadable

TITLE = 300  # characters of its title: what is longer is cut
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
    if len(parsed.text) > LONGEST:
        raise Unreadable(f"The file has {len(parsed.text):,} characters of text; up to {LONGEST:,} are read. Split it.")
    return replace(parsed, title=parsed.title[:TITLE])


def _parsed(path: Path, media_type: str) -> Parsed:
    if media_type == sniff.PDF:
        from retrieval.parsing import pdf

        return pdf.parse(path)
    if media_type in (sniff.DOCX, sniff.PPTX, sniff.XLSX):
        from retrieval.parsing import office  # takes a second to import

        return office.parse(path, media_type)
    if (size := path.stat().st_size) > 4 * LONGEST:  # no encoding takes more than 4 bytes a character
        raise Unreadable(f"The file has {size >> 20} MiB of text; up to {LONGEST:,} characters are read. Split it.")
    data = path.read_bytes()
    if media_type == sniff.HTML:
        from retrieval.parsing import html

        return html.parse(data)
    decoded, faults = text.decode(data)
    title = markdown.title(decoded) if media_type == sniff.MARKDOWN else ""
    return Parsed(decoded, title, _KINDS[media_type], media_type, (), faults)
