"""However an answer is split on its way, its calls are those of the whole: 10,000 random ways.

The bodies are calls of known and unknown tools, side by side, some of them damaged, cut off, or no calls at all. They
are split into characters, into bytes of UTF-8, and into tokens of the bundled model's tokenizer.
"""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.model.detokenizer import Detokenizer
from engine.tool_parsers import (
    Bodies,
    CallBegun,
    CallEnded,
    CallEvent,
    Malformed,
    ParsedCall,
    ToolPlan,
    fold,
    read_tools,
)
from tests.engine.structured_output.sources import pebble
from tests.engine.tool_parsers.samples import TEMPLATES, joined, tool_parser, written

pytestmark = pytest.mark.slow

ROUNDS = 850  # for each of four tool parsers and three ways of splitting: over 10,000 in all
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in (
            ("write_file", {"path": {"type": "string"}, "text": {"type": ["string", "null"]}}),
            ("plot", {"points": {"type": "array"}, "style": {"type": "object"}, "n": {"type": "number"}}),
        )
    ]
)
TEXTS = [
    "",
    "null",
    "nu",
    "notes.txt",
    'a "quoted" \\ line\n\n',
    "</parameter>",
    "\n</paramete",
    "Größe 日本語 🙂",
    "{}",
]


def some_arguments(rng: random.Random, tool: str) -> dict[str, Any]:
    """Any: JSON."""
    if tool == "plot":
        every: dict[str, Any] = {
            "points": [[rng.randint(-9, 9), rng.random()], []],
            "style": {"ligne": rng.choice(TEXTS), "nested": {"a": [None, True]}},
            "n": rng.choice([0, -1.5, 1e30]),
        }
    else:
        every = {"path": rng.choice(TEXTS), "text": rng.choice(TEXTS) + rng.choice(TEXTS)}
    return {key: value for key, value in every.items() if rng.random() < 0.8}


def some_bodies(rng: random.Random, name: str) -> list[str]:
    calls = []
    for _ in range(rng.randint(1, 3) if name not in ("llama3_json", "harmony") else 1):
        tool = rng.choice(["write_file", "plot", "nobody.knows-this_one"])
        calls.append((tool, some_arguments(rng, tool)))
    bodies = written(name, calls)
    return [damaged(rng, body) if rng.random() < 0.4 else body for body in bodies]


def damaged(rng: random.Random, body: str) -> str:
    at = rng.randrange(len(body))
    match rng.randrange(5):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + body[at + 1 :]
        case 2:
            return body[:at] + rng.choice(['"', "}", "\\", ",", "NaN", "<", "\n", "🙂", "\\ud83d"]) + body[at:]
        case 3:
            return body + rng.choice([" ", "}", body, "I am done."])
    return rng.choice(["", "Sorry, no.", "{}", '{"name": 5}', "<function=>", "[1, 2]"])


def characters(rng: random.Random, text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        size = rng.choice([1, 1, 2, 3, 7, 50])
        yield text[at : at + size]
        at += size


def utf8(rng: random.Random, text: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    data, at = text.encode(), 0
    while at < len(data):
        size = rng.choice([1, 1, 2, 5, 30])
        yield decoder.decode(data[at : at + size])
        at += size


def tokens(rng: random.Random, text: str) -> Iterator[str]:
    cut = rng.randint(0, len(text))  # tokenised in two parts, so not always as the tokenizer itself would
    detokenizer = Detokenizer(pebble())
    for part in (text[:cut], text[cut:]):
        for id in pebble().encode(part):
            yield detokenizer.push([id])
    yield detokenizer.flush()


def events(plan: ToolPlan, bodies: list[str], split: Callable[[str], Iterator[str]]) -> list[list[CallEvent]]:
    """The events of each body and, last, those of the answer's end."""
    answer = Bodies(plan.parser)
    found: list[list[CallEvent]] = []
    for section, body in enumerate(bodies):
        found += [answer.push(section, piece) for piece in split(body)]
    return [*found, answer.end()]


@pytest.mark.parametrize("split", [characters, utf8, tokens])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_split_gives_the_same_calls_as_the_whole(
    name: str, split: Callable[[random.Random, str], Iterator[str]]
) -> None:
    rng = random.Random(f"{name} {split.__name__}")
    plan = tool_parser(name).plan(TOOLS, "auto")
    kinds = set()
    for _ in range(ROUNDS):
        bodies = some_bodies(rng, name)
        whole = [event for some in events(plan, bodies, lambda text: iter([text])) for event in some]
        pieces = [event for some in events(plan, bodies, lambda text: split(rng, text)) for event in some]
        assert joined(pieces) == joined(whole), bodies
        assert fold(pieces) == fold(whole)
        kinds |= {type(event) for event in whole}
    assert {CallBegun, CallEnded, Malformed} <= kinds  # the sample had calls and what is none


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_damaged_body_never_harms_the_bodies_beside_it(name: str) -> None:
    rng = random.Random(name)
    plan = tool_parser(name).plan(TOOLS, "auto")
    for _ in range(300):
        calls = [("plot", some_arguments(rng, "plot")), ("unknown", some_arguments(rng, "write_file"))]
        if any("\n</parameter>" in str(value) for _, arguments in calls for value in arguments.values()):
            continue  # Qwen3-Coder's format cannot write such a value
        before, after = written(name, calls)
        found = events(plan, [before, damaged(rng, before), after], lambda text: characters(rng, text))
        read, _ = fold(event for some in found for event in some)
        assert [read[0], read[-1]] == fold([*one(plan, before), *one(plan, after)])[0]
        assert [(call.name, json.loads(call.arguments)) for call in (read[0], read[-1])] == calls


def one(plan: ToolPlan, body: str) -> list[CallEvent]:
    parser = plan.parser()
    return [*parser.push(body), *parser.end()]


@pytest.mark.parametrize("name", TEMPLATES)
def test_events_of_a_call_are_never_interleaved(name: str) -> None:
    rng = random.Random(name)
    plan = tool_parser(name).plan(TOOLS, "auto")
    for _ in range(300):
        open_call = False
        for some in events(plan, some_bodies(rng, name), lambda text: characters(rng, text)):
            for event in some:
                if isinstance(event, (CallBegun, Malformed)):
                    assert not open_call
                else:
                    assert open_call
                open_call = not isinstance(event, (CallEnded, Malformed))
        assert not open_call


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_character_of_a_body_without_a_call_is_handed_on(name: str) -> None:
    rng = random.Random(name)
    plan = tool_parser(name).plan(TOOLS, "auto")
    without = 0
    for _ in range(600):
        for body in some_bodies(rng, name):
            calls, text = fold(one(plan, body))
            if not calls and body.strip():
                without += 1
                assert text.rstrip() == body.rstrip()
    assert without > 30


def test_arguments_are_given_while_they_are_written() -> None:
    """Not held back to the end of a value: an argument may be a whole file."""
    plan = tool_parser("qwen3_coder").plan(TOOLS, "auto")
    parser = plan.parser()
    text = "line\n" * 100
    found = parser.push(f"\n<function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=text>\n{text}")
    assert fold([*found, CallEnded()])[0] == [
        ParsedCall("write_file", json.dumps({"path": "a", "text": text[:-1]})[:-2])
    ]
