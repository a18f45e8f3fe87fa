"""A tool as it is offered in a chat: its schema under sampled names, in the many ways in which people write schemas.

Sample: {"name": "getWeather", "description": "Weather of a location.", "parameters": {"town": a string}}. Knows nothing
of requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from training.conversation import Phrasing, SpokenCall, Tool
from training.phrases import read
from training.tool_bank import Ask, Concept, Param

_EXTRAS: dict[Phrasing, tuple[tuple[str, dict[str, Any]], ...]] = {
    "train": (
        ("format", {"type": "string", "enum": ["json", "text"]}),
        ("verbose", {"type": "boolean", "default": False}),
        ("timeout_s", {"type": "integer", "description": "Seconds to wait"}),
        ("user_token", {"type": "string", "description": "Optional token"}),
        ("dry_run", {"type": "boolean"}),
        ("page", {"type": "integer", "default": 1}),
    ),
    "held_out": (
        ("locale", {"type": "string", "description": "Locale of the reply"}),
        ("cache", {"type": "boolean", "default": True}),
        ("offset", {"type": "integer", "default": 0}),
        ("trace_id", {"type": "string"}),
    ),
}


@dataclass(frozen=True, slots=True)
class Offered:
    concept: Concept
    name: str
    params: tuple[Param, ...]  # those offered, in the schema's order
    keys: tuple[str, ...]  # their names in the schema
    tool: Tool

    @property
    def defaults(self) -> dict[str, Any]:
        properties = self.tool["function"]["parameters"]["properties"]
        return {key: schema["default"] for key, schema in properties.items() if "default" in schema}

    def answerable(self) -> tuple[Ask, ...]:
        """The wordings that name all required parameters and only offered ones."""
        offered = {param.names[0] for param in self.params}
        required = {param.names[0] for param in self.params if param.required}
        return tuple(ask for ask in self.concept.asks if required <= ask.needs <= offered)

    def call(self, given: dict[str, Any]) -> SpokenCall:
        """`given` by first names → the call, its arguments in the schema's order."""
        pairs = zip(self.params, self.keys, strict=True)
        return SpokenCall(self.name, {key: given[param.names[0]] for param, key in pairs if param.names[0] in given})


def _styled(rng: Random, name: str) -> str:
    parts = re.split(r"[ _]", name)
    roll = rng.random()
    if roll < 0.6 or len(parts) == 1:
        return "_".join(parts)
    if roll < 0.75:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if roll < 0.9:
        return f"{'_'.join(parts[1:])}.{parts[0]}" if rng.random() < 0.5 else ".".join(parts)
    return "-".join(parts)


def schema_type(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of value."""
    base, *rest = kind.split()
    if base == "list":
        return {"type": "array", "items": schema_type(" ".join(rest))}
    if "/" in kind:
        return {"type": "string", "enum": kind.split("/")}
    return {"type": {"int": "integer", "num": "number", "amount": "number", "bool": "boolean"}.get(base, "string")}


def offer(rng: Random, concept: Concept, phrasing: Phrasing, progress: float, ask_for: bool = False) -> Offered:
    """The concept under sampled names; `ask_for` keeps more of its optional parameters, as it is to be asked for."""
    bare = progress < 0.12
    keep = 0 if bare else 0.7 if ask_for else 0.35
    params = tuple(param for param in concept.params if param.required or rng.random() < keep)
    keys = tuple(rng.choice(param.names) for param in params)
    if len(set(keys)) < len(keys):
        keys = tuple(param.names[0] for param in params)
    style = rng.random()
    if style < 0.12:
        keys = tuple(re.sub(r"_(\w)", lambda match: match[1].upper(), key) for key in keys)
    described = 0.2 if bare else rng.choice((0.2, 0.6, 1))
    wordy = not bare and rng.random() < 0.15
    properties: dict[str, Any] = {}
    for param, key in zip(params, keys, strict=True):
        schema = schema_type(param.kind)
        if param.description and rng.random() < described:
            text = param.description
            schema["description"] = read("tool_choice")["parameter"].ask(rng, phrasing).format(text) if wordy else text
        if param.default is not None and rng.random() < 0.7:
            schema["default"] = param.default
        if not bare and rng.random() < 0.1:
            schema = dict(reversed(schema.items()))
        properties[key] = schema
    if progress > 0.4 and rng.random() < 0.12:
        extra, schema = rng.choice(_EXTRAS[phrasing])
        if extra not in properties:
            properties[extra] = dict(schema)
    name = _styled(rng, rng.choice(concept.names))
    does = rng.choice(concept.does)
    if wordy:
        does = f"{does} {read('tool_choice')['remark'].ask(rng, phrasing)}"
    required = [key for param, key in zip(params, keys, strict=True) if param.required]
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required or rng.random() < 0.5:
        parameters["required"] = required
        if rng.random() < 0.1:
            parameters = {"type": "object", "required": required, "properties": properties}
    function = {"name": name, "description": does, "parameters": parameters}
    return Offered(concept, name, params, keys, {"type": "function", "function": function})
