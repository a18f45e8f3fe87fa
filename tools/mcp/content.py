"""An MCP tool's result as what a model reads: its text, or its value, or what could not be shown."""

from __future__ import annotations

from typing import Any

from mcp.types import (
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)


def content_of(result: CallToolResult) -> Any:
    """A text, or any JSON value."""
    if result.structured_content is not None and not any(isinstance(each, TextContent) for each in result.content):
        return result.structured_content
    return "\n".join(_shown(each) for each in result.content)


def _shown(block: ContentBlock) -> str:
    match block:
        case TextContent(text=text):
            return text
        case ImageContent(data=data, mime_type=kind) | AudioContent(data=data, mime_type=kind):
            return f"[{kind}, {len(data) * 3 // 4} bytes: not shown]"
        case ResourceLink(name=name, uri=uri):
            return f"[{name}: {uri}]"
        case EmbeddedResource(resource=TextResourceContents(text=text)):
            return text
        case EmbeddedResource(resource=resource):
            return f"[{resource.uri}: not shown]"
