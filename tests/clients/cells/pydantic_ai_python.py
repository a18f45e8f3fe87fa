"""pydantic-ai, through chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops
from tests.clients.script import Turn, play

cells = Cells("pydantic-ai", "pydantic-ai-slim")


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return cell.WEATHER[city]


def agent(url: str, model: str = "default", **fields: Any) -> Agent[None, Any]:
    return Agent(OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")), **fields)


@cells("plain")
def plain(url: str) -> None:
    first = agent(url).run_sync(cell.SAYS_HELLO)
    assert first.output == cell.HELLO
    assert agent(url).run_sync("And?", message_history=first.all_messages()).output == "And again."


@cells("stream")
def stream(url: str) -> None:
    async def main() -> list[str]:
        async with agent(url).run_stream(cell.SAYS_HELLO) as result:
            return [delta async for delta in result.stream_text(delta=True, debounce_by=None)]

    deltas = asyncio.run(main())
    assert "".join(deltas) == cell.HELLO and len(deltas) > 3


@cells("tools")
def tools(url: str) -> None:
    assert agent(url, tools=[get_weather]).run_sync(cell.ASKS_WEATHER).output == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    result = agent(url, tools=[get_weather]).run_sync(cell.ASKS_BOTH)
    assert result.output == cell.BOTH and result.usage.tool_calls == 2


@cells("typed result")
def typed_result(url: str) -> None:
    """Types by a tool, as pydantic-ai does by itself, and by the answer's form."""
    by_tool = play(Turn(calls=[("final_result", cell.PERSON)]))
    assert agent(url, output_type=ToolOutput(Person)).run_sync(by_tool).output == Person(**cell.PERSON)
    assert agent(url, output_type=NativeOutput(Person)).run_sync(cell.WRITES_PERSON).output == Person(**cell.PERSON)


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    both = play(Turn(calls=[("get_weather", {"city": "Oslo"})]), Turn(calls=[("final_result", cell.PERSON)]))
    assert agent(url, output_type=Person, tools=[get_weather]).run_sync(both).output == Person(**cell.PERSON)
    native = agent(url, output_type=NativeOutput(Person), tools=[get_weather])
    assert native.run_sync(cell.READS_AND_WRITES_PERSON).output == Person(**cell.PERSON)


@cells("reasoning")
def reasoning(url: str) -> None:
    settings = OpenAIChatModelSettings(openai_reasoning_effort="low")
    result = agent(url).run_sync(cell.SAYS_HELLO, model_settings=settings)
    thoughts = [part.content for part in result.new_messages()[-1].parts if isinstance(part, ThinkingPart)]
    assert "".join(thoughts).strip() == cell.THOUGHT and result.output == cell.HELLO


@cells("errors")
def errors(url: str) -> None:
    cases: list[tuple[int, str, ModelSettings]] = [(404, "gpt-5", {}), (400, "default", {"temperature": 9})]
    for status, model, settings in cases:
        try:
            agent(url, model).run_sync("hi", model_settings=settings)
        except ModelHTTPError as error:
            assert error.status_code == status and next(iter(settings), model) in str(error.body)
        else:
            raise AssertionError(f"{model} with {settings} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    async def leave() -> None:
        async with agent(url).run_stream(cell.NEVER_ENDS) as result:
            heard = 0
            async for _ in result.stream_text(delta=True, debounce_by=None):
                heard += 1
                if heard == 20:
                    break

    return assert_stops(url, lambda: asyncio.run(leave()))


@cells("long agent")
def long_agent(url: str) -> str:
    cache = PromptCache(url)

    def read_part(number: int) -> str:
        """Reads a part of the text."""
        cache.turn()
        return cell.part(number)

    result = agent(url, tools=[read_part]).run_sync(cell.works_long())
    cache.turn()
    assert result.output == cell.FINISHED
    return cache.remark()


if __name__ == "__main__":
    cells.main()
