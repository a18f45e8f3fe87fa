"""Who asks. There are no accounts yet, so it is always the same person; routes learn it here and nowhere else."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from app.config import LOCAL_USER


async def user_of(request: Request) -> str:
    """The user that a request comes from."""
    return LOCAL_USER


User = Annotated[str, Depends(user_of)]  # a route's parameter
