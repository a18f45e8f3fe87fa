"""A text cut into parents to read and children to search, both as spans of its characters.

Units (sentences, code lines, table rows) are never split unless one alone is too long. Children hold at most `child`
word pieces, what the embedder reads at once, and overlap, so that an answer on a border lies whole in one of them;
parents hold some 400 to 800 and break where the text does: at headings, then between paragraphs. Every character but
white space between units lies in a parent and in a child. Knows nothing of files or indexes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from retrieval.parsing.parsed import Kind, Parsed

Count = Callable[[Sequence[str]], Sequence[Sequence[tuple[int, int]]]]  # of texts, the spans of their word pieces

_SENTENCE = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9À-Þ])|(?<=[。！？])")
_BLOCK = re.compile(r"\n[ \t]*\n\s*|\f")
_HEADING = re.compile(r"^(#{1,6})[ \t]+(.+?)[ \t#]*$")
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in word pieces; `longest` in characters, for text that has few pieces or none."""

    child: int = 200
    overlap: int = 60
    parent_low: int = 400
    parent_high: int = 800
    longest: int = 2000


@dataclass(frozen=True, slots=True)
class Chunk:
    """Characters `start` to `end` of the text, within the parent of that number, under the headings `context`."""

    start: int
    end: int
    parent: int
    context: str


