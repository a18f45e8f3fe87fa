"""Holds a call's arguments to the question: texts, numbers and lists that it has, and the values that it names.

For models so small that they garble what they copy. A parameter's schema gets an `enum` of candidates from the question
that are valid against it; one without any stays free, and a value that its schema lists and the question names is the
only one. Candidates of texts are what stands in quotes, and runs of words that neither begin nor end with a function
word and do not cut a name in two. Knows nothing of how calls are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from engine.tool_parsers import ToolSpec

MAX_WORDS = 6  # of a copied text
MAX_CANDIDATES = 300
_MAX_LENGTH = 2_000  # characters of a question that are looked at
_FUNCTION_WORD = re.compile(
    r"a|about|after|also|an|and|any|are|as|at|be|before|between|by|calculate|can|compute|"
    r"could|did|do|does|during|find|for|from|get|give|given|had|has|have|how|i|i'd|i'm|i've|"
    r"if|in|into|is|it|it's|know|let|like|me|my|need|of|on|or|over|per|please|show|so|"
    r"tell|than|that|the|then|there|these|this|those|through|to|under|until|use|used|using|"
    r"want|was|were|what|what's|when|where|whether|which|who|whose|will|with|within|without|"
    r"would|you|your"
)
_NUMBER_WORDS = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12,
}  # fmt: skip
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", re.IGNORECASE)
_ANY_NUMBER = re.compile(r"\d+(?:\.\d+)?")  # of "2x^2", "rs603"
_LIST = re.compile(r"-?\d+(?:\.\d+)?(?:\s*(?:,\s*and\b|,|\band\b)\s*-?\d+(?:\.\d+)?)+")
_QUOTED = re.compile(r"(?<!\w)'([^'\n]+)'(?!\w)|\"([^\"\n]+)\"|“([^”\n]+)”")
_PLACE = re.compile(r"(?:\d+ )?[A-Z][\w.&'-]*(?: [A-Z][\w.&'-]*)*(?:, [A-Z][\w.&'-]*(?: [A-Z][\w.&'-]*)*)+")
_TOKEN = re.compile(r"[^\s,;:!?()\[\]{}\"“”]+|[,;:!?()\[\]{}\"“”\n]")
_BORDER = re.compile(r"[,;:!?()\[\]{}\"“”\n]")
_ABBREVIATION = re.compile(r"\b(?:[A-Z]|Ltd|Inc|Co|Jr|Sr)\.$")

_COMPOUND = frozenset({"format", "const", "allOf", "anyOf", "oneOf", "not", "if"})  # of schemas that stay as they are

Json = Any  # any JSON
Schema = Mapping[str, Any]  # Any: JSON


def held_to_question(tool: ToolSpec, question: str) -> ToolSpec:
    """Returns the tool with its parameters held to the question; a schema with references stays as it is."""
    schema = tool.parameters or {}
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or "$ref" in str(schema):
        return tool
    asked = question[:_MAX_LENGTH]
    held = {str(name): _held(each, asked) for name, each in properties.items()}
    return replace(tool, parameters={**schema, "properties": held})


def _held(schema: Json, question: str) -> Json:
    if not isinstance(schema, Mapping) or _COMPOUND & schema.keys():
        return schema
    if isinstance(listed := schema.get("enum"), list):
        words = _plain(question)
        named = [value for value in listed if isinstance(value, str) and value and _plain(value) in words]
        return {**schema, "enum": named} if named else schema
    candidates: Sequence[Json] = ()
    match schema.get("type"):
        case "string":
            candidates = list(texts(question))
        case "integer":
            candidates = [number for number in numbers(question) if isinstance(number, int)]
        case "number":
            candidates = numbers(question)
        case "array" if isinstance(items := schema.get("items"), Mapping):
            if items.get("type") in ("integer", "number") and (whole := _valid(lists(question), schema)):
                return {**schema, "enum": whole}
            inner = _held(items, question)
            most = {} if "enum" not in inner or "maxItems" in schema else {"maxItems": _most(schema, inner["enum"])}
            return {**schema, "items": inner, **most}
        case "object" if isinstance(properties := schema.get("properties"), Mapping):
            return {**schema, "properties": {name: _held(each, question) for name, each in properties.items()}}
    found = _valid(candidates, schema)
    return {**schema, "enum": found} if found else schema


def _most(schema: Schema, candidates: Sequence[Json]) -> int:
    least = schema.get("minItems", 0)
    return max(least if isinstance(least, int) else 0, min(8, len(candidates)))


def _valid(candidates: Sequence[Json], schema: Schema) -> list[Json]:
    try:
        return [each for each in candidates[:MAX_CANDIDATES] if Draft202012Validator(schema).is_valid(each)]
    except (SchemaError, re.error, TypeError):
        return []


def numbers(question: str) -> list[int | float]:
    """Returns the numbers of a question, in order, those in words last."""
    found = list[int | float]()
    for written in _NUMBER.findall(question) or _ANY_NUMBER.findall(question):
        digits = written.rstrip(",").replace(",", "")
        found.append(float(digits) if re.search(r"[.e]", digits, re.IGNORECASE) else int(digits))
    found += [_NUMBER_WORDS[word] for word in re.findall(r"[a-z]+", question.lower()) if word in _NUMBER_WORDS]
    return list(dict.fromkeys(found))


def lists(question: str) -> list[list[int | float]]:
    """Returns the numbers that a question lists side by side: "10, 12 and 14"."""
    return [
        [float(each) if "." in each else int(each) for each in re.findall(r"-?\d+(?:\.\d+)?", found.group())]
        for found in _LIST.finditer(question)
    ]


def texts(question: str) -> Iterator[str]:
    """Yields the texts that may be copied, each once."""
    seen = set[str]()
    for text in _texts(question):
        if text and text not in seen:
            seen.add(text)
            yield text


def _texts(question: str) -> Iterator[str]:
    for groups in _QUOTED.findall(question):
        yield next(each for each in groups if each)
    for found in _PLACE.finditer(question):
        yield found.group().rstrip(".")
    for run in _runs(question):
        words = [question[start:end].strip(".'’`*").lower() for start, end in run]
        free = [_FUNCTION_WORD.fullmatch(word) is not None for word in words]
        names = [
            question[start:end].lstrip("'")[:1].isupper() and not f for (start, end), f in zip(run, free, strict=True)
        ]
        if not question[: run[0][0]].rstrip() or question[: run[0][0]].rstrip()[-1] in ".?!":  # a sentence's first word
            names[0] = names[0] and len(run) > 1 and names[1]
        for first in range(len(run)):
            if free[first] or (first and names[first] and names[first - 1]):
                continue
            for last in range(first, min(len(run), first + MAX_WORDS)):
                if free[last] or (last + 1 < len(run) and names[last] and names[last + 1]):
                    continue
                yield _trimmed(question[run[first][0] : run[last][1]])


def _runs(question: str) -> Iterator[list[tuple[int, int]]]:
    """Yields the spans of words between marks and ends of sentences."""
    run = list[tuple[int, int]]()
    for found in _TOKEN.finditer(question):
        if not _BORDER.fullmatch(found.group()):
            run.append(found.span())
            if not found.group().endswith(".") or len(found.group()) <= 3:
                continue
        if run:
            yield run
        run = []
    if run:
        yield run


def _trimmed(text: str) -> str:
    text = text.strip(" '’`*").removesuffix("'s").removesuffix("’s")
    return text if _ABBREVIATION.search(text) else text.rstrip(".")


def _plain(text: str) -> str:
    """Returns the words in lower case between spaces."""
    return " " + re.sub(r"[^\w]+", " ", text.lower()).strip() + " "
