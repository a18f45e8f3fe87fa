"""Checks the JSON schemas of tools, and closes their objects to additional properties.

JSON Schema lets an object have further properties unless `additionalProperties` says otherwise, but a model should not
invent parameters, and tool descriptions hardly ever mean that. So `closed` adds `additionalProperties: false` where an
object lists `properties` and leaves the rest unsaid, at any depth. A text that is valid against the result is valid
against the original: nothing is closed where that could fail (below `not`, `if`, `contains`, or a `oneOf` whose cases
could overlap), nor where several schemas describe one object and closing one would forbid another's. Nothing here looks
for keywords that a backend cannot enforce, nor for schemas that nothing is valid against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from engine.errors import InvalidParameter

Schema = Mapping[str, Any]  # Any: JSON

DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties")
_SINGLES = ("items", "additionalProperties", "additionalItems", "unevaluatedItems")
_LISTS = ("prefixItems",)
_TURNING = ("not", "if", "contains", "propertyNames")  # a text may be valid because these are not
_TOGETHER = ("allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas", "dependencies")
_SAYS_MORE = ("additionalProperties", "unevaluatedProperties")
_DEMANDS = ("required", "minProperties", "dependentRequired")
_DATA = ("const", "enum", "default", "examples", "example")


def closed(schema: Schema) -> Schema:
    """The schema with its listing objects closed. References that are not paths in the schema leave it as it is."""
    for part in parts(schema):
        if "$dynamicRef" in part or "$recursiveRef" in part or ("$id" in part and part is not schema):
            return schema
    if any(resolve(schema, ref) is None for ref in references(schema)):
        return schema
    closing = _Closing(schema)
    while True:
        known = len(closing.shared) + len(closing.untouched)
        result = closing.schema(schema, "#", alone=True)
        if len(closing.shared) + len(closing.untouched) == known:
            return result


def parts(value: Any) -> Iterator[Schema]:
    """Every object in a schema, itself included; not the data in it. Any: JSON."""
    if isinstance(value, Mapping):
        yield value
        for key, part in value.items():
            if key in (*_MAPS, *DEFINITIONS, "dependentSchemas") and isinstance(part, Mapping):
                for named in part.values():
                    yield from parts(named)
            elif key not in _DATA:
                yield from parts(part)
    elif isinstance(value, list):
        for part in value:
            yield from parts(part)


def references(schema: Any) -> Iterator[str]:
    """Every `$ref` in it. Any: JSON."""
    return (part["$ref"] for part in parts(schema) if isinstance(part.get("$ref"), str))


def resolve(root: Schema, ref: str) -> Any:
    """Resolves a reference within the schema; None where it has no target. Any: JSON."""
    value: Any = root
    for step in ref.removeprefix("#").split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value if ref == "#" or ref.startswith("#/") else None


class _Closing:
    """One pass over a schema. References found on its way may change the next pass.

    `alone` says of a schema that nothing beside it describes the same value. `shared` are references that were met
    where something does, `untouched` those that were met where closing could admit invalid values.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self.shared: set[str] = set()
        self.untouched: set[str] = set()

    def schema(self, value: Any, at: str, *, alone: bool) -> Any:
        """Any: a schema is an object or a boolean."""
        if not isinstance(value, Mapping) or at in self.untouched:
            return value
        alone = alone and at not in self.shared
        if isinstance(ref := value.get("$ref"), str) and not (alone and _describers(value) == 1):
            self.shared.add(ref)
        inner = alone and _describers(value) == 1
        result = {key: self._keyword(key, part, f"{at}/{_step(key)}", inner) for key, part in value.items()}
        if alone and self._lists_all(value):
            result["additionalProperties"] = False
        return result

    def _keyword(self, key: str, part: Any, at: str, inner: bool) -> Any:
        """Any: JSON."""
        if key in _TURNING or (key == "oneOf" and not self._apart(part)):
            self._leave(part)
            return part
        if key in (*_MAPS, *DEFINITIONS) and isinstance(part, Mapping):
            return {name: self.schema(p, f"{at}/{_step(name)}", alone=True) for name, p in part.items()}
        if key in _SINGLES or key in _LISTS:
            return self._each(part, at, alone=True)
        if key in ("dependentSchemas", "dependencies") and isinstance(part, Mapping):
            return {name: self.schema(p, f"{at}/{_step(name)}", alone=False) for name, p in part.items()}
        if key in _TOGETHER:
            return self._each(part, at, alone=inner)
        return part

    def _each(self, part: Any, at: str, *, alone: bool) -> Any:
        """Any: JSON."""
        if isinstance(part, list):
            return [self.schema(p, f"{at}/{i}", alone=alone) for i, p in enumerate(part)]
        return self.schema(part, at, alone=alone)

    def _leave(self, part: Any) -> None:
        """Leaves all that is referred to from here as it is. Any: JSON."""
        for ref in references(part):
            if ref not in self.untouched:
                self.untouched.add(ref)
                self._leave(resolve(self._root, ref))

    def _lists_all(self, value: Schema) -> bool:
        """Returns whether its own properties are the only ones that apply to the object."""
        properties = value.get("properties")
        if not isinstance(properties, Mapping) or any(key in value for key in _SAYS_MORE):
            return False
        required = value.get("required")
        if not set(required if isinstance(required, list) else ()) <= properties.keys():
            return False
        least = value.get("minProperties", 0)
        if isinstance(least, (int, float)) and least > len(properties):
            return False
        beside = {key: part for key, part in value.items() if key in (*_TOGETHER, "if", "$ref")}
        return self._named(beside, set()) <= properties.keys()

    def _named(self, value: Any, seen: set[str]) -> set[str]:
        """Returns the property names that a schema mentions for the object that it describes. Any: JSON."""
        if isinstance(value, list):
            return set().union(*(self._named(part, seen) for part in value))
        if not isinstance(value, Mapping):
            return set()
        names = set(value.get("properties", ())) | set(value.get("required", ()))
        for key in (*_TOGETHER, "if"):
            part = value.get(key)
            if key in ("dependentSchemas", "dependencies") and isinstance(part, Mapping):
                part = list(part.values())
            names |= self._named(part, seen)
        if isinstance(ref := value.get("$ref"), str) and ref not in seen:
            names |= self._named(resolve(self._root, ref), {*seen, ref})
        return names

    def _apart(self, cases: Any) -> bool:
        """Returns whether no value can be valid against two of the cases: by type, or a property that tells. Any:
        JSON."""
        if not isinstance(cases, list):
            return False
        resolved = [self._resolved(case) for case in cases]
        return all(_differ(one, other) for i, one in enumerate(resolved) for other in resolved[:i])

    def _resolved(self, value: Any) -> Any:
        """Any: JSON."""
        seen: set[str] = set()
        while isinstance(value, Mapping) and isinstance(ref := value.get("$ref"), str) and ref not in seen:
            seen.add(ref)
            value = resolve(self._root, ref)
        return value


