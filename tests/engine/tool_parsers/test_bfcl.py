"""BFCL's tool sets in every tool parser: all can be planned and compiled, and what the mask lets through is a valid
call.

Bodies are random walks over the bundled model's tokens: no model writes them, so it is the mask that is tested.
"""

from __future__ import annotations

import json
from functools import lru_cache
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine.model.detokenizer import Detokenizer
from engine.structured_output.matcher import Matcher
from engine.tool_parsers import ToolPlan, ToolSpec, choose_parser, fold, read_tools
from engine.tool_parsers.tagged_calls import STOP
from tests.engine.structured_output.bfcl import tool_sets
from tests.engine.structured_output.sources import allowed, guidance, pebble, vocabulary
from tests.engine.tool_parsers.samples import TEMPLATES, TOKENS

pytestmark = pytest.mark.slow

FORMS = ("hermes", "qwen3_coder", "llama3_json", "mistral")  # without control tokens, which the vocabulary lacks
WALKS = 200  # for each tool parser
SOON, MAX_COUNT = 30, 400  # tokens after which a walk goes for its end, and after which it is given up


@lru_cache
def plans(name: str) -> list[tuple[tuple[ToolSpec, ...], ToolPlan]]:
    tool_parser = choose_parser(TOKENS, TEMPLATES[name])
    assert tool_parser is not None
    sets = [read_tools([{"type": "function", "function": tool} for tool in tools]) for tools in tool_sets()]
    return [(tools, tool_parser.plan(tools, "required")) for tools in sets]


@pytest.mark.parametrize("name", FORMS)
def test_every_tool_set_has_a_plan_that_compiles(name: str) -> None:
    for _, plan in plans(name):
        assert guidance("pebble").compile(plan.body).size > 0
    assert len(plans(name)) > 600


@pytest.mark.parametrize("name", FORMS)
def test_whatever_the_mask_lets_through_is_read_as_valid_calls(name: str) -> None:
    rng = Random(name)
    finished = 0
    for tools, plan in rng.sample(plans(name), WALKS):
        ids = walk(guidance("pebble").compile(plan.body).matcher(), rng)
        if ids is None:
            continue
        finished += 1
        parser, detokenizer = plan.parser(), Detokenizer(pebble())
        events = [event for id in ids for event in parser.push(detokenizer.push([id]))]
        calls, text = fold([*events, *parser.end()])
        assert text == "", pebble().decode(ids)
        assert len(calls) == 1 or (name == "mistral" and calls)
        for call in calls:
            (tool,) = (tool for tool in tools if tool.name == call.name)
            assert tool.parameters is not None
            Draft202012Validator(tool.parameters).validate(json.loads(call.arguments, parse_constant=refuse))
    assert finished > WALKS * 0.9


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def walk(matcher: Matcher, rng: Random) -> list[int] | None:
    """The tokens of a finished body, or None for one that did not finish."""
    text = vocabulary("pebble").tokens
    eos = set(vocabulary("pebble").eos)
    ids: list[int] = []
    while len(ids) < MAX_COUNT:
        may = allowed(matcher, len(text))
        assert may, pebble().decode(ids)
        if matcher.can_end() and (len(ids) > SOON or eos >= set(may) or rng.random() < 0.5):
            return ids
        may = [id for id in may if id not in eos]
        taken = closing(matcher, may) if len(ids) > SOON or rng.random() < 0.1 else []
        for id in taken or [rng.choice(may)]:
            assert matcher.accept(id)
            ids.append(id)
    return None


def closing(matcher: Matcher, may: list[int]) -> list[int]:
    """Returns the text that ends a value soonest: the tag that closes raw text where it may come, else what closes
    JSON."""
    ahead, stop = matcher.fork(), pebble().encode(STOP)
    if all(ahead.accept(id) for id in stop):
        return stop
    texts = {vocabulary("pebble").tokens[id]: id for id in may}
    closers = (b'"}', b'"]', b'"', b"}", b"]", b",", b"null", b"0", b"[]", b"{}", b"</")
    return [texts[closer] for closer in closers if closer in texts][:1]
