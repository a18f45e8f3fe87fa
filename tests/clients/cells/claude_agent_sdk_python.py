"""Claude's agent SDK for Python, whose package carries Claude Code. Tools are functions of an MCP server inside, which
Claude Code loads late: the model searches for them first, with its tool `ToolSearch`."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import claude_agent_sdk as sdk

from tests.clients import cell
from tests.clients.cell import Cells, assert_stops
from tests.clients.script import Turn, play

cells = Cells("claude-agent-sdk", "claude-agent-sdk")
ENVIRONMENT = {
    "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "default", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "default",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
}  # fmt: skip


async def get_weather(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": cell.WEATHER[arguments["city"]]}]}


async def read_part(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": cell.part(arguments["number"])}]}


def options(url: str, home: str, **fields: Any) -> Any:
    weather = sdk.tool("get_weather", "The weather of a city.", {"city": str})(get_weather)
    part = sdk.tool("read_part", "Reads a part of the text.", {"number": int})(read_part)
    tools = sdk.create_sdk_mcp_server("ours", tools=[weather, part])
    return sdk.ClaudeAgentOptions(
        cwd=home, env={**ENVIRONMENT, "ANTHROPIC_BASE_URL": url, "HOME": home}, mcp_servers={"ours": tools},
        allowed_tools=["mcp__ours__get_weather", "mcp__ours__read_part"], **fields,
    )  # fmt: skip


def run(url: str, text: str, **fields: Any) -> list[Any]:
    async def main() -> list[Any]:
        with tempfile.TemporaryDirectory() as home:
            return [message async for message in sdk.query(prompt=text, options=options(url, home, **fields))]

    return asyncio.run(main())


def blocks(messages: list[Any], kind: type) -> list[Any]:
    contents = [message.content for message in messages if isinstance(message, sdk.AssistantMessage | sdk.UserMessage)]
    return [block for content in contents if isinstance(content, list) for block in content if isinstance(block, kind)]


def calls(*arguments: tuple[str, dict[str, Any]]) -> Turn:
    return Turn(calls=[(f"mcp__ours__{name}", given) for name, given in arguments])


SEARCH = Turn(calls=[("ToolSearch", {"query": "select:mcp__ours__get_weather,mcp__ours__read_part"})])


@cells("plain")
def plain(url: str) -> None:
    messages = run(url, cell.SAYS_HELLO)
    assert messages[-1].result == cell.HELLO and not messages[-1].is_error


@cells("stream")
def stream(url: str) -> None:
    messages = run(url, cell.SAYS_HELLO, include_partial_messages=True)
    deltas = [message.event.get("delta", {}) for message in messages if isinstance(message, sdk.types.StreamEvent)]
    texts = [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]
    assert "".join(texts) == cell.HELLO and len(texts) > 3


@cells("tools")
def tools(url: str) -> None:
    messages = run(url, play(SEARCH, calls(("get_weather", {"city": "Oslo"})), Turn(cell.SUMMARY)))
    _, result = blocks(messages, sdk.ToolResultBlock)
    assert cell.WEATHER["Oslo"] in str(result.content) and messages[-1].result == cell.SUMMARY


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    both = calls(("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"}))
    messages = run(url, play(SEARCH, both, Turn(cell.BOTH)))
    results = [str(result.content) for result in blocks(messages, sdk.ToolResultBlock)[1:]]
    assert ["12 degrees" in results[0], "30 degrees" in results[1]] == [True, True]
    assert messages[-1].result == cell.BOTH


@cells("typed result")
def typed_result(url: str) -> None:
    """Claude Code makes the form a tool of its own, `StructuredOutput`."""
    kinds = {"name": {"type": "string"}, "age": {"type": "integer"}}
    form = {"type": "json_schema", "schema": {"type": "object", "properties": kinds, "required": [*kinds]}}
    script = play(Turn(calls=[("StructuredOutput", cell.PERSON)]))
    assert run(url, script, output_format=form)[-1].structured_output == cell.PERSON


@cells("typed result + tools")
def typed_result_and_tools(url: str) -> None:
    kinds = {"name": {"type": "string"}, "age": {"type": "integer"}}
    form = {"type": "json_schema", "schema": {"type": "object", "properties": kinds, "required": [*kinds]}}
    script = play(SEARCH, calls(("get_weather", {"city": "Oslo"})), Turn(calls=[("StructuredOutput", cell.PERSON)]))
    messages = run(url, script, output_format=form)
    assert messages[-1].structured_output == cell.PERSON and len(blocks(messages, sdk.ToolResultBlock)) == 3


@cells("reasoning")
def reasoning(url: str) -> None:
    messages = run(url, cell.SAYS_HELLO, max_thinking_tokens=2000)
    assert [block.thinking.strip() for block in blocks(messages, sdk.ThinkingBlock)] == [cell.THOUGHT]
    assert messages[-1].result == cell.HELLO


@cells("errors")
def errors(url: str) -> None:
    try:
        run(url, cell.SAYS_HELLO, model="claude-5")
    except Exception as error:  # of a class without a name of its own
        assert "claude-5" in str(error)
    else:
        raise AssertionError("claude-5 was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    async def leave() -> None:
        with tempfile.TemporaryDirectory() as home:
            before = cell.counters(url)["generation_tokens_total"]
            async with sdk.ClaudeSDKClient(options(url, home)) as client:
                await client.query(cell.NEVER_ENDS)
                while cell.counters(url)["generation_tokens_total"] < before + 50:
                    await asyncio.sleep(0.01)
                await client.interrupt()
                async for _ in client.receive_response():
                    pass

    return assert_stops(url, lambda: asyncio.run(leave()))


@cells("long agent")
def long_agent(url: str) -> str:
    steps = [calls(("read_part", {"number": number})) for number in range(cell.STEPS)]
    messages = run(url, play(SEARCH, *steps, Turn(cell.FINISHED)))
    assert messages[-1].result == cell.FINISHED and len(blocks(messages, sdk.ToolResultBlock)) == cell.STEPS + 1
    usages = {m.message_id: m.usage for m in messages if isinstance(m, sdk.AssistantMessage)}
    names = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
    return cell.cached([usage[names[0]] / sum(usage[name] for name in names) for usage in usages.values()][1:])


if __name__ == "__main__":
    cells.main()
