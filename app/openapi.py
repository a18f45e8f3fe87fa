"""Completes `/openapi.json` for each route: its body, its parameters, and every status that it may answer with.

Routes read bodies by hand, so that a refusal is in one shape and names the field; here their models are put into the
document. A test holds the two together, by asking the server what the document allows and what it does not.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from app.api import accounts, chats, collections, permissions, runs, search, tools
from app.db.chat_exchange import Export
from app.openai.request_models import ChatRequest, CompletionRequest
from app.openai.responses_request import ResponseRequest
from app.openai.routes import EmbeddingRequest
from app.sequences.sequence_requests import (
    AppendRequest,
    ForkRequest,
    GenerateRequest,
    OpenRequest,
    ScoreRequest,
    TruncateRequest,
)

Json = dict[str, Any]  # Any: a JSON schema is JSON

BODIES: dict[str, type[BaseModel]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponseRequest,
    "POST /v1/embeddings": EmbeddingRequest,
    "POST /api/session": accounts.SessionRequest,
    "POST /api/chats/import": Export,
    "PATCH /api/chats/{chat_id}": chats.ChatChange,
    "POST /api/chats/{chat_id}/runs": runs.RunRequest,
    "POST /api/folders": chats.FolderRequest,
    "PATCH /api/folders/{folder_id}": chats.FolderRequest,
    "POST /api/collections": collections.CollectionRequest,
    "PATCH /api/collections/{collection_id}": collections.CollectionRequest,
    "PUT /api/collections/{collection_id}/members/{member}": collections.MemberRequest,
    "POST /api/search": search.SearchRequest,
    "PUT /api/permissions": permissions.ClassesRequest,
    "PUT /api/chats/{chat_id}/permissions": permissions.ClassesRequest,
    "POST /api/runs/{run_id}/approvals/{approval_id}": tools.DecisionRequest,
    "POST /api/runs/{run_id}/questions/{question_id}": tools.AnswerRequest,
    "POST /api/sequences": OpenRequest,
    "POST /api/sequences/{sequence_id}/append": AppendRequest,
    "POST /api/sequences/{sequence_id}/generate": GenerateRequest,
    "POST /api/sequences/{sequence_id}/fork": ForkRequest,
    "POST /api/sequences/{sequence_id}/score": ScoreRequest,
    "POST /api/sequences/{sequence_id}/truncate": TruncateRequest,
    "POST /api/operator/users": accounts.UserRequest,
    "PATCH /api/operator/users/{user_id}": accounts.UserChange,
    "POST /api/operator/keys": accounts.KeyRequest,
    "PATCH /api/operator/keys/{key_id}": accounts.KeyChange,
}

_NUMBER: Json = {"type": "integer", "minimum": 0}
_TEXT: Json = {"type": "string"}


def _up_to(most: int) -> Json:
    return {"type": "integer", "minimum": 1, "maximum": most}


PARAMETERS: dict[str, dict[str, Json]] = {
    "GET /api/chats": {"limit": _up_to(500), "before": _TEXT, "folder_id": _TEXT},
    "GET /api/chats/search": {"q": _TEXT, "limit": _up_to(100)},
    "GET /api/chats/{chat_id}": {"all": {"enum": ["true", "false"]}},
    "GET /api/chats/{chat_id}/export": {"format": {"enum": ["json", "html", "markdown"]}},
    "GET /api/runs/{run_id}/events": {"after": _NUMBER, "follow": {"enum": ["true", "false"]}},
    "GET /api/documents": {"collection": _NUMBER},
    "GET /api/documents/{document_id}/text": {"start": _NUMBER, "end": _NUMBER},
    "GET /api/documents/{document_id}/boxes": {"start": _NUMBER, "end": _NUMBER},
    "GET /api/documents/{document_id}/pages/{page}": {"width": _NUMBER},
    "GET /api/operator/runs": {"limit": _up_to(500)},
    "GET /api/operator/keys": {"user": _TEXT},
    "GET /v1/responses/{response_id}/input_items": {
        "limit": _up_to(100), "order": {"enum": ["asc", "desc"]}, "after": _TEXT
    },
}  # fmt: skip

_STATUSES: dict[str, tuple[int, ...]] = {  # where it is not 200 alone
    "POST /api/chats": (201,),
    "POST /api/chats/import": (201,),
    "POST /api/chats/{chat_id}/runs": (202,),
    "POST /api/runs/{run_id}/cancel": (202,),
    "POST /api/runs/{run_id}/approvals/{approval_id}": (202,),
    "POST /api/runs/{run_id}/questions/{question_id}": (202,),
    "POST /api/folders": (201,),
    "POST /api/documents": (201, 202),
    "DELETE /api/documents/{document_id}": (204,),
    "POST /api/jobs/{job_id}/cancel": (202,),
    "POST /api/collections": (200, 201),
    "DELETE /api/collections/{collection_id}": (204,),
    "DELETE /api/collections/{collection_id}/members/{member}": (204,),
    "DELETE /api/invitations/{collection_id}": (204,),
    "DELETE /api/permissions": (204,),
    "DELETE /api/permissions/{grant_id}": (204,),
    "DELETE /api/chats/{chat_id}/permissions": (204,),
    "POST /api/sequences": (201,),
    "POST /api/sequences/{sequence_id}/fork": (201,),
    "DELETE /api/sequences/{sequence_id}": (204,),
    "DELETE /api/session": (204,),
    "POST /api/operator/users": (201,),
    "POST /api/operator/keys": (201,),
}
_JSON, _EVENTS = "application/json", "text/event-stream"
_TYPES: dict[str, tuple[str, ...]] = {  # where it is not JSON
    "POST /v1/chat/completions": (_JSON, _EVENTS),
    "POST /v1/completions": (_JSON, _EVENTS),
    "POST /v1/responses": (_JSON, _EVENTS),
    "POST /api/sequences/{sequence_id}/generate": (_EVENTS,),
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


def install(app: FastAPI) -> None:
    """Let `app` tell its routes so."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
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


