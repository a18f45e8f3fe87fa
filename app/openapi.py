"""Completes `/openapi.json` for each route: its body, its parameters, and every status that it may answer with.

Routes take bodies and parameters by `JsonBody` and `QueryParams`, so a refusal is in one shape and names the field.
Here their models are put into the document. A test sends the server requests that the document allows, and others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel

from app.errors import is_anthropic, is_ollama
from app.query_params import QueryParams
from app.request_body import JsonBody

Json = dict[str, Any]  # Any: a JSON schema is JSON

_JSON, _EVENTS = "application/json", "text/event-stream"
_TYPES: dict[str, tuple[str, ...]] = {  # where it is not JSON
    "POST /v1/chat/completions": (_JSON, _EVENTS),
    "POST /v1/completions": (_JSON, _EVENTS),
    "POST /v1/responses": (_JSON, _EVENTS),
    "POST /v1/messages": (_JSON, _EVENTS),
    "POST /v1/audio/transcriptions": (_JSON, "text/plain", _EVENTS),
    "POST /v1/audio/translations": (_JSON, "text/plain"),
    "POST /v1/audio/speech": ("audio/*", _EVENTS),
    "POST /api/chat": ("application/x-ndjson", _JSON),
    "POST /api/generate": ("application/x-ndjson", _JSON),
    "POST /api/sequences/{sequence_id}/generate": (_EVENTS,),
    "POST /api/diffusion": (_EVENTS,),
    "GET /api/runs/{run_id}/events": (_EVENTS,),
    "GET /api/runs/{run_id}/trace": ("application/x-ndjson",),
    "GET /api/chats/{chat_id}/export": (_JSON, "text/html", "text/markdown"),
    "GET /api/documents/{document_id}/file": ("*/*",),
    "GET /api/documents/{document_id}/pages/{page}": ("image/png",),
    "GET /metrics": ("text/plain",),
}

ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR: Json = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "additionalProperties": False,
            "properties": {"type": {"type": "string"}, "message": {"type": "string", "minLength": 1}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}
OLLAMA_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {"error": {"type": "string", "minLength": 1}},
}


def install(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Makes the document of `app`'s `routers` complete."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, routers)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI's documentation has it


def methods_at(app: FastAPI, path: str) -> list[str]:
    """The methods that the document knows at an address; none where it knows no such address."""
    fitting = [each for each in app.openapi()["paths"] if _pattern(each).fullmatch(path)]
    if not fitting:
        return []
    found = app.openapi()["paths"][min(fitting, key=lambda each: each.count("{"))]  # a name before any id
    return sorted(method.upper() for method in found)


@cache
def _pattern(path: str) -> re.Pattern[str]:
    """Of an address with ids; a name of a model may have slashes."""
    return re.compile(
        "".join(
            part if not part.startswith("{") else "(.+)" if part == "{name}" else "([^/]+)"
            for part in re.split(r"(\{\w+\})", path)
        )
    )


def models_of(routers: Sequence[APIRouter], kind: type[JsonBody[Any]] | type[QueryParams[Any]]) -> dict[str, Any]:
    """The models that routes take by a dependency of this kind, by method and path."""
    return {
        f"{method} {route.path}": dependency.call.model
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        for dependency in route.dependant.dependencies
        if isinstance(dependency.call, kind)
        for method in route.methods or ()
    }


def _document(app: FastAPI, routers: Sequence[APIRouter]) -> Json:
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies, queries = models_of(routers, JsonBody), models_of(routers, QueryParams)
    schemas: Json = {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR, "OllamaError": OLLAMA_ERROR}
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {path}"
            operation["responses"] = _responses(route, operation["responses"])
            if (model := bodies.get(route)) is not None:
                content = {_JSON: {"schema": _body(model, schemas)}}
                required = any(field.is_required() for field in model.model_fields.values())
                operation["requestBody"] = {"required": required, "content": content}
            if (query := queries.get(route)) is not None:
                operation["parameters"] = [*operation.get("parameters", ()), *_parameters(query)]
    kept = made.get("components", {}).get("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # which no route answers with
        kept.pop(name, None)
    made["components"] = {"schemas": {**kept, **schemas}}
    return made


def _responses(route: str, typed: Json) -> Json:
    """Success as the route's types say it, if they do, and refusals in the one shape."""
    made: Json = {}
    for status in (int(each) for each in typed if each != "422"):
        known = typed.get(str(status), {}).get("content", {}).get(_JSON, {}).get("schema") or {}
        types = () if status == 204 else _TYPES.get(route, (_JSON,))
        content = {kind: {"schema": known if kind == _JSON else {}} for kind in types}
        made[str(status)] = {"description": "As asked for.", **({"content": content} if content else {})}
    path = route.split()[1]
    error = "AnthropicError" if is_anthropic(path) else "OllamaError" if is_ollama(path) else "Error"
    refusal = {_JSON: {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    made["4XX"] = {"description": "Refused; the message says why, and what is accepted.", "content": refusal}
    for status, why in ((503, "Not now."), (507, "The disk is full, or cannot be written to.")):
        made[str(status)] = {"description": why, "content": refusal}
    if route == "GET /health":
        made["503"] = {"description": "It does not answer.", "content": {_JSON: {"schema": {"type": "object"}}}}
    return made


def _parameters(model: type[BaseModel]) -> list[Json]:
    """The parameters of a query. An empty one is an absent one, unless it is required."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return [
        {
            "name": name, "in": "query", "required": name in required,
            "schema": field if name in required else {"anyOf": [field, {"const": ""}]},
        }
        for name, field in schema["properties"].items()
    ]  # fmt: skip


def _body(model: type[BaseModel], schemas: Json) -> Json:
    """A reference to the body's schema. A null is an absent field in every body."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            described = {"description": field.pop("description")} if "description" in field else {}
            default = {"default": field.pop("default")} if "default" in field else {}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **default, **described}
    schemas[model.__name__] = schema
    return {"$ref": f"#/components/schemas/{model.__name__}"}
