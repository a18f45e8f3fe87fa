"""Artifacts of the fake server, answered as the real one answers: by the same code, with the same headers."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.api.artifacts import download_of, preview_of
from app.db.artifact_store import clean_name, media_type_of
from app.runs.app_requests import AppAnswer, AppApproval, AppError
from app.runs.events import ToolArtifact, ToolResult
from tools.context import APP_TYPE, AppView

Artifacts = dict[str, dict[str, Any]]  # by id: rows. Any: JSON, and bytes


SHOWN = AppView(
    "clock", "clock", "ui://clock/app.html", {"zone": "Ulm"},
    {"content": [{"type": "text", "text": "12:00"}], "structuredContent": {"hour": 12}},
)  # fmt: skip


def keep(artifacts: Artifacts, name: str, content: str | bytes, app: AppView | None = None) -> ToolArtifact:
    """A file; with `app` the document of an MCP app."""
    data = content.encode() if isinstance(content, str) else content
    plain = clean_name(name)
    version = 1 + sum(each["name"] == plain for each in artifacts.values())
    media_type = media_type_of(plain, data) if app is None else APP_TYPE
    made = ToolArtifact(
        id=f"art_{len(artifacts)}", name=plain, version=version, media_type=media_type, size=len(data)
    )  # fmt: skip
    view = None if app is None else json.dumps(asdict(app))
    artifacts[made.id] = {**made.model_dump(), "created_at": time.time(), "content": data, "app": view}
    return made


def with_files(name: str, text: str, *files: ToolArtifact, call_id: str = "call_1") -> ToolResult:
    """A result of a tool that made files."""
    return ToolResult(
        call_id=call_id, name=name, text=text, truncated=0, untrusted=True, sources=[], ms=12.0, artifacts=list(files)
    )


def app_answer(body: dict[str, Any]) -> AppAnswer:
    """A server with the tools `tick`, and `wind`, which asks first. Any: JSON."""
    method, params = body["method"], body["params"]
    match method, params.get("name", params.get("uri")):
        case "tools/call", "tick":
            return AppAnswer(result={"content": [{"type": "text", "text": "tock"}], "isError": False})
        case "tools/call", "wind" if "decision" not in body:
            preview = f"wind({json.dumps(params.get('arguments'))})"
            reason = "wind asks before it runs: its permission is 'execute'."
            fields: dict[str, Any] = {"reason": reason, "risk": "high", "preview": preview, "arguments_hash": "0" * 64}
            return AppAnswer(approval=AppApproval(name="wind", **fields))
        case "tools/call", "wind" if body["decision"] in ("once", "always"):
            return AppAnswer(result={"content": [{"type": "text", "text": "wound"}], "isError": False})
        case "tools/call", "wind":
            return AppAnswer(error=AppError(code=-32000, message="The person declined this call of wind."))
        case "resources/read", "clock://zones":
            return AppAnswer(result={"contents": [{"uri": "clock://zones", "text": "Bonn, Ulm"}]})
    return AppAnswer(error=AppError(code=-32602, message="The server clock has no such tool that apps may call."))


def artifacts_of(artifacts: Artifacts, asked: list[dict[str, Any]]) -> APIRouter:
    """`asked` gets the requests of apps, as they came."""
    router = APIRouter(prefix="/api")

    @router.get("/chats/{chat_id}/artifacts")
    async def listed(chat_id: str) -> dict[str, Any]:
        hidden = ("content", "app")
        rows = [{name: each[name] for name in each if name not in hidden} for each in artifacts.values()]
        return {"artifacts": rows}

    @router.get("/artifacts/{id}")
    async def download(id: str) -> Response:
        return download_of(artifacts[id]) if id in artifacts else JSONResponse({"error": {}}, 404)

    @router.get("/artifacts/{id}/preview")
    async def preview(id: str, request: Request) -> Response:
        return preview_of(artifacts[id], framed=request.headers.get("sec-fetch-dest") == "iframe")

    @router.get("/artifacts/{id}/app")
    async def app(id: str) -> Any:
        if id not in artifacts:
            return JSONResponse({"error": {}}, 404)
        return json.loads(artifacts[id]["app"]) | {"connected": True}

    @router.post("/artifacts/{id}/app")
    async def ask_server(id: str, request: Request) -> AppAnswer:
        body = await request.json()
        asked.append(body)
        return app_answer(body)

    return router
