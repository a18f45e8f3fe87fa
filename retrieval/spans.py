"""Finds the places of things in a text: its sentences and what else can be quoted (list items, lines of a name and a
value, rows of tables), a quotation in it however it is spaced, its numbers and names."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9À-Þ])|\n\s*\n|\f|(?<=[。！？])")
_SHORTENED = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|No|vs|Fig|approx|e\.g|i\.e|etc|Jr|Sr|Inc|Co|Ltd)\.$")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NAME = re.compile(r"[A-ZÀ-Þ][\w’'-]*")
_SAME = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\u00a0": " "})
Span = tuple[int, int]  # the first character, and the one after the last
_DROPPED = "\u00ad\u200b\u200c\u200d\ufeff"


def sentences(text: str) -> Iterator[Span]:
    """The spans of a text's sentences, without the white space between them."""
    start = 0
    for found in _SENTENCE.finditer(text):
        if shortened(text, start, found.start()) and "\n" not in found[0]:
            continue
        if text[start : found.end()].strip():
            yield _stripped(text, start, found.end())
        start = found.end()
    if text[start:].strip():
        yield _stripped(text, start, len(text))


def shortened(text: str, start: int, end: int) -> bool:
    """Returns whether the full stop before `end` ends a shortened word and not a sentence."""
    return _SHORTENED.search(text[max(start, end - 12) : end]) is not None


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())


@dataclass(frozen=True, slots=True)
class Statement:
    """Characters `start` to `end` of a text, which can be quoted alone.

    `headings` are the spans that it stands under in the text, the outermost first. `header` names the columns of a
    table's row. `block` numbers paragraphs, lists and tables: neighbours are of the same one.
    """

    start: int
    end: int
    headings: tuple[Span, ...] = ()
    header: tuple[str, ...] = ()
    block: int = 0

    def shown(self, text: str) -> str:
        """Returns the statement as a reader gets it: without marks of lists, a row with the names of its columns."""
        own = text[self.start : self.end]
        if self.header:
            return "; ".join(f"{name}: {cell}" for name, cell in zip(self.header, _cells(own), strict=False) if cell)
        mark = _HEADING.match(own) or _MARK.match(own)
        return " ".join((own[mark.end() :] if mark else own).split())


_HEADING = re.compile(r"#{1,6}[ \t]+(?=\S)")
_MARK = re.compile(r"^[ \t]*(?:[-*+•–·]|\d{1,3}[.)])[ \t]+")
_NUMBERED = re.compile(r"\d{1,3}[.)]")  # an item's number, where a paragraph has the items
_FIELD = re.compile(r"[A-ZÀ-Þ][\w'’ /().-]{0,40}:[ \t]+\S")  # a name and its value on one line
_RULE = re.compile(r"[ \t|:-]*--[ \t|:-]*")
_LINE = re.compile(r"[^\n\f]+")
ENDS = (".", "!", "?", "…", "。", "！", "？", ";")
HEADING_WORDS = 10  # a line of more is none, where no mark says that it is one
TRAILING_WORDS = 4  # of a heading behind the sentences of a block


