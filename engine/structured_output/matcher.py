"""The interface of a constraint: a matcher that returns the tokens that may come next, and a compiler of matchers.

A matcher starts before the first token. Accepted tokens can be taken back one by one, the end included, so drafts,
forks and preemption need nothing special. Knows nothing of any one backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.structured_output.spec import Constraint

Row = NDArray[np.int32]  # (words,): bit t % 32 of word t // 32 says whether token t may come


def words(vocab_size: int) -> int:
    """Returns the 32-bit words that a row of bits for the vocabulary takes."""
    return -(-vocab_size // 32)


class ConstraintRefused(EngineError, ValueError):
    """No backend can enforce the constraint exactly, or in time. `reasons` say why, each naming the offending part."""

    code = "constraint_refused"

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


class CompileTimeout(ConstraintRefused):
    """Compiling it took too long; a later retry may succeed."""

    code = "constraint_timeout"

    def __init__(self, reason: str) -> None:
        super().__init__([reason])


class ConstraintFailed(EngineError):
    """A constraint that was compiled cannot go on: its state grew beyond a limit, or no token fits any more."""

    code = "constraint_failed"


class Matcher(Protocol):
    """The state of one constrained text."""

    def fill(self, row: Row) -> None:
        """Writes the bits of the tokens that may come next; of the end-of-sequence tokens where the text may end. None
        after that.

        Raises:
            ConstraintFailed: no token fits and the text is not complete, or the backend met a limit of its own.
        """
        ...

    def accept(self, token: int) -> bool:
        """Takes a token, an end-of-sequence token included; False, and no change, where it may not come."""
        ...

    def rollback(self, n: int) -> None:
        """Takes back the last `n` accepted tokens."""
        ...

    def forced(self) -> list[int]:
        """Returns the jump-forward tokens: those that must come next because only one text can; often empty, never past
        a choice or the end."""
        ...

    def can_end(self) -> bool:
        """Returns whether the text so far is complete."""
        ...

    def must_end(self) -> bool:
        """Returns whether the text is complete and nothing but its end may come."""
        ...

    def fork(self) -> Self:
        """Returns an independent matcher in the same state."""
        ...


class Compiled(Protocol):
    """A constraint ready to use, by any number of sequences at once."""

    @property
    def size(self) -> int:
        """Returns about how many bytes keeping it costs."""
        ...

    def matcher(self) -> Matcher:
        """Returns a new matcher, before the first token."""
        ...


class Backend(Protocol):
    """Compiles while a request waits."""

    def prepare(self, constraint: Constraint) -> None:
        """Starts the preparations of a compile that do not count against its time; often none.

        Raises:
            ConstraintRefused: it could not start.
        """
        ...

    def compile(self, constraint: Constraint) -> Compiled:
        """Compiles. Raises `ConstraintRefused`. May take seconds, and lets other threads run meanwhile."""
        ...

    def close(self) -> None:
        """Stops its processes. Nothing is compiled after that."""
        ...
