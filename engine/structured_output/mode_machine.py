"""The mode machine: the mode that a span is in, token by token: thinking, free text, inside a constrained body, or
between two of them.

Control tokens switch modes, and a backend sees only the body. So a trigger works with every backend, only a body's own
text can stand in a body, and the end of a thought inside a draft is a token like any other. All of it rolls back and
forks. Knows nothing of backends, logits or text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Self

import numpy as np

from engine.outputs import Kind
from engine.structured_output.layout import MAX_BREAKS, Layout
from engine.structured_output.matcher import Compiled, Matcher, Row


class Mode(Enum):
    START = auto()  # before the answer
    HEADER = auto()  # of a section, or of text beside sections
    THINK = auto()
    FREE = auto()  # unconstrained text
    BODY = auto()
    ANSWER = auto()  # text in place of sections, by a constraint of its own
    BETWEEN = auto()  # after a section: the next one, or the end
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a span after some token. `kind` is that token's part in the answer, None for one that is no text."""

    mode: Mode
    kind: Kind | None = None
    section: int = 0  # markers passed so far
    breaks: int = 0  # breaks in a row
    back: Mode = Mode.START  # mode after thinking
    matcher: Matcher | None = None
    fed: bool = False  # the matcher took the token that led here
    header: tuple[int, ...] = ()  # what is left of it
    then: Mode = Mode.BODY  # mode after the header


