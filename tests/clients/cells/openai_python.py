"""OpenAI's official client: chat completions and embeddings."""

from __future__ import annotations

import json
from typing import Any

import openai
from pydantic import BaseModel

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops

cells = Cells("openai (Python)", "openai")
Json = dict[str, Any]


class Person(BaseModel):
    name: str
    age: int


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(url: str, *messages: Any, **fields: Any) -> Any:
    turns: list[Any] = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    made: Any = client(url).chat.completions.create(model="default", messages=turns, **fields)
    return made


def answered(call: Any, text: str) -> Json:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


@cells("plain")
def plain(url: str) -> None:
    reply = ask(url, cell.SAYS_HELLO)
    assert reply.choices[0].message.content == cell.HELLO
    again = ask(url, cell.SAYS_HELLO, reply.choices[0].message.model_dump(exclude_none=True), "And?")
    assert again.choices[0].message.content == "And again."


@cells("stream")
def stream(url: str) -> None:
    with client(url).chat.completions.stream(
        model="default", messages=[{"role": "user", "content": cell.SAYS_HELLO}]
    ) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        whole = events.get_final_completion()
    assert "".join(deltas) == whole.choices[0].message.content == cell.HELLO and len(deltas) > 3


@cells("tools")
def tools(url: str) -> None:
    message = ask(url, cell.ASKS_WEATHER, tools=[cell.GET_WEATHER]).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    then = ask(url, cell.ASKS_WEATHER, message, answered(call, cell.WEATHER["Oslo"]), tools=[cell.GET_WEATHER])
    assert then.choices[0].message.content == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    message = ask(url, cell.ASKS_BOTH, tools=[cell.GET_WEATHER]).choices[0].message
    cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls]
    assert cities == ["Oslo", "Rome"]
    results = [answered(*pair) for pair in zip(message.tool_calls, cell.WEATHER.values(), strict=True)]
    then = ask(url, cell.ASKS_BOTH, message, *results, tools=[cell.GET_WEATHER])
    assert then.choices[0].message.content == cell.BOTH


@cells("typed result")
def typed_result(url: str) -> None:
    made = client(url).chat.completions.parse(
        model="default", messages=[{"role": "user", "content": cell.WRITES_PERSON}], response_format=Person
    )
    assert made.choices[0].message.parsed == Person(**cell.PERSON)


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    function: Any = cell.GET_WEATHER["function"]
    tool = {**function, "strict": True, "parameters": {**function["parameters"], "additionalProperties": False}}
    history: list[Any] = [{"role": "user", "content": cell.READS_AND_WRITES_PERSON}]
    fields: Json = {"model": "default", "tools": [{"type": "function", "function": tool}], "response_format": Person}
    message = client(url).chat.completions.parse(messages=history, **fields).choices[0].message
    assert message.tool_calls is not None
    history += [message, answered(message.tool_calls[0], cell.WEATHER["Oslo"])]
    made = client(url).chat.completions.parse(messages=history, **fields).choices[0].message
    assert made.parsed == Person(**cell.PERSON)


@cells("reasoning")
def reasoning(url: str) -> None:
    reply = ask(url, cell.SAYS_HELLO, reasoning_effort="low")
    assert reply.choices[0].message.reasoning_content.strip() == cell.THOUGHT
    assert reply.usage.completion_tokens_details.reasoning_tokens > 3


@cells("embeddings")
def embeddings(url: str) -> None:
    made = client(url).embeddings.create(model="default", input=["a", "b"])
    assert [len(each.embedding) for each in made.data] == [len(made.data[0].embedding)] * 2


@cells("errors")
def errors(url: str) -> None:
    for kind, fields in ((openai.NotFoundError, {"model": "gpt-5"}), (openai.BadRequestError, {"temperature": 9})):
        try:
            ask(url, "hi", extra_body=fields)
        except kind as error:
            assert str(next(iter(fields.values()))) in str(error)
        else:
            raise AssertionError(f"{fields} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    def leave() -> None:
        with ask(url, cell.NEVER_ENDS, stream=True) as chunks:
            for number, _ in enumerate(chunks):
                if number == 20:
                    return

    return assert_stops(url, leave)


@cells("long agent")
def long_agent(url: str) -> str:
    history: list[Any] = [cell.works_long()]
    cache = PromptCache(url)
    while (message := ask(url, *history, tools=[cell.READ_PART]).choices[0].message).tool_calls:
        cache.turn()
        (call,) = message.tool_calls
        history += [message, answered(call, cell.part(json.loads(call.function.arguments)["number"]))]
    cache.turn()
    assert message.content == cell.FINISHED and len(history) == 1 + 2 * cell.STEPS
    return cache.remark()


if __name__ == "__main__":
    cells.main()
