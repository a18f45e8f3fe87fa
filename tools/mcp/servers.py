"""All the MCP servers that an operator named, together. The SDK, slow to import, waits for the first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from tools.mcp.mcp_settings import McpSettings
from tools.registry import Registry

if TYPE_CHECKING:
    from tools.mcp.mcp_client import McpServer


@asynccontextmanager
async def mcp_servers(
    settings: Mapping[str, McpSettings],
    registry: Registry,
    environment: Mapping[str, str] | None = None,
    *,
    wait_s: float = 5.0,
) -> AsyncIterator[list[McpServer]]:
    """Their tools are in the registry from when they are reached; those that can't be are its faults.

    `environment` is where `inherit` is looked up. Waits until each was reached or failed, though not above `wait_s`.

    Raises:
        ValueError: a name can't stand before a tool's name.
    """
    if not settings:
        yield []
        return
    from tools.mcp.mcp_client import McpServer

    servers = [McpServer(name, each, registry, environment) for name, each in settings.items()]
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        waiting = [asyncio.create_task(server.reached("connected", "down")) for server in servers]
        try:
            await asyncio.wait(waiting, timeout=wait_s)
        finally:
            for task in waiting:
                task.cancel()
        yield servers
