"""Routes of artifacts: the files that tools made in a chat, as a list, to download, and to look at in a frame; and of
MCP apps, artifacts whose frame may ask its own server through the page.

An artifact is written by a model or a stranger. Its download is its bytes as they are, which no browser shows. Its
preview is a document of an opaque origin (CSP `sandbox`), even where its address is opened by itself: it has no cookie,
no storage, nothing of the page's, and may fetch nothing. Its scripts run in a frame of the page's own alone.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.chats import attachment
from app.current_user import AppState, Asker, User, check_scope
from app.errors import ApiError, invalid
from app.query_params import ONLY_KNOWN
from app.request_body import JsonBody
from app.runs.app_requests import AppAnswer, AppRequest, Method, answer_app
from tools.call_policy import Decision
from tools.context import APP_TYPE

router = APIRouter(prefix="/api", tags=["Artifacts"], dependencies=[ONLY_KNOWN])

_FRAMED = frozenset({"text/html", APP_TYPE, "image/svg+xml", "image/png", "image/jpeg", "image/gif", "image/webp"})
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; media-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_SCRIPTS = f"sandbox allow-scripts; script-src 'unsafe-inline'; {_POLICY}"
_NO_SCRIPTS = f"sandbox; {_POLICY}"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",
    # What CSP leaves open in Chromium: WebRTC, and connections before a navigation that is then refused.
    "Connection-Allowlist": "()",
    "Cache-Control": "private, no-cache",
}


class ArtifactShown(BaseModel):
    """One version of an artifact. `size`: bytes."""

    id: str
    chat_id: str
    run_id: str
    call_id: str
    name: str
    version: int
    media_type: str
    size: int
    created_at: float


class ArtifactsShown(BaseModel):
    """All versions, the oldest first."""

    artifacts: list[ArtifactShown]


@router.get("/chats/{chat_id}/artifacts")
async def list_artifacts(user: User, state: AppState, chat_id: str) -> ArtifactsShown:
    found = await state.store.artifacts.of(user, chat_id)
    return ArtifactsShown(artifacts=[ArtifactShown(**each) for each in found])


@router.get("/artifacts/{artifact_id}")
async def download_artifact(user: User, state: AppState, artifact_id: str) -> Response:
    """The bytes as the tool made them, as a file."""
    return download_of(await state.store.artifacts.get(user, artifact_id))


@router.get("/artifacts/{artifact_id}/preview")
async def preview_artifact(request: Request, user: User, state: AppState, artifact_id: str) -> Response:
    """A document for a frame, of HTML, SVG and pictures."""
    artifact = await state.store.artifacts.get(user, artifact_id)
    return preview_of(artifact, framed=request.headers.get("sec-fetch-dest") == "iframe")


class AppShown(BaseModel):
    """The call that an MCP app's document shows, of `tool` of `server`. `result`: a `CallToolResult`. `domains` and
    `permissions` are asked for by the app, and not granted. `connected`: whether its server answers now."""

    server: str
    tool: str
    uri: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    domains: list[str]
    permissions: list[str]
    connected: bool


class AppRequestBody(BaseModel):
    """The body of `POST /api/artifacts/{id}/app`: a request of the app's frame, as JSON-RPC has it."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    method: Method = Field(description='"tools/call" or "resources/read"')
    params: dict[str, Any] = Field(description='{"name", "arguments"?} or {"uri"}')
    decision: Literal["once", "no", "always", "never"] | None = Field(
        None, description='"once", "no", "always" or "never", where an approval was asked for'
    )
    scope: Literal["arguments", "tool"] = Field(
        "arguments", description='"arguments" (exactly this call) or "tool" (any call of it)'
    )
    arguments_hash: str | None = Field(None, max_length=64, description="of the approval that decision answers")

    def decided(self) -> Decision | None:
        """
        Raises:
            ApiError: one of decision and arguments_hash is missing, or the scope is of nothing that is remembered.
        """
        if (self.decision is None) != (self.arguments_hash is None):
            missing = "decision" if self.decision is None else "arguments_hash"
            raise invalid(missing, f"{missing} is missing; accepted: decision and arguments_hash, or neither.")
        if self.decision is None or self.arguments_hash is None:
            return None
        try:
            return Decision(self.decision, self.arguments_hash, self.scope)
        except ValueError as error:
            raise invalid("decision", str(error)) from None


AppBody = Annotated[AppRequestBody, Depends(JsonBody(AppRequestBody))]


@router.get("/artifacts/{artifact_id}/app")
async def show_app(user: User, state: AppState, artifact_id: str) -> AppShown:
    """An MCP app: the call that it shows."""
    artifact = _app_of(await state.store.artifacts.get(user, artifact_id))
    app = json.loads(artifact["app"])
    server = state.tool_service.mcp_servers.get(app["server"])
    return AppShown(**app, connected=server is not None and server.status == "connected")


@router.post("/artifacts/{artifact_id}/app")
async def ask_app_server(user: User, who: Asker, state: AppState, artifact_id: str, given: AppBody) -> AppAnswer:
    """A request of an app to its own server: `tools/call` or `resources/read`."""
    artifact = _app_of(await state.store.artifacts.get(user, artifact_id))
    check_scope(who, "tools")
    request = AppRequest(given.method, given.params, given.decided())
    return await answer_app(artifact, user, request, state.tool_service)


def _app_of(artifact: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        ApiError: 404, the artifact is no app.
    """
    if artifact["app"] is None:
        raise ApiError(404, f"{artifact['name']!r:.150} is no MCP app.", code="no_app")
    return artifact


def download_of(artifact: dict[str, Any]) -> Response:
    """Any: a row of the artifact with its content."""
    name = artifact["name"]
    media_type = artifact["media_type"] + ("; charset=utf-8" if artifact["media_type"].startswith("text/") else "")
    headers = {**_HEADERS, **attachment(name, "file"), "Content-Security-Policy": "default-src 'none'; sandbox"}
    return Response(artifact["content"], headers={**headers, "Content-Type": media_type})


def preview_of(artifact: dict[str, Any], *, framed: bool) -> Response:
    """The document; `framed`: the browser says that it goes into a frame, where its scripts may run.

    Raises:
        ApiError: 404, it is of a type that no frame shows.
    """
    media_type = artifact["media_type"]
    if media_type not in _FRAMED:
        message = f"{artifact['name']!r:.150} is {media_type}, which has no preview; accepted: HTML, SVG and pictures."
        raise ApiError(404, message, code="no_preview")
    is_html = media_type in ("text/html", APP_TYPE)
    scripts = framed and is_html
    sent_type = "text/html; charset=utf-8" if is_html else media_type
    headers = {**_HEADERS, "Content-Security-Policy": _SCRIPTS if scripts else _NO_SCRIPTS, "Content-Type": sent_type}
    return Response(artifact["content"], headers=headers)
