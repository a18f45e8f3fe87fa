"""Guided alignment: where an attention head is to look, as the text itself says.

    label    from every token of "[S2] The dam was finished." to S2; from every token of a tool's schema to its name
    match    from a word of a question to the same word in what the answer copies, or earlier in the question
    ask      from where an answer decides, its first tokens and those that choose what to copy, to the matched words
    source   from each token of an answer that copies to the sentence, line or schema that it copies from
    place    from each token of a copy to the token that comes next, where it stands

Heads that find and copy form late when only the next token is learned (Olsson et al., 2022). With their targets in
the loss (Chen et al., 2016, and Liu et al., 2016, for translation) they form after less than half of the tokens
(docs/design.md). Knows token ids and the two forms of a label, nothing of tasks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Span = tuple[int, int]  # positions of the first token and of the one after the last
NOWHERE: Span = (-1, -1)
ROLES = ("label", "match", "ask", "source", "place")

SHORTEST = 4  # tokens of a copy; in a call's arguments fewer do, if they stand exactly once in what was read
LETTERS = 3  # letters and digits that such a shorter copy has at least
WORD = 4  # letters and digits that a matched word has at least
BRACKET = 2  # tokens of "[S2]" before its number
FAR = 200  # tokens from which a label is still looked at, and the most of a schema
_LABEL = re.compile(r'(?<![\w-])S(\d+)\b|"name": "(\w+)"|(</tools>|<\|im_end\|>)')  # the last ends what it labels


@dataclass(frozen=True, slots=True)
class Label:
    """The number of a source, as the 2 of "[S2]", or the name of a tool."""

    span: Span
    tool: bool


@dataclass(slots=True)
class Alignment:
    """For each role and each position that looks, the span that is looked at, or `NOWHERE`."""

    label: list[Span]
    match: list[Span]
    ask: list[Span]
    source: list[Span]
    place: list[Span]
    decides: list[int] = field(default_factory=list)  # tokens that do not follow from those before them in the answer

    @classmethod
    def of(cls, near: Sequence[Label | None]) -> Alignment:
        """Returns the alignment of tokens that have these labels and nothing else."""
        found = [
            label.span if label is not None and at - label.span[1] < FAR else NOWHERE for at, label in enumerate(near)
        ]
        nowhere = [NOWHERE] * len(near)
        return cls(found, nowhere[:], nowhere[:], nowhere[:], nowhere)

    def roles(self) -> tuple[list[Span], ...]:
        """Returns the spans in the order of `ROLES`."""
        return self.label, self.match, self.ask, self.source, self.place


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


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """A conversation's tokens; a word has the same ids with the space before it and without."""

    ids: Sequence[int]
    letters: Sequence[int]  # letters and digits of each token
    words: Sequence[int]  # letters and digits of the word that it belongs to
    near: Sequence[Label | None]  # as `labels` returns it
    answers: Sequence[Span]  # learned
    questions: Sequence[Span]  # before each answer, the message that it replies to


def align(text: ReadTokens) -> Alignment:
    """Returns where each position is to look.

    The position before a token is the one that looks for it. Answers copy from what was read, not from other answers.
    """
    near = text.near
    made = Alignment.of(near)
    read = _Read(text.ids, text.letters)
    for (first, end), question in zip(text.answers, text.questions, strict=True):
        read.up_to(first)
        at = pending = first
        made.decides.append(first)
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
            made.decides += range(chosen, at + 1)
            made.decides += [at + copied for copied in range(1, length) if read.ambiguous(at, copied)]
            for copied in range(1, length):
                made.place[at + copied - 1] = (start + copied, start + copied + 1)
            if near[source[1] - 1] is not None:
                quoted.append(source)
            at += length
            pending = at
        matched = _match(made.match, text, question, quoted)
        for decided in made.decides if matched != NOWHERE else ():
            if decided >= first:
                made.ask[decided - 1] = matched
        read.skip_to(end)
    return made


def _match(match: list[Span], text: ReadTokens, question: Span, quoted: list[Span]) -> Span:
    """Lets the words of a question look at themselves in what is quoted, else earlier in the question.

    Returns the span from the first of them to the last.
    """
    places: dict[int, int] = {}
    for begin, end in quoted or [question]:
        for at in range(begin, end):
            places.setdefault(text.ids[at], at)
    matched = list[int]()
    for at in range(*question):
        place, label = places.get(text.ids[at], at), text.near[at]
        named = bool(quoted) and label is not None and label.span[0] <= at < label.span[1]
        if place < at and (text.words[at] >= WORD or named):
            match[at] = (place, place + 1)
            matched.append(at)
    return (matched[0], matched[-1] + 1) if matched else NOWHERE


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


class _Read:
    """Finds text that stands before an answer by its first one to three tokens."""

    def __init__(self, ids: Sequence[int], letters: Sequence[int]) -> None:
        self._ids = ids
        self._letters = letters
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._ends = [0] * len(ids)  # of the stretch that each place is in
        self._begin = 0

    def up_to(self, end: int) -> None:
        """Adds the text from the last answer to the next, which begins at `end`."""
        self._ends[self._begin : end] = [end] * (end - self._begin)
        ids = self._ids[self._begin : end]
        for length in (1, 2, 3):
            runs = zip(*(ids[skipped:] for skipped in range(length)), strict=False)  # of tokens in a row
            for at, run in enumerate(runs, self._begin):
                self._places[run].append(at)

    def skip_to(self, end: int) -> None:
        """Leaves out the answer that ends at `end`."""
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
            places = self._places.get(tuple(self._ids[at : at + length]), ())
            if len(places) == 1 and sum(self._letters[at : at + length]) >= LETTERS:
                return length, places[0]
        return 0, 0

    def ambiguous(self, at: int, copied: int) -> bool:
        """Returns whether what was read goes on in several ways after the last three of `copied` tokens from `at`."""
        size = min(3, copied)
        places = self._places[tuple(self._ids[at + copied - size : at + copied])]
        return len({self._ids[place + size] for place in places if place + size < self._ends[place]}) > 1
