"""MCP Apps (SEP-1865): documents that a server's tools are shown by, and the tools that they may call.

A tool names its document by `_meta.ui.resourceUri`, a `ui://` resource. All of it is by strangers: no address and no
permission that a document asks for is granted here, they are only told. Knows nothing of frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from mcp.client.extension import ClientExtension, advertise
from mcp.server.apps import EXTENSION_ID, ResourceCsp, ResourcePermissions, Visibility
from mcp.types import ReadResourceResult
from mcp.types import Tool as Offered
from pydantic import BaseModel, ValidationError

from tools.context import APP_TYPE
from tools.errors import ToolDeclarationError, ToolError
from tools.mcp.offers import resource_bytes
from tools.result import shorten

MAX_URI = 2048  # characters
MAX_DOMAINS = 32  # that are told
_FLAT_KEY = "ui/resourceUri"  # of drafts of the extension
_SEES: frozenset[str] = frozenset(get_args(Visibility))


def extension() -> ClientExtension:
    """The capability that a client shows apps, by which servers decide whether to offer them."""
    return advertise(EXTENSION_ID, {"mimeTypes": [APP_TYPE]})


@dataclass(frozen=True, slots=True)
class AppLinks:
    """The apps of a server's tools, by the server's own names of them.

    `uris`: of the documents that show results. `hidden` are tools that no model is offered, `callable` those that apps
    may call. `refused` is a sentence for each tool with metadata of a wrong form: neither is offered it.
    """

    uris: Mapping[str, str]
    hidden: frozenset[str]
    callable: frozenset[str]
    refused: tuple[str, ...]


def links_of(offered: Iterable[Offered]) -> AppLinks:
    uris, hidden, callable_, refused = dict[str, str](), set[str](), set[str](), list[str]()
    for tool in offered:
        try:
            sees, uri = _visibility(tool), _uri(tool)
        except ToolDeclarationError as error:
            refused.append(str(error))
            hidden.add(tool.name)
            continue
        if uri is not None:
            uris[tool.name] = uri
        if "model" not in sees:
            hidden.add(tool.name)
        if "app" in sees:
            callable_.add(tool.name)
    return AppLinks(uris, frozenset(hidden), frozenset(callable_), tuple(refused))


def document_of(read: ReadResourceResult, uri: str) -> tuple[bytes, tuple[str, ...], tuple[str, ...]]:
    """Returns an app's HTML, the addresses that it asks to reach, and the browser's permissions that it asks for.

    Raises:
        ToolError: it is no document of an app.
    """
    found = next((each for each in read.contents if str(each.uri) == uri), None)
    if found is None:
        raise ToolError(f"the server does not send {uri!r:.80}.")
    kind = (found.mime_type or "").replace(" ", "").lower()
    if kind != APP_TYPE:
        raise ToolError(f"it is {found.mime_type!r:.80}; accepted: {APP_TYPE}.")
    content = resource_bytes(found)
    try:
        if content is None or not content.decode().strip():
            raise ValueError
    except ValueError:
        raise ToolError("it is empty, or no text in UTF-8.") from None
    ui = _ui(found.meta)
    csp = _parsed(ResourceCsp, ui.get("csp"))
    domains = dict.fromkeys(each for field in csp.values() for each in field)
    return content, tuple(_plain(domains)), tuple(_parsed(ResourcePermissions, ui.get("permissions")))


def file_name(uri: str) -> str:
    """Returns the name under which a document is kept: the last part of its address, as HTML."""
    last = uri.removeprefix("ui://").partition("?")[0].rstrip("/").rpartition("/")[2] or "app"
    return last if last.endswith((".html", ".htm")) else f"{last}.html"


def _ui(meta: Mapping[str, Any] | None) -> Mapping[str, Any]:
    said = (meta or {}).get("ui")
    return said if isinstance(said, Mapping) else {}


def _parsed(model: type[BaseModel], said: object) -> dict[str, Any]:
    """
    Raises:
        ToolError: it is not of the model's form.
    """
    try:
        return {} if said is None else model.model_validate(said).model_dump(by_alias=True, exclude_none=True)
    except ValidationError as error:
        raise ToolError(f"its _meta.ui has a wrong form: {error.errors()[0]['msg']}.") from None


def _plain(texts: Iterable[str]) -> list[str]:
    """Returns the texts without characters that do not show, cut, and no more than a person reads."""
    clean = (shorten("".join(c for c in each if c.isprintable()), 200)[0] for each in texts)
    return [each for each, _ in zip(clean, range(MAX_DOMAINS), strict=False)]


def _visibility(offered: Offered) -> frozenset[str]:
    """Returns who may call the tool: "model", "app", or both, which is the default.

    Raises:
        ToolDeclarationError: it says something else.
    """
    said = _ui(offered.meta).get("visibility")
    if said is None:
        return _SEES
    if not isinstance(said, list) or not said or not all(isinstance(each, str) and each in _SEES for each in said):
        raise ToolDeclarationError(
            f"Tool {offered.name!r:.80}: _meta.ui.visibility is {said!r:.80}; accepted: a list of 'model' and 'app'."
        )
    return frozenset(said)


def _uri(offered: Offered) -> str | None:
    """Returns the address of the document that shows the tool's results; None where it has none.

    Raises:
        ToolDeclarationError: it is no address of a document.
    """
    said = _ui(offered.meta).get("resourceUri", (offered.meta or {}).get(_FLAT_KEY))
    if said is None:
        return None
    if not isinstance(said, str) or not said.startswith("ui://") or len(said) > MAX_URI:
        raise ToolDeclarationError(
            f"Tool {offered.name!r:.80}: its app is at {said!r:.80}; accepted: ui:// and up to {MAX_URI} characters."
        )
    return said
