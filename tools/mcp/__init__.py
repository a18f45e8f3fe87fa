"""MCP, both ways: other servers' tools among ours, and ours for other clients."""

from tools.mcp.mcp_client import mcp_servers
from tools.mcp.mcp_settings import McpName, McpSettings

__all__ = ["McpName", "McpSettings", "mcp_servers"]
