"""Ollama's official client, at a server with the setting `ollama_api`."""

from __future__ import annotations

import json
from typing import Any

import ollama

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops

cells = Cells("ollama (Python)", "ollama")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def ask(url: str, *messages: Any, **fields: Any) -> Any:
    turns = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    return ollama.Client(host=url).chat("default", turns, **fields)


def result(call: Any, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_name": call.function.name, "content": text}


@cells("plain")
def plain(url: str) -> None:
    reply = ask(url, cell.SAYS_HELLO)
    assert reply.message.content == cell.HELLO
    assert ask(url, cell.SAYS_HELLO, reply.message, {"role": "user", "content": "And?"}).message.content == "And again."
    assert ollama.Client(host=url).generate("default", cell.SAYS_HELLO).response == cell.HELLO


@cells("stream")
def stream(url: str) -> None:
    parts = list(ask(url, cell.SAYS_HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == cell.HELLO and len(parts) > 3


@cells("tools")
def tools(url: str) -> None:
    fields = {"tools": [cell.GET_WEATHER]}
    message = ask(url, cell.ASKS_WEATHER, **fields).message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    then = ask(url, cell.ASKS_WEATHER, message, result(call, cell.WEATHER["Oslo"]), **fields)
    assert then.message.content == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    fields = {"tools": [cell.GET_WEATHER]}
    message = ask(url, cell.ASKS_BOTH, **fields).message
    assert [call.function.arguments["city"] for call in message.tool_calls] == ["Oslo", "Rome"]
    results = [result(*pair) for pair in zip(message.tool_calls, cell.WEATHER.values(), strict=True)]
    assert ask(url, cell.ASKS_BOTH, message, *results, **fields).message.content == cell.BOTH


@cells("typed result")
def typed_result(url: str) -> None:
    assert json.loads(ask(url, cell.WRITES_PERSON, format=SCHEMA).message.content) == cell.PERSON


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    fields = {"tools": [cell.GET_WEATHER], "format": SCHEMA}
    message = ask(url, cell.READS_AND_WRITES_PERSON, **fields).message
    back = result(message.tool_calls[0], cell.WEATHER["Oslo"])
    assert json.loads(ask(url, cell.READS_AND_WRITES_PERSON, message, back, **fields).message.content) == cell.PERSON


@cells("reasoning")
def reasoning(url: str) -> None:
    message = ask(url, cell.SAYS_HELLO, think=True).message
    assert message.thinking.strip() == cell.THOUGHT and message.content == cell.HELLO


@cells("embeddings")
def embeddings(url: str) -> None:
    assert len(ollama.Client(host=url).embed("default", ["a", "b"]).embeddings) == 2


@cells("errors")
def errors(url: str) -> None:
    for model, options in (("llama3.2", {}), ("default", {"num_predict": 0})):
        try:
            ollama.Client(host=url).chat(model, [{"role": "user", "content": "hi"}], options=options)
        except ollama.ResponseError as error:
            assert error.status_code == (400 if options else 404)
            assert next(iter(options), model) in error.error, error.error
        else:
            raise AssertionError(f"{model} with {options} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    def leave() -> None:
        for number, _ in enumerate(parts := ask(url, cell.NEVER_ENDS, stream=True)):
            if number == 20:
                parts.close()
                break

    return assert_stops(url, leave)


@cells("long agent")
def long_agent(url: str) -> str:
    history: list[Any] = [cell.works_long()]
    cache = PromptCache(url)
    while calls := (message := ask(url, *history, tools=[cell.READ_PART]).message).tool_calls:
        cache.turn()
        history += [message, result(calls[0], cell.part(calls[0].function.arguments["number"]))]
    cache.turn()
    assert message.content == cell.FINISHED and len(history) == 1 + 2 * cell.STEPS
    return cache.remark()


if __name__ == "__main__":
    cells.main()
