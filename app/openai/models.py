"""`GET /v1/models`: what this server serves, each under its own name, the first also as `default`, and `auto`."""

from __future__ import annotations

from typing import Any

from app.config import AUTO_NAME
from app.models import Models


def model_list(models: Models) -> dict[str, Any]:
    return {"object": "list", "data": [model_entry(models, name) for name in models.names]}


def model_entry(models: Models, name: str) -> dict[str, Any]:
    """
    `thinks` and `tools` say whether it thinks and takes tools. `auto` takes what the roomiest of its models takes,
    thinks where all of them do, and takes no tools.

    Raises:
        ApiError: 404 `model_not_found`.
    """
    asked = models.auto.rungs if name == AUTO_NAME and models.auto is not None else (models.get(name),)
    return {
        "id": name,
        "object": "model",
        "created": max(served.created for served in asked),
        "owned_by": "ponder",
        "max_model_len": max(served.engine.max_model_len for served in asked),
        "thinks": all(served.markers is not None for served in asked),
        "tools": name != AUTO_NAME and all(served.dialect is not None for served in asked),
    }
