"""Forms that could take a compiler hours or all memory: answered, or refused by name, while other answers go on."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.app.conftest import Server
from tests.app.toolbox import chat, tool

pytestmark = [pytest.mark.usefixtures("nothing_lost_by_pebble"), pytest.mark.slow]

CHAT = "/v1/chat/completions"


def _nested(keyword: str, levels: int) -> dict[str, Any]:
    if not levels:
        return {"type": "string"}
    part = _nested(keyword, levels - 1)
    return {keyword: [part, {"type": "object", "properties": {"a": part}}]}


def _patterned(schemas: int) -> dict[str, Any]:
    return {
        "anyOf": [
            {"properties": {f"k{j}": {"type": "string", "pattern": f"(a|b|c){{0,{i + j}}}x"} for j in range(40)}}
            for i in range(schemas)
        ]
    }


COUNTS = "(((a{0,99}b){0,99}c){0,99}d){0,99}"
BOMBS: dict[str, dict[str, Any]] = {
    "nested oneOf": {"guided_json": _nested("oneOf", 9)},
    "nested anyOf": {"guided_json": _nested("anyOf", 9)},
    "thousands of expressions": {"guided_json": _patterned(150)},
    "a long enum": {"guided_json": {"enum": [f"{i}" * 9 for i in range(24_000)]}},
    "long strings": {"guided_json": {"items": {"type": "string", "maxLength": 5000}, "minItems": 9**9}},
    "recursion": {"guided_json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
    "counts in counts": {"guided_regex": COUNTS},
    "many automata in one": {"guided_regex": "|".join(f".{{0,{i}}}x{{{i}}}" for i in range(1, 400))},
    "long choices": {"guided_choice": [f"{i}" * 300 for i in range(4096)]},
    "an ambiguous grammar": {"guided_grammar": 'start: e\ne: e e | e "a" e | "a"'},
    "a text that never ends": {"guided_grammar": "start: /a+/ /a+/"},  # the first takes every a there is
    "an object in itself": {"guided_json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}},
    "a strict tool": {"tools": [tool("f", {"type": "object", **_nested("oneOf", 5)}, strict=True)]},
    "a tool": {"tools": [tool("f", {"properties": {"a": {"type": "string", "pattern": COUNTS}}})]},
}
MUST_BE_REFUSED = {"nested oneOf", "a long enum", "recursion", "long choices", "a strict tool"}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_answered_or_refused_by_name_while_others_go_on(
    pebble: Server, pebble_http: httpx.Client, name: str
) -> None:
    """Another answer runs from before the bomb until after it."""
    body = chat("Count.", max_tokens=3000, ignore_eos=True, stream=True)
    ticks, errors = 0, []
    begun, over = threading.Event(), threading.Event()
    enough = 10**9  # ticks after which the other answer has seen the bomb go by

    def run() -> None:
        nonlocal ticks
        with httpx.stream("POST", f"{pebble.url}{CHAT}", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                if '"error"' in line:
                    errors.append(line)
                ticks += line.startswith("data: ")
                if ticks == 5:
                    begun.set()
                if over.is_set() and ticks > enough:
                    return

    other = threading.Thread(target=run)
    other.start()
    try:
        assert begun.wait(60)
        reply = pebble_http.post(CHAT, json=chat("hi", **BOMBS[name], max_tokens=3))
        enough = ticks
    finally:
        over.set()
        other.join(60)
    assert not errors and not other.is_alive()
    assert reply.status_code in ((400,) if name in MUST_BE_REFUSED else (200, 400)), reply.text
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert error["param"].split("[")[0] in BOMBS[name]
        assert error["code"] in ("constraint_refused", "constraint_timeout")
        assert "cannot be held exactly" in error["message"]
