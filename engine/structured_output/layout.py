"""The layout of an answer: the places of constrained bodies in it, marked by single control tokens. Plain data.

The mode machine (mode_machine.py) reads it; a tool parser or a response format writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.structured_output.spec import Constraint

MAX_BREAKS = 2  # skipped tokens in a row


@dataclass(frozen=True, slots=True)
class Layout:
    """Token ids that switch modes.

    - No `begin`, not `free`: the body is the whole answer, and the answer ends where the body does.
    - `begin`, `free`: sections may stand in free text, each from the token `begin` to the token `end`.
    - `begin`, not `free`: the answer is one section at least, and nothing but sections.
    - No `begin`, `free`: an answer whose first token is one of `openers` is a body; any other is free text.

    A section without `end` ends the answer with its body, or before the next `begin` where there may be `several`.
    `header` follows `begin`. `text_header` begins the text of an answer that is no section, and no section follows it,
    as `begin` may be a token of text. `breaks` are tokens that may stand, at most two in a row, before the first
    section, around thinking and between sections, and belong to no text. `think` are the tokens that open and close
    thinking; `thinking` says that the span begins inside it, `begun` that the answer has a section already, in an
    earlier span. With `shows_control`, control tokens within a body are part of its text, as they are spelt.

    Raises:
        ValueError: `end`, `several`, `openers` or a header are given where they have no effect, or text and sections
            begin with one token.
    """

    begin: int | None = None
    end: int | None = None
    free: bool = False
    several: bool = False
    header: tuple[int, ...] = ()
    text_header: tuple[int, ...] = ()
    openers: frozenset[int] = frozenset()
    breaks: frozenset[int] = frozenset()
    think: tuple[int, int] | None = None
    thinking: bool = False
    begun: bool = False
    shows_control: bool = False

    def __post_init__(self) -> None:
        if self.end is not None and self.begin is None:
            raise ValueError("a layout with an end has a beginning")
        if self.begin is None and (self.several or self.header or self.text_header):
            raise ValueError("a layout with several sections, or headers, begins each section with a token")
        if self.text_header[:1] == (self.begin,):
            raise ValueError("a layout's sections and text begin with two tokens")
        if self.openers and not (self.free and self.begin is None):
            raise ValueError("openers are for bodies in place of free text")
        if self.thinking and self.think is None:
            raise ValueError("a span that begins inside thinking needs the tokens of thinking")
        if self.begun and self.end is None:
            raise ValueError("an answer that has a section already needs a layout of sections")


@dataclass(frozen=True, slots=True)
class Constrained:
    """A constrained span: a layout, the constraint of its bodies, and the constraint of the text beside them.

    With `answer` the text of a layout that is `free` is not: the answer is sections, or one text that `answer` allows.

    Raises:
        ValueError: `answer` is given with a layout that has no `begin`, or is not `free`.
    """

    body: Constraint
    layout: Layout = Layout()
    answer: Constraint | None = None

    def __post_init__(self) -> None:
        if self.answer is not None and not (self.layout.free and self.layout.begin is not None):
            raise ValueError("an answer beside sections needs a layout of sections in free text")

    @property
    def free(self) -> bool:
        """Returns whether text that nothing constrains may stand in the answer."""
        return self.layout.free and self.answer is None

    @property
    def parts(self) -> tuple[Constraint, ...]:
        """Returns the constraints that are compiled, the body's first."""
        return (self.body,) if self.answer is None else (self.body, self.answer)
