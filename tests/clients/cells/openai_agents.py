"""OpenAI's agent framework, through the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
from openai.types.responses import ResponseTextDeltaEvent
from openai.types.shared import Reasoning
from pydantic import BaseModel

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops

cells = Cells("openai-agents", "openai-agents")
QUIET = agents.RunConfig(tracing_disabled=True)  # traces would be sent away


class Person(BaseModel):
    name: str
    age: int


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return cell.WEATHER[city]


def agent(url: str, model: str = "default", **fields: Any) -> agents.Agent[None]:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return agents.Agent(name="a", model=agents.OpenAIResponsesModel(model, client), **fields)


def run(asked: agents.Agent[None], text: Any) -> Any:
    return asyncio.run(agents.Runner.run(asked, text, run_config=QUIET, max_turns=20))


async def streamed(asked: agents.Agent[None], text: str, most: int) -> tuple[list[str], Any]:
    """Returns the text as it comes, `most` pieces at most, and the result; leaves after those."""
    result = agents.Runner.run_streamed(asked, text, run_config=QUIET)
    heard: list[str] = []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            heard.append(event.data.delta)
            if len(heard) == most:
                result.cancel()
    return heard, result.final_output


@cells("plain")
def plain(url: str) -> None:
    first = run(agent(url), cell.SAYS_HELLO)
    assert first.final_output == cell.HELLO
    again = run(agent(url), [*first.to_input_list(), {"role": "user", "content": "And?"}])
    assert again.final_output == "And again."


@cells("stream")
def stream(url: str) -> None:
    deltas, whole = asyncio.run(streamed(agent(url), cell.SAYS_HELLO, 1000))
    assert "".join(deltas) == whole == cell.HELLO and len(deltas) > 3


@cells("tools")
def tools(url: str) -> None:
    assert run(agent(url, tools=[get_weather]), cell.ASKS_WEATHER).final_output == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    result = run(agent(url, tools=[get_weather]), cell.ASKS_BOTH)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == list(cell.WEATHER.values()) and result.final_output == cell.BOTH


@cells("typed result")
def typed_result(url: str) -> None:
    assert run(agent(url, output_type=Person), cell.WRITES_PERSON).final_output == Person(**cell.PERSON)


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    asked = agent(url, output_type=Person, tools=[get_weather])
    assert run(asked, cell.READS_AND_WRITES_PERSON).final_output == Person(**cell.PERSON)


@cells("reasoning")
def reasoning(url: str) -> None:
    settings = agents.ModelSettings(reasoning=Reasoning(effort="low", summary="auto"))
    result = run(agent(url, model_settings=settings), cell.SAYS_HELLO)
    (item,) = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    assert item.content[0].text.strip() == cell.THOUGHT and result.final_output == cell.HELLO


@cells("errors")
def errors(url: str) -> None:
    for kind, word, asked in (
        (openai.NotFoundError, "gpt-5", agent(url, "gpt-5")),
        (openai.BadRequestError, "9", agent(url, model_settings=agents.ModelSettings(temperature=9))),
    ):
        try:
            run(asked, "hi")
        except kind as error:
            assert word in str(error)
        else:
            raise AssertionError(f"{word} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    return assert_stops(url, lambda: asyncio.run(streamed(agent(url), cell.NEVER_ENDS, 20)))


@cells("long agent")
def long_agent(url: str) -> str:
    cache = PromptCache(url)

    @agents.function_tool
    def read_part(number: int) -> str:
        """Reads a part of the text."""
        cache.turn()
        return cell.part(number)

    result = run(agent(url, tools=[read_part]), cell.works_long())
    cache.turn()
    assert result.final_output == cell.FINISHED
    return cache.remark()


if __name__ == "__main__":
    cells.main()
