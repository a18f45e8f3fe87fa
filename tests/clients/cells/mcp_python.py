"""The MCP SDK's client at `/mcp`, where the server's own tools are, in both protocols."""

from __future__ import annotations

import asyncio
from typing import Any

from mcp import Client

from tests.clients.cell import Cells

cells = Cells("mcp (Python)", "mcp")


def call(url: str, *calls: tuple[str, dict[str, Any]]) -> None:
    """Makes the calls at once, and asserts what the calculator says."""

    async def main(mode: Any) -> None:
        async with Client(f"{url}/mcp", mode=mode) as client:
            results = await asyncio.gather(*(client.call_tool(name, arguments) for name, arguments in calls))
        assert [getattr(result.content[0], "text", None) for result in results] == ["0.3"] * len(calls)

    for mode in ("legacy", "auto"):
        asyncio.run(main(mode))


@cells("plain")
def plain(url: str) -> None:
    async def main() -> None:
        async with Client(f"{url}/mcp") as client:
            assert "calculator" in {tool.name for tool in (await client.list_tools()).tools}

    asyncio.run(main())


@cells("tools")
def tools(url: str) -> None:
    call(url, ("calculator", {"expression": "0.1 + 0.2"}))


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    call(url, *[("calculator", {"expression": "0.1 + 0.2"})] * 3)


@cells("errors")
def errors(url: str) -> None:
    async def main() -> None:
        async with Client(f"{url}/mcp") as client:
            for name, word in (("calculater", "calculator"), ("calculator", "expression")):
                result = await client.call_tool(name, {})
                assert result.is_error and word in getattr(result.content[0], "text", "")

    asyncio.run(main())


if __name__ == "__main__":
    cells.main()
