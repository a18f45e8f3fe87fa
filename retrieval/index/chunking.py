"""A text cut into parents to read and children to search, both as spans of its characters.

Units (sentences, code lines, table rows) are never split unless one alone is too long. Children have at most `child`
word pieces, the embedder's limit, and overlap, so that an answer on a border lies whole in one of them; parents have
some 400 to 800 and break where the text does: at headings, then between paragraphs. Every character but white space
between units lies in a parent and in a child. Time is linear in any text. Knows nothing of files or indexes.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from retrieval.parsing.markdown import Heading, outline
from retrieval.parsing.parsed import Kind, Parsed

Count = Callable[[Sequence[str]], Sequence[Sequence[tuple[int, int]]]]  # of texts, the spans of their word pieces

_SENTENCE = re.compile(  # the gap after one; not after an initial or an abbreviation
    r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|St|al|vs|cf)\.)(?<!\b(?:Mrs|Fig|Vol|Sec|e\.g|i\.e)\.)(?<!\bProf\.)"
    r"[\"'”’)\]]*(\s+)(?=[\"'“‘(\[]*[A-Z0-9À-Þ])"
    r"|(?<=[。！？।؟])(?![」』”’）])|(?<=[。！？][」』”’）])"
)
_BLOCK = re.compile(r"\n[ \t]*\n\s*|\f")
_ITEM = re.compile(r"\n(?=[ \t]*(?:[-*+•–·]|\d{1,3}[.)])[ \t])")
_LINE = re.compile(r"\n")
_TABLE = re.compile(r"(?:^[ \t]*\|[^\n]*(?:\n|\Z))+", re.MULTILINE)
_SPACE = re.compile(r"\s*")
BATCH = 1 << 20  # characters tokenized at once to count their pieces
ROW_LINES = 50  # that one row of CSV may have: a quote that is open for longer is only a quote
HEADER = 200  # characters of a table's header that go with its rows


@dataclass(frozen=True, slots=True)
class ChunkShape:
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
class _Span:
    start: int
    end: int
    opens: int  # 2: a heading, 1: a paragraph begins here, 0: neither
    context: str = ""


@dataclass(frozen=True, slots=True)
class _Unit:
    start: int
    end: int
    size: int  # word pieces
    opens: int
    context: str


def cut(parsed: Parsed, pieces: Count, shape: ChunkShape = ChunkShape()) -> Cut:  # frozen
    """Cut a text. `pieces` is the embedder's tokenizer."""
    units = list(_units(parsed, pieces, shape))
    parents, chunks = list[tuple[int, int]](), list[Chunk]()
    for group in _parents(units, shape):
        for first, last in _windows(group, shape):
            chunks.append(Chunk(group[first].start, group[last].end, len(parents), group[first].context))
        parents.append((group[0].start, group[-1].end))
    return Cut(tuple(parents), tuple(chunks))


# Units


def _units(parsed: Parsed, pieces: Count, shape: ChunkShape) -> Iterator[_Unit]:
    text = parsed.text
    for spans in _batches(_stretches(text, _SPLITTERS[parsed.kind](text), 10 * shape.longest)):
        counted = pieces([text[span.start : span.end] for span in spans])
        for span, inside in zip(spans, counted, strict=True):
            if len(inside) <= shape.child and span.end - span.start <= shape.longest:
                yield _Unit(span.start, span.end, len(inside), span.opens, span.context)
                continue
            opens = span.opens
            for low, high, size in _parts(text[span.start : span.end], inside, shape):
                yield _Unit(span.start + low, span.start + high, size, opens, span.context)
                opens = 0


def _batches(spans: Iterator[_Span]) -> Iterator[list[_Span]]:
    made, size = list[_Span](), 0
    for span in spans:
        made.append(span)
        size += span.end - span.start
        if size >= BATCH or len(made) == 4096:
            yield made
            made, size = [], 0
    if made:
        yield made


