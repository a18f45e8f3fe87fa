"""Middleware around an application in every process of a server, before anybody is asked who they are.

Knows nothing of what is inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

from app import tracing
from app.guard import Guard
from app.wire import AnswerHeaders

if TYPE_CHECKING:
    from fastapi import FastAPI

    from app.config import Settings


def surround(app: FastAPI, settings: Settings) -> None:
    """Add it: the outermost last, as Starlette has it."""
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(
        Guard, bound=settings.host, allowed_hosts=settings.allowed_hosts, cors_origins=settings.cors_origins
    )
    app.add_middleware(tracing.Traced)
    app.add_middleware(AnswerHeaders)
