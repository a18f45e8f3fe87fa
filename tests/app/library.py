"""Helpers for tests of documents: two texts, a search, and the check of a refusal."""

from __future__ import annotations

import json
from typing import Any

import httpx

DAM = "The dam at Hollow Creek was finished in 1931. It is built of granite."
BEES = "Bees dance to tell each other where the flowers are."


def upload(http: httpx.Client, *files: tuple[str, str | bytes], **fields: Any) -> httpx.Response:
    """Send files as a browser does. A field that is no string is sent as JSON."""
    parts = [("file", (name, content)) for name, content in files]
    data = {name: value if isinstance(value, str | list) else json.dumps(value) for name, value in fields.items()}
    return http.post("/api/documents", files=parts, data=data)


def add(http: httpx.Client, name: str, content: str | bytes, **fields: Any) -> dict[str, Any]:
    """The one document that comes of a file."""
    reply = upload(http, (name, content), **fields)
    assert reply.status_code == 201, reply.text
    (document,) = reply.json()["documents"]
    return dict(document)


def error(reply: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """The message of an answer that must be this refusal."""
    body = reply.json()["error"]
    assert (reply.status_code, body["code"], body["param"]) == (status, code, param), reply.text
    return str(body["message"])


def search(http: httpx.Client, query: str, **fields: Any) -> list[dict[str, Any]]:
    reply = http.post("/api/search", json={"query": query, **fields})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["passages"])
