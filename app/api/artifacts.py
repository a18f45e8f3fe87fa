"""Routes of artifacts: the files that tools made in a chat, as a list, to download, and to look at in a frame.

An artifact is written by a model or a stranger. Its download is its bytes as they are, which no browser shows. Its
preview is a document of an opaque origin (CSP `sandbox`), even where its address is opened by itself: it has no cookie,
no storage, nothing of the page's, and may fetch nothing. Its scripts run in a frame of the page's own alone.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from app.api.chats import attachment
from app.current_user import AppState, User
from app.errors import ApiError
from app.query_params import ONLY_KNOWN

router = APIRouter(prefix="/api", tags=["Artifacts"], dependencies=[ONLY_KNOWN])

_FRAMED = frozenset({"text/html", "image/svg+xml", "image/png", "image/jpeg", "image/gif", "image/webp"})
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
    is_html = media_type == "text/html"
    scripts = framed and is_html
    sent_type = "text/html; charset=utf-8" if is_html else media_type
    headers = {**_HEADERS, "Content-Security-Policy": _SCRIPTS if scripts else _NO_SCRIPTS, "Content-Type": sent_type}
    return Response(artifact["content"], headers=headers)
