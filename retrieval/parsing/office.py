"""DOCX, PPTX and XLSX, turned into Markdown by markitdown. An archive that would unpack to too much is not unpacked."""

from __future__ import annotations

import re
import zipfile
from functools import lru_cache
from pathlib import Path

from markitdown import MarkItDown

from retrieval.parsing.parsed import Kind, Page, Parsed, Unreadable
from retrieval.parsing.sniff import DOCX, PPTX, XLSX
from retrieval.parsing.text import heading

UNPACKED = 512 << 20  # bytes an archive may unpack to
RATIO = 200  # how many times its size
SMALL = 16 << 20  # an archive that unpacks to less may have any ratio
_SUFFIX = {DOCX: ".docx", PPTX: ".pptx", XLSX: ".xlsx"}
_SLIDE = re.compile(r"<!-- Slide number: (\d+) -->\n?")


@lru_cache(maxsize=1)
def _converter() -> MarkItDown:
    return MarkItDown(enable_plugins=False)


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


def parse(path: Path, media_type: str) -> Parsed:
    """
    Raises:
        Unreadable: as `check_archive`, or the converter could not read it.
    """
    check_archive(path)
    try:
        with path.open("rb") as file:
            made = _converter().convert_stream(file, file_extension=_SUFFIX[media_type])
    except Exception as error:  # the converters raise what their libraries raise, of many kinds
        raise Unreadable(f"The file could not be read as {_SUFFIX[media_type][1:].upper()}: {_brief(error)}") from None
    text, pages = made.markdown, tuple[Page, ...]()
    if media_type == PPTX:
        text, pages = _slides(text)
    if not text.strip():
        raise Unreadable("The file has no text.")
    kind: Kind = "table" if media_type == XLSX else "markdown"
    return Parsed(text, (made.title or heading(text) or "").strip(), kind, media_type, pages)


def _slides(text: str) -> tuple[str, tuple[Page, ...]]:
    """The text without the marks of its slides, and where each begins."""
    parts = _SLIDE.split(text)
    made, pages = parts[0], list[Page]()
    for number, body in zip(parts[1::2], parts[2::2], strict=True):
        pages.append(Page(int(number), len(made), len(made) + len(body)))
        made += body
    return made, tuple(pages)


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
