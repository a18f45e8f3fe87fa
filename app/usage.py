"""Token usage of an answer: in the last event of its log, and beside its message."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from reasoning.thinking import Tally


class Usage(BaseModel):
    """Token counts of one run. `cached_tokens` of the prompt needed no computing."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, tally: Tally) -> Usage:
        return cls(**asdict(tally))
