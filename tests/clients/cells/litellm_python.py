"""litellm, to each of the three APIs: `openai/default`, `anthropic/default` and `ollama_chat/default`."""

from __future__ import annotations

import itertools
import json
from typing import Any

import litellm
from pydantic import BaseModel

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops

cells = Cells("litellm", "litellm")


class Person(BaseModel):
    name: str
    age: int


PROVIDERS = {"openai": "/v1", "anthropic": "", "ollama_chat": ""}


def ask(url: str, provider: str, *messages: Any, **fields: Any) -> Any:
    turns = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    name = fields.pop("model", "default")
    return litellm.completion(
        f"{provider}/{name}", turns, api_base=url + PROVIDERS[provider], api_key="none", num_retries=0, **fields
    )


@cells("plain")
def plain(url: str) -> None:
    for provider in PROVIDERS:
        message = ask(url, provider, cell.SAYS_HELLO).choices[0].message
        assert message.content == cell.HELLO
        assert ask(url, provider, cell.SAYS_HELLO, message, "And?").choices[0].message.content == "And again."


@cells("stream")
def stream(url: str) -> None:
    for provider in PROVIDERS:
        chunks = list(ask(url, provider, cell.SAYS_HELLO, stream=True))
        assert litellm.stream_chunk_builder(chunks).choices[0].message.content == cell.HELLO and len(chunks) > 3


@cells("tools")
def tools(url: str) -> None:
    for provider in PROVIDERS:
        fields = {"tools": [cell.GET_WEATHER]}
        message = ask(url, provider, cell.ASKS_WEATHER, **fields).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
        back = {"role": "tool", "tool_call_id": call.id, "content": cell.WEATHER["Oslo"]}
        then = ask(url, provider, cell.ASKS_WEATHER, message, back, **fields)
        assert then.choices[0].message.content == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    for provider in PROVIDERS:
        calls = ask(url, provider, cell.ASKS_BOTH, tools=[cell.GET_WEATHER]).choices[0].message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]


@cells("typed result")
def typed_result(url: str) -> None:
    for provider in ("openai", "ollama_chat"):
        made = ask(url, provider, cell.WRITES_PERSON, response_format=Person).choices[0].message
        assert json.loads(made.content) == cell.PERSON


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    fields = {"tools": [cell.GET_WEATHER], "response_format": Person}
    message = ask(url, "openai", cell.READS_AND_WRITES_PERSON, **fields).choices[0].message
    back = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": cell.WEATHER["Oslo"]}
    made = ask(url, "openai", cell.READS_AND_WRITES_PERSON, message, back, **fields)
    assert json.loads(made.choices[0].message.content) == cell.PERSON


@cells("reasoning")
def reasoning(url: str) -> None:
    for provider, fields in (
        ("openai", {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"]}),
        (
            "anthropic",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "allowed_openai_params": ["thinking"]},
        ),
    ):
        message = ask(url, provider, cell.SAYS_HELLO, **fields).choices[0].message
        assert message.reasoning_content.strip() == cell.THOUGHT and message.content == cell.HELLO, provider


@cells("embeddings")
def embeddings(url: str) -> None:
    made = litellm.embedding("openai/default", ["a", "b"], api_base=f"{url}/v1", api_key="none")
    assert len(made.data) == 2


@cells("errors")
def errors(url: str) -> None:
    for kind, fields in ((litellm.NotFoundError, {"model": "gpt-5"}), (litellm.BadRequestError, {"top_p": 9})):
        for provider in ("openai", "anthropic"):
            try:
                ask(url, provider, "hi", **fields)
            except kind as error:
                assert str(next(iter(fields.values()))) in str(error)
            else:
                raise AssertionError(f"{fields} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    def leave() -> None:
        chunks = ask(url, "openai", cell.NEVER_ENDS, stream=True)
        list(itertools.islice(chunks, 20))
        chunks.completion_stream.close()

    return assert_stops(url, leave)


@cells("long agent")
def long_agent(url: str) -> str:
    history: list[Any] = [cell.works_long()]
    cache = PromptCache(url)
    while calls := (message := ask(url, "openai", *history, tools=[cell.READ_PART]).choices[0].message).tool_calls:
        cache.turn()
        text = cell.part(json.loads(calls[0].function.arguments)["number"])
        history += [message, {"role": "tool", "tool_call_id": calls[0].id, "content": text}]
    cache.turn()
    assert message.content == cell.FINISHED and len(history) == 1 + 2 * cell.STEPS
    return cache.remark()


if __name__ == "__main__":
    cells.main()
