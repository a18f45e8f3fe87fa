"""MCP, both ways: other servers' tools among ours, and ours for other clients."""

from tools.mcp.mcp_settings import McpName, McpSettings
from tools.mcp.servers import mcp_servers

__all__ = ["McpName", "McpSettings", "mcp_servers"]
