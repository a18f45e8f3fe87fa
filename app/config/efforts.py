"""Budgets of thinking, as requests and the configuration say them. Plain data, without the engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Thinking = Literal["minimal", "low", "medium", "high", "xhigh", "max"]  # the efforts that think
EFFORTS = '"none", "minimal", "low", "medium", "high", "xhigh" or "max"'
THINKING = '{"min_tokens": 0 or more, "max_tokens": 2 or more, "waits": 0 to 64, "wait_text": "Wait"}, each optional'
MAX_WAITS = 64


class BudgetFields(BaseModel):
    """`thinking` of a request, and what an effort stands for in the configuration: see `ThinkingBudget`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    min_tokens: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(default=None, ge=2)
    waits: int = Field(default=0, ge=0, le=MAX_WAITS)
    wait_text: str = Field(default="Wait", min_length=1, max_length=200)


BUDGETS: Mapping[Thinking, BudgetFields] = MappingProxyType(
    {
        "minimal": BudgetFields(max_tokens=128),
        "low": BudgetFields(max_tokens=512),
        "medium": BudgetFields(max_tokens=2048),
        "high": BudgetFields(max_tokens=8192),
        "xhigh": BudgetFields(max_tokens=32_768),
        "max": BudgetFields(max_tokens=131_072),
    }
)
"""Budgets of the efforts where the configuration does not say otherwise; `none` is no thinking at all."""