def statements(text: str, context: str = "") -> list[Statement]:
    """Returns what can be quoted from a text, in its order. `context` ends with the header of a table that began
    before the text."""
    made, path = list[Statement](), list[tuple[int, Span]]()
    header = _cells(context.rpartition(" › ")[2])
    bare = False  # whether nothing stands under the last heading yet

    def under(level: int, heading: Span | None, number: int) -> None:
        """Ends the headings down to a level, and begins one. What heads nothing is a statement itself."""
        nonlocal path, bare
        if bare and level <= path[-1][0]:
            _, span = path.pop()
            made.append(Statement(*span, tuple(span for _, span in path), (), number - 1))
        path = [each for each in path if each[0] < level]
        bare = heading is not None
        if heading is not None:
            path.append((level, heading))

    number, blocks = 0, list(_blocks(text))
    for number, lines in enumerate(blocks):
        follows = text[slice(*blocks[number + 1][0])] if number + 1 < len(blocks) else ""
        if mark := _HEADING.match(text, lines[0][0]):
            under(len(mark[0].strip()), lines[0], number)
            continue
        rows = _table(text, lines, header if number == 0 else ())
        if not rows:
            lines, title, level = _titled(text, lines, follows)
            if title is not None:
                under(level, title, number)
        headings = tuple(span for _, span in path)
        spans = rows or [Statement(start, end) for start, end in _prose(text, lines)]
        last = spans[-1] if len(spans) > 1 and follows and not rows else None
        if last is not None:
            words = text[last.start : last.end]
            last = last if _may_head(words, TRAILING_WORDS) and not _MARK.match(words) else None
        made += (replace(each, headings=headings, block=number) for each in spans if each is not last)
        bare = bare and not spans
        if headings and spans and text[headings[-1][1] - 1] == ":":
            path.pop()  # the words before a list head no more than that
        if last is not None:  # in the text of a PDF, a heading is often joined with the paragraph before it
            under(7, (last.start, last.end), number)
    under(0, None, number + 1)
    return made


def _blocks(text: str) -> Iterator[list[Span]]:
    """Yields the lines of each paragraph, list or table; a heading stands alone."""
    block, after = list[Span](), 0
    for found in _LINE.finditer(text):
        line = found[0]
        start, end = found.start() + len(line) - len(line.lstrip()), found.end() - len(line) + len(line.rstrip())
        apart = text.count("\n", after, found.start()) > 1 or "\f" in text[after : found.start()]
        after = found.end()
        heading = start < end and _HEADING.match(text, start) is not None
        if block and (apart or heading or start >= end):
            yield block
            block = []
        if heading:
            yield [(start, end)]
        elif start < end:
            block.append((start, end))
    if block:
        yield block


def _may_head(line: str, words: int) -> bool:
    line = _MARK.sub("", line)
    whole = len(line.split()) <= words and not line.endswith(ENDS) and not _FIELD.match(line)
    return whole and len(list(sentences(line))) == 1


def _titled(text: str, lines: list[Span], follows: str) -> tuple[list[Span], Span | None, int]:
    """Returns a block's lines without the title that it begins with, that, and its level below those of Markdown.
    `follows`: the first line of the next block."""
    first = text[slice(*lines[0])]
    if not _may_head(first, HEADING_WORDS):
        return lines, None, 0
    if len(lines) == 1:
        marked = _MARK.match(first)
        alone = follows and not (marked and _MARK.match(follows))
        return ([], lines[0], 8 if marked else 7) if alone else (lines, None, 0)
    second = text[slice(*lines[1])]
    above = not first.endswith(",") and len(first) < 0.6 * max(end - start for start, end in lines)
    above = above and not (second[:1].islower() or _MARK.match(second) or _FIELD.match(second))
    return (lines[1:], lines[0], 8) if above or first.endswith(":") else (lines, None, 0)


def _table(text: str, lines: Sequence[Span], header: tuple[str, ...]) -> list[Statement]:
    """Returns the rows of a block that is a table, in Markdown or as CSV; none else."""
    cells = [_cells(text[slice(*line)]) for line in lines]
    width = len(cells[0])
    piped = all(text.startswith("|", start) for start, _ in lines)
    if piped and len(lines) > 1 and _RULE.fullmatch(text[slice(*lines[1])]):
        return [Statement(*line, header=cells[0]) for line in lines[2:]]
    if width < 2 or any(len(row) != width for row in cells):
        return []
    if width == len(header) and (piped or text[slice(*lines[0])].count(" ") < 10 * width):
        return [Statement(*line, header=header) for line in lines]
    named = all(cell and not numbers(cell) and not cell.endswith(ENDS) and len(cell.split()) <= 4 for cell in cells[0])
    if not named or len(lines) < 3 or piped:
        return []
    return [Statement(*line, header=cells[0]) for line in lines[1:]]