@dataclass(frozen=True, slots=True)
class Cut:
    """`parents` are spans in the order of the text and do not overlap."""

    parents: tuple[tuple[int, int], ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class _Unit:
    start: int
    end: int
    size: int  # word pieces
    opens: int  # 2: a heading begins here, 1: a paragraph, 0: neither
    context: str


def cut(parsed: Parsed, pieces: Count, shape: Shape = Shape()) -> Cut:  # frozen
    """Cut a text. `pieces` is the embedder's tokenizer."""
    units = list(_units(parsed, pieces, shape))
    parents, chunks = list[tuple[int, int]](), list[Chunk]()
    for group in _parents(units, shape):
        for first, last in _windows(group, shape):
            chunks.append(Chunk(group[first].start, group[last].end, len(parents), group[first].context))
        parents.append((group[0].start, group[-1].end))
    return Cut(tuple(parents), tuple(chunks))


def _units(parsed: Parsed, pieces: Count, shape: Shape) -> Iterator[_Unit]:
    spans = list(_SPLITTERS[parsed.kind](parsed.text))
    for batch in range(0, len(spans), 512):
        some = spans[batch : batch + 512]
        for (start, end, opens, context), inside in zip(
            some, pieces([parsed.text[start:end] for start, end, _, _ in some]), strict=True
        ):
            if len(inside) <= shape.child and end - start <= shape.longest:
                yield _Unit(start, end, len(inside), opens, context)
                continue
            for at, (low, high, size) in enumerate(_parts(end - start, inside, shape)):
                yield _Unit(start + low, start + high, size, opens if at == 0 else 0, context)


def _parts(length: int, inside: Sequence[tuple[int, int]], shape: Shape) -> Iterator[tuple[int, int, int]]:
    """A unit too long for a child, cut between word pieces where it can be."""
    start = size = 0
    for piece_start, piece_end in inside:
        if size and (size == shape.child or piece_end - start > shape.longest):
            yield start, piece_start, size
            start, size = piece_start, 0
        while piece_end - start > shape.longest:
            yield start, start + shape.longest, 1
            start += shape.longest
        size += 1
    while length - start > shape.longest:
        yield start, start + shape.longest, max(1, size)
        start, size = start + shape.longest, 0
    if start < length:
        yield start, length, size


def _parents(units: Sequence[_Unit], shape: Shape) -> Iterator[list[_Unit]]:
    group, size = list[_Unit](), 0
    for unit in units:
        full = size + unit.size > shape.parent_high or (bool(group) and unit.end - group[0].start > 5 * shape.longest)
        section = unit.opens == 2 and size >= shape.child
        paragraph = unit.opens == 1 and size >= shape.parent_low
        if group and (full or section or paragraph):
            yield group
            group, size = [], 0
        group.append(unit)
        size += unit.size
    if group:
        yield group


def _windows(group: Sequence[_Unit], shape: Shape) -> Iterator[tuple[int, int]]:
    """First and last unit of each child; the next begins up to `overlap` pieces before the end of the one before."""
    first = 0
    while True:
        last, size = first, group[first].size
        while (
            last + 1 < len(group)
            and size + group[last + 1].size <= shape.child
            and group[last + 1].end - group[first].start <= shape.longest
        ):
            last += 1
            size += group[last].size
        yield first, last
        if last + 1 == len(group):
            return
        back, kept = last + 1, 0
        while back - 1 > first and kept + group[back - 1].size <= shape.overlap:
            back -= 1
            kept += group[back].size
        first = back


_Span = tuple[int, int, int, str]


def _prose(text: str, start: int = 0, end: int | None = None, context: str = "") -> Iterator[_Span]:
    end = len(text) if end is None else end
    for low, high in _between(_BLOCK, text, start, end):
        opens = 1
        for one, other in _between(_SENTENCE, text, low, high):
            for line_start, line_end in _long_lines(text, one, other):
                yield line_start, line_end, opens, context
                opens = 0


def _long_lines(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """What has no sentences but lines, such as lists, is cut into its lines."""
    if end - start < 400 or "\n" not in text[start:end]:
        yield start, end
        return
    yield from _between(re.compile(r"\n"), text, start, end)


def _markdown(text: str) -> Iterator[_Span]:
    path: list[str] = []
    fences = [match.span() for match in _FENCE.finditer(text)]
    for low, high in _sections(text, fences):
        first_line, _, _ = text[low:high].partition("\n")
        opens = 1
        if heading := _HEADING.match(first_line):
            del path[len(heading[1]) - 1 :]
            path += [""] * (len(heading[1]) - 1 - len(path)) + [heading[2].strip()]
            opens = 2
        context = " › ".join(part for part in path if part)
        for start, end, mark, _ in _with_fences(text, low, high, fences):
            yield start, end, max(opens, mark), context
            opens = 0


def _sections(text: str, fences: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """From heading to heading; a `#` within a fence is none."""
    headings = (found.start() for found in re.finditer(r"^#{1,6}[ \t]+\S", text, re.MULTILINE))
    starts = [0, *(at for at in headings if at and not any(low <= at < high for low, high in fences))]
    yield from zip(starts, [*starts[1:], len(text)], strict=True)


def _with_fences(text: str, low: int, high: int, fences: Sequence[tuple[int, int]]) -> Iterator[_Span]:
    at = low
    for start, end in fences:
        if low <= start < high:
            yield from _prose(text, at, start)
            yield from _lines(text, start, min(end, high))
            at = min(end, high)
    yield from _prose(text, at, high)


def _lines(text: str, start: int = 0, end: int | None = None) -> Iterator[_Span]:
    end = len(text) if end is None else end
    opens = 1
    for low, high in _between(re.compile(r"\n"), text, start, end, strip=False):
        if not text[low:high].strip():
            opens = 1  # a blank line: what follows is a new paragraph
            continue
        yield low, high, opens, ""
        opens = 0


def _table(text: str) -> Iterator[_Span]:
    """Rows, each under the table's first one."""
    header = ""
    for low, high, opens, _ in _lines(text):
        row = text[low:high].strip()
        if heading := _HEADING.match(row):
            header = heading[2]
            yield low, high, 2, header
            continue
        if opens:
            header = row[:200]
        yield low, high, opens, "" if opens else header


def _between(
    pattern: re.Pattern[str], text: str, start: int, end: int, strip: bool = True
) -> Iterator[tuple[int, int]]:
    """The parts of `text[start:end]` between the matches, without white space around them."""
    at = start
    for found in pattern.finditer(text, start, end):
        yield from _stripped(text, at, found.start(), strip)
        at = found.end()
    yield from _stripped(text, at, end, strip)


def _stripped(text: str, start: int, end: int, strip: bool) -> Iterator[tuple[int, int]]:
    body = text[start:end]
    if not body.strip():
        if not strip:
            yield start, end
        return
    left = len(body) - len(body.lstrip()) if strip else 0
    right = len(body) - len(body.rstrip())
    yield start + left, end - right


_SPLITTERS: dict[Kind, Callable[[str], Iterator[_Span]]] = {
    "prose": _prose,
    "markdown": _markdown,
    "table": _table,
    "code": _lines,
}
