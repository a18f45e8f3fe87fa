"""Constraints by llguidance: an Earley parser over derivatives of regular expressions, for all that is context-free.

It holds a JSON schema or names the keyword that it cannot; `narrow` takes care of the few that it would hold wrongly.
Its matcher has habits that are kept from the rest of the engine: the end of sequence is not among the tokens it can
take back, and it breaks for good on ids outside the vocabulary, on dead ends and at its limits. Left to itself it would
also forbid tokens that it then accepts, wherever the text is forced: forced runs are worked out here instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark

from engine.constrain import narrow, spec
from engine.constrain.matcher import ConstraintFailed, ConstraintRefused, Row, words
from engine.constrain.regular import patterns, regular
from engine.constrain.spec import Constraint
from engine.constrain.vocabulary import Vocabulary

LONGEST_SOURCE = 1_000_000  # characters of a grammar: what is longer would take seconds that nothing can stop
MOST_LEVELS = 1_500  # rules and brackets of a grammar: some 2,500 within one another overflow the stack of a thread


class Guidance:
    """The backend. Building one reads the whole vocabulary: about a second for 150,000 tokens.

    Raises:
        ConstraintRefused: the model has no end-of-sequence token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos:
            raise ConstraintRefused(["the model has no end-of-sequence token, so no text could be complete"])
        self._vocabulary = vocabulary
        vocabulary.warm()
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Words(vocabulary)),
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos),
            slices=LLTokenizer.json_slices(),
        )

    def compile(self, constraint: Constraint) -> GuidanceCompiled:
        for pattern in patterns(constraint):
            _check_pattern(pattern)
        source = lark(constraint)
        if len(source) > LONGEST_SOURCE:
            raise ConstraintRefused([f"its grammar has {len(source)} characters; at most {LONGEST_SOURCE} are taken"])
        first = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(source), log_level=0)
        if first.is_error():
            raise ConstraintRefused([reason(first.get_error())])
        compiled = GuidanceCompiled(first, self._vocabulary, frozenset(self._vocabulary.eos), len(source))
        try:  # some limits, and texts that cannot even begin, show only when the first mask is made
            compiled.matcher().fill(np.empty(words(self._vocabulary.size), dtype=np.int32))
        except ConstraintFailed as failed:
            raise ConstraintRefused([str(failed)]) from None
        return compiled

    def close(self) -> None:
        """Nothing runs beside this process."""


@dataclass(frozen=True, slots=True)
class GuidanceCompiled:
    """A matcher that never moves, to be copied."""

    first: LLMatcher
    vocabulary: Vocabulary
    eos: frozenset[int]
    source_length: int

    @property
    def size(self) -> int:
        """A guess: the library does not say. Lexers grow with use, grammars with their source."""
        return 200_000 + 50 * self.source_length

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self.first.deep_copy(), self.vocabulary, self.eos)


class GuidanceMatcher:
    """One text. See `Matcher`."""

    def __init__(self, inner: LLMatcher, vocabulary: Vocabulary, eos: frozenset[int], ended: bool = False) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._eos = eos
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
            raise ValueError(f"cannot roll back {n} tokens: {_first_line(self._inner.get_error())}")
        self._ended = self._ended and not taken

    def forced(self) -> list[int]:
        text = b"" if self._ended else self._inner.compute_ff_bytes()
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
        return type(self)(self._inner.deep_copy(), self._vocabulary, self._eos, self._ended)


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


