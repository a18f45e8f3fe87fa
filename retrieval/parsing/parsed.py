"""A parsed file: its text, where its pages begin, and faults found on the way. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_LENGTH = 50_000_000  # characters of text of one document

Kind = Literal["prose", "markdown", "table", "code"]  # how the text wants to be cut


class Unreadable(Exception):
    """A file that gives no text; the message says why, and names the accepted kinds."""


@dataclass(frozen=True, slots=True)
class ParsedPage:
    """A page of a PDF, or a slide: characters `start` to `end` of the text. Numbers count from 1."""

    number: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on a page as it is shown, in points from its lower left corner; the page is `width` by `height`."""

    page: int
    left: float
    bottom: float
    right: float
    top: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class ParseFault:
    """An unreadable part of a file that otherwise could be read; `page` where it is known."""

    message: str
    page: int | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """The text that everything else counts its characters in."""

    text: str
    title: str
    kind: Kind
    media_type: str
    pages: tuple[ParsedPage, ...] = ()
    faults: tuple[ParseFault, ...] = ()
