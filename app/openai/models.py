"""`GET /v1/models`: what this server serves, under its own name and as `default`."""

from __future__ import annotations

from typing import Any

from app.openai.generation import check_model
from app.served import DEFAULT_NAME, Served


def model_list(served: Served) -> dict[str, Any]:
    names = dict.fromkeys((served.name, DEFAULT_NAME))
    return {"object": "list", "data": [_entry(served, name) for name in names]}


def model_entry(served: Served, name: str) -> dict[str, Any]:
    """
    Raises:
        ApiError: 404 `model_not_found`.
    """
    check_model(served, name)
    return _entry(served, name)


def _entry(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "ponder",
        "max_model_len": served.engine.max_model_len,
    }
