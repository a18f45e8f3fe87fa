"""Calls that go wrong: the tool's complaint, the thought about it, and the call that repairs it, if any does.

Sample: "weather in Osloo" → {"error": "unknown city 'Osloo', did you mean 'Oslo'?"} → "It should be Oslo." and a second
call. Knows nothing of turns.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from random import Random
from typing import Any

from training.conversation import Phrasing, SpokenCall, Tool
from training.phrases import read
from training.tool_bank import values
from training.tool_bank.offered import Offered
from training.tool_bank.requests import Request

KINDS = ("suggestion", "missing", "number", "string", "renamed", "limit", "again", "hopeless")
_NAMED = frozenset(["city", "person", "country", "company", "team", "fullname", "made", "product", "petname"])


@dataclass(frozen=True, slots=True)
class Mishap:
    """`repaired` are the calls that put it right, the first being the one to learn; none where nothing helps."""

    text: str
    tool: Tool
    failed: SpokenCall
    error: str
    thinking: str
    repaired: tuple[SpokenCall, ...]
    told: str = ""


def _slip(rng: Random, word: str) -> str:
    at = rng.randrange(1, len(word) - 1)
    return rng.choice((word[:at] + word[at] + word[at:], word[:at] + word[at + 1 :]))


def _changed(call: SpokenCall, key: str, value: Any) -> SpokenCall:
    return SpokenCall(call.name, {name: value if name == key else old for name, old in call.arguments.items()})


def _complaint(rng: Random, message: str) -> str:
    roll = rng.random()
    if roll < 0.6:
        return json.dumps({"error": message}, ensure_ascii=False)
    if roll < 0.8:
        return f"Error: {message}"
    return json.dumps({"status": "error", "message": message}, ensure_ascii=False)


def mishap(rng: Random, offered: Offered, request: Request, phrasing: Phrasing, kind: str) -> Mishap | None:
    """Returns the request's one call gone wrong in this way; None where it can't."""
    (call,) = request.calls
    kinds = {key: param.kind for param, key in zip(offered.params, offered.keys, strict=True)}
    tool = copy.deepcopy(offered.tool)
    schema = tool["function"]["parameters"]
    text, failed = request.text, call
    repaired: tuple[SpokenCall, ...] = (call,)
    filled: dict[str, str] = {}
    options: list[str]
    match kind:
        case "suggestion":
            options = [
                key
                for key, value in call.arguments.items()
                if kinds[key] in _NAMED and isinstance(value, str) and len(value) > 3 and text.count(value) == 1
            ]
            if not options:
                return None
            key = rng.choice(options)
            good = str(call.arguments[key])
            bad = _slip(rng, good)
            if bad == good:
                return None
            text, failed = text.replace(good, bad), _changed(call, key, bad)
            filled = {"key": key, "bad": bad, "good": good}
        case "missing":
            options = [key for key, of in kinds.items() if "/" in of and key not in call.arguments]
            if not options:
                return None
            key = rng.choice(options)
            choices = kinds[key].split("/")
            order = {name: at for at, name in enumerate(schema["properties"])}

            def added(choice: str) -> SpokenCall:
                return SpokenCall(
                    call.name, dict(sorted({**call.arguments, key: choice}.items(), key=lambda p: order[p[0]]))
                )

            schema["properties"][key].pop("default", None)
            repaired = tuple(map(added, choices))
            filled = {"key": key, "choices": ", ".join(choices), "good": choices[0]}
        case "number" | "string":
            of_number = {key for key, of in kinds.items() if of.split()[0] in {"int", "num", "amount"}}
            options = [key for key in call.arguments if key in of_number]
            if not options:
                return None
            key = rng.choice(options)
            value = call.arguments[key]
            schema["properties"][key].pop("default", None)
            if kind == "number":
                schema["properties"][key]["type"] = "string"
                failed = _changed(call, key, str(value))
            else:
                repaired = (_changed(call, key, str(value)),)
            filled = {"key": key, "bad": str(value)}
        case "renamed":
            if not call.arguments:
                return None
            key = rng.choice(list(call.arguments))
            param = next(param for param, name in zip(offered.params, offered.keys, strict=True) if name == key)
            options = [
                name for name in (*param.names, values.made_up(rng, phrasing)) if name not in schema["properties"]
            ]
            good = rng.choice(options)
            pairs = {good if name == key else name: value for name, value in call.arguments.items()}
            repaired = (SpokenCall(call.name, pairs),)
            filled = {"key": key, "good": good}
        case "limit":
            options = [key for key, value in call.arguments.items() if kinds[key].startswith("int") and value > 4]
            if not options:
                return None
            key = rng.choice(options)
            most = rng.randint(2, call.arguments[key] - 1)
            repaired = (_changed(call, key, most),)
            filled = {"key": key, "bad": str(call.arguments[key]), "good": str(most)}
        case "hopeless":
            repaired = ()
    wording = read("tool_choice")[kind]
    message = wording.ask(rng, phrasing).format(**filled)
    return Mishap(
        text=text,
        tool=tool,
        failed=failed,
        error=_complaint(rng, message),
        thinking=wording.thinking.format(**filled),
        repaired=repaired,
        told=wording.answers[0].format(error=message) if wording.answers else "",
    )
