"""The llguidance backend: writes a constraint as Lark, compiles it and matches text against it.

llguidance is an Earley parser over derivatives of regular expressions, for all that is context-free. It enforces a JSON
schema or names the keyword that it cannot; `schema_gate` handles the few that it would enforce wrongly. Its matcher
cannot take back the end of sequence, and breaks for good on ids outside the vocabulary, on dead ends and at its limits:
this module hides that from the rest of the engine. It would also forbid tokens that it then accepts, wherever the text
is forced, so forced runs (jump-forward) are worked out here. A part that a finite automaton can match becomes one
expression in the syntax of Rust's `regex` crate. Mistakes that can be found before a grammar is compiled are named
here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from engine.structured_output import sandboxed_compile, schema_gate, spec
from engine.structured_output.matcher import ConstraintFailed, ConstraintRefused, Row, words
from engine.structured_output.sandboxed_compile import SandboxedCompile
from engine.structured_output.schema_gate import forces_soon, plainly_harmless
from engine.structured_output.spec import Constraint
from engine.structured_output.vocabulary import Vocabulary

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def regular(constraint: Constraint) -> str | None:
    """Returns the whole constraint as one expression; None where a part of it is not plainly regular."""
    match constraint:
        case spec.Literal(text):
            return escape(text)
        case spec.Regex(pattern):
            return f"(?:{pattern})"
        case spec.Sequence(parts):
            each = _all(parts)
            return None if each is None else "".join(each)
        case spec.OneOf(parts):
            each = _all(parts)
            return f"(?:{'|'.join(each)})" if each else None
        case spec.Optional(part):
            once = regular(part)
            return None if once is None else f"(?:{once})?"
        case spec.Repeat(part, separator):
            once = regular(part)
            return None if once is None else f"{once}(?:{escape(separator)}{once})*"
    return None


def _all(parts: Iterable[Constraint]) -> list[str] | None:
    found = [regular(part) for part in parts]
    whole = [each for each in found if each is not None]
    return whole if len(whole) == len(found) else None


def escape(text: str) -> str:
    """Returns an expression that matches exactly `text`. (`re.escape` also escapes characters that Rust's `regex` wants
    unescaped.)"""
    return _SPECIAL.sub(lambda match: "\\" + match.group(), text)


def patterns(constraint: Constraint) -> list[str]:
    """Returns every expression in the constraint, to be checked by itself before it is combined with others."""
    match constraint:
        case spec.Regex(pattern):
            return [pattern]
        case spec.Sequence(parts) | spec.OneOf(parts):
            return [pattern for part in parts for pattern in patterns(part)]
        case spec.Optional(part) | spec.Repeat(part, _):
            return patterns(part)
    return []


MAX_SOURCE_LENGTH = 1_000_000  # characters of a grammar


def lark(constraint: Constraint) -> str:
    """Writes the constraint in llguidance's variant of Lark, from its rule `start`.

    Neighbours that are regular become one terminal: the lexer takes the longest match, so two terminals side by side
    would not match like their expressions one after the other.

    Raises:
        ConstraintRefused: a part cannot be written so.
    """
    for pattern in patterns(constraint):
        _check_pattern(pattern)
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
                return named("json", ": %json " + schema_gate.for_guidance(source, compact=compact))
            case spec.Grammar(source, control):
                _check_grammar(source, control)
                return named("inner", ": %lark {\n" + source + "\n}")
            case spec.Substring(text, least, most):
                lengths = f"{least - 1},{most - 1}"
                inside = json.dumps({"substring_words": text}, ensure_ascii=False)  # by a suffix automaton
                return named("Q", f": /[\\p{{L}}\\p{{N}}\"'“‘„«(](?s:.{{{lengths}}})/ & %regex {inside}")
            case spec.ControlToken(id):
                return f"<[{id}]>"
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
                # Once or more, by a rule that calls itself: the repeated part is written once.
                once = expression(inner)
                name = named("repeat", "")
                again = f" {terminal(regular(spec.Literal(separator)) or '')}" if separator else ""
                rules[rules.index(name)] = f"{name}: {once} | {name}{again} {once}"
                return name
        raise AssertionError(part)  # a literal or an expression is regular

    start = f"start: {expression(constraint)}"
    source = "\n".join(['%llguidance {"no_forcing": true}', start, *rules, ""])
    if len(source) > MAX_SOURCE_LENGTH:
        raise ConstraintRefused([f"its grammar has {len(source)} characters; at most {MAX_SOURCE_LENGTH} are taken"])
    return source


def _flat(parts: Iterable[Constraint]) -> Iterator[Constraint]:
    for part in parts:
        if isinstance(part, spec.Sequence):
            yield from _flat(part.parts)
        else:
            yield part


# Parts of a grammar's source that are no reference to a token: strings, expressions and comments. A `<` elsewhere is
# one.
_NO_TOKENS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/')


def _check_grammar(source: str, control: Iterable[int]) -> None:
    outside = _NO_TOKENS.sub(" ", source)
    for id in control:
        outside = outside.replace(f"<[{id}]>", "")
    if "<" in outside:
        raise ConstraintRefused(["grammar: it refers to a token (<…>); only text can be held"])


def _check_pattern(pattern: str) -> None:
    """Checks an expression by itself, so that no unbalanced parenthesis of it can pair with one of its surroundings."""
    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
    if message:
        raise ConstraintRefused([f"regex: {reason(message)}"])


def reason(message: str) -> str:
    """Returns llguidance's message as one line that names the keyword."""
    if match := re.search(r"Unimplemented keys: (\[.*?\])", message):
        return f"JSON Schema keyword not supported: {', '.join(json.loads(match.group(1)))}"
    if message.startswith("panic"):
        return "llguidance failed on it"
    first = first_line(message)
    if "Default retriever" in first:
        return "$ref: the reference leads outside the schema; nothing is fetched"
    if first.endswith("regex parse error:") and (why := re.search(r"^\s*error: (.*)$", message, re.MULTILINE)):
        first = f"{first} {why.group(1)}"
    first = first.removesuffix(" Enable 'coerce_one_of' option to approximate oneOf with anyOf")
    # Its position in our wrapping grammar means nothing to the constraint's author.
    return re.sub(r"^((at )?\d+\(\d+\): )*(failed to compile JSON schema: )?", "", first)


