"""Settings of limits: for each key in a minute, and for the whole server before some are turned away."""

from __future__ import annotations

from pydantic import BaseModel, Field

from app.config.names import BadSetting


class LimitSettings(BaseModel):
    requests_per_minute: int | None = Field(None, ge=1, description="requests of one key in a minute, 1 or more")
    tokens_per_minute: int | None = Field(
        None, ge=1, description="tokens of one key in a minute, read and written together, 1 or more"
    )
    concurrent_requests: int | None = Field(
        None, ge=1, description="requests of one key that are answered at the same time, 1 or more"
    )
    max_output_tokens: int | None = Field(None, ge=1, description="tokens of one answer, thinking included, 1 or more")
    deadline_s: float | None = Field(
        None, gt=0, le=86_400, description="seconds that one answer may take, above 0 up to 86400"
    )
    max_wait_s: float = Field(
        60.0, gt=0, le=86_400, description="seconds that a request may have to wait for others, above 0 up to 86400"
    )
    reduce: bool = Field(True, description="true or false: whether answers are made shorter before any is refused")
    reduce_wait_s: float | None = Field(
        None, ge=0, le=86_400, description="seconds of waiting, less than max_wait_s, from which on answers are shorter"
    )
    reduced_thinking: int = Field(256, ge=2, description="tokens of thinking that are left of more, 2 or more")

    @property
    def reduce_from_s(self) -> float:
        """The wait from which on answers are made shorter."""
        return self.max_wait_s / 4 if self.reduce_wait_s is None else self.reduce_wait_s

    def check_limits(self) -> None:
        """
        Raises:
            BadSetting: nothing would ever be made shorter, as it would be refused before.
        """
        if self.reduce_wait_s is not None and self.reduce_wait_s >= self.max_wait_s:
            raise BadSetting(
                f"reduce_wait_s is {self.reduce_wait_s:g}, and from max_wait_s = {self.max_wait_s:g} on requests are "
                "refused; accepted: less than that."
            )
