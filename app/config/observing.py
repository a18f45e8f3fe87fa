"""Settings of observability: the log, and the metrics' goals and price."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ObservingSettings(BaseModel):
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="debug, info, warning or error"
    )
    log_format: Literal["text", "json"] = Field("text", description="text or json (a line of JSON each)")
    slo_ttft_ms: float = Field(2000.0, gt=0, description="milliseconds to the first token, above 0")
    slo_itl_ms: float = Field(200.0, gt=0, description="milliseconds between two tokens on average, above 0")
    price_per_hour: float | None = Field(None, ge=0, allow_inf_nan=False, description="what an hour costs, 0 or more")
