"""`speculation` and OpenAI's `prediction` of a request, as the speculative decoding of its spans.

Neither changes a token of an answer, only its time. Knows nothing of proposers: the engine names them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from app.errors import invalid
from engine.config import MAX_DRAFT
from engine.params import Span, Speculation

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel

SPECULATION = f'"off", or {{"proposer"?: "auto", "off" or a proposer\'s name, "max_tokens"?: 1 to {MAX_DRAFT}}}'
PREDICTION = '{"type": "content", "content": a text or a list of {"type": "text", "text": …}}'


class SpeculationFields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    proposer: str = "auto"
    max_tokens: int | None = Field(None, ge=1, le=MAX_DRAFT)

    @property
    def speculation(self) -> Speculation:
        return Speculation(self.proposer, self.max_tokens)


def _fields(value: Any) -> Any:  # any JSON
    return {"proposer": "off"} if value == "off" else value


SpeculationField = Annotated[
    SpeculationFields | None,
    BeforeValidator(_fields, json_schema_input_type=SpeculationFields | Literal["off"] | None),
    Field(description=SPECULATION),
]


class PredictionText(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: str


class PredictionFields(BaseModel):
    """`prediction` of a chat request: a text that the answer repeats in large part."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["content"]
    content: str | list[PredictionText] = Field(max_length=10_000_000)

    @property
    def text(self) -> str:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return "".join(parts)


async def predicted(span: Span, prediction: PredictionFields | None, served: ServedModel) -> Span:
    """Returns the span with the prediction's tokens, which the proposer `suffix` reads.

    Raises:
        ApiError: its speculation is off or another proposer's, or the prediction is longer than the context.
    """
    if prediction is None:
        return span
    wish = span.speculation or Speculation()
    if wish.proposer not in ("auto", "suffix"):
        raise invalid(
            "speculation", f"speculation is {wish.proposer!r} together with prediction, which the proposer 'suffix' "
            "reads; accepted: one of them, or the proposer 'auto' or 'suffix'.",
        )  # fmt: skip
    tokens = await served.text_tokens(prediction.text, "prediction", special=False, bos=False)
    reads = served.engine.speculation in ("auto", "suffix")
    proposer = wish.proposer if reads else "suffix"
    return replace(span, speculation=replace(wish, proposer=proposer, prediction=tuple(tokens)))