class ModeMachine:
    """The state of one span's layout: like a `Matcher`, but `fill` returns False where nothing is forbidden."""

    def __init__(
        self,
        layout: Layout,
        body: Compiled,
        eos: frozenset[int],
        stops: frozenset[int] = frozenset(),
        answer: Compiled | None = None,
    ) -> None:
        """`eos` end the answer; `stops` end the span before they are accepted, and may come wherever it may end.
        `answer` constrains the text that may stand in place of sections."""
        self._layout = layout
        self._free = layout.free and answer is None
        self._body = body
        self._answer = answer
        self._eos = eos
        self._ends = eos | stops
        start = Mode.BETWEEN if layout.begun else Mode.START
        self._places = [_Place(Mode.THINK if layout.thinking else start, back=start)]
        self._beginning: Matcher | None = None  # before the first token of a body, or of an answer: for masks alone

    @property
    def mode(self) -> Mode:
        return self._places[-1].mode

    @property
    def kind(self) -> Kind | None:
        """Returns the part of the answer that the last accepted token belongs to; None for a marker, a break or an
        end."""
        return self._places[-1].kind

    @property
    def section(self) -> int:
        """Counts up with every marker: text of one section belongs together."""
        return self._places[-1].section

    @property
    def free(self) -> bool:
        """Returns whether the answer may go on as the model likes, so that its end can be forbidden too."""
        return self.mode in (Mode.FREE, Mode.THINK) or self._starts_freely

    @property
    def open(self) -> bool:
        """Returns whether any token may come next. Usually so after that one, too: few tokens switch modes."""
        if self.mode in (Mode.FREE, Mode.THINK):
            return self._free
        return self._starts_freely and not self._layout.openers

    @property
    def _starts_freely(self) -> bool:
        return self.mode is Mode.START and self._free and not self._layout.text_header

    def fill(self, row: Row) -> bool:
        """Writes the bits of the tokens that may come next, or returns False where any may: the row is left as it
        was."""
        if self.open:
            return False
        layout, place = self._layout, self._places[-1]
        match place.mode:
            case Mode.THINK:
                row[:] = -1
                _clear(row, self._eos)
            case Mode.START:
                self._fill_start(row)
                self._set_markers(row, place)
            case Mode.BODY:
                assert place.matcher is not None
                place.matcher.fill(row)
                if layout.end is not None:
                    _clear(row, self._eos)
                following = layout.end if layout.end is not None else layout.begin if layout.several else None
                if following is not None and place.matcher.can_end():
                    _set(row, (following,))
            case Mode.ANSWER:
                assert place.matcher is not None
                place.matcher.fill(row)
            case Mode.BETWEEN:
                row[:] = 0
                if layout.several and layout.begin is not None:
                    _set(row, (layout.begin,))
                    self._set_markers(row, place)
            case Mode.HEADER:
                row[:] = 0
                _set(row, place.header[:1])
            case Mode.ENDED:
                row[:] = 0
        if self.can_end():
            _set(row, self._ends)
        return True

    def _fill_start(self, row: Row) -> None:
        layout = self._layout
        if layout.begin is not None:
            if layout.text_header or self._answer is None:
                row[:] = 0
                if layout.free:
                    _set(row, layout.text_header[:1])
            else:
                self._before_answer().fill(row)
            _set(row, (layout.begin,))
            return
        self._before_body().fill(row)
        if layout.free:
            bodies = row.copy()
            row[:] = -1
            _clear(row, layout.openers)
            row |= bodies

    def _set_markers(self, row: Row, place: _Place) -> None:
        if self._layout.think is not None and not self._awaits_header(place):
            _set(row, self._layout.think[:1])
        if place.breaks < MAX_BREAKS:
            _set(row, self._layout.breaks)

    def accept(self, token: int) -> bool:
        """Takes a token; False, and no change, where it may not come."""
        following = self._after(self._places[-1], token)
        if following is None:
            return False
        self._places.append(following)
        return True

    def _after(self, place: _Place, token: int) -> _Place | None:
        layout = self._layout
        if token in self._eos and place.mode not in (Mode.BODY, Mode.ANSWER):
            return _marker(place, Mode.ENDED) if self.can_end() else None
        match place.mode:
            case Mode.THINK:
                assert layout.think is not None
                if token == layout.think[1]:
                    return _marker(place, place.back)
                return replace(place, kind="thought")
            case Mode.START:
                return self._after_start(place, token)
            case Mode.HEADER:
                return self._in_header(place, place.then, place.header[1:]) if token == place.header[0] else None
            case Mode.FREE:
                return self._after_marker(place, token) or replace(place, kind="text")
            case Mode.BODY:
                return self._after_body(place, token)
            case Mode.ANSWER:
                assert place.matcher is not None
                return _fed_answer(place, place.matcher, token in self._eos) if place.matcher.accept(token) else None
            case Mode.BETWEEN:
                if not layout.several:
                    return None
                return self._after_break(place, token) or self._after_marker(place, token)
        return None

    def _after_start(self, place: _Place, token: int) -> _Place | None:
        layout = self._layout
        if marked := self._after_marker(place, token):
            return marked
        if layout.text_header:
            if not layout.free or token != layout.text_header[0]:
                return None
            then = Mode.FREE if self._answer is None else Mode.ANSWER
            return self._in_header(_marker(place, then), then, layout.text_header[1:])
        if layout.begin is not None:
            if self._free:
                return replace(place, mode=Mode.FREE, kind="text")
            if self._answer is not None and (answer := self._answer.matcher()).accept(token):
                return _fed_answer(place, answer, token in self._eos)
            return self._after_break(place, token)
        matcher = self._body.matcher()
        if matcher.accept(token):
            return _fed(place, matcher, ended=token in self._eos)
        if broken := self._after_break(place, token):
            return broken
        if layout.free and token not in layout.openers:
            return replace(place, mode=Mode.FREE, kind="text")
        return None

    def _after_break(self, place: _Place, token: int) -> _Place | None:
        if token in self._layout.breaks and place.breaks < MAX_BREAKS:
            return replace(place, kind=None, breaks=place.breaks + 1)
        return None

    def _after_marker(self, place: _Place, token: int) -> _Place | None:
        """Returns the place that the beginning of thinking or of a section leads to."""
        layout = self._layout
        if layout.think is not None and token == layout.think[0] and not self._awaits_header(place):
            return replace(_marker(place, Mode.THINK), back=place.mode)
        begins = not layout.text_header or place.mode is not Mode.FREE
        if layout.begin is not None and token == layout.begin and begins:
            return self._in_header(_marker(place, Mode.BODY), Mode.BODY, layout.header)
        return None

    def _awaits_header(self, place: _Place) -> bool:
        """Returns whether a header comes next: the text's, or a section's. No thinking does."""
        return place.mode is Mode.START and bool(self._layout.text_header)

    def _in_header(self, place: _Place, then: Mode, left: tuple[int, ...]) -> _Place:
        """Returns the place in or after a header of which this much is `left`."""
        if left:
            return replace(place, mode=Mode.HEADER, header=left, then=then)
        source = {Mode.BODY: self._body, Mode.ANSWER: self._answer}.get(then)
        return replace(place, mode=then, header=(), matcher=None if source is None else source.matcher())

    def _after_body(self, place: _Place, token: int) -> _Place | None:
        matcher, layout = place.matcher, self._layout
        assert matcher is not None
        if layout.end is None:
            if matcher.accept(token):
                return _fed(place, matcher, ended=token in self._eos)
            again = layout.several and token == layout.begin and matcher.can_end()
            return self._after_marker(place, token) if again else None
        if token in self._eos:
            return None
        if matcher.accept(token):
            return _fed(place, matcher, ended=False)
        return _marker(place, Mode.BETWEEN) if token == layout.end and matcher.can_end() else None

    def rollback(self, n: int) -> None:
        """Takes back the last `n` accepted tokens."""
        if not 0 <= n < len(self._places):
            raise ValueError(f"cannot roll back {n} of {len(self._places) - 1} tokens")
        for _ in range(n):
            place = self._places.pop()
            if place.fed and place.matcher is not None:
                place.matcher.rollback(1)

    def forced(self) -> list[int]:
        """Returns the jump-forward tokens: those that must come next, up to a choice or an end."""
        layout, place = self._layout, self._places[-1]
        match place.mode:
            case Mode.BODY:
                assert place.matcher is not None
                if layout.end is not None and place.matcher.must_end():
                    return [layout.end]
                return place.matcher.forced()
            case Mode.ANSWER:
                assert place.matcher is not None
                return place.matcher.forced()
            case Mode.START if not layout.free and layout.think is None and not layout.breaks:
                return self._before_body().forced() if layout.begin is None else [layout.begin, *layout.header]
            case Mode.HEADER:
                return list(place.header)
        return []

    def can_end(self) -> bool:
        """Returns whether the span's text is complete as it stands."""
        layout, place = self._layout, self._places[-1]
        match place.mode:
            case Mode.BETWEEN:
                return True
            case Mode.BODY:
                assert place.matcher is not None
                return layout.end is None and place.matcher.can_end()
            case Mode.ANSWER:
                assert place.matcher is not None
                return place.matcher.can_end()
            case Mode.ENDED | Mode.HEADER:
                return False
        return self._free and not self._awaits_header(place)

    def must_end(self) -> bool:
        """Returns whether nothing but the end may come."""
        layout, place = self._layout, self._places[-1]
        match place.mode:
            case Mode.BETWEEN:
                return not layout.several
            case Mode.BODY:
                assert place.matcher is not None
                return layout.end is None and not layout.several and place.matcher.must_end()
            case Mode.ANSWER:
                assert place.matcher is not None
                return place.matcher.must_end()
        return place.mode is Mode.ENDED

    def fork(self) -> Self:
        """Returns an independent copy in the same state."""
        forks: dict[int, Matcher] = {}

        def forked(place: _Place) -> _Place:
            if place.matcher is None:
                return place
            if id(place.matcher) not in forks:
                forks[id(place.matcher)] = place.matcher.fork()
            return replace(place, matcher=forks[id(place.matcher)])

        copy = type(self)(self._layout, self._body, self._eos, self._ends, self._answer)
        copy._places = list(map(forked, self._places))
        return copy

    def lookahead(self) -> Self:
        """Returns an independent machine at the present place, to try a draft on. It does not roll back beyond that."""
        place = self._places[-1]
        copy = type(self)(self._layout, self._body, self._eos, self._ends, self._answer)
        copy._places = [place if place.matcher is None else replace(place, matcher=place.matcher.fork())]
        return copy

    def _before_body(self) -> Matcher:
        if self._beginning is None:
            self._beginning = self._body.matcher()
        return self._beginning

    def _before_answer(self) -> Matcher:
        assert self._answer is not None
        if self._beginning is None:
            self._beginning = self._answer.matcher()
        return self._beginning


def _marker(place: _Place, mode: Mode) -> _Place:
    return _Place(mode, section=place.section + 1)


def _fed(place: _Place, matcher: Matcher, *, ended: bool) -> _Place:
    """Returns the place after a token that the body's matcher took."""
    if ended:
        return _Place(Mode.ENDED, None, place.section, matcher=matcher, fed=True)
    return _Place(Mode.BODY, "body", place.section, matcher=matcher, fed=True)


def _fed_answer(place: _Place, matcher: Matcher, ended: bool) -> _Place:
    """Returns the place after a token that the answer's matcher took."""
    if ended:
        return _Place(Mode.ENDED, None, place.section, matcher=matcher, fed=True)
    return _Place(Mode.ANSWER, "text", place.section, matcher=matcher, fed=True)


def _set(row: Row, tokens: Iterable[int]) -> None:
    for token in tokens:
        row[token >> 5] |= _BIT[token & 31]


def _clear(row: Row, tokens: Iterable[int]) -> None:
    for token in tokens:
        row[token >> 5] &= ~_BIT[token & 31]


_BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