def _describers(value: Schema) -> int:
    """Returns the number of parts of a schema that may each describe one object's properties."""
    own = any(key in value for key in (*_MAPS, *_SAYS_MORE, *_DEMANDS))
    several = value.get("allOf")
    together = sum(key in value for key in (*_TOGETHER, "if", "$ref"))
    return own + together + (len(several) - 1 if isinstance(several, list) and several else 0)


def _differ(one: Any, other: Any) -> bool:
    """Any: JSON."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return one is False or other is False
    mine, others = json_types(one), json_types(other)
    if not mine & others:
        return True
    if mine != {"object"} or others != {"object"}:
        return False
    tags, other_tags = _tags(one), _tags(other)
    return any(not tags[name] & other_tags[name] for name in tags.keys() & other_tags.keys())


def _tags(value: Schema) -> dict[str, set[str]]:
    """The strings that each required property of an object may be, where they are listed."""
    properties, required = value.get("properties"), value.get("required")
    found = {}
    for name in required if isinstance(required, list) else ():
        part = properties.get(name) if isinstance(properties, Mapping) else None
        if isinstance(part, Mapping) and ("const" in part or isinstance(part.get("enum"), list)):
            values = [part["const"]] if "const" in part else part["enum"]
            if all(isinstance(v, str) for v in values):
                found[name] = set(values)
    return found


ALL_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})


def json_types(value: Schema) -> frozenset[str]:
    """The types that a schema's own `type`, `const` and `enum` leave; integers are numbers."""
    types = ALL_TYPES
    if isinstance(named := value.get("type"), (str, list)):
        types = frozenset("number" if t == "integer" else t for t in ([named] if isinstance(named, str) else named))
    for listed in ([value["const"]] if "const" in value else None, value.get("enum")):
        if isinstance(listed, list):
            types &= frozenset(map(type_of, listed))
    return types


def type_of(value: Any) -> str:
    """The JSON type of a JSON value. Any: JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _step(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


MAX_DEPTH = 100  # levels of objects and lists

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = (
    *("items", "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties"),
    *("not", "if", "then", "else", "contains", "propertyNames"),
)


def check_schema(schema: object, path: str) -> None:
    """Raises `InvalidParameter` that names the keyword's path, should a keyword's value be of the wrong kind."""
    level: list[Any] = [schema]  # Any: JSON
    for _ in range(MAX_DEPTH):
        level = [part for whole in level if isinstance(whole, (Mapping, list)) for part in _children(whole)]
    if level:
        raise InvalidParameter(path, f"{path} is nested too deeply; accepted: at most {MAX_DEPTH} levels.")
    _check(schema, path)


def _children(whole: Any) -> Iterator[Any]:
    """Any: JSON."""
    return iter(whole.values() if isinstance(whole, Mapping) else whole)


def _check(schema: object, path: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise invalid(path, schema, "a JSON Schema: an object, true or false")
    for keyword, (fits, accepted) in _KINDS.items():
        if keyword in schema and not fits(schema[keyword]):
            raise invalid(f"{path}.{keyword}", schema[keyword], accepted)
    for keyword in _SCHEMAS_BY_NAME:
        for name, part in schema.get(keyword, {}).items():
            _check(part, f"{path}.{keyword}.{name}")
    for keyword in (*_SCHEMA_LISTS, *_SCHEMAS):
        part = schema.get(keyword, True)
        for i, one in enumerate(part if isinstance(part, list) else [part]):
            _check(one, f"{path}.{keyword}[{i}]" if isinstance(part, list) else f"{path}.{keyword}")
    for name, part in schema.get("dependencies", {}).items():
        if not _strings(part):
            _check(part, f"{path}.dependencies.{name}")


def invalid(path: str, value: object, accepted: str) -> InvalidParameter:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "…"
    return InvalidParameter(path, f"{path} is {shown}; accepted: {accepted}.")


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is(*kinds: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or _strings(value), "a type's name, or a list of them"),
    "required": (_strings, "a list of names"),
    "enum": (_is(list), "a list of values"),
    "$ref": (_is(str), "a string"),
    "minProperties": (_is(int, float), "a number"),
    "dependencies": (_is(Mapping), "an object"),
    **dict.fromkeys(_SCHEMAS_BY_NAME, (_is(Mapping), "an object of schemas by name")),
    **dict.fromkeys(_SCHEMA_LISTS, (_is(list), "a list of schemas")),
    **dict.fromkeys(_SCHEMAS, (_is(Mapping, bool), "a schema")),
    "items": (_is(Mapping, bool, list), "a schema"),
}