def _stretches(text: str, spans: Iterator[_Span], longest: int) -> Iterator[_Span]:
    """Spans without end, such as a whole file on one line, in stretches that a tokenizer can take."""
    for span in spans:
        start, opens = span.start, span.opens
        while span.end - start > longest:
            space = max(text.rfind(gap, start + longest // 2, start + longest) for gap in "\n ")
            end = space + 1 or start + longest
            for low, high in _stripped(text, start, end):
                yield _Span(low, high, opens, span.context)
                opens = 0
            start = end
        if start == span.start:
            yield span
            continue
        for low, high in _stripped(text, start, span.end):
            yield _Span(low, high, opens, span.context)


def _parts(text: str, inside: Sequence[tuple[int, int]], shape: ChunkShape) -> Iterator[tuple[int, int, int]]:
    """A unit too long for a child, cut at a line's end, else between words, else between word pieces, else anywhere."""
    first, start = 0, 0
    while start < len(text):
        stop = min(start + shape.longest, len(text))
        last = first  # pieces `first` to `last` fit
        while last < len(inside) and last - first < shape.child and inside[last][1] <= stop:
            last += 1
        end = stop  # as it stays where a piece alone, or a text without pieces, is too long
        if first < last < len(inside) and start < (best := _break(text, inside, first, last)) < stop:
            end = best
        while last > first and inside[last - 1][0] >= end:
            last -= 1
        size = max(1, last - first) if inside else 0
        for low, high in _stripped(text, start, end):
            yield low, high, size
        while last < len(inside) and inside[last][1] <= end:
            last += 1
        first, start = last, _skipped(text, end)


def _break(text: str, inside: Sequence[tuple[int, int]], first: int, last: int) -> int:
    """Returns where a part that could hold the pieces up to `last` ends best: in its last half, at the widest gap's
    end."""
    best, found = 0, inside[last][0]
    for at in range(last, first + (last - first) // 2, -1):
        gap = text[inside[at - 1][1] : inside[at][0]]
        rank = 2 if "\n" in gap else 1 if gap else 0
        if rank > best:
            best, found = rank, inside[at][0]
    return found


def _skipped(text: str, at: int) -> int:
    """Returns where the white space from `at` on ends."""
    found = _SPACE.match(text, at)
    assert found is not None  # it matches nothing too
    return found.end()


# Groups of units


def _parents(units: Sequence[_Unit], shape: ChunkShape) -> Iterator[list[_Unit]]:
    group, size = list[_Unit](), 0
    for unit in units:
        full = size + unit.size > shape.parent_high or (bool(group) and unit.end - group[0].start > 5 * shape.longest)
        section = unit.opens == 2 and size >= shape.child
        paragraph = unit.opens == 1 and size >= shape.parent_low
        if group and (full or section or paragraph):
            keep = _headings_last(group)  # they go with the text that follows
            yield group[:keep]
            group = group[keep:]
            size = sum(each.size for each in group)
        group.append(unit)
        size += unit.size
    if group:
        yield group


def _headings_last(group: Sequence[_Unit]) -> int:
    """Returns how many units come before the headings that a group ends with; all of them where it is nothing else."""
    keep = len(group)
    while keep and group[keep - 1].opens == 2:
        keep -= 1
    return keep or len(group)


def _windows(group: Sequence[_Unit], shape: ChunkShape) -> Iterator[tuple[int, int]]:
    """First and last unit of each child; the next begins up to `overlap` pieces before the end of the one before."""

    def fits(first: int, last: int, size: int) -> bool:
        return size <= shape.child and group[last].end - group[first].start <= shape.longest

    first = 0
    while True:
        last, size = first, group[first].size
        while last + 1 < len(group) and fits(first, last + 1, size + group[last + 1].size):
            last += 1
            size += group[last].size
        if last + 1 == len(group):
            yield first, last
            return
        last = first + _headings_last(group[first : last + 1]) - 1  # a heading goes with the text that follows
        yield first, last
        following, size = last + 1, group[last + 1].size  # pieces of the next besides the overlap
        while following + 1 < len(group) and group[following].opens == 2:
            following += 1
            size += group[following].size
        first, kept = last + 1, 0
        while kept + group[first - 1].size <= shape.overlap and fits(
            first - 1, following, size + group[first - 1].size
        ):
            first -= 1
            kept += group[first].size
            size += group[first].size


# Spans of each kind of text


def _prose(text: str) -> Iterator[_Span]:
    yield from _sentences(text, 0, len(text), "")


def _sentences(text: str, start: int, end: int, context: str) -> Iterator[_Span]:
    for block in _between(_BLOCK, text, start, end):
        opens = 1
        for item in _between(_ITEM, text, *block):
            for low, high in _between(_SENTENCE, text, *item):
                yield _Span(low, high, opens, context)
                opens = 0


def _markdown(text: str) -> Iterator[_Span]:
    found = outline(text)
    fences = iter([*found.fences, (len(text), len(text))])
    fence = next(fences)
    at, path = 0, list[str]()
    for heading in (*found.headings, Heading(len(text), len(text), 1, "")):
        context = _joined(path)
        while fence[0] < heading.start:
            yield from _section(text, at, fence[0], context)
            yield from _lines(text, *fence, context)
            at, fence = fence[1], next(fences)
        yield from _section(text, at, heading.start, context)
        path[heading.level - 1 :] = [*[""] * (heading.level - 1 - len(path)), heading.title]
        if heading.start < heading.end:
            yield _Span(heading.start, heading.end, 2, _joined(path))
        at = heading.end


def _joined(path: Sequence[str]) -> str:
    return " › ".join(part for part in path if part)


def _section(text: str, start: int, end: int, context: str) -> Iterator[_Span]:
    """Yields the text under a heading and in no fence: prose, and tables by their rows."""
    at = start
    for table in _TABLE.finditer(text, start, end):
        yield from _sentences(text, at, table.start(), context)
        yield from _rows(text, *table.span(), context)
        at = table.end()
    yield from _sentences(text, at, end, context)


def _rows(text: str, start: int, end: int, context: str) -> Iterator[_Span]:
    """A table in Markdown: its header with the rule below it, then each row under the header."""
    lines = list(_between(_LINE, text, start, end))
    opens = 1
    if len(lines) > 1 and not text[lines[1][0] : lines[1][1]].strip("|-: \t"):
        (low, high), (_, under) = lines[:2]
        yield _Span(low, under, 1, context)
        context = _joined([context, text[low : min(high, low + HEADER)].strip("| \t")])
        opens, lines = 0, lines[2:]
    for low, high in lines:
        yield _Span(low, high, opens, context)
        opens = 0


def _code(text: str) -> Iterator[_Span]:
    yield from _lines(text, 0, len(text), "")


def _lines(text: str, start: int, end: int, context: str) -> Iterator[_Span]:
    """Lines with their indentation; after an empty one a paragraph begins."""
    at, opens = start, 1
    while at < end:
        stop = text.find("\n", at, end)
        stop = end if stop < 0 else stop
        length = len(text[at:stop].rstrip())
        if length:
            yield _Span(at, at + length, opens, context)
        opens = 0 if length else 1
        at = stop + 1


def _csv(text: str) -> Iterator[_Span]:
    """Rows, each under the first one. A row that quotes line ends is several lines."""
    lines = text.split("\n")
    delimiter = max(",;\t|", key=next(filter(str.strip, lines), "").count)
    at, number, header = 0, 0, ""
    while number < len(lines):
        count = _row_lines(lines, number, delimiter) if '"' in lines[number] else 1
        end = at + sum(map(len, lines[number : number + count])) + count - 1
        for low, high in _stripped(text, at, end):
            yield _Span(low, high, 0 if header else 1, header)
            header = header or " ".join(text[low : min(high, low + HEADER)].split())
        at, number = end + 1, number + count


def _row_lines(lines: Sequence[str], number: int, delimiter: str) -> int:
    rest = (lines[at] + "\n" for at in range(number, min(number + ROW_LINES, len(lines))))
    reader = csv.reader(rest, delimiter=delimiter, strict=True)
    try:
        next(reader)
    except csv.Error:  # a quote that nothing closes is a character like any other
        return 1
    return reader.line_num


def _between(pattern: re.Pattern[str], text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of `text[start:end]` between the matches, or their groups, without white space around them."""
    at = start
    for found in pattern.finditer(text, start, end):
        low, high = found.span(found.lastindex or 0)
        yield from _stripped(text, at, low)
        at = high
    yield from _stripped(text, at, end)


def _stripped(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    body = text[start:end]
    if inner := body.strip():
        low = start + len(body) - len(body.lstrip())
        yield low, low + len(inner)


_SPLITTERS: dict[Kind, Callable[[str], Iterator[_Span]]] = {
    "prose": _prose,
    "markdown": _markdown,
    "table": _csv,
    "code": _code,
}
