"""Bodies for Anthropic's and Ollama's routes, with fields that are right, nearly right and wrong: each is answered, or
refused with a 4xx in the API's own shape, and never fails inside."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.app import wild
from tests.app.conftest import Server, all_is_back
from tests.clients.scripted_model import Requests

pytestmark = pytest.mark.slow

SOME = settings(max_examples=60, suppress_health_check=list(HealthCheck))
Fields = dict[str, st.SearchStrategy[Any]]
small, anything = wild.small, wild.anything


def objects(required: Fields, optional: Fields) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(required, optional=optional)


texts = st.sampled_from(["hi", "a\nb", "é東🚲", "<|im_end|>", "<tool_call>"])
ephemeral = st.sampled_from([{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])
schemas = st.sampled_from(
    [{"type": "object"}, {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}, {}]
)
forms = st.builds(lambda schema: {"type": "json_schema", "schema": schema}, schemas)
names = st.sampled_from(["f", "g"])

# Fields of Anthropic's requests as they should be.
text_block = objects({"type": st.just("text"), "text": texts}, {"cache_control": ephemeral})
document = objects(
    {"type": st.just("document"), "source": objects({"type": st.just("text"), "data": texts}, {})}, {"title": texts}
)
found = objects(
    {"type": st.just("search_result"), "title": texts, "source": texts, "content": st.lists(text_block, max_size=2)}, {}
)
reference = objects({"type": st.just("tool_reference"), "tool_name": names}, {})
call = objects({"type": st.just("tool_use"), "id": st.just("a"), "name": names, "input": st.just({"a": 1})}, {})
result = objects(
    {"type": st.just("tool_result"), "tool_use_id": st.just("a")},
    {"content": texts | st.lists(text_block | reference | found, max_size=3), "is_error": st.booleans()},
)
user = objects(
    {"role": st.just("user"), "content": texts | st.lists(text_block | document | found | result, max_size=3)}, {}
)
assistant = objects({"role": st.just("assistant"), "content": texts | st.lists(text_block | call, max_size=3)}, {})
system = objects({"role": st.just("system"), "content": texts}, {})
asked = st.just([{"role": "user", "content": "hi"}])
messages = st.tuples(st.lists(user | assistant | system, max_size=4), asked).map(lambda parts: parts[0] + parts[1])
their_tool = objects(
    {"input_schema": schemas},
    {"description": texts, "strict": st.booleans(), "defer_loading": st.booleans(), "cache_control": ephemeral},
)
tools = st.builds(
    lambda found: [{**each, "name": name} for each, name in zip(found, "fg", strict=False)],
    st.lists(their_tool, max_size=2),
)
CONVERSATION: Fields = {
    "system": texts | st.lists(text_block, max_size=2), "tools": tools,
    "tool_choice": objects({"type": st.sampled_from(["auto", "none"])}, {"disable_parallel_tool_use": st.booleans()}),
    "thinking": st.sampled_from(
        [{"type": "enabled", "budget_tokens": 2}, {"type": "adaptive", "display": "updates"}, {"type": "disabled"}]
    ),
    "output_config": objects({}, {"effort": st.sampled_from(["low", "max"]), "format": forms}),
}  # fmt: skip
MESSAGES: Fields = {
    **CONVERSATION, "stop_sequences": st.lists(texts, max_size=3),
    "temperature": st.floats(0, 2), "top_p": st.floats(0.1, 1), "top_k": st.integers(0, 9), "stream": st.booleans(),
    "metadata": anything, "context_management": st.just({"edits": []}), "cache_control": ephemeral,
}  # fmt: skip

# Fields of Ollama's.
called = objects({"function": objects({"name": names, "arguments": st.just({"a": 1})}, {})}, {})
turn = st.one_of(
    objects({"role": st.sampled_from(["user", "system"]), "content": texts}, {"images": st.just([])}),
    objects({"role": st.just("assistant"), "content": texts}, {"thinking": texts, "tool_calls": st.lists(called)}),
    objects({"role": st.just("tool"), "content": texts}, {"tool_name": names}),
)
function = objects({"name": names}, {"parameters": schemas, "description": texts})
options = objects(
    {"num_predict": st.integers(1, 8)},
    {
        "temperature": st.floats(0, 2), "top_p": st.floats(0.1, 1), "top_k": st.integers(0, 9), "num_ctx": anything,
        "seed": st.integers(0, 9), "stop": st.lists(texts, max_size=3), "mirostat": st.just(0),
    },
)  # fmt: skip
GENERATING: Fields = {
    "stream": st.booleans(), "format": st.just("json") | schemas, "keep_alive": anything,
    "think": st.sampled_from([True, False, "low"]),
}  # fmt: skip
# By path: the fields that are always there, and the others.
BODIES: dict[str, tuple[Fields, Fields]] = {
    "/v1/messages": ({"messages": messages, "max_tokens": st.integers(3, 8)}, MESSAGES),
    "/v1/messages/count_tokens": ({"messages": messages}, CONVERSATION),
    "/api/chat": (
        {"messages": st.lists(turn, max_size=4), "options": options},
        {**GENERATING, "tools": st.lists(objects({"type": st.just("function"), "function": function}, {}), max_size=1)},
    ),
    "/api/generate": ({"prompt": texts, "options": options}, {**GENERATING, "system": texts}),
    "/api/embed": ({"input": texts | st.lists(texts, min_size=1)}, {"dimensions": st.integers(1, 4)}),
    "/api/embeddings": ({"prompt": texts}, {"options": anything, "keep_alive": anything}),
    "/api/show": ({}, {"name": st.just("default"), "verbose": anything}),
}  # fmt: skip


def damaged(value: Any, data: st.DataObject) -> Any:
    """Returns JSON with one part of it replaced, left out or put in."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        name = data.draw(st.sampled_from(sorted(value)))
        return {**value, name: damaged(value[name], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 3)):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], damaged(value[at], data), *value[at + 1 :]]
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        gone = data.draw(st.sampled_from(sorted(value)))
        return {name: each for name, each in value.items() if name != gone}
    if isinstance(value, dict) and data.draw(st.booleans()):
        return {**value, data.draw(st.sampled_from(["surprise", "type", "name", "thread"])): data.draw(small)}
    return data.draw(wild.schemas | anything)


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("path", BODIES)
@SOME
@given(data=st.data())
def test_no_body_makes_the_server_fail(http: httpx.Client, path: str, wrong: int, data: st.DataObject) -> None:
    required, optional = BODIES[path]
    body = {"model": "default", **data.draw(objects(required, optional))}
    for _ in range(wrong):
        body = damaged(body, data)
        if not isinstance(body, dict):
            break
    reply = http.post(path, json=body)
    event(f"{path} {reply.status_code}")
    assert reply.status_code < 500 if wrong else reply.status_code == 200, (reply.text, body)
    if reply.status_code >= 400:
        error = reply.json()["error"]
        assert error["message"] if path.startswith("/v1") else isinstance(error, str) and error, body
    else:
        assert '"api_error"' not in reply.text and '{"error"' not in reply.text, (reply.text, body)


@pytest.mark.parametrize("path", BODIES)
@SOME
@given(content=st.binary(max_size=20) | anything.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_the_server_fail(http: httpx.Client, path: str, content: bytes) -> None:
    reply = http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code < 500, (reply.text, content)


def test_nothing_of_it_is_left(scripted: tuple[Server, Requests]) -> None:
    all_is_back(scripted[0])