def _cells(line: str) -> tuple[str, ...]:
    """Returns the cells of a line of a table; one where it is none."""
    line = line.strip()
    if line.startswith("|") or " | " in line:
        return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
    delimiter = max(",;\t", key=line.count)
    try:
        (row,) = csv.reader([line], delimiter=delimiter)
    except (csv.Error, ValueError):
        return (line,)
    return tuple(cell.strip() for cell in row)


def _prose(text: str, lines: Sequence[Span]) -> Iterator[Span]:
    """Yields a block's sentences; each item of a list and each line of a name and its value by itself."""
    start: int | None = None
    for number, (low, high) in enumerate(lines):
        line = text[low:high]
        field = _FIELD.match(line) is not None
        if start is not None and (field or _MARK.match(line)):
            yield from _within(text, start, lines[number - 1][1])
            start = None
        start = low if start is None else start
        follows = number + 1 == len(lines) or _FIELD.match(text, lines[number + 1][0])
        if field and follows:
            yield from _within(text, start, high)
            start = None
    if start is not None:
        yield from _within(text, start, lines[-1][1])


def _within(text: str, start: int, end: int) -> Iterator[Span]:
    part = text[start:end]
    mark = _MARK.match(part)
    body = mark.end() if mark else 0  # "1. Remove": the mark's full stop ends no sentence
    for low, high in sentences(part[body:]):
        if not _NUMBERED.fullmatch(part, body + low, body + high):
            yield start + (body + low if low else 0), start + body + high


class Folded:
    """A text searched for quotations, ignoring case, quotation marks, dashes and spaces."""

    def __init__(self, text: str) -> None:
        self._text, self._at = _fold(text)

    def find(self, quotation: str) -> Span | None:
        """The span of the text that it is, at the borders of words."""
        wanted = _fold(quotation)[0].strip()
        if not wanted:
            return None
        at = self._text.find(wanted)
        while at >= 0:
            end = at + len(wanted)
            if not (self._joins(at) or self._joins(end)):
                return self._at[at], self._at[end - 1] + 1
            at = self._text.find(wanted, at + 1)
        return None

    def all(self, quotation: str) -> Iterator[Span]:
        """Every place where it stands, inside words too."""
        wanted = _fold(quotation)[0].strip()
        at = self._text.find(wanted) if wanted else -1
        while at >= 0:
            yield self._at[at], self._at[at + len(wanted) - 1] + 1
            at = self._text.find(wanted, at + len(wanted))

    def _joins(self, at: int) -> bool:
        """Returns whether a word goes on over this place."""
        return 0 < at < len(self._text) and self._text[at - 1].isalnum() and self._text[at].isalnum()


def _fold(text: str) -> tuple[str, list[int]]:
    made, at = list[str](), list[int]()
    for place, character in enumerate(text.translate(_SAME)):
        if character in _DROPPED:
            continue
        if character.isspace():
            if made and made[-1] == " ":
                continue
            character = " "
        for part in character.lower():
            made.append(part)
            at.append(place)
    return "".join(made), at


def numbers(text: str) -> frozenset[str]:
    """The numbers in a text, without the commas between their thousands."""
    return frozenset(re.sub(r",(?=\d{3}\b)", "", found).rstrip(".,") for found in _NUMBER.findall(text))


def names(text: str, everywhere: bool = False) -> frozenset[str]:
    """Capitalised words in lower case; those that begin a sentence only where `everywhere` is asked for."""
    found = set[str]()
    for match in _NAME.finditer(text):
        before = text[: match.start()].rstrip(" \"'“‘([")
        if everywhere or (before and before[-1] not in ".!?…:\n"):
            found.add(re.sub(r"['’]s$", "", match[0]).lower())
    return frozenset(found)
