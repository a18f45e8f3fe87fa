"""A client's side of a stream of typed events: what it makes of them, and what it holds them to.

Every event must be one that the official client's types take as a whole, in order and about the item it names.
"""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

Json = dict[str, Any]
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXTS = {"response.output_text": "text", "response.reasoning_text": "text"}
CALLS = ("response.function_call_arguments", "response.mcp_call_arguments")


def events_of(body: str) -> list[Json]:
    """The events of a stream's text, each under its own name, and nothing after the last."""
    events = []
    *parts, rest = body.split("\n\n")
    assert rest == ""
    for part in parts:
        if part == ": ping":
            continue
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def output_of(events: list[Json]) -> list[Json]:
    """The items that these events make; asserts the contract on the way."""
    items: list[Json] = []
    told: list[Json] = []  # as `done` shows them
    for event in events:
        kind = event["type"]
        at = event.get("output_index")
        if kind == "response.output_item.added":
            assert at == len(items) and event["item"]["status"] == "in_progress"
            items.append(json.loads(json.dumps(event["item"])))
            told.append({})
            continue
        if at is None:
            continue
        item = items[at]
        assert not told[at], "an item that is done does not change"
        assert event.get("item_id", item["id"]) == item["id"]
        stem, _, end = kind.rpartition(".")
        if kind == "response.content_part.added":
            assert event["content_index"] == len(item["content"]) == 0 and event["part"]["text"] == ""
            item["content"].append(dict(event["part"]))
        elif kind == "response.content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif stem in TEXTS:
            part = item["content"][event["content_index"]]
            if end == "delta":
                part["text"] += event["delta"]
                if "logprobs" in event:
                    part["logprobs"] = part["logprobs"] + event["logprobs"]
            else:
                assert part["text"] == event["text"]
        elif stem in CALLS:
            assert stem == f"response.{item['type']}_arguments"
            if end == "delta":
                item["arguments"] += event["delta"]
            else:
                assert item["arguments"] == event["arguments"]
        elif kind == "response.output_item.done":
            told[at] = event["item"]
            changing = ("status", "output", "error", "encrypted_content")
            assert {k: v for k, v in event["item"].items() if k not in changing} == {
                k: v for k, v in item.items() if k not in changing
            }
        else:
            assert kind in ("response.mcp_call.in_progress", "response.mcp_call.completed", "response.mcp_call.failed")
    assert all(told), "every item that begins is done"
    return told


def response_of(events: list[Json]) -> Json:
    """The response that a stream ends with, checked against the events before it."""
    for event in events:
        _EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    *_, last = events
    response = dict(last["response"])
    assert last["type"] == f"response.{response['status']}" in ("response.completed", "response.incomplete")
    Response.model_validate(response)
    assert output_of(events[2:-1]) == response["output"]
    return response


def without_ids(response: Json) -> Json:
    """A response as another run of the same request would have it."""
    changing = ("id", "created_at", "completed_at")
    made = {key: value for key, value in json.loads(json.dumps(response)).items() if key not in changing}
    for item in made["output"]:
        assert item.pop("id")
        item.pop("call_id", None)
        for part in item.get("content", []):
            # A prompt that was found in the cache is rounded otherwise than one that is computed.
            part["logprobs"] = [entry["token"] for entry in part.get("logprobs", [])]
    made["usage"]["input_tokens_details"].pop("cached_tokens")
    return made