def _document(app: FastAPI) -> Json:
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: Json = {"Error": ERROR}
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {path}"
            operation["responses"] = _responses(route, operation["responses"])
            if (model := BODIES.get(route)) is not None:
                content = {_JSON: {"schema": _body(model, schemas)}}
                operation["requestBody"] = {"required": True, "content": content}
            for name, schema in PARAMETERS.get(route, {}).items():
                either = {"anyOf": [schema, {"const": ""}]}  # an empty one is an absent one
                parameter = {"name": name, "in": "query", "required": name == "q", "schema": either}
                operation.setdefault("parameters", []).append(parameter)
    kept = made.get("components", {}).get("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # which no route answers with
        kept.pop(name, None)
    made["components"] = {"schemas": {**kept, **schemas}}
    return made


def _responses(route: str, typed: Json) -> Json:
    """Success as the route's types say it, if they do, and refusals in the one shape."""
    made: Json = {}
    for status in _STATUSES.get(route, (200,)):
        known = typed.get(str(status), {}).get("content", {}).get(_JSON, {}).get("schema") or {}
        types = () if status == 204 else _TYPES.get(route, (_JSON,))
        content = {kind: {"schema": known if kind == _JSON else {}} for kind in types}
        made[str(status)] = {"description": "As asked for.", **({"content": content} if content else {})}
    refusal = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    made["4XX"] = {"description": "Refused; the message says why, and what is accepted.", "content": refusal}
    for status, why in ((503, "Not now."), (507, "The disk is full, or cannot be written to.")):
        made[str(status)] = {"description": why, "content": refusal}
    if route == "GET /health":
        made["503"] = {"description": "It does not answer.", "content": {_JSON: {"schema": {"type": "object"}}}}
    return made


def _body(model: type[BaseModel], schemas: Json) -> Json:
    """A reference to the body's schema. A null is an absent field in every body."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            described = {"description": field.pop("description")} if "description" in field else {}
            default = {"default": field.pop("default")} if "default" in field else {}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **default, **described}
    schemas[model.__name__] = schema
    return {"$ref": f"#/components/schemas/{model.__name__}"}
