"""Agents that others wrote, through the Responses API: they call their tools and ours, and end with the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    HostedMCPTool,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    TResponseInputItem,
    function_tool,
)
from agents.items import ToolCallItem
from openai.types.responses import ResponseTextDeltaEvent
from openai.types.responses.response_output_item import McpCall
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.app.conftest import Server
from tests.app.runs.test_tool_runs import CALCULATOR, http, plugin, there

__all__ = ["http", "plugin"]  # fixtures

pytestmark = pytest.mark.usefixtures("nothing_lost_by_pebble")

QUESTION = "What is 23 * 17?"
QUIET = RunConfig(tracing_disabled=True)  # traces would be sent away
GREEDY = ModelSettings(temperature=0)


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def with_client(server: Server, work: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with client_of(server) as client:
            await work(client)

    asyncio.run(main())


def calculating(client: openai.AsyncOpenAI, asked: list[str]) -> Agent[None]:
    @function_tool
    def calculator(expression: str) -> str:
        """Work out an arithmetic expression."""
        asked.append(expression)
        return str({"23 * 17": 391, "40 * 2": 80}[expression])

    model = OpenAIResponsesModel(model="default", openai_client=client)
    return Agent(name="Adder", tools=[calculator], model=model, model_settings=GREEDY)


def test_an_agent_of_openai_agents_calls_its_function(pebble: Server) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        asked: list[str] = []
        agent = calculating(client, asked)
        first = await Runner.run(agent, QUESTION, run_config=QUIET)
        assert asked == ["23 * 17"] and "391" in first.final_output
        again: list[TResponseInputItem] = [*first.to_input_list(), {"role": "user", "content": "What is 40 * 2?"}]
        second = await Runner.run(agent, again, run_config=QUIET)
        assert asked[1:] == ["40 * 2"] and "80" in second.final_output

    with_client(pebble, work)


def test_a_streamed_agent_of_openai_agents_hears_the_answer_grow(pebble: Server) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        asked: list[str] = []
        run = Runner.run_streamed(calculating(client, asked), QUESTION, run_config=QUIET)
        heard = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]
        assert asked == ["23 * 17"] and "391" in "".join(heard) == run.final_output

    with_client(pebble, work)


def test_an_agent_of_openai_agents_has_the_servers_tools(pebble: Server, plugin: Any) -> None:
    plugin(CALCULATOR, there)

    async def work(client: openai.AsyncOpenAI) -> None:
        ours = HostedMCPTool(
            tool_config={
                "type": "mcp", "server_label": "ponder", "allowed_tools": ["calculate"], "require_approval": "never",
            }
        )  # fmt: skip
        model = OpenAIResponsesModel(model="default", openai_client=client)
        agent = Agent[None](name="Adder", tools=[ours], model=model, model_settings=GREEDY)
        run = await Runner.run(agent, QUESTION, run_config=QUIET)
        calls = [item.raw_item for item in run.new_items if isinstance(item, ToolCallItem)]
        assert [call.output for call in calls if isinstance(call, McpCall)] == ["391"]
        assert "391" in run.final_output
        after: list[TResponseInputItem] = [*run.to_input_list(), {"role": "user", "content": "What is 40 * 2?"}]
        assert "80" in (await Runner.run(agent, after, run_config=QUIET)).final_output

    with_client(pebble, work)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_agent_of_pydantic_ai_calls_its_function(pebble: Server, streamed: bool) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        asked: list[str] = []
        model = PydanticModel("default", provider=OpenAIProvider(openai_client=client))
        agent = PydanticAgent(model, model_settings={"temperature": 0})

        @agent.tool_plain
        def calculator(expression: str) -> str:
            """Work out an arithmetic expression."""
            asked.append(expression)
            return "391"

        if streamed:
            async with agent.run_stream(QUESTION) as run:
                answer = await run.get_output()
        else:
            answer = (await agent.run(QUESTION)).output
        assert asked == ["23 * 17"] and "391" in answer

    with_client(pebble, work)
