"""Rewrites JSON schemas to an equal form, or to the nearest superset, that llguidance can enforce.

`exact` keeps a schema's language: `oneOf` of branches that exclude one another is `anyOf`, `uniqueItems` over a few
values is a list of their arrangements, `dependencies` are alternatives of a key's absence, so is `not` of `required`,
`propertyNames` are the keys of a closed object, and a `format` that is not known is an annotation. `supersets` gives
wider schemas, each wider than the one before. References are followed as RFC 6901 pointers behind a `#`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, permutations, product
from math import perm, prod
from typing import Any

from engine.structured_output.matcher import ConstraintRefused


def followed(root: Any, reference: str) -> Any:
    """Resolves `#` or `#/…` in `root`; None for a missing target, an anchor, or another document.

    Any: a schema is JSON.
    """
    start, *names = reference.split("/")
    if start != "#":
        return None
    value = root
    for name in (name.replace("~1", "/").replace("~0", "~") for name in names):
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
MAX_ARRANGEMENTS = 400  # of the values of an array without repetition: a row of llguidance's parser holds some 600
MAX_BRANCHES = 64  # of a oneOf that is looked at, pair by pair
MAX_DEPTH = 8  # of values that tell two branches apart
MAX_PAIRS = 5_000  # of schemas compared in one: beyond it, branches count as overlapping

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # name -> schema
VALUES = frozenset({"const", "enum", "default", "examples"})  # JSON that is no schema
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id"}
)
_TYPES = {"number": {"integer", "fraction"}} | {
    name: {name} for name in ("string", "integer", "boolean", "null", "array", "object")
}
_EVERY_TYPE = frozenset({"string", "integer", "fraction", "boolean", "null", "array", "object"})
_NOT_HELD = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems"),
    *(
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
    ),
)
_COSTLY = frozenset({"pattern", "multipleOf", "format", "patternProperties", *_DEPENDENCIES})

Json = Any  # a schema, or a value


def exact(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Rewrites the schema to the same language in keywords that llguidance enforces, as far as there are such.

    Raises:
        ConstraintRefused: `uniqueItems` over more than a few values.
    """
    made: dict[str, Json] = _Writing(schema, exact=True).of(schema)
    return made