def first_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[0] if lines else "no reason given"


# Limit of one mask, in expressions: about 14,000 a millisecond. A string of up to 100 words counted by a pattern takes
# 300,000 with its first mask, and its answer would be cut off in the middle at llguidance's own 200,000.
_LIMITS = LLParserLimits(step_lexer_fuel=500_000, verbose_errors=False)


class Guidance:
    """The llguidance backend. Building one reads the whole vocabulary: about a second for 150,000 tokens.

    A constraint that is not plainly harmless is compiled by `probe` first, in a process that starts when the first such
    constraint comes: one that takes too long there, or too much memory, or ends that process, is refused.

    Raises:
        ConstraintRefused: the model has no end-of-sequence token.
    """

    def __init__(self, vocabulary: Vocabulary, *, deadline_s: float = 2.0) -> None:
        if not vocabulary.eos:
            raise ConstraintRefused(["the model has no end-of-sequence token, so no text could be complete"])
        self._vocabulary = vocabulary
        self.probe = SandboxedCompile(vocabulary, deadline_s=deadline_s)
        vocabulary.warm()
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Words(vocabulary)),
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos),
            slices=LLTokenizer.json_slices(),
        )

    def prepare(self, constraint: Constraint) -> None:
        if not plainly_harmless(constraint):
            self.probe.start()

    def compile(self, constraint: Constraint) -> GuidanceCompiled:
        if plainly_harmless(constraint):
            return self.load(lark(constraint), forces=forces_soon(constraint))
        source = self.probe.lark(constraint)
        return sandboxed_compile.aside(lambda: self.load(source, forces=forces_soon(constraint)))

    def load(self, source: str, *, forces: bool = False) -> GuidanceCompiled:
        """Compiles the output of `lark` in this process: nothing can stop it, and some grammars overflow the stack.

        With `forces` its matchers return forced tokens (jump-forward): only for texts that cannot go on for ever.

        Raises:
            ConstraintRefused: it cannot be enforced.
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
        """Estimates the bytes: the library does not report them. Lexers grow with use, grammars with their source."""
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
    """Builds the vocabulary in the shape that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos[0]
        # Without a text of its own, a mask would not tell one from the next: bytes that are no UTF-8, and its id.
        self.tokens: Sequence[bytes] = [token or b"\xff[%d]" % id for id, token in enumerate(vocabulary.tokens)]
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
