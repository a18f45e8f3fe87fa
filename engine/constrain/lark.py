"""Constraints written in llguidance's dialect of Lark, and what it says of them in a person's words.

Everything that can be told before a grammar is compiled is told here, by name. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from llguidance import LLMatcher, regex_to_lark

from engine.constrain import narrow, spec
from engine.constrain.matcher import ConstraintRefused
from engine.constrain.regular import patterns, regular
from engine.constrain.spec import Constraint

LONGEST_SOURCE = 1_000_000  # characters of a grammar


def lark(constraint: Constraint) -> str:
    """The constraint in llguidance's dialect of Lark, from its rule `start`.

    Neighbours that are regular become one terminal: the lexer takes the longest match, so two terminals side by side
    would not mean what their expressions mean one after the other.

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
    source = "\n".join(['%llguidance {"no_forcing": true}', start, *rules, ""])
    if len(source) > LONGEST_SOURCE:
        raise ConstraintRefused([f"its grammar has {len(source)} characters; at most {LONGEST_SOURCE} are taken"])
    return source


def _flat(parts: Iterable[Constraint]) -> Iterator[Constraint]:
    for part in parts:
        if isinstance(part, spec.Sequence):
            yield from _flat(part.parts)
        else:
            yield part


# What in a grammar's source is no reference to a token: strings, expressions and comments. A `<` elsewhere is one.
_NO_TOKENS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/')


def _check_grammar(source: str) -> None:
    if "<" in _NO_TOKENS.sub(" ", source):
        raise ConstraintRefused(["grammar: it refers to a token (<…>); only text can be held"])


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
    first = first_line(message)
    if "Default retriever" in first:
        return "$ref: the reference leads outside the schema; nothing is fetched"
    if first.endswith("regex parse error:") and (why := re.search(r"^\s*error: (.*)$", message, re.MULTILINE)):
        first = f"{first} {why.group(1)}"
    first = first.removesuffix(" Enable 'coerce_one_of' option to approximate oneOf with anyOf")
    # Its place in our own wrapping grammar says nothing to whoever wrote the constraint.
    return re.sub(r"^((at )?\d+\(\d+\): )*(failed to compile JSON schema: )?", "", first)


def first_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[0] if lines else "no reason given"
