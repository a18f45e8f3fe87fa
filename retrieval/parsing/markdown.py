"""Where Markdown's headings and fenced code are, with every line looked at once.

A `#` within a fence is no heading; a fence that nothing closes is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARKS = re.compile(
    r"^(?:[ \t]*(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)"
    r"| {0,3}(?P<level>\#{1,6})[ \t](?P<title>[^\n]*)"
    r"|(?P<under>={3,}|-{3,})[ \t]*$)",
    re.MULTILINE,
)
LONGEST = 120  # characters of a heading's title: it goes with all that stands under it


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
        return Heading(found.start(), found.end(), len(found["level"]), name[:LONGEST]) if name else None
    if not found["under"] or found.start() < 2:
        return None
    start = text.rfind("\n", 0, found.start() - 1) + 1  # the line above is the heading, if it stands alone
    name = text[start : found.start() - 1].strip()
    if len(name) > LONGEST or not name.strip("-=*_ ") or "|" in name or (start > 1 and text[start - 2] != "\n"):
        return None
    return Heading(start, found.end(), 1 if found["under"][0] == "=" else 2, name)
