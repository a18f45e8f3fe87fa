"""The events of a run: what is written to its log and what a browser reads. The page's types are generated from here.

A run is one answer being made. Its log is append-only and numbered from 1; a reader that has seen number n asks for
what comes after n, so a reload or a second tab loses nothing and doubles nothing. The last event of every log is one
of `run.completed`, `run.failed`, `run.cancelled`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, Field

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


class RunQueued(BaseModel):
    type: Literal["run.queued"] = "run.queued"
    position: int  # runs ahead of this one


class RunStarted(BaseModel):
    type: Literal["run.started"] = "run.started"
    model: str
    started_at: float  # seconds since the epoch, by the server's clock
    max_tokens: int


class ThinkingStarted(BaseModel):
    type: Literal["thinking.started"] = "thinking.started"
    started_at: float


class ThinkingDelta(BaseModel):
    type: Literal["thinking.delta"] = "thinking.delta"
    text: str


class ThinkingDone(BaseModel):
    type: Literal["thinking.done"] = "thinking.done"
    duration_s: float
    tokens: int


class AnswerDelta(BaseModel):
    type: Literal["answer.delta"] = "answer.delta"
    text: str


class AnswerDone(BaseModel):
    type: Literal["answer.done"] = "answer.done"
    text: str
    finish_reason: Literal["stop", "length"]


class SourceShown(BaseModel):
    """Characters `start` to `end` of a document, which are `text`."""

    label: str
    document: int
    title: str
    page: int | None
    start: int
    end: int
    text: str
    score: float


class CitationSources(BaseModel):
    """What was found for the question, before the answer begins. `none`: the model was not asked."""

    type: Literal["citation.sources"] = "citation.sources"
    verdict: Literal["answer", "partial", "none"]
    score: float
    questions: list[str]
    sources: list[SourceShown]


class CitationRef(BaseModel):
    """What supports the sentence that is characters `start` to `end` of the answer."""

    type: Literal["citation.ref"] = "citation.ref"
    sentence: int
    start: int
    end: int
    support: Literal["supported", "elsewhere", "unsupported", "plain"]
    citations: list[SourceShown]


class Metrics(BaseModel):
    """At most four a second while the answer grows, and once at its end."""

    type: Literal["metrics"] = "metrics"
    ttft_s: float
    tokens_per_s: float
    completion_tokens: int


class RunCompleted(BaseModel):
    type: Literal["run.completed"] = "run.completed"
    usage: Usage


class RunFailed(BaseModel):
    type: Literal["run.failed"] = "run.failed"
    code: str
    message: str
    retryable: bool


class RunCancelled(BaseModel):
    type: Literal["run.cancelled"] = "run.cancelled"
    usage: Usage


Event = Annotated[
    RunQueued
    | RunStarted
    | ThinkingStarted
    | ThinkingDelta
    | ThinkingDone
    | AnswerDelta
    | AnswerDone
    | CitationSources
    | CitationRef
    | Metrics
    | RunCompleted
    | RunFailed
    | RunCancelled,
    Field(discriminator="type"),
]

TERMINAL = frozenset({"run.completed", "run.failed", "run.cancelled"})
