"""Tools for tests, and a client's side of the contract: what chunks of a stream may be, and what they join to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import jsonschema

from tests.app.conftest import Server

Json = dict[str, Any]


def tool(name: str, parameters: Json | None = None, **more: Any) -> Json:
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **more}
    return {"type": "function", "function": function}


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 14},
        },
        "required": ["city"],
    },
    description="The weather of a city.",
)
ADD = tool(
    "add",
    {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": -99, "maximum": 99} for name in ("a", "b")},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    strict=True,
)
LIGHTS_OFF = tool("lights-off")  # no parameters: always {}
TRIP = tool(
    "plan.trip",
    {
        "type": "object",
        "$defs": {
            "place": {
                "type": "object",
                "properties": {
                    "name": {"enum": ["Köln", "東京", 'say "hi"', "a\\b", "🚲"]},
                    "near": {"type": "boolean"},
                },
                "required": ["name"],
            },
            "stop": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        },
        "properties": {
            "von": {"$ref": "#/$defs/place"},
            "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
            "größe": {"type": "number", "enum": [1, 2.5, -3]},
        },
        "required": ["von", "stops", "größe"],
    },
)
TOOLS = [WEATHER, ADD, LIGHTS_OFF, TRIP]


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def begins_call(server: Server) -> str:
    """The token that begins a call, as a key of `logit_bias`: with it, tests decide whether a free answer calls."""
    return str(server.engine.tokenizer.token_id("<tool_call>"))


def check_call(call: Json, tools: Iterable[Json]) -> None:
    """That a call of a whole reply is one of a tool, with arguments that its schema takes."""
    assert call["type"] == "function" and call["id"]
    (schema,) = [t["function"].get("parameters") for t in tools if t["function"]["name"] == call["function"]["name"]]
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, schema or {"type": "object", "maxProperties": 0}, jsonschema.Draft202012Validator)


def ask(http: httpx.Client, prompt: str = "hi", **fields: Any) -> Json:
    """The whole reply of a chat request that is accepted."""
    reply = http.post("/v1/chat/completions", json=chat(prompt, **fields))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def chat(prompt: str, **fields: Any) -> Json:
    return {"model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": 60, **fields}


def refusal(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> Json:
    """The error of a request that is refused with a 400."""
    reply = http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return dict(reply.json()["error"])


def stream(http: httpx.Client, body: Mapping[str, Any]) -> list[Json]:
    """The chunks of a streamed request, usage included."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = http.post("/v1/chat/completions", json={**body, **options})
    assert reply.status_code == 200, reply.text
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events if event != ": ping"]


def join(chunks: list[Json]) -> Json:
    """Returns what a client that knows the contract makes of a stream; asserts the contract on the way."""
    *chunks, last = chunks
    assert last["choices"] == []
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in [*chunks, last]}) == 1
    choices: dict[int, Json] = {}
    for chunk in chunks:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        index, delta = choice["index"], choice["delta"]
        if index not in choices:
            assert delta["role"] == "assistant" and set(delta) == {"role", "content", "refusal"}
            assert delta["content"] in (None, "") and choice["finish_reason"] is None
            choices[index] = {"message": {"role": "assistant", **delta}, "finish_reason": None, "logprobs": None}
            continue
        assert choices[index]["finish_reason"] is None, "nothing comes after the finish reason"
        if choice["finish_reason"] is not None:
            assert delta == {}
            choices[index]["finish_reason"] = choice["finish_reason"]
            continue
        (kind,) = delta  # one thing at a time
        message = choices[index]["message"]
        if choice["logprobs"] is not None:
            assert kind == "content" and choice["logprobs"]["content"]
            entries = choices[index]["logprobs"] = choices[index]["logprobs"] or {"content": [], "refusal": None}
            entries["content"] += choice["logprobs"]["content"]
        if kind == "tool_calls":
            _join_call(message.setdefault("tool_calls", []), delta["tool_calls"])
        else:
            message[kind] = (message.get(kind) or "") + delta[kind]
    return {"choices": [{"index": i, **choices[i]} for i in sorted(choices)], "usage": last["usage"]}


def _join_call(calls: list[Json], deltas: list[Json]) -> None:
    (delta,) = deltas
    index, function = delta["index"], delta["function"]
    if index == len(calls):
        assert set(delta) == {"index", "id", "type", "function"} and set(function) == {"name", "arguments"}
        assert function["arguments"] == "" and function["name"]
        calls.append({"id": delta["id"], "type": delta["type"], "function": dict(function)})
        return
    assert index == len(calls) - 1, "a call that another has followed is over"
    assert set(delta) == {"index", "function"} and set(function) == {"arguments"} and function["arguments"]
    calls[index]["function"]["arguments"] += function["arguments"]


def without_ids(choices: list[Json]) -> list[Json]:
    """Choices as another run of the same request would have them."""
    made = json.loads(json.dumps(choices))
    for choice in made:
        if choice["logprobs"] is not None and not choice["logprobs"]["content"]:
            choice["logprobs"] = None  # a stream has no place to say that there are none
        for call in choice["message"].get("tool_calls", []):
            assert call.pop("id")
    return list(made)
