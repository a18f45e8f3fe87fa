"""Guided alignment: where an attention head is to look, as the text itself says.

    label    from every token of "[S2] The dam was finished." to S2; from every token of a tool's schema to its name
    match    from a word of a question to the same word in what the answer copies, or in what was read before
    source   from each token of an answer that copies to the sentence, line or schema that it copies from
    place    from each token of a copy to the token that comes next, where it stands

Heads that find and copy form late when only the next token is learned (Olsson et al., 2022). With their targets in
the loss (Chen et al., 2016, and Liu et al., 2016, for translation) a model copies text after a quarter of the tokens.
Knows token ids and the two forms of a label, nothing of tasks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # positions of the first token and of the one after the last
NOWHERE: Span = (-1, -1)
ROLES = ("label", "match", "source", "place")

SHORTEST = 4  # tokens of a copy; in a call's arguments fewer, if they stand exactly once in what was read
LETTERS = 3  # and digits, of the fewer and of words that are matched
BRACKET = 2  # tokens of "[S2]" before its number
FAR = 200  # tokens from which a label is still looked at, and the most of a schema
QUESTION = 60  # tokens before an answer of which words are matched
_LABEL = re.compile(r'(?<![\w-])S(\d+)\b|"name": "(\w+)"|(</tools>|<\|im_end\|>)')  # the last ends what it labels


@dataclass(frozen=True, slots=True)
class Label:
    span: Span
    tool: bool


@dataclass(slots=True)
class Alignment:
    """For each role and each position that looks, the span that is looked at, or `NOWHERE`."""

    label: list[Span]
    match: list[Span]
    source: list[Span]
    place: list[Span]

    @classmethod
    def of(cls, near: Sequence[Label | None]) -> Alignment:
        """Returns the alignment of tokens that have these labels and nothing else."""
        found = [
            label.span if label is not None and at - label.span[1] < FAR else NOWHERE for at, label in enumerate(near)
        ]
        return cls(found, *([NOWHERE] * len(near) for _ in range(3)))

    def roles(self) -> tuple[list[Span], ...]:
        """Returns the spans in the order of `ROLES`."""
        return self.label, self.match, self.source, self.place


def labels(text: str, offsets: Sequence[tuple[int, int]], begins: int, last: Label | None) -> list[Label | None]:
    """Returns for each token of `text` the label that stands last before it or in it.

    `offsets` are the tokens' characters, `begins` the position of the first token, `last` the label before the text.
    """
    matches, at = list(_LABEL.finditer(text)), 0
    nearest = list[Label | None]()
    for match in matches:
        first, end = match.span(match.lastindex or 0)
        while at < len(offsets) and offsets[at][1] <= first:
            nearest.append(last)
            at += 1
        begun = at
        while at < len(offsets) and offsets[at][1] < end:
            nearest.append(last)
            at += 1
        last = None if match.lastindex == 3 else Label((begins + begun, begins + at + 1), match.lastindex == 2)
    return nearest + [last] * (len(offsets) - at)


def align(
    ids: Sequence[int], learned: Sequence[bool], near: Sequence[Label | None], letters: Sequence[int]
) -> Alignment:
    """Returns where each position is to look.

    `ids` are the same for a word with the space before it and without. `learned` marks the tokens of answers, `near`
    is what `labels` returned, `letters[id]` counts a token's letters and digits. The position before a token is the one
    that looks for it. Answers copy from what was read, not from other answers.
    """
    made = Alignment.of(near)
    read = _Read(ids, letters)
    for first, end in _stretches(learned):
        read.up_to(first)
        at = pending = first
        quoted = list[Span]()
        while at < end:
            length, start = read.longest(at, end, short=_in_call(near[at]))
            if not length:
                at += 1
                continue
            source, chosen = _whole(near, start, start + length), at
            label = near[at - 1]
            if label is not None and label.span[0] >= pending:  # the label of what is quoted is chosen with it
                chosen = max(pending, label.span[0] - BRACKET)
            made.source[chosen - 1 : at + length - 1] = [source] * (at + length - chosen)
            for copied in range(1, length):
                made.place[at + copied - 1] = (start + copied, start + copied + 1)
            if near[source[1] - 1] is not None:
                quoted.append(source)
            at += length
            pending = at
        _match(made.match, ids, letters, read.stretch, quoted)
        read.skip_to(end)
    return made


def _match(match: list[Span], ids: Sequence[int], letters: Sequence[int], stretch: Span, quoted: list[Span]) -> None:
    """Lets the words of a question, the last of `stretch`, look at themselves in what is quoted, or else before."""
    first, end = stretch
    places: dict[int, int] = {}
    for begin, stop in quoted or [stretch]:
        for at in range(begin, stop):
            places.setdefault(ids[at], at)
    for at in range(max(first, end - QUESTION), end):
        place = places.get(ids[at], at)
        if place < at and letters[ids[at]] >= LETTERS:
            match[at] = (place, place + 1)


def _in_call(label: Label | None) -> bool:
    return label is not None and label.tool


def _whole(near: Sequence[Label | None], start: int, end: int) -> Span:
    """Returns what a copy of `start` to `end` comes from: with a tool's name in it, the tool's schema, since what
    stands before and in the name says nothing of the tool yet."""
    label = near[end - 1]
    if label is None or not label.tool or label.span[0] < start:
        return start, end
    while end < len(near) and near[end] is label and end - start < FAR:
        end += 1
    return start, end


def _stretches(learned: Sequence[bool]) -> Iterator[Span]:
    at = 0
    while at < len(learned):
        end = at
        while end < len(learned) and learned[end]:
            end += 1
        if at < end and at:
            yield at, end
        at = end + 1


class _Read:
    """Finds text that stands before an answer by its first one to three tokens."""

    def __init__(self, ids: Sequence[int], letters: Sequence[int]) -> None:
        self._ids = ids
        self._letters = letters
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._ends: dict[int, int] = {}  # of the stretch that each place is in
        self.stretch = (0, 0)  # between the last answer and the next

    def up_to(self, end: int) -> None:
        """Adds the text from the last answer to the next, which begins at `end`."""
        self.stretch = (self.stretch[0], end)
        for at in range(*self.stretch):
            self._ends[at] = end
            for length in range(1, min(3, end - at) + 1):
                self._places[tuple(self._ids[at : at + length])].append(at)
        self._begin = end

    def skip_to(self, end: int) -> None:
        """Leaves an answer out."""
        self._begin = end

    def longest(self, at: int, end: int, short: bool) -> tuple[int, int]:
        """Returns length and start of the longest copy of what comes at `at`, the earliest one; (0, 0) for none."""
        best, start = 0, 0
        for begins in self._places.get(tuple(self._ids[at : at + 3]), ()) if end - at >= SHORTEST else ():
            length, most = 3, min(end - at, self._ends[begins] - begins)
            while length < most and self._ids[at + length] == self._ids[begins + length]:
                length += 1
            if length > best:
                best, start = length, begins
        if best >= SHORTEST:
            return best, start
        for length in range(min(3, end - at), 0, -1) if short else ():
            gram = tuple(self._ids[at : at + length])
            places = self._places.get(gram, ())
            if len(places) == 1 and sum(self._letters[token] for token in gram) >= LETTERS:
                return length, places[0]
        return 0, 0
