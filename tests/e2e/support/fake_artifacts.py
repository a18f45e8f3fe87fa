"""Artifacts of the fake server, answered as the real one answers: by the same code, with the same headers."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.api.artifacts import download_of, preview_of
from app.db.artifact_store import clean_name, media_type_of
from app.runs.events import ToolArtifact, ToolResult

Artifacts = dict[str, dict[str, Any]]  # by id: rows. Any: JSON, and bytes


def keep(artifacts: Artifacts, name: str, content: str | bytes) -> ToolArtifact:
    data = content.encode() if isinstance(content, str) else content
    plain = clean_name(name)
    version = 1 + sum(each["name"] == plain for each in artifacts.values())
    media_type = media_type_of(plain, data)
    made = ToolArtifact(
        id=f"art_{len(artifacts)}", name=plain, version=version, media_type=media_type, size=len(data)
    )  # fmt: skip
    artifacts[made.id] = {**made.model_dump(), "created_at": time.time(), "content": data}
    return made


def with_files(name: str, text: str, *files: ToolArtifact, call_id: str = "call_1") -> ToolResult:
    """A result of a tool that made files."""
    return ToolResult(
        call_id=call_id, name=name, text=text, truncated=0, untrusted=True, sources=[], ms=12.0, artifacts=list(files)
    )


def artifacts_of(artifacts: Artifacts) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.get("/chats/{chat_id}/artifacts")
    async def listed(chat_id: str) -> dict[str, Any]:
        rows = [{name: each[name] for name in each if name != "content"} for each in artifacts.values()]
        return {"artifacts": rows}

    @router.get("/artifacts/{id}")
    async def download(id: str) -> Response:
        return download_of(artifacts[id]) if id in artifacts else JSONResponse({"error": {}}, 404)

    @router.get("/artifacts/{id}/preview")
    async def preview(id: str, request: Request) -> Response:
        return preview_of(artifacts[id], framed=request.headers.get("sec-fetch-dest") == "iframe")

    return router
