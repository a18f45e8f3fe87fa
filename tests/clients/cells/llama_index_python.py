"""LlamaIndex: OpenAILike, OpenAILikeEmbedding, and its function agent."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ThinkingBlock
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops
from tests.clients.script import Turn, play

cells = Cells("LlamaIndex", "llama-index-llms-openai-like")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return cell.WEATHER[city]


def llm(url: str, name: str = "default", **fields: Any) -> OpenAILike:
    return OpenAILike(
        model=name, api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        context_window=60_000, max_retries=0, **fields,
    )  # fmt: skip


def run(url: str, tools: list[Any], text: str, **fields: Any) -> Any:
    async def main() -> Any:
        agent = FunctionAgent(tools=tools, llm=llm(url), streaming=False, **fields)
        return await agent.run(text, max_iterations=30)

    return asyncio.run(main())


@cells("plain")
def plain(url: str) -> None:
    asked = ChatMessage(role="user", content=cell.SAYS_HELLO)
    reply = llm(url).chat([asked])
    assert reply.message.content == cell.HELLO
    again = llm(url).chat([asked, reply.message, ChatMessage(role="user", content="And?")])
    assert again.message.content == "And again."
    assert llm(url).complete(cell.SAYS_HELLO).text == cell.HELLO


@cells("stream")
def stream(url: str) -> None:
    chunks = [chunk.delta for chunk in llm(url).stream_chat([ChatMessage(role="user", content=cell.SAYS_HELLO)])]
    assert "".join(chunks) == cell.HELLO and len(chunks) > 3


@cells("tools")
def tools(url: str) -> None:
    reply = llm(url).chat_with_tools([FunctionTool.from_defaults(get_weather)], user_msg=cell.ASKS_WEATHER)
    (call,) = llm(url).get_tool_calls_from_response(reply)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Oslo"})
    assert str(run(url, [get_weather], cell.ASKS_WEATHER)) == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    reply = llm(url).chat_with_tools(
        [FunctionTool.from_defaults(get_weather)], user_msg=cell.ASKS_BOTH, allow_parallel_tool_calls=True
    )
    assert len(llm(url).get_tool_calls_from_response(reply)) == 2
    assert str(run(url, [get_weather], cell.ASKS_BOTH)) == cell.BOTH


@cells("typed result")
def typed_result(url: str) -> None:
    by_tool = llm(url).as_structured_llm(Person).complete(play(Turn(calls=[("Person", cell.PERSON)])))
    assert by_tool.raw == Person(**cell.PERSON)
    native = llm(url, should_use_structured_outputs=True).as_structured_llm(Person).complete(cell.WRITES_PERSON)
    assert native.raw == Person(**cell.PERSON)


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    """The agent hands its answer to a request of its own, which gives it its form."""
    formed = play(Turn(calls=[("Person", cell.PERSON)]))
    both = play(Turn(calls=[("get_weather", {"city": "Oslo"})]), Turn(formed))
    made = run(url, [get_weather], both, output_cls=Person)
    assert made.get_pydantic_model(Person) == Person(**cell.PERSON)


@cells("reasoning")
def reasoning(url: str) -> None:
    reply = llm(url, reasoning_effort="low").chat([ChatMessage(role="user", content=cell.SAYS_HELLO)])
    thoughts = [block.content for block in reply.message.blocks if isinstance(block, ThinkingBlock)]
    assert reply.message.content == cell.HELLO
    assert [text.strip() for text in thoughts] == [cell.THOUGHT]


@cells("embeddings")
def embeddings(url: str) -> None:
    made = OpenAILikeEmbedding(model_name="default", api_base=f"{url}/v1", api_key="none")
    assert len(made.get_text_embedding_batch(["a", "b"])) == 2 and made.get_query_embedding("a")


@cells("errors")
def errors(url: str) -> None:
    for kind, name, fields in (
        (openai.NotFoundError, "gpt-5", {}), (openai.BadRequestError, "default", {"temperature": 1, "max_tokens": 0}),
    ):  # fmt: skip
        try:
            llm(url, name, additional_kwargs={"top_p": 9} if fields else {}).complete("hi")
        except kind as error:
            assert ("top_p" if fields else name) in str(error)
        else:
            raise AssertionError(f"{name} with {fields} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    """Leaves an asynchronous stream: the synchronous one reads on in a thread of the library's."""

    async def leave() -> None:
        chunks = await llm(url).astream_chat([ChatMessage(role="user", content=cell.NEVER_ENDS)])
        for _ in range(20):
            await anext(chunks)
        await chunks.aclose()

    return assert_stops(url, lambda: asyncio.run(leave()))


@cells("long agent")
def long_agent(url: str) -> str:
    cache = PromptCache(url)

    def read_part(number: int) -> str:
        """Reads a part of the text."""
        cache.turn()
        return cell.part(number)

    assert str(run(url, [read_part], cell.works_long())) == cell.FINISHED
    cache.turn()
    return cache.remark()


if __name__ == "__main__":
    cells.main()
