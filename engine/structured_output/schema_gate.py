r"""Admits JSON schemas that llguidance enforces exactly, and refuses others by name. Knows nothing of tokens.

An admitted schema never allows more texts than it means. llguidance compares keys as they are written, so a key spelt
with an escape (`"\u0061"` for `"a"`) passes for an additional one, and a key that comes twice counts twice; a class
that holds all control characters (`[^"]`) lets an escaped quote or backslash into a string; and expressions are Rust's,
not JavaScript's. Such schemas are narrowed, which leaves out rare ways to write a value, or refused by keyword.

Nothing can stop a long compile. So alternatives that would be multiplied out (`allOf`, keywords side by side) and
remainders of a `multipleOf` are counted first, and only a constraint that is plainly harmless is compiled without a
trial in the sandboxed process. Text is not forced where a schema leads back into itself, as in `{"properties": {"a":
{"$ref": "#"}}, "required": ["a"]}`: that would never end, with the interpreter's lock held. Masks stay the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from math import prod
from typing import Any

from engine.structured_output import spec
from engine.structured_output.matcher import ConstraintRefused
from engine.structured_output.schema_rewrite import NAMED, VALUES, exact, followed, schemas
from engine.structured_output.spec import Constraint

MAX_ALTERNATIVES = 1024
MAX_REMAINDERS = 10_000


def check(schema: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> None:
    """`parts` are all the schemas within `schema`. Raises `ConstraintRefused`. Any: a schema is JSON."""
    parts = list(parts)
    steps = [remainders(part["multipleOf"]) for part in parts if "multipleOf" in part]
    total = prod(steps) if any("allOf" in part for part in parts) else sum(steps)
    if total > MAX_REMAINDERS:
        raise ConstraintRefused([f"multipleOf: {total} remainders to tell apart; at most {MAX_REMAINDERS} are held"])
    _Alternatives(schema).of([schema])


def remainders(step: object) -> int:
    """Returns a value where it is a number; of others llguidance reports the error."""
    if isinstance(step, bool) or not isinstance(step, (int, float)) or step <= 0:
        return 1
    return int("".join(map(str, Decimal(str(step)).normalize().as_tuple().digits)))


class _Alternatives:
    """Counts the branches that an intersection of schemas is multiplied out to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[frozenset[int], int] = {}

    def of(self, schemas: list[Any]) -> int:
        """Returns how many alternatives the intersection has; each is looked at once, so references may go round."""
        flat: dict[int, Mapping[str, Any]] = {}
        self._flatten(schemas, flat)
        key = frozenset(flat)
        if key in self._known:
            return self._known[key]
        self._known[key] = 1
        lists = [
            part[name] for part in flat.values() for name in ("anyOf", "oneOf") if isinstance(part.get(name), list)
        ]
        count = prod(sum(self.of([branch]) for branch in branches) for branches in lists if isinstance(branches, list))
        if count > MAX_ALTERNATIVES:
            raise ConstraintRefused(
                [f"allOf, anyOf, oneOf: {count} combinations of alternatives; at most {MAX_ALTERNATIVES} are held"]
            )
        self._known[key] = count
        for same in self._members(flat.values()).values():
            self.of(same)
        return count

    def _flatten(self, schemas: list[Any], flat: dict[int, Mapping[str, Any]]) -> None:
        """Returns the schemas that have to hold together, `allOf` and references resolved, by identity."""
        for schema in schemas:
            if isinstance(schema, dict) and id(schema) not in flat:
                flat[id(schema)] = schema
                if isinstance(schema.get("allOf"), list):
                    self._flatten(schema["allOf"], flat)
                if isinstance(reference := schema.get("$ref"), str):
                    anchor = reference.startswith("#") and "/" not in reference  # it may be anywhere: the whole counts
                    self._flatten([self._root if anchor else followed(self._root, reference)], flat)

    def _members(self, schemas: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Any]]:
        """Returns the schemas that apply to one place within: a property, an item."""
        members: dict[tuple[str, str], list[Any]] = {}
        for schema in schemas:
            for keyword in ("properties", "patternProperties"):
                if isinstance(schema.get(keyword), dict):
                    for name, part in schema[keyword].items():
                        members.setdefault((keyword, name), []).append(part)
            for keyword in ("items", "additionalProperties"):
                members.setdefault((keyword, ""), []).append(schema.get(keyword))
        return members


# At most one space after a comma or a colon: no model can loop in white space. The separators are expressions.
_SPACED = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_COMPACT = {"whitespace_flexible": False}
_ESCAPES_WITHOUT_U = 'nrbtf\\"'


