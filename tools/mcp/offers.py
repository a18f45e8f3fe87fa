"""Converts the tools that an MCP server offers, and the content of their results.

All of it is untrusted. Descriptions are cut and cleaned of invisible characters. Annotations are hints: that a tool
destroys makes it ask first; that it only reads takes it out of the class "execute", where every call asks, yet not out
of the calls that ask once a run has read untrusted text, unless the operator trusts the server's annotations. A result
becomes its text, its JSON value, or a note of content that could not be shown.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from mcp.types import Tool as Offered

from tools.context import Context
from tools.errors import ToolDeclarationError
from tools.mcp.mcp_settings import McpSettings
from tools.options import Approval, Permission
from tools.result import shorten
from tools.schema import JSONSchema
from tools.tool import Tool

MAX_COUNT = 128  # tools of one server: a model confuses more
DESCRIPTION = 1000  # characters
SCHEMA = 16_000  # characters of a tool's parameters as JSON
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]+")
_PATTERNS = frozenset({"pattern", "patternProperties"})

Call = Callable[[str, Context, dict[str, Any]], Awaitable[Any]]  # of the server's tool of this name, with arguments


@dataclass(frozen=True, slots=True)
class Offers:
    """The tools, by the server's own names too, and a sentence for each of those that could not be taken."""

    tools: tuple[Tool, ...]
    refused: tuple[str, ...]
    by_their_name: Mapping[str, Tool]


def tools_of(
    offered: Iterable[Offered], settings: McpSettings, server: str, origin: str, taken: Collection[str], call: Call
) -> Offers:
    """The tools of the server named `server`; `taken` are names that others have."""
    tools, refused, theirs = dict[str, Tool](), list[str](), dict[str, Tool]()
    for each in offered:
        if len(tools) == MAX_COUNT:
            refused.append(f"it offers more than {MAX_COUNT} tools; those after {each.name!r:.80} are left out.")
            break
        name = _name(each.name, server, {*taken, *tools})
        try:
            theirs[each.name] = tools[name] = _tool(each, name, settings, origin, call)
        except ToolDeclarationError as error:
            refused.append(str(error)[:500])
    return Offers(tuple(tools.values()), tuple(refused), theirs)


def _name(theirs: str, server: str, taken: Collection[str]) -> str:
    """Their name with our characters; after the server's where another tool has it, and numbered after that."""
    clean = _NOT_IN_NAMES.sub("_", theirs).strip("_") or "tool"
    long = f"{server}_{clean}"
    tries = [clean[:64], long[:64], *(f"{long[:60]}_{number}" for number in range(2, MAX_COUNT + 2))]
    return next(each for each in tries if each not in taken)


def _tool(each: Offered, name: str, settings: McpSettings, origin: str, call: Call) -> Tool:
    """
    Raises:
        ToolDeclarationError: its schema is too long, or is none.
    """
    theirs = each.name
    size = len(json.dumps(each.input_schema))
    if size > SCHEMA:
        raise ToolDeclarationError(
            f"Tool {name!r} (of {origin}): the schema of its parameters has {size} characters; accepted: {SCHEMA}."
        )
    permission, approval, idempotent = _allowed(each, settings)

    async def run(ctx: Context, arguments: dict[str, Any]) -> Any:
        return await call(theirs, ctx, arguments)

    made = Tool.from_schema(
        name,
        _description(each) or f"The tool {name} of the MCP server {origin.removeprefix('mcp ')}.",
        _without_patterns(each.input_schema),
        run,
        origin=origin,
        permission=permission,
        timeout=settings.timeout_s,
        approval=approval,
        idempotent=idempotent,
        max_chars=settings.max_chars,
    )
    # The model is shown the patterns. Whether arguments fit them the server sees: a pattern of a stranger's could take
    # our event loop's time without end.
    return replace(made, parameters=each.input_schema, foreign=not settings.trust_descriptions)


def _allowed(each: Offered, settings: McpSettings) -> tuple[Permission, Approval | None, bool | None]:
    """Its class, approval and idempotence; None is the default of the class."""
    hints = each.annotations
    reads = hints is not None and hints.read_only_hint is True
    permission: Permission = settings.allowed
    if reads and settings.trust_annotations:
        permission = "read"
    elif reads and settings.permission is None and permission == "execute":
        permission = "network"
    destroys = hints is not None and hints.destructive_hint is True and not reads
    approval: Approval | None = "always" if destroys and settings.approval is None else settings.approval
    again = reads or (hints is not None and hints.idempotent_hint is True)
    return permission, approval, True if again else None


def _description(each: Offered) -> str:
    """Returns its printable characters: others could hide instructions from the person and not from the model."""
    text = each.description or each.title or ""
    return shorten("".join(c for c in text if c.isprintable() or c == "\n").strip(), DESCRIPTION)[0]


def _without_patterns(schema: JSONSchema) -> JSONSchema:
    def walked(node: Any, names: bool = False) -> Any:
        if isinstance(node, list):
            return [walked(each) for each in node]
        if not isinstance(node, dict):
            return node
        # Within "properties", "pattern" is a parameter's name.
        kept = {key: value for key, value in node.items() if names or key not in _PATTERNS}
        return {key: walked(value, not names and key in ("properties", "$defs")) for key, value in kept.items()}

    clean: JSONSchema = walked(schema)
    return clean


def content_of(result: CallToolResult) -> Any:
    """A text, or any JSON value."""
    if result.structured_content is not None and not any(isinstance(each, TextContent) for each in result.content):
        return result.structured_content
    return "\n".join(_shown(each) for each in result.content)


def files_of(result: CallToolResult) -> list[tuple[str, bytes]]:
    """Pictures, recordings and embedded resources of a result, as files with names that say their type."""
    files = list[tuple[str, bytes]]()
    for block in result.content:
        kind, name = "", f"result-{len(files) + 1}"
        match block:
            case ImageContent(data=data, mime_type=kind) | AudioContent(data=data, mime_type=kind):
                content = _decoded(data)
            case EmbeddedResource(resource=resource):
                kind, name = resource.mime_type or "", str(resource.uri).rstrip("/").rpartition("/")[2] or name
                content = resource_bytes(resource)
            case _:
                continue
        if content is not None:
            files.append((_with_end(name, kind), content))
    return files


def resource_bytes(resource: TextResourceContents | BlobResourceContents) -> bytes | None:
    """The content of a resource; None where it is no base64."""
    if isinstance(resource, TextResourceContents):
        return resource.text.encode("utf-8", "replace")
    return _decoded(resource.blob)


def _decoded(data: str) -> bytes | None:
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        return None


def _with_end(name: str, media_type: str) -> str:
    """Returns the name with the end that its media type has, where it has no end."""
    end = mimetypes.guess_extension(media_type.partition(";")[0].strip()) or ""
    return name if re.search(r"\.\w{1,8}$", name) else name + end


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
