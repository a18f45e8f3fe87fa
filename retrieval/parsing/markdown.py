"""Headings and fences of Markdown, and the decoding of text files.

A `#` within a fence is no heading; a fence that nothing closes is none. Lines in another encoding than the rest of a
file are decoded by themselves.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from charset_normalizer import from_bytes

from retrieval.parsing.parsed import ParseFault
from retrieval.parsing.sniff import unmarked_unicode

_MARKS = re.compile(
    r"^(?:[ \t]*(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)"
    r"| {0,3}(?P<level>\#{1,6})[ \t](?P<title>[^\n]*)"
    r"|(?P<under>={3,}|-{3,})[ \t]*$)",
    re.MULTILINE,
)
MAX_LENGTH = 120  # characters of a heading's title: it goes with all that stands under it


@dataclass(frozen=True, slots=True)
class Heading:
    """Characters `start` to `end` of the text, the mark included."""

    start: int
    end: int
    level: int
    title: str


@dataclass(frozen=True, slots=True)
class Outline:
    """Both in the order of the text. A fence is a span with its marks."""

    headings: tuple[Heading, ...]
    fences: tuple[tuple[int, int], ...]


def outline(text: str) -> Outline:
    """The headings and fences of a text."""
    headings, within, fences = list[Heading](), list[Heading](), list[tuple[int, int]]()
    fence, opened, free = "", 0, 0  # `free`: where the last heading or fence ended
    for found in _MARKS.finditer(text):
        if mark := found["fence"]:
            if not fence:
                if mark[0] == "~" or "`" not in found["info"]:  # else it is code within a line
                    fence, opened = mark, found.start()
            elif mark[0] == fence[0] and len(mark) >= len(fence) and not found["info"].strip():
                free = found.end()
                fences.append((opened, free))
                fence = ""
                within.clear()
        elif (heading := _heading(text, found)) and heading.start >= free:
            free = heading.end
            (within if fence else headings).append(heading)
    return Outline((*headings, *within), tuple(fences))


def title(text: str) -> str:
    """The first of the larger headings, or nothing."""
    return next((heading.title for heading in outline(text).headings if heading.level <= 3), "")


def _heading(text: str, found: re.Match[str]) -> Heading | None:
    if found["level"]:
        name = found["title"].strip()
        bare = name.rstrip("#")  # marks may close it too, after a space
        name = bare.rstrip() if not bare or bare[-1].isspace() else name
        return Heading(found.start(), found.end(), len(found["level"]), name[:MAX_LENGTH]) if name else None
    if not found["under"] or found.start() < 2:
        return None
    start = text.rfind("\n", 0, found.start() - 1) + 1  # the line above is the heading, if it stands alone
    name = text[start : found.start() - 1].strip()
    if len(name) > MAX_LENGTH or not name.strip("-=*_ ") or "|" in name or (start > 1 and text[start - 2] != "\n"):
        return None
    return Heading(start, found.end(), 1 if found["under"][0] == "=" else 2, name)


_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig", "UTF-8"),
    (codecs.BOM_UTF32_LE, "utf-32", "UTF-32"),  # before UTF-16: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF16_LE, "utf-16", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16", "UTF-16"),
)
_SAMPLE = 1 << 16  # bytes that the encoding is guessed from
_TELLING = 8  # bytes beyond ASCII in it: with fewer a guess is no better than the most common encoding
_COMMON = "cp1252"
# The encodings before Unicode that browsers read (WHATWG's Encoding Standard): rarer ones are guessed by mistake only.
_LEGACY = [
    "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp874", "iso8859_2",
    "iso8859_5", "iso8859_7", "koi8_r", "koi8_u", "cp866", "mac_cyrillic", "shift_jis", "euc_jp", "gb18030", "big5",
    "cp949",
]  # fmt: skip
_UNWANTED = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff]")  # control characters; tab, line and page ends stay
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def decode(data: bytes, declared: str | None = None) -> tuple[str, tuple[ParseFault, ...]]:
    """The text of a file as `clean` leaves it, and the faults of a guessed encoding. `declared` is the file's own
    claim.
    """
    text, fault = _decode(data, declared)
    return clean(text), (fault,) if fault else ()


def clean(text: str) -> str:
    """Line ends become newlines, control characters spaces."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\v", "\n")
    return _SURROGATE.sub("\ufffd", _UNWANTED.sub(" ", text))


def _decode(data: bytes, declared: str | None) -> tuple[str, ParseFault | None]:
    for mark, encoding, name in _BOMS:
        if data.startswith(mark):
            text = data.decode(encoding, "replace")
            return text, ParseFault(f"What is not {name} in it was left out.") if "\ufffd" in text else None
    if (wide := unmarked_unicode(data[:_SAMPLE])) and (whole := _strictly(data, wide)) is not None:
        return whole, None
    for encoding in ("utf-8", declared or "utf-8"):
        if (whole := _strictly(data, encoding)) is not None:
            return whole, None
    lines = data.splitlines(keepends=True)
    read = [_strictly(line, "utf-8") or _nearly(line) for line in lines]
    foreign = [line for line, text in zip(lines, read, strict=True) if text is None]
    if any(text is not None and not text.isascii() for text in read):  # UTF-8 but for some lines or bytes
        parts = [
            line.decode(_COMMON, "replace") if text is None else text for line, text in zip(lines, read, strict=True)
        ]
        said = f"{len(foreign)} of {len(lines)} lines are not UTF-8 like the rest: they were read as Windows-1252."
        return "".join(parts), ParseFault(said if foreign else "What is not UTF-8 in it was left out.")
    encoding = _guess(b"".join(foreign)[:_SAMPLE])
    named = encoding.replace("cp125", "Windows-125").replace("_", "-")
    return data.decode(encoding, "replace"), ParseFault(f"The encoding is not given: it was read as {named}.")


def _strictly(data: bytes, encoding: str) -> str | None:
    try:
        return data.decode(encoding)
    except (UnicodeDecodeError, LookupError):
        return None


def _nearly(line: bytes) -> str | None:
    """A line that is UTF-8 but for a few bytes. Other encodings hardly ever look like it by chance."""
    text = line.decode("utf-8", "replace")
    lost = text.count("\ufffd")
    return text if len(text) - len(text.encode("ascii", "ignore")) > 4 * lost else None


def _guess(sample: bytes) -> str:
    if sum(byte > 127 for byte in sample) < _TELLING and _strictly(sample, _COMMON) is not None:
        return _COMMON
    found = from_bytes(sample, cp_isolation=_LEGACY)
    best = found.best()
    if best is None or _COMMON in best.could_be_from_charset:
        return _COMMON
    as_good = (each.encoding for each in found if (each.chaos, each.coherence) == (best.chaos, best.coherence))
    return _COMMON if _COMMON in as_good else best.encoding
