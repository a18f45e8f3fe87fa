"""Steps of an answer on its way, and its usage: each is a text, the calls that followed it and their results.

The last step is what the model wrote after its last results, and calls nothing; so the texts together are the answer.
Knows nothing of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from reasoning.thinking import Tally

RESULT_CHARACTERS = 4000  # of a result that are kept


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StepCall(Part):
    """`arguments` is the JSON text that the model wrote."""

    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str


class StepResult(Part):
    """`text`: as the model read it. `untrusted`: somebody else may have written it."""

    call_id: str
    text: str = Field(max_length=RESULT_CHARACTERS)
    untrusted: bool


class AnswerStep(Part):
    content: str
    calls: list[StepCall] = []
    results: list[StepResult] = []


def check_steps(steps: Sequence[AnswerStep]) -> None:
    """
    Raises:
        ValueError: a call has no result, a result no call, or a step that is not the last one calls nothing.
    """
    for at, step in enumerate(steps):
        ids = [call.id for call in step.calls]
        if ids != [result.call_id for result in step.results] or len(set(ids)) < len(ids):
            raise ValueError("each call of a step has one result, in the order of the calls")
        if bool(ids) == (at == len(steps) - 1):
            raise ValueError("every step but the last calls something, and the last nothing")


_STEPS = TypeAdapter(list[AnswerStep])


def dump_steps(steps: Sequence[AnswerStep]) -> str | None:
    return _STEPS.dump_json(list(steps)).decode() if steps else None


def load_steps(text: str | None) -> list[AnswerStep]:
    """Loads stored steps, which were checked before."""
    return _STEPS.validate_json(text) if text else []


class Usage(BaseModel):
    """Token counts of one run. `cached_tokens` of the prompt needed no computing. The model saw nothing of
    `forgotten_tokens` of an endless chat; `seen_from`: the id of the first message that it saw whole, the system prompt
    apart."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    forgotten_tokens: int = 0
    seen_from: str | None = None

    @classmethod
    def of(cls, tally: Tally, seen_from: str | None = None) -> Usage:
        return cls(**asdict(tally), seen_from=seen_from)
