"""LangChain: ChatOpenAI, OpenAIEmbeddings, and an agent of LangGraph's; ChatAnthropic and ChatOllama in short."""

from __future__ import annotations

import itertools
from typing import Any

import openai
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops
from tests.clients.script import Turn, play

cells = Cells("LangChain", "langchain-openai")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return cell.WEATHER[city]


def model(url: str, name: str = "default", **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0, **fields)


def models(url: str) -> list[Any]:
    """Returns a model of each API."""
    theirs = ChatAnthropic(model="default", base_url=url, api_key="none", max_tokens=2000, max_retries=0)
    return [model(url), theirs, ChatOllama(model="default", base_url=url)]


def last(agent: Any, text: str) -> Any:
    return agent.invoke({"messages": [("user", text)]}, {"recursion_limit": 60})["messages"][-1]


@cells("plain")
def plain(url: str) -> None:
    for each in models(url):
        reply = each.invoke(cell.SAYS_HELLO)
        assert reply.content == cell.HELLO and reply.usage_metadata["input_tokens"] > 0
        assert each.invoke([("user", cell.SAYS_HELLO), reply, ("user", "And?")]).content == "And again."


@cells("stream")
def stream(url: str) -> None:
    for each in models(url):
        chunks = [chunk.text for chunk in each.stream(cell.SAYS_HELLO)]
        assert "".join(chunks) == cell.HELLO and len(chunks) > 3


@cells("tools")
def tools(url: str) -> None:
    reply = model(url).bind_tools([get_weather]).invoke(cell.ASKS_WEATHER)
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("get_weather", {"city": "Oslo"})]
    for each in models(url):
        assert last(create_agent(each, [get_weather]), cell.ASKS_WEATHER).content == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    reply = model(url).bind_tools([get_weather]).invoke(cell.ASKS_BOTH)
    assert [call["args"]["city"] for call in reply.tool_calls] == ["Oslo", "Rome"]
    assert last(create_agent(model(url), [get_weather]), cell.ASKS_BOTH).content == cell.BOTH


@cells("typed result")
def typed_result(url: str) -> None:
    """Types by the answer's form, by a tool, and by JSON mode."""
    expected = Person(**cell.PERSON)
    assert model(url).with_structured_output(Person).invoke(cell.WRITES_PERSON) == expected
    by_tool = play(Turn(calls=[("Person", cell.PERSON)]))
    assert model(url).with_structured_output(Person, method="function_calling").invoke(by_tool) == expected
    assert model(url).with_structured_output(Person, method="json_mode").invoke(cell.WRITES_PERSON) == expected


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    both = play(Turn(calls=[("get_weather", {"city": "Oslo"})]), Turn(calls=[("Person", cell.PERSON)]))
    agent = create_agent(model(url), [get_weather], response_format=Person)
    made = agent.invoke({"messages": [("user", both)]})
    assert made["structured_response"] == Person(**cell.PERSON)


@cells("reasoning")
def reasoning(url: str) -> None:
    """Through the Responses API: ChatOpenAI drops `reasoning_content` of chat completions."""
    reply = model(url, use_responses_api=True, reasoning={"effort": "low", "summary": "auto"}).invoke(cell.SAYS_HELLO)
    assert reply.text == cell.HELLO and reply.usage_metadata["output_token_details"]["reasoning"] > 3
    assert any(block["type"] == "reasoning" for block in reply.content_blocks)
    assert model(url, reasoning_effort="low").invoke(cell.SAYS_HELLO).content == cell.HELLO


@cells("embeddings")
def embeddings(url: str) -> None:
    made = OpenAIEmbeddings(
        model="default", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    ).embed_documents(["a", "b"])
    assert len(made) == 2


@cells("errors")
def errors(url: str) -> None:
    for kind, name, fields in (
        (openai.NotFoundError, "gpt-5", {}), (openai.BadRequestError, "default", {"temperature": 9}),
    ):  # fmt: skip
        try:
            model(url, name, **fields).invoke("hi")
        except kind as error:
            assert next(iter(fields), name) in str(error)
        else:
            raise AssertionError(f"{name} with {fields} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    def leave() -> None:
        stream = model(url).stream(cell.NEVER_ENDS)
        list(itertools.islice(stream, 20))
        stream.close()

    return assert_stops(url, leave)


@cells("long agent")
def long_agent(url: str) -> str:
    cache = PromptCache(url)

    def read_part(number: int) -> str:
        """Reads a part of the text."""
        cache.turn()
        return cell.part(number)

    assert last(create_agent(model(url), [read_part]), cell.works_long()).content == cell.FINISHED
    cache.turn()
    return cache.remark()


if __name__ == "__main__":
    cells.main()