def for_guidance(source: str, *, compact: bool) -> str:
    """Rewrites a schema in JSON text for llguidance's `%json`.

    Raises:
        ConstraintRefused: it is no schema, or uses a keyword in a way that would not be enforced exactly.
    """
    try:
        schema = json.loads(source)
        if schema is False:
            raise ConstraintRefused(["the schema is false: nothing is valid against it"])
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ConstraintRefused([f"the schema is {json.dumps(schema)[:40]}; a schema is an object or a boolean"])
        schema = exact(schema)
        parts = list(schemas(schema))
        for part in parts:
            _check_count(part)
        _check_bounds(parts)
        check(schema, parts)
        schema = _with_patterns(schema)
    except RecursionError:
        raise ConstraintRefused(["the schema is nested too deeply"]) from None
    except json.JSONDecodeError as error:
        raise ConstraintRefused([f"the schema is not JSON: {error}"]) from None
    # Where keys are told apart by name, each may have one spelling only; else any character may be written as \uXXXX.
    escapes: dict[str, object] = (
        {"json_allowed_escapes": _ESCAPES_WITHOUT_U}
        if any(map(_tells_keys_apart, parts))
        else {"json_allow_general_unicode_escapes": True}
    )
    options = {**(_COMPACT if compact else _SPACED), **escapes}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _with_patterns(schema: Any) -> Any:
    """Returns the schema with its expressions as `exact_pattern` has them. Any: a schema is JSON."""
    if isinstance(schema, list):
        return [_with_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            made[keyword] = exact_pattern(value)
        elif keyword == "patternProperties" and isinstance(value, dict):
            # Keys that such a key does not match are additional ones, so its dot must keep its whole meaning.
            made[keyword] = {exact_pattern(key, dot="."): _with_patterns(part) for key, part in value.items()}
        elif keyword in NAMED and isinstance(value, dict):
            made[keyword] = {name: _with_patterns(part) for name, part in value.items()}
        else:
            made[keyword] = value if keyword in VALUES else _with_patterns(value)
    return made


def _open(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def _tells_keys_apart(schema: Mapping[str, Any]) -> bool:
    return _open(schema) and any(schema.get(name) for name in ("properties", "patternProperties", "required"))


def _check_count(schema: Mapping[str, Any]) -> None:
    least = schema.get("minProperties")
    if isinstance(least, (int, float)) and least >= 2 and _open(schema):
        raise ConstraintRefused(
            ["minProperties: 2 or more is held only beside additionalProperties: false, without patternProperties"]
        )


def _check_bounds(parts: list[Mapping[str, Any]]) -> None:
    """Admits a whole number as an exclusive bound where the other bound is less than 1 away."""
    together = any("allOf" in part for part in parts)  # bounds of different schemas may meet
    for part in parts:
        together = together or (_bounded(part) and any(name in part for name in ("$ref", "anyOf", "oneOf")))
    for group in [parts] if together else [[part] for part in parts]:
        for exclusive, other, sign in (
            ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
            ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
        ):
            whole = [bound for bound in _numbers(group, exclusive) if bound == int(bound)]
            for far in (bound for name in other for bound in _numbers(group, name)):
                if any(0 < sign * (far - near) < 1 for near in whole):
                    raise ConstraintRefused([f"{exclusive}: a whole number less than 1 from the other bound, {far}"])


def _bounded(part: Mapping[str, Any]) -> bool:
    return any(name in part for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))


def _numbers(parts: list[Mapping[str, Any]], name: str) -> list[float]:
    """Returns the finite numbers under a keyword. (Of any other value llguidance reports the error.)"""
    values = [part.get(name) for part in parts]
    return [value for value in values if isinstance(value, (int, float)) and abs(value) < 1e300]


_DOT = r"[^\n\r\u2028\u2029]"  # JavaScript's meaning; Rust's stops at \n alone
_PIECE = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\[xuU](?:\{[^}]*\}|[0-9a-fA-F]*)|\\.|\[|\.|[^\\\[.]+", re.DOTALL)
_CLASS = re.compile(r"\[(?!\^?\])\^?(?:[^\\\[\]]|\\.)+\]", re.DOTALL)
_NUL = re.compile(r"\\[xuU]\{?0+\}?|.*\x00.*", re.DOTALL)


def exact_pattern(pattern: str, dot: str = _DOT) -> str:
    r"""Rewrites a schema's expression for llguidance.

    NUL is taken out of every class: a class that then lacks one control character is read right. Brackets inside a
    class and set operations mean something else in Rust.

    Raises:
        ConstraintRefused: it uses one of those, or NUL by itself.
    """
    made: list[str] = []
    at = 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        if piece is None:  # a lone backslash at the end: llguidance reports the error
            return pattern
        text = piece.group()
        if text == "[":
            found = _CLASS.match(pattern, at)
            if found is None or re.search("&&|--|~~", found.group()):
                raise ConstraintRefused([f"pattern {pattern!r}: in a class, brackets, && -- and ~~ must be escaped"])
            text = found.group()
        elif _NUL.fullmatch(text):
            raise ConstraintRefused([f"pattern {pattern!r}: the character NUL"])
        is_set = text[0] == "[" or text[:2] in (r"\p", r"\P")
        made.append(dot if text == "." else rf"[{text}&&[^\x00]]" if is_set else text)
        at += len(text)
    return "".join(made)


MAX_SCHEMA_LENGTH = 16_000  # characters
MAX_PATTERN_LENGTH = 400
MAX_TOTAL_LENGTH = 64_000
MAX_COUNT = 10_000  # in a schema: of characters, items, properties
MAX_COUNT_MATCHED = 256  # of the characters of a string with a pattern
MAX_PROPERTIES = 200
MAX_BRANCHES = 64  # of an anyOf
MAX_MULTIPLIED = 12  # branches in all, where some are multiplied with something
_PLAIN_REMAINDERS = 100  # of a multipleOf
MAX_ITEMS = 16  # of a prefixItems
MAX_INTEGER = 2**53  # llguidance overflows the stack on integers from -2**63 + 1 downwards
MAX_DEPTH = 64
MAX_REPEATS = 2_000  # characters of all expressions that count, with the counts written out
FORMAT = 10  # characters that a format counts for
WIDE = 16  # times as much for an expression with classes of other than a few ASCII characters

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_WRITTEN = tuple(  # in other keywords
    f'"{name}"'
    for name in ("uniqueItems", "dependencies", "dependentRequired", "dependentSchemas", "not", "propertyNames")
)
MAX_WRITTEN = 4  # of each
MAX_SUBSTRING_LENGTH = 50_000  # characters: 3,000 compile in 7 ms, and a mask over them takes 0.1 ms
_BRANCHING = ("anyOf", "oneOf", "allOf")
_MULTIPLIED = frozenset({"$ref", "properties", "additionalProperties", "items", "pattern"})  # beside alternatives
_COUNTED = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_PIECE_PLAIN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d*(?:,\d*)?\}|.", re.DOTALL)
_WIDE_CLASS = re.compile(r"\\[pPwWDS]|\[\^|\.|[^\x00-\x7f]")


def plainly_harmless(constraint: Constraint) -> bool:
    """Returns whether it may be compiled without a trial."""
    todo: list[Constraint] = [constraint]
    characters = repeats = 0
    while todo:
        part = todo.pop()
        characters += 1
        match part:
            case spec.Sequence(parts) | spec.OneOf(parts):
                todo.extend(parts)
            case spec.Optional(inner):
                todo.append(inner)
            case spec.Repeat(inner, separator):
                characters += len(separator)
                todo.append(inner)
            case spec.Literal(text) | spec.Until(text):
                characters += len(text)
            case spec.Substring() if len(part.text) > MAX_SUBSTRING_LENGTH:
                return False
            case spec.Regex(pattern):
                characters += len(pattern)
                repeats += _repeats(pattern)
            case spec.JsonSchema(source, _):
                characters += len(source)
                written = _expressions(source)
                if written is None:
                    return False
                repeats += written
            case spec.Grammar():
                return False
        if characters > MAX_TOTAL_LENGTH or repeats > MAX_REPEATS:
            return False
    return True


def _expressions(source: str) -> int | None:
    """Returns how long the expressions are in a schema that is plain but for them; None where it is not plain."""
    written = [source.count(name) for name in _WRITTEN]
    if len(source) > MAX_SCHEMA_LENGTH or max(written) > MAX_WRITTEN:
        return None
    try:
        schema = json.loads(source)  # as it is written for llguidance, where that is more
        todo: list[tuple[Any, int]] = [(exact(schema) if any(written) and isinstance(schema, dict) else schema, 0)]
    except (ValueError, RecursionError):  # a refusal is a ValueError, too
        return 0  # refused at once
    length = branches = 0
    multiplied = False
    while todo:
        part, depth = todo.pop()
        if isinstance(part, list):
            todo.extend((each, depth + 1) for each in part)
        elif isinstance(part, dict):  # values of an enum are checked too: they can only make it less plain
            if depth > MAX_DEPTH or len(part) > MAX_PROPERTIES or not _few(part):
                return None
            lists = [some for name in _BRANCHING if isinstance(some := part.get(name), list)]
            branches += sum(map(len, lists))
            several = len(lists) > 1 or len(part.get("allOf") or ()) > 1
            multiplied = multiplied or (bool(lists) and (several or not _MULTIPLIED.isdisjoint(part)))
            keys = part.get("patternProperties")
            for pattern in (part.get("pattern"), *(keys if isinstance(keys, dict) else ())):
                length += _repeats(pattern) if isinstance(pattern, str) else 0
            length += FORMAT * isinstance(part.get("format"), str)
            todo.extend((each, depth + 1) for each in part.values())
        elif isinstance(part, (int, float)) and not abs(part) <= MAX_INTEGER:
            return None
    if multiplied and (branches > MAX_MULTIPLIED or "Ref" in source or "$ref" in source):
        return None
    return length


def _few(schema: dict[str, Any]) -> bool:
    """No large counts, no long lists of alternatives or items, no large step."""
    max_count = MAX_COUNT_MATCHED if "pattern" in schema else MAX_COUNT
    if any(isinstance(count := schema.get(name), (int, float)) and count > max_count for name in _COUNTS):
        return False
    lists = [(len(some), MAX_BRANCHES) for name in _BRANCHING if isinstance(some := schema.get(name), list)]
    for name, limit in (("prefixItems", MAX_ITEMS), ("patternProperties", MAX_ITEMS)):
        if isinstance(some := schema.get(name), (list, dict)):
            lists.append((len(some), limit))
    if any(length > limit for length, limit in lists):
        return False
    return "multipleOf" not in schema or remainders(schema["multipleOf"]) <= _PLAIN_REMAINDERS


def _repeats(pattern: str) -> int:
    """Returns how long the expression is with its counts written out; 0 where it has none."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        return MAX_REPEATS + 1
    if "{" not in pattern:
        return 0
    open_groups, last = [0], 0
    for piece in _PIECE_PLAIN.findall(pattern):
        if piece == "(":
            open_groups.append(0)
        elif piece == ")" and len(open_groups) > 1:
            last = open_groups.pop()
            open_groups[-1] += last
        elif counted := _COUNTED.fullmatch(piece):
            times = max(1, int(counted[2] or counted[1] or 1))
            open_groups[-1] += last * (times - 1)
            last *= times
        elif piece not in "*+?":
            last = 1
            open_groups[-1] += 1
    return sum(open_groups) * (WIDE if _WIDE_CLASS.search(pattern) else 1)


_OTHER_REFERENCES = ("$dynamicRef", "$recursiveRef")


def forces_soon(constraint: Constraint) -> bool:
    """Returns whether forced text (jump-forward) at any place is finite: the constraint is plain, and nothing in it
    leads back."""
    if not plainly_harmless(constraint):
        return False
    todo: list[Constraint] = [constraint]
    while todo:
        match todo.pop():
            case spec.Sequence(parts) | spec.OneOf(parts):
                todo.extend(parts)
            case spec.Optional(inner) | spec.Repeat(inner, _):  # there is always a way out of a repetition
                todo.append(inner)
            case spec.JsonSchema(source, _) if leads_back(source):
                return False
            case spec.Grammar() | spec.ControlToken():  # forced text has no control tokens
                return False
    return True


def leads_back(source: str) -> bool:
    """Returns whether a schema may refer to itself, directly or by way of others; one that cannot be followed may."""
    if "Ref" not in source and "$ref" not in source:
        return False
    try:
        root = json.loads(source)
        return _Following(root).leads_back()
    except (ValueError, RecursionError):
        return True


class _Following:
    """References of one schema, followed. Any: a schema is JSON."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._open: set[str] = set()
        self._closed: set[str] = set()

    def leads_back(self) -> bool:
        return self._within(self._root)

    def _within(self, part: Any) -> bool:
        todo = [part]
        while todo:
            part = todo.pop()
            if isinstance(part, list):
                todo.extend(part)
            elif isinstance(part, dict):
                if any(name in part for name in _OTHER_REFERENCES):
                    return True
                reference = part.get("$ref")
                if isinstance(reference, str) and self._follow(reference):
                    return True
                todo.extend(part.values())
        return False

    def _follow(self, reference: str) -> bool:
        if reference in self._closed:
            return False
        value = followed(self._root, reference)
        if reference in self._open or reference == "#" or value is None:
            return True  # round in a circle, to the root, or to where it cannot be followed
        self._open.add(reference)
        found = self._within(value)
        self._open.remove(reference)
        self._closed.add(reference)
        return found
