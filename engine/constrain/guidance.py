"""Constraints by llguidance: an Earley parser over derivatives of regular expressions, for all that is context-free.

It holds a JSON schema or names the keyword that it cannot; `narrow` takes care of the few that it would hold wrongly.
Its matcher has habits that are kept from the rest of the engine: the end of sequence is not among the tokens it can
take back, and it breaks for good on ids outside the vocabulary, on dead ends and at its limits. Left to itself it would
also forbid tokens that it then accepts, wherever the text is forced: forced runs are worked out here instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.constrain import threads
from engine.constrain.endless import forces_soon
from engine.constrain.lark import first_line, lark, reason
from engine.constrain.matcher import ConstraintFailed, ConstraintRefused, Row, words
from engine.constrain.plain import plain
from engine.constrain.probe import Probe
from engine.constrain.spec import Constraint
from engine.constrain.vocabulary import Vocabulary

# What one mask may cost, in expressions: about 14,000 a millisecond. A string of up to 100 words counted by a pattern
# takes 300,000 with its first mask, and its answer would be cut off in the middle at llguidance's own 200,000.
_LIMITS = LLParserLimits(step_lexer_fuel=500_000, verbose_errors=False)


class Guidance:
    """The backend. Building one reads the whole vocabulary: about a second for 150,000 tokens.

    What is not plainly harmless is compiled by `probe` first, in a process that starts when the first such constraint
    comes: what takes too long there, or too much memory, or ends that process, is refused.

    Raises:
        ConstraintRefused: the model has no end-of-sequence token.
    """

    def __init__(self, vocabulary: Vocabulary, *, deadline_s: float = 2.0) -> None:
        if not vocabulary.eos:
            raise ConstraintRefused(["the model has no end-of-sequence token, so no text could be complete"])
        self._vocabulary = vocabulary
        self.probe = Probe(vocabulary, deadline_s=deadline_s)
        vocabulary.warm()
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Words(vocabulary)),
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos),
            slices=LLTokenizer.json_slices(),
        )

    def prepare(self, constraint: Constraint) -> None:
        if not plain(constraint):
            self.probe.start()

    def compile(self, constraint: Constraint) -> GuidanceCompiled:
        if plain(constraint):
            return self.load(lark(constraint), forces=forces_soon(constraint))
        source = self.probe.lark(constraint)
        return threads.aside(lambda: self.load(source, forces=forces_soon(constraint)))

    def load(self, source: str, *, forces: bool = False) -> GuidanceCompiled:
        """Compile what `lark` wrote, in this process: nothing can stop it, and some grammars overflow the stack.

        With `forces` its matchers tell what is forced: only for texts that cannot go on for ever.

        Raises:
            ConstraintRefused: it cannot be held.
        """
        first = LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(source), log_level=0, limits=_LIMITS)
        if first.is_error():
            raise ConstraintRefused([reason(first.get_error())])
        compiled = GuidanceCompiled(first, self._vocabulary, frozenset(self._vocabulary.eos), len(source), forces)
        try:  # some limits, and texts that cannot even begin, show only when the first mask is made
            compiled.matcher().fill(np.empty(words(self._vocabulary.size), dtype=np.int32))
        except ConstraintFailed as failed:
            raise ConstraintRefused([str(failed)]) from None
        return compiled

    def close(self) -> None:
        self.probe.close()


@dataclass(frozen=True, slots=True)
class GuidanceCompiled:
    """A matcher that never moves, to be copied."""

    first: LLMatcher
    vocabulary: Vocabulary
    eos: frozenset[int]
    source_length: int
    forces: bool = False

    @property
    def size(self) -> int:
        """A guess: the library does not say. Lexers grow with use, grammars with their source."""
        return 200_000 + 50 * self.source_length

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self.first.deep_copy(), self.vocabulary, self.eos, self.forces)


class GuidanceMatcher:
    """One text. See `Matcher`."""

    def __init__(
        self, inner: LLMatcher, vocabulary: Vocabulary, eos: frozenset[int], forces: bool, ended: bool = False
    ) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._eos = eos
        self._forces = forces
        self._ended = ended  # an end-of-sequence token was accepted

    def fill(self, row: Row) -> None:
        if self._ended:
            row[:] = 0
            return
        self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._inner.is_error():
            raise ConstraintFailed(_failure(self._inner))

    def accept(self, token: int) -> bool:
        if self._ended or not 0 <= token < self._vocabulary.size:
            return False
        if token in self._eos:
            self._ended = self._inner.is_accepting()
            return self._ended
        return self._inner.try_consume_tokens([token]) == 1

    def rollback(self, n: int) -> None:
        taken = min(n, int(self._ended))
        if n > taken and not self._inner.rollback(n - taken):
            raise ValueError(f"cannot roll back {n} tokens: {first_line(self._inner.get_error())}")
        self._ended = self._ended and not taken

    def forced(self) -> list[int]:
        text = self._inner.compute_ff_bytes() if self._forces and not self._ended else b""
        if not text:
            return []
        tokens = self._vocabulary.tokenize(text)
        taken = self._inner.try_consume_tokens(tokens)
        ends = self._inner.is_accepting() and self._inner.is_stopped()
        self._inner.rollback(taken)
        return tokens[:taken] if ends else self._vocabulary.settled(text, tokens[:taken])

    def can_end(self) -> bool:
        return not self._ended and self._inner.is_accepting()

    def must_end(self) -> bool:
        if not self.can_end():
            return False
        if self._inner.is_stopped():
            return True
        row = np.empty(words(self._vocabulary.size), dtype=np.int32)  # it sees some ends only when it makes the mask
        self.fill(row)
        return int(np.bitwise_count(row.view(np.uint32)).sum()) == len(self._eos)

    def fork(self) -> Self:
        return type(self)(self._inner.deep_copy(), self._vocabulary, self._eos, self._forces, self._ended)


class _Words:
    """The vocabulary in the shape that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos[0]
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = [id for id, token in enumerate(vocabulary.tokens) if not token]
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text.encode())


def _failure(broken: LLMatcher) -> str:
    error = first_line(broken.get_error())
    if "NoExtension" in error:
        return "no token fits the constraint, and the text is not complete"
    if "TooComplex" in broken.stop_reason() or "TooComplex" in error:
        return f"the constraint grew beyond llguidance's limits: {error}"
    return f"llguidance: {error}"
