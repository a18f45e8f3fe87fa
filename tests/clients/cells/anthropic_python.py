"""Anthropic's official client, through the Messages API."""

from __future__ import annotations

from typing import Any

import anthropic
from pydantic import BaseModel

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops

cells = Cells("anthropic (Python)", "anthropic")


class Person(BaseModel):
    name: str
    age: int


def tool(function: dict[str, Any]) -> Any:
    return {"name": function["function"]["name"], "input_schema": function["function"]["parameters"]}


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def ask(url: str, *messages: Any, **fields: Any) -> Any:
    """Returns the reply to messages of a user and an assistant in turns."""
    return client(url).messages.create(**asked(*messages), **fields)


def asked(*messages: Any) -> Any:
    turns = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(messages)]
    return {"model": "default", "max_tokens": 4000, "messages": turns}


def result(call: Any, text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call.id, "content": text}


@cells("plain")
def plain(url: str) -> None:
    reply = ask(url, cell.SAYS_HELLO)
    assert [block.text for block in reply.content] == [cell.HELLO]
    assert ask(url, cell.SAYS_HELLO, reply.content, "And?").content[0].text == "And again."
    counted = client(url).messages.count_tokens(model="default", messages=[{"role": "user", "content": "hi"}])
    assert counted.input_tokens > 0


@cells("stream")
def stream(url: str) -> None:
    with client(url).messages.stream(**asked(cell.SAYS_HELLO)) as events:
        deltas = list(events.text_stream)
        (block,) = events.get_final_message().content
    assert "".join(deltas) == getattr(block, "text", None) == cell.HELLO and len(deltas) > 3


@cells("tools")
def tools(url: str) -> None:
    fields = {"tools": [tool(cell.GET_WEATHER)]}
    first = ask(url, cell.ASKS_WEATHER, **fields)
    _, call = first.content
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    then = ask(url, cell.ASKS_WEATHER, first.content, [result(call, cell.WEATHER["Oslo"])], **fields)
    assert then.content[0].text == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    fields = {"tools": [tool(cell.GET_WEATHER)]}
    calls = ask(url, cell.ASKS_BOTH, **fields).content
    assert [call.input["city"] for call in calls] == ["Oslo", "Rome"]
    results = [result(*pair) for pair in zip(calls, cell.WEATHER.values(), strict=True)]
    assert ask(url, cell.ASKS_BOTH, calls, results, **fields).content[0].text == cell.BOTH


@cells("typed result")
def typed_result(url: str) -> None:
    made = client(url).messages.parse(**asked(cell.WRITES_PERSON), output_format=Person)
    assert made.parsed_output == Person(**cell.PERSON)


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    fields: Any = {"tools": [tool(cell.GET_WEATHER)], "output_format": Person}
    calls: Any = client(url).messages.parse(**asked(cell.READS_AND_WRITES_PERSON), **fields).content
    back = asked(cell.READS_AND_WRITES_PERSON, calls, [result(calls[0], cell.WEATHER["Oslo"])])
    assert client(url).messages.parse(**back, **fields).parsed_output == Person(**cell.PERSON)


@cells("reasoning")
def reasoning(url: str) -> None:
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    reply = ask(url, cell.SAYS_HELLO, **fields)
    thinking, text = reply.content
    assert thinking.thinking.strip() == cell.THOUGHT and thinking.signature and text.text == cell.HELLO
    assert ask(url, cell.SAYS_HELLO, reply.content, "And?", **fields).content[-1].text == "And again."


@cells("errors")
def errors(url: str) -> None:
    for kind, fields in ((anthropic.NotFoundError, {"model": "claude-5"}), (anthropic.BadRequestError, {"top_p": 9})):
        try:
            client(url).messages.create(**asked("hi"), extra_body=fields)
        except kind as error:
            assert str(next(iter(fields.values()))) in str(error)
        else:
            raise AssertionError(f"{fields} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    def leave() -> None:
        with client(url).messages.stream(**{**asked(cell.NEVER_ENDS), "max_tokens": 9000}) as events:
            for number, _ in enumerate(events):
                if number == 20:
                    return

    return assert_stops(url, leave)


@cells("long agent")
def long_agent(url: str) -> str:
    """Runs the client's own loop over tools."""
    cache, read = PromptCache(url), list[int]()

    @anthropic.beta_tool
    def read_part(number: int) -> str:
        """Reads a part of the text."""
        cache.turn()
        read.append(number)
        return cell.part(number)

    last: Any = client(url).beta.messages.tool_runner(**asked(cell.works_long()), tools=[read_part]).until_done()
    cache.turn()
    assert read == list(range(cell.STEPS)) and last.content[0].text == cell.FINISHED
    return cache.remark()


if __name__ == "__main__":
    cells.main()