def lark(constraint: Constraint) -> str:
    """The constraint in llguidance's dialect of Lark, from its rule `start`.

    Neighbours that are regular become one terminal: the lexer takes the longest match, so two terminals side by side
    would not mean what their expressions mean one after the other.

    Raises:
        ConstraintRefused: a part cannot be written so.
    """
    rules: list[str] = []

    def named(kind: str, body: str) -> str:
        name = f"{kind}{len(rules)}"
        rules.append(f"{name}{body}")
        return name

    def terminal(pattern: str) -> str:
        return named("T", f": /{regex_to_lark(pattern, use_ascii='')}/") if pattern else '""'

    def expression(part: Constraint) -> str:
        if (pattern := regular(part)) is not None:
            return terminal(pattern)
        match part:
            case spec.JsonSchema(source, compact):
                return named("json", ": %json " + narrow.for_guidance(source, compact=compact))
            case spec.Grammar(source):
                _check_grammar(source)
                return named("inner", ": %lark {\n" + source + "\n}")
            case spec.Until(stop):
                return named("until", f"[suffix={json.dumps(stop, ensure_ascii=False)}]: /(?s:.*)/")
            case spec.Sequence(parts):
                written: list[str] = []
                for is_regular, run in groupby(_flat(parts), lambda each: regular(each) is not None):
                    neighbours = tuple(run)
                    written += map(expression, [spec.Sequence(neighbours)] if is_regular else neighbours)
                return f"({' '.join(written)})"
            case spec.OneOf(parts):
                if not parts:
                    raise ConstraintRefused(["a choice of nothing: no text fits"])
                return f"({' | '.join(map(expression, parts))})"
            case spec.Optional(inner):
                return f"({expression(inner)})?"
            case spec.Repeat(inner, separator):
                # Once or more, by a rule that calls itself: what is repeated is written down once.
                once = expression(inner)
                name = named("repeat", "")
                again = f" {terminal(regular(spec.Literal(separator)) or '')}" if separator else ""
                rules[rules.index(name)] = f"{name}: {once} | {name}{again} {once}"
                return name
        raise AssertionError(part)  # a literal or an expression is regular

    start = f"start: {expression(constraint)}"
    return "\n".join(['%llguidance {"no_forcing": true}', start, *rules, ""])


def _flat(parts: Iterable[Constraint]) -> Iterator[Constraint]:
    for part in parts:
        if isinstance(part, spec.Sequence):
            yield from _flat(part.parts)
        else:
            yield part


# What in a grammar's source is no reference to a token: strings, expressions and comments. A `<` elsewhere is one.
_NO_TOKENS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/')


def _check_grammar(source: str) -> None:
    plain = _NO_TOKENS.sub(" ", source)
    if "<" in plain:
        raise ConstraintRefused(["grammar: it refers to a token (<…>); only text can be held"])
    levels = sum(map(plain.count, ":([{~"))
    if levels > MOST_LEVELS:
        raise ConstraintRefused([f"grammar: {levels} rules and brackets; at most {MOST_LEVELS} are taken"])


def _check_pattern(pattern: str) -> None:
    """By itself, so that no unbalanced parenthesis of it can pair with one of its surroundings."""
    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
    if message:
        raise ConstraintRefused([f"regex: {reason(message)}"])


def reason(message: str) -> str:
    """llguidance's message as one line that names the keyword."""
    if match := re.search(r"Unimplemented keys: (\[.*?\])", message):
        return f"JSON Schema keyword not supported: {', '.join(json.loads(match.group(1)))}"
    if message.startswith("panic"):
        return "llguidance failed on it"
    first = _first_line(message)
    if "Default retriever" in first:
        return "$ref: the reference leads outside the schema; nothing is fetched"
    if first.endswith("regex parse error:") and (why := re.search(r"^\s*error: (.*)$", message, re.MULTILINE)):
        first = f"{first} {why.group(1)}"
    first = first.removesuffix(" Enable 'coerce_one_of' option to approximate oneOf with anyOf")
    # Its place in our own wrapping grammar says nothing to whoever wrote the constraint.
    return re.sub(r"^((at )?\d+\(\d+\): )*(failed to compile JSON schema: )?", "", first)


def _first_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[0] if lines else "no reason given"


def _failure(broken: LLMatcher) -> str:
    error = _first_line(broken.get_error())
    if "NoExtension" in error:
        return "no token fits the constraint, and the text is not complete"
    if "TooComplex" in broken.stop_reason() or "TooComplex" in error:
        return f"the constraint grew beyond llguidance's limits: {error}"
    return f"llguidance: {error}"
