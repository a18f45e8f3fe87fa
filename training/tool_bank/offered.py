"""A tool as it is offered in a chat: its schema under drawn names, and requests for it with the call they want.

Sample: {"name": "getWeather", "description": "Weather of a location.", "parameters": {"town": a string}} and
"weather in Oslo" → getWeather({"town": "Oslo"}). Knows nothing of turns and results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from training.conversation import Phrasing, Tool, ToolCall
from training.noise import casual
from training.tool_bank import Ask, Concept, Param, values

_SLOT = re.compile(r"\{([^}]+)\}")
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_SMALL = {str(number): word for number, word in enumerate(_WORDS, 1)}
_BEFORE_DAY = re.compile(r"(^|[:,(\"']|(on|for|due|from|until|after|is|be|of)) $")
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
class Request:
    """`spread` names the parameter whose values several calls of one request differ in."""

    text: str
    calls: tuple[ToolCall, ...]
    spread: str = ""


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
        """The wordings that name all that is required and nothing that is not offered."""
        offered = {param.names[0] for param in self.params}
        required = {param.names[0] for param in self.params if param.required}
        return tuple(ask for ask in self.concept.asks if required <= ask.needs <= offered)

    def call(self, given: dict[str, Any]) -> ToolCall:
        """`given` by first names → the call, its arguments in the schema's order."""
        pairs = zip(self.params, self.keys, strict=True)
        return ToolCall(self.name, {key: given[param.names[0]] for param, key in pairs if param.names[0] in given})


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
    """The concept under drawn names; `ask_for` keeps more of its optional parameters, as it is to be asked for."""
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
    properties: dict[str, Any] = {}
    for param, key in zip(params, keys, strict=True):
        schema = schema_type(param.kind)
        if param.description and rng.random() < described:
            schema["description"] = param.description
        if param.default is not None and rng.random() < 0.7:
            schema["default"] = param.default
        properties[key] = schema
    if progress > 0.4 and rng.random() < 0.12:
        extra, schema = rng.choice(_EXTRAS[phrasing])
        if extra not in properties:
            properties[extra] = dict(schema)
    required = [key for param, key in zip(params, keys, strict=True) if param.required]
    name = _styled(rng, rng.choice(concept.names))
    function = {
        "name": name,
        "description": rng.choice(concept.does),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return Offered(concept, name, params, keys, {"type": "function", "function": function})


def _worded(rng: Random, ask: Ask, kinds: dict[str, str]) -> str:
    """The wording with a slip or two, but nothing added behind a free text, where it would belong to the text."""
    template = casual(rng, ask.template, typos=0.04)
    last = re.search(r"\{([^}]+)\}\W*$", ask.template)
    if last and kinds[last[1]] in values.TEXTS and ask.template.rstrip(".?!").endswith("}"):
        return ask.template.rstrip(".?!")
    if last and not re.search(r"\{[^}]+\}[\"')%°]*[.?!]?$", template):
        return ask.template
    return template


def _filled(rng: Random, template: str, spoken: dict[str, str]) -> str:
    def word(match: re.Match[str]) -> str:
        text = spoken[match[1]]
        before, after = template[: match.start()], template[match.end() :]
        if text.startswith("on ") and _BEFORE_DAY.search(before):
            return text[3:]
        alone = before.endswith(" ") and after[:1] == " " and after[1:2].islower()
        if alone and text in _SMALL and rng.random() < 0.12:
            return _SMALL[text]
        return text

    return _SLOT.sub(word, template)


def request(rng: Random, offered: Offered, phrasing: Phrasing, several: int = 1) -> Request | None:
    """A request for the tool; with `several`, one that wants as many calls; None where no wording can be made."""
    asks = offered.answerable()
    kinds = {param.names[0]: param.kind for param in offered.params}
    if several > 1:
        asks = tuple(ask for ask in asks if any(_joinable(kinds[slot]) for slot in ask.slots))
    if not asks:
        return None
    ask = rng.choice(asks)
    drawn = {slot: values.draw(rng, kinds[slot], phrasing) for slot in dict.fromkeys(ask.slots)}
    texts = {slot: value.text for slot, value in drawn.items()}
    if len(set(texts.values())) < len(texts):  # the same value twice: from Oslo to Oslo
        return request(rng, offered, phrasing, several)
    if offered.concept.params and rng.random() < 0.06:
        for slot in drawn:
            if kinds[slot] in {"city", "person", "country", "product", "company"}:
                drawn[slot] = values.Value(texts[slot].lower(), texts[slot].lower())
                texts[slot] = drawn[slot].text
    given = dict(ask.implied) | {slot: value.json for slot, value in drawn.items()}
    template = _worded(rng, ask, kinds)
    if several == 1:
        return Request(_filled(rng, template, texts), (offered.call(given),))
    spread = rng.choice([slot for slot in drawn if _joinable(kinds[slot])])
    options = {drawn[spread].text: drawn[spread].json}
    for _ in range(30):  # a short list may not have so many
        value = values.draw(rng, kinds[spread], phrasing)
        if value.text not in texts.values():
            options[value.text] = value.json
        if len(options) == several:
            break
    texts[spread] = values.join(rng, list(options))
    calls = tuple(offered.call(given | {spread: json}) for json in options.values())
    return Request(_filled(rng, template, texts), calls, spread=next(iter(offered.call({spread: 0}).arguments)))


def _joinable(kind: str) -> bool:
    return kind.split()[0] in values.JOINABLE
