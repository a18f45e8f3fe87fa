"""Files that are text: which encoding they have. Lines of another encoding than the rest are read by themselves."""

from __future__ import annotations

import codecs
import re

from charset_normalizer import from_bytes

from retrieval.parsing.parsed import Fault

_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_SAMPLE = 1 << 18  # bytes that the encoding is guessed from
_UNWANTED = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")  # control characters; tab, line and page ends stay


def decode(data: bytes) -> tuple[str, tuple[Fault, ...]]:
    """The text of a file and what had to be guessed. Line ends become newlines, control characters spaces."""
    text, faults = _decode(data)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _UNWANTED.sub(" ", text), faults


def _decode(data: bytes) -> tuple[str, tuple[Fault, ...]]:
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, "replace"), ()
    try:
        return data.decode("utf-8"), ()
    except UnicodeDecodeError:
        pass
    lines = data.splitlines(keepends=True)
    foreign = [line for line in lines if not _is_utf8(line)]
    if any(_is_utf8(line) and not line.isascii() for line in lines):  # UTF-8 but for some lines
        parts = [line.decode("utf-8") if _is_utf8(line) else line.decode("cp1252", "replace") for line in lines]
        fault = Fault(
            f"{len(foreign)} of {len(lines)} lines are not UTF-8 like the rest: they were read as Windows-1252."
        )
        return "".join(parts), (fault,)
    sample = b"".join(foreign)[:_SAMPLE]
    best = from_bytes(sample).best()
    encoding = best.encoding if best else "cp1252"
    return data.decode(encoding, "replace"), (Fault(f"The encoding is not given; it was read as {encoding}."),)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def heading(text: str) -> str | None:
    """The first heading of Markdown, or None."""
    found = re.search(r"^#{1,3}[ \t]+(.+?)[ \t#]*$", text, re.MULTILINE)
    return found[1].strip() if found else None
