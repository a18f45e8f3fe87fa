"""Tools through Anthropic's own client. The model is a real one, and so small that hardly any call makes sense: what is
tested is that none can be invalid, and that results find their calls."""

from __future__ import annotations

from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic.types import MessageParam, ToolUseBlock

from tests.app.conftest import Server
from tests.app.toolbox import TOOLS

pytestmark = [pytest.mark.usefixtures("nothing_lost_by_pebble"), pytest.mark.slow]

OURS: list[Any] = [
    {
        "name": tool["function"]["name"], "description": tool["function"].get("description", "A tool."),
        "input_schema": tool["function"].get("parameters", {"type": "object", "properties": {}}),
    }
    for tool in TOOLS
]  # fmt: skip
QUESTION: list[MessageParam] = [{"role": "user", "content": "What is 17 + 26?"}]
GREEDY = {"temperature": 0}
ASK: dict[str, Any] = {"model": "default", "messages": QUESTION, "max_tokens": 300, "tools": OURS, "extra_body": GREEDY}


def calls_of(message: anthropic.types.Message) -> list[ToolUseBlock]:
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    for call in calls:
        (schema,) = [tool["input_schema"] for tool in OURS if tool["name"] == call.name]
        jsonschema.validate(call.input, schema, jsonschema.Draft202012Validator)
    return calls


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}], ids=["any", "tool"])
def test_a_call_that_has_to_come_comes(pebble_claude: anthropic.Anthropic, choice: Any) -> None:
    single: Any = {**choice, "disable_parallel_tool_use": True}
    message = pebble_claude.messages.create(**ASK, tool_choice=single)
    (call,) = calls_of(message)
    assert message.stop_reason == "tool_use" and call.name == choice.get("name", call.name)


def test_a_streamed_call_is_the_whole_one(pebble_claude: anthropic.Anthropic) -> None:
    asked = {**ASK, "tool_choice": {"type": "tool", "name": "add"}}
    with pebble_claude.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = calls_of(stream.get_final_message())
    (whole,) = calls_of(pebble_claude.messages.create(**asked))
    assert streamed.input == whole.input and "input_json" in kinds


def test_a_call_that_is_cut_off_has_the_beginning_of_its_input(pebble_claude: anthropic.Anthropic) -> None:
    message = pebble_claude.messages.create(
        **{**ASK, "max_tokens": 14}, tool_choice={"type": "tool", "name": "plan.trip"}
    )
    assert message.stop_reason == "max_tokens"
    assert all(isinstance(block.input, dict) for block in message.content if isinstance(block, ToolUseBlock))


def test_none_calls_nothing(pebble_claude: anthropic.Anthropic) -> None:
    message = pebble_claude.messages.create(**ASK, tool_choice={"type": "none"})
    assert not calls_of(message) and message.stop_reason in ("end_turn", "max_tokens")


def test_an_answer_goes_on_after_several_results(pebble_claude: anthropic.Anthropic) -> None:
    calls: Any = [
        {"type": "tool_use", "id": id, "name": "add", "input": {"a": 17, "b": b}} for id, b in (("one", 26), ("two", 9))
    ]
    results: Any = [
        {"type": "tool_result", "tool_use_id": "two", "content": [{"type": "text", "text": "26"}]},
        {"type": "tool_result", "tool_use_id": "one", "content": "too large", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    answered: list[MessageParam] = [
        *QUESTION, {"role": "assistant", "content": calls}, {"role": "user", "content": results},
    ]  # fmt: skip
    asked = {**ASK, "messages": answered}
    counted = pebble_claude.messages.count_tokens(model="default", messages=answered, tools=OURS)
    usage = pebble_claude.messages.create(**asked).usage
    assert counted.input_tokens == sum(
        (usage.input_tokens, usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0)
    )
    assert pebble_claude.messages.create(**{**ASK, "messages": answered[:2]}).content  # interrupted


def test_the_template_is_given_the_thinking_of_a_turn_that_goes_on(
    pebble: Server, pebble_claude: anthropic.Anthropic
) -> None:
    text = "I should add these two numbers."
    thought: Any = {"type": "thinking", "thinking": text, "signature": pebble.app.state.ponder.signer.sign(text)}
    call: Any = {"type": "tool_use", "id": "one", "name": "add", "input": {"a": 17, "b": 26}}
    told: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "one", "content": "43"}]}

    def counted(*blocks: Any) -> int:
        messages: Any = [*QUESTION, {"role": "assistant", "content": blocks}, told]
        return pebble_claude.messages.count_tokens(model="default", messages=messages, tools=OURS).input_tokens

    assert counted(thought, call) >= counted(call) + len(pebble.engine.tokenizer.encode(text))


def test_a_deferred_tool_is_loaded_by_a_result_that_refers_to_it(pebble_claude: anthropic.Anthropic) -> None:
    tools = [{**tool, "defer_loading": tool["name"] == "add"} for tool in OURS]
    search = {"type": "tool_use", "id": "one", "name": "get_weather", "input": {"city": "add"}}
    reference = {
        "type": "tool_result",
        "tool_use_id": "one",
        "content": [{"type": "tool_reference", "tool_name": "add"}],
    }
    loaded: Any = [*QUESTION, {"role": "assistant", "content": [search]}, {"role": "user", "content": [reference]}]
    asked: dict[str, Any] = {**ASK, "tools": tools, "tool_choice": {"type": "tool", "name": "add"}}

    def prompt(messages: Any, tools: Any) -> int:
        return pebble_claude.messages.count_tokens(model="default", messages=messages, tools=tools).input_tokens

    without = [tool for tool in OURS if tool["name"] != "add"]
    assert prompt(QUESTION, tools) == prompt(QUESTION, without)  # the prompt's list does not change when it is loaded
    gone = prompt(loaded, without)
    assert prompt(loaded, tools) > gone
    with pytest.raises(anthropic.BadRequestError, match="add"):
        pebble_claude.messages.create(**asked)
    (call,) = calls_of(pebble_claude.messages.create(**{**asked, "messages": loaded}))
    assert call.name == "add"