def supersets(schema: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    """Returns schemas that are valid wherever this one is, the nearest first, the last of them next to anything."""
    writing = _Writing(schema, exact=False)
    yield writing.of(schema)
    yield writing.of(_without(schema, _COSTLY))
    yield {"type": schema["type"]} if isinstance(schema.get("type"), str) and schema["type"] in _TYPES else {}


def unknown_formats(schema: Json) -> list[str]:
    """Returns the formats in a schema that are treated as annotations, in the order of their names."""
    return sorted({part["format"] for part in schemas(schema) if _unknown(part.get("format"))})


def schemas(schema: Json) -> Iterator[Mapping[str, Json]]:
    """Yields every schema within a schema, also where only a reference finds it."""
    if isinstance(schema, list):
        for part in schema:
            yield from schemas(part)
    elif isinstance(schema, dict):
        yield schema
        for keyword, value in schema.items():
            if keyword in NAMED and isinstance(value, dict):
                yield from schemas(list(value.values()))
            elif keyword not in VALUES:
                yield from schemas(value)


def _unknown(format: Json) -> bool:
    return isinstance(format, str) and format not in FORMATS


def _without(schema: Json, dropped: frozenset[str]) -> Json:
    if isinstance(schema, list):
        return [_without(part, dropped) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Json] = {}
    for keyword, value in schema.items():
        if keyword in dropped or (keyword == "additionalProperties" and "patternProperties" in schema):
            continue
        if keyword in NAMED and isinstance(value, dict):
            made[keyword] = {name: _without(part, dropped) for name, part in value.items()}
        else:
            made[keyword] = value if keyword in VALUES else _without(value, dropped)
    return made


class _Writing:
    """Rewrites one schema."""

    def __init__(self, root: Json, *, exact: bool) -> None:
        self._exact = exact
        self._disjoint = _Disjoint(root)
        self._root = root

    def of(self, schema: Json) -> Json:
        if isinstance(schema, list):
            return [self.of(part) for part in schema]
        if not isinstance(schema, dict):
            return schema
        made: dict[str, Json] = {}
        for keyword, value in schema.items():
            if keyword in (*NAMED, "dependencies") and isinstance(value, dict):
                made[keyword] = {name: self.of(part) for name, part in value.items()}
            elif keyword in _COUNTS and isinstance(value, float) and value.is_integer():
                made[keyword] = int(value)
            elif keyword != "format" or not _unknown(value):
                made[keyword] = value if keyword in VALUES else self.of(value)
        if "$ref" in made:  # llguidance takes a recursive reference only by itself
            made = {keyword: value for keyword, value in made.items() if keyword not in _ANNOTATIONS - {"$id"}}
        if "propertyNames" in made:
            made = self._closed(made)
        alternatives = [
            *self._dependencies(made), *self._one_of(schema, made), *self._unique(made), *self._absent(schema, made)
        ]  # fmt: skip
        if not self._exact:
            _loosen(made)
        if alternatives and "anyOf" not in made:
            made["anyOf"] = alternatives.pop()
        if alternatives:
            made["allOf"] = [*_list(made, "allOf"), *({"anyOf": some} for some in alternatives)]
        return made

    def _dependencies(self, made: dict[str, Json]) -> Iterator[list[Json]]:
        """For every key that depends on others: it is absent, or they are there."""
        for keyword in _DEPENDENCIES:
            if not isinstance(made.get(keyword), dict):
                continue
            for name, needed in made.pop(keyword).items():
                if needed is not True and needed != []:
                    held = {"required": needed} if isinstance(needed, list) else needed
                    yield [{"properties": {name: False}}, held]

    def _absent(self, schema: Mapping[str, Json], made: dict[str, Json]) -> Iterator[list[Json]]:
        """Of keys that may not be there together, one is absent. A value that is no object has none, and is valid only
        where `not` is about objects."""
        forbidden = schema.get("not")
        if not isinstance(forbidden, dict):
            return
        some = _list(forbidden, "anyOf") if forbidden.keys() <= _ANNOTATIONS | {"anyOf"} else [forbidden]
        for part in some:
            if not isinstance(part, dict) or part.keys() - _ANNOTATIONS - {"required", "type"} or not _names(part):
                return
            if part.get("type", "object") != "object":
                return
        if some:
            del made["not"]
        for part in some:
            kind = {} if "type" in part else {"type": "object"}
            yield [{**kind, "properties": {name: False}} for name in _names(part)]

    def _closed(self, schema: dict[str, Json]) -> dict[str, Json]:
        """Returns the object with just the keys that `propertyNames` allows; the schema as it is where they are neither
        listed nor matched by one expression."""
        made = dict(schema)
        names = made.pop("propertyNames")
        if isinstance(names, dict) and isinstance(names.get("$ref"), str) and names.keys() <= _ANNOTATIONS | {"$ref"}:
            names = followed(self._root, names["$ref"])
        if names is True or (isinstance(names, dict) and not names.keys() - _ANNOTATIONS - {"type"}):
            return made if names is True or "string" in _types(names) else schema
        if not isinstance(names, dict) or "string" not in _types(names) or "patternProperties" in made:
            return schema
        other = made.get("additionalProperties", True)
        given = names.keys() - _ANNOTATIONS - {"type"}
        if given in ({"enum"}, {"const"}) and (listed := _listed(names)) is not None:
            keys = [name for name in listed if isinstance(name, str)]
            held = {name: part if name in keys else False for name, part in made.get("properties", {}).items()}
            made["properties"] = held | {name: other for name in keys if name not in held}
        elif given == {"pattern"} and not made.get("properties"):
            made["patternProperties"] = {names["pattern"]: other}
        else:
            return schema
        made["additionalProperties"] = False
        return made

    def _one_of(self, schema: Mapping[str, Json], made: dict[str, Json]) -> Iterator[list[Json]]:
        """Returns the branches, where no two of them can be valid together."""
        branches = _list(made, "oneOf")
        alternatives = branches if self._disjoint.all(schema.get("oneOf")) else None
        alternatives = alternatives or _by_presence(branches) or _by_values(branches)
        if branches and (alternatives or not self._exact):
            del made["oneOf"]
            yield alternatives or branches

    def _unique(self, made: dict[str, Json]) -> Iterator[list[Json]]:
        """Lists every arrangement of the values, of the greatest length: shorter arrays are beginnings of these."""
        unique = made.pop("uniqueItems", False)
        if unique is not True or made.get("maxItems") in (0, 1):
            return
        values = self._values(made.get("items"))
        least, most = made.get("minItems", 0), made.get("maxItems", len(values or ()))
        counts = isinstance(least, int) and isinstance(most, int)
        most = min(most, len(values or ())) if counts else 0
        if values is None or not counts or made.get("type") != "array" or "prefixItems" in made:
            if self._exact:
                raise ConstraintRefused([_UNIQUE])
        elif perm(len(values), most) > MAX_ARRANGEMENTS:
            if self._exact:
                raise ConstraintRefused([f"{_UNIQUE}; these have {perm(len(values), most)}"])
        else:
            if least > most:
                raise ConstraintRefused([f"uniqueItems: {least} different items of {most} values"])
            for keyword in ("items", "minItems", "maxItems"):
                made.pop(keyword, None)
            array = {"type": "array", "items": False, "minItems": least}
            each = ([{"const": one} for one in some] for some in permutations(values, most))
            yield [{**array, "prefixItems": some} for some in each]

    def _values(self, items: Json) -> list[Json] | None:
        """Lists all values that an item may have, each once, if they are listed."""
        if isinstance(items, dict) and isinstance(items.get("$ref"), str) and items.keys() <= _ANNOTATIONS | {"$ref"}:
            items = followed(self._root, items["$ref"])
        if not isinstance(items, dict) or items.keys() - _ANNOTATIONS - {"type", "enum", "const", "minimum", "maximum"}:
            return None
        types = _types(items)
        if (listed := _listed(items)) is not None:
            if "minimum" in items or "maximum" in items:
                return None
        elif types == {"boolean"}:
            listed = [True, False]
        elif types == {"integer"} and all(type(items.get(name)) is int for name in ("minimum", "maximum")):
            if items["maximum"] - items["minimum"] >= MAX_ARRANGEMENTS:
                return None
            listed = list(range(items["minimum"], items["maximum"] + 1))
        else:
            return None
        return list({_same(value): value for value in listed if _type(value) in types}.values())


def _loosen(made: dict[str, Json]) -> None:
    """Removes the keywords of one schema, not of those within it, that llguidance lacks."""
    for keyword in _NOT_HELD:
        made.pop(keyword, None)
    if _number(made.get("minProperties")) and made["minProperties"] > 1:
        made["minProperties"] = 1
    if isinstance(made.get("$ref"), str) and not made["$ref"].startswith("#"):
        del made["$ref"]
    if len(made.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) > 1:
        for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if _number(made.get(exclusive)):
                made.setdefault(inclusive, made.pop(exclusive))


_UNIQUE = (
    f"uniqueItems: held over an array of at most one item, or of listed values with at most {MAX_ARRANGEMENTS} "
    "arrangements"
)


def _by_presence(branches: list[Json]) -> list[Json] | None:
    """Branches that each only require keys: one has its keys, and of every other one some key is absent."""
    required: list[set[str]] = []
    for branch in branches:
        if not isinstance(branch, dict) or branch.keys() - _ANNOTATIONS - {"required", "type"}:
            return None
        if not _names(branch) or branch.get("type", "object") != "object":
            return None
        required.append(set(_names(branch)))
    alternatives: list[Json] = []
    for at, mine in enumerate(required):
        absent = [sorted(other - mine) for i, other in enumerate(required) if i != at]
        if prod(map(len, absent)) > MAX_BRANCHES:
            return None
        for names in sorted({tuple(sorted(set(some))) for some in product(*absent)}):
            properties = dict.fromkeys(names, False)
            alternatives.append({"type": "object", "required": sorted(mine), "properties": properties})
    return alternatives or None


def _by_values(branches: list[Json]) -> list[Json] | None:
    """Branches that each only list values: those that one branch lists alone."""
    values: dict[object, list[Json]] = {}
    for branch in branches:
        if not isinstance(branch, dict) or branch.keys() - _ANNOTATIONS - {"const", "enum", "type"}:
            return None
        if (listed := _listed(branch)) is None:
            return None
        own = {_same(value): value for value in listed if _type(value) in _types(branch)}
        for key, value in own.items():
            values.setdefault(key, []).append(value)
    once = [found[0] for found in values.values() if len(found) == 1]
    return [{"enum": once}] if once else None


class _Disjoint:
    """Tells whether two schemas have no value in common; where it cannot tell, they may have."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._left = MAX_PAIRS

    def all(self, branches: Json) -> bool:
        """Returns whether at most one of them is ever valid."""
        if not isinstance(branches, list) or not 0 < len(branches) <= MAX_BRANCHES:
            return False
        return all(self.pair(a, b, 0) for a, b in combinations(branches, 2))

    def pair(self, a: Json, b: Json, depth: int) -> bool:
        if a is False or b is False:
            return True
        self._left -= 1
        if not isinstance(a, dict) or not isinstance(b, dict) or depth > MAX_DEPTH or self._left < 0:
            return False
        return self._parts(a, b, depth) or self._parts(b, a, depth) or self._direct(a, b, depth)

    def _parts(self, a: Mapping[str, Json], b: Json, depth: int) -> bool:
        """Compares by schemas that apply to `a` besides its own keywords."""
        if isinstance(a.get("$ref"), str) and self.pair(followed(self._root, a["$ref"]), b, depth + 1):
            return True
        if any(self.pair(part, b, depth + 1) for part in _list(a, "allOf")):
            return True
        lists = [branches for name in ("anyOf", "oneOf") if (branches := _list(a, name))]
        return any(len(some) <= MAX_BRANCHES and all(self.pair(x, b, depth + 1) for x in some) for some in lists)

    def _direct(self, a: Mapping[str, Json], b: Mapping[str, Json], depth: int) -> bool:
        types = _types(a) & _types(b)
        listed = [(values, other) for one, other in ((a, b), (b, a)) if (values := _listed(one)) is not None]
        for values, other in listed:
            others = _listed(other)
            keys = None if others is None else {_same(value) for value in others}
            if all(_type(value) not in types or (keys is not None and _same(value) not in keys) for value in values):
                return True
        return all(self._apart(kind, a, b, depth) for kind in types)

    def _apart(self, kind: str, a: Mapping[str, Json], b: Mapping[str, Json], depth: int) -> bool:
        """Returns whether no value of that type is common."""
        match kind:
            case "string":
                return _beyond(a, b, "minLength", "maxLength")
            case "array":
                return _beyond(a, b, "minItems", "maxItems")
            case "integer" | "fraction":
                return _beyond(a, b, "minimum", "maximum")
            case "object":
                names = {*_names(a), *_names(b)}
                return any(self.pair(_member(a, name), _member(b, name), depth + 1) for name in sorted(names))
        return False


def _names(schema: Mapping[str, Json]) -> list[str]:
    return [name for name in _list(schema, "required") if isinstance(name, str)]


def _list(schema: Mapping[str, Json], keyword: str) -> list[Json]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _member(schema: Mapping[str, Json], name: str) -> Json:
    """Returns the minimal schema of a property; False where it may not be there."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return {} if properties[name] is True else properties[name]
    more = schema.get("additionalProperties", {})
    return {} if more is True or schema.get("patternProperties") else more


def _beyond(a: Mapping[str, Json], b: Mapping[str, Json], low: str, high: str) -> bool:
    """Returns whether the minimum of one exceeds the maximum of the other."""
    for one, other in ((a, b), (b, a)):
        least, most = one.get(low), other.get(high)
        if isinstance(least, (int, float)) and isinstance(most, (int, float)) and least > most:
            return True
    return False


def _number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(schema: Mapping[str, Json]) -> list[Json] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _types(schema: Mapping[str, Json]) -> frozenset[str]:
    given = schema.get("type")
    names = [name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]
    if not names or not all(name in _TYPES for name in names):
        return _EVERY_TYPE
    return frozenset().union(*(_TYPES[name] for name in names))


def _type(value: Json) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case None:
            return "null"
    return "array" if isinstance(value, list) else "object"


def _same(value: Json) -> object:
    """Returns a form that is equal for values that JSON Schema calls equal."""
    match value:
        case list():
            return ("array", tuple(map(_same, value)))
        case dict():
            return ("object", frozenset((name, _same(part)) for name, part in value.items()))
    return ("number" if _number(value) else type(value).__name__, value)
