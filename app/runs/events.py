"""The events of a run: written to its log and read by a browser. The page's types are generated from here.

A run is one answer being made. Its log is append-only and numbered from 1; a reader that has seen number n asks for
those after n, so a reload or a second tab loses nothing and doubles nothing. The last event of every log is one of
`run.completed`, `run.failed`, `run.cancelled`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, JsonValue

from app.db.answer_steps import Usage


class RunQueued(BaseModel):
    type: Literal["run.queued"] = "run.queued"
    position: int  # runs ahead of this one


class RunStarted(BaseModel):
    type: Literal["run.started"] = "run.started"
    model: str
    started_at: float  # seconds since the epoch, by the server's clock
    max_tokens: int
    strategy: str | None = None  # that finds the answer


class RunReduced(BaseModel):
    """Many wait, so this answer gets less: at most so many tokens of thinking, or only these of `auto`'s models."""

    type: Literal["run.reduced"] = "run.reduced"
    thinking: int | None = None
    models: list[str] | None = None


class PrefillProgress(BaseModel):
    """Progress of the prefill, in tokens, where that takes a while: at most ten a second."""

    type: Literal["prefill.progress"] = "prefill.progress"
    processed: int
    total: int
    cached: int


class ThinkingStarted(BaseModel):
    """`max_tokens` and `waits` are the budget's; null and 0 where there is none."""

    type: Literal["thinking.started"] = "thinking.started"
    started_at: float
    max_tokens: int | None = None
    waits: int = 0


class ThinkingDelta(BaseModel):
    type: Literal["thinking.delta"] = "thinking.delta"
    text: str


class ThinkingProgress(BaseModel):
    """Tokens that this answer has thought so far: at most four times a second, also where the text is not shown."""

    type: Literal["thinking.progress"] = "thinking.progress"
    tokens: int


class ThinkingWait(BaseModel):
    """The model would have ended its thinking, and was made to go on, for the `number`th time of `of` at most."""

    type: Literal["thinking.wait"] = "thinking.wait"
    number: int
    of: int


class ThinkingDone(BaseModel):
    type: Literal["thinking.done"] = "thinking.done"
    duration_s: float
    tokens: int


class AnswerDelta(BaseModel):
    """`guessed`: from where to where in `text`, in characters and in pairs, its tokens were drafted before they were
    sampled."""

    type: Literal["answer.delta"] = "answer.delta"
    text: str
    guessed: list[int] = []


class AnswerChecking(BaseModel):
    """A sentence of an answer from documents is held back until it is whole and checked: `tokens` of it so far."""

    type: Literal["answer.checking"] = "answer.checking"
    tokens: int


class AnswerDone(BaseModel):
    """`length`: the run's `max_tokens` were reached. `sources`: it grew as long as its sources. `repetition`: the model
    wrote the same again and again.
    """

    type: Literal["answer.done"] = "answer.done"
    text: str
    finish_reason: Literal["stop", "length", "sources", "repetition"]
    outcome: Literal["answered", "unknown"] = "answered"  # unknown: it says that it does not know, in so many words


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
    """Sources found for the question, before the answer begins. `none`: the model was not asked; `nearest` are the
    sentences that come nearest then, the nearest first, whose score is the probability that they answer.
    """

    type: Literal["citation.sources"] = "citation.sources"
    verdict: Literal["answer", "partial", "none"]
    score: float
    questions: list[str]
    sources: list[SourceShown]
    nearest: list[SourceShown] = []


class CitationRef(BaseModel):
    """Support of the sentence that is characters `start` to `end` of the answer. `answers`: the probability that what
    it cites answers the question, too.
    """

    type: Literal["citation.ref"] = "citation.ref"
    sentence: int
    start: int
    end: int
    support: Literal["supported", "elsewhere", "partial", "unsupported", "plain"]
    citations: list[SourceShown]
    answers: float | None = None


class ToolCall(BaseModel):
    """A call of the model's, complete; what becomes of it is one `tool.result` or `tool.error` with the same id."""

    type: Literal["tool.call"] = "tool.call"
    call_id: str
    name: str
    arguments: str  # JSON, as the model wrote it
    agent: str | None = None  # the sub-agent that calls; logs before 2026-11-28 have none


class ToolProgress(BaseModel):
    type: Literal["tool.progress"] = "tool.progress"
    call_id: str
    name: str
    text: str
    done: float | None
    total: float | None


class ToolOutput(BaseModel):
    """A piece of a streaming tool's output, as it comes."""

    type: Literal["tool.output"] = "tool.output"
    call_id: str
    name: str
    text: str


class ToolSource(BaseModel):
    title: str
    url: str | None
    text: str | None
    document: int | str | None
    page: int | None
    start: int | None
    end: int | None


class ToolArtifact(BaseModel):
    """A file that a call made, kept with the chat. `size`: bytes."""

    id: str
    name: str
    version: int  # of its name in the chat, from 1
    media_type: str
    size: int


class ToolResult(BaseModel):
    """`untrusted`: somebody else may have written it. `truncated`: characters that the model does not see."""

    type: Literal["tool.result"] = "tool.result"
    call_id: str
    name: str
    text: str
    truncated: int
    untrusted: bool
    sources: list[ToolSource]
    ms: float
    artifacts: list[ToolArtifact] = []


class ToolError(BaseModel):
    type: Literal["tool.error"] = "tool.error"
    call_id: str
    name: str
    kind: str
    message: str
    ms: float


class AgentStarted(BaseModel):
    """A sub-agent begins a task that the call `call_id` delegates. `tools`: names of those that it may call."""

    type: Literal["agent.started"] = "agent.started"
    agent: str
    call_id: str
    instructions: str
    tools: list[str]


class AgentDone(BaseModel):
    """`text` is its answer, or why there is none where it `failed`. `limit` ended its calling. `tokens`: it wrote."""

    type: Literal["agent.done"] = "agent.done"
    agent: str
    text: str
    failed: bool
    limit: Literal["steps", "tokens", "seconds", "context"] | None
    tokens: int
    seconds: float


class ApprovalRequested(BaseModel):
    """A person must see `preview` and decide, before `expires_at` (seconds since the epoch); without, it is a no."""

    type: Literal["approval.requested"] = "approval.requested"
    approval_id: str
    call_id: str
    name: str
    reason: str
    risk: Literal["low", "medium", "high"]
    preview: str
    arguments_hash: str
    expires_at: float


class ApprovalResolved(BaseModel):
    type: Literal["approval.resolved"] = "approval.resolved"
    approval_id: str
    call_id: str
    decision: Literal["once", "no", "always", "never", "expired"]


class QuestionAsked(BaseModel):
    """A tool asks the person; with `choices` the answer is one of them."""

    type: Literal["question.asked"] = "question.asked"
    question_id: str
    call_id: str
    name: str
    text: str
    choices: list[str] | None
    expires_at: float


class QuestionAnswered(BaseModel):
    """`text` is null where nobody answered in time."""

    type: Literal["question.answered"] = "question.answered"
    question_id: str
    call_id: str
    text: str | None


class RouteTried(BaseModel):
    """One of several models answered. `why` it was not enough is empty where it `passed`; its answer then follows."""

    type: Literal["route.tried"] = "route.tried"
    model: str
    passed: bool
    why: str
    tokens: int
    cost: float  # in tokens of the largest model
    seconds: float


class RouteAnswering(BaseModel):
    """The model whose answer follows."""

    type: Literal["route.answering"] = "route.answering"
    model: str


class RemoteSent(BaseModel):
    """Something of the chat leaves the server, for this remote model, and why."""

    type: Literal["remote.sent"] = "remote.sent"
    model: str
    why: str
    messages: int
    characters: int
    images: int
    passages: int
    tool_results: int


class SearchNode(BaseModel):
    """A state of a search. The root has the number 0 and no parent."""

    type: Literal["search.node"] = "search.node"
    node: int
    parent: int | None
    depth: int
    text: str


class SearchMerge(BaseModel):
    """A step led to a state that is there already."""

    type: Literal["search.merge"] = "search.merge"
    node: int
    parent: int
    text: str


class SearchScore(BaseModel):
    type: Literal["search.score"] = "search.score"
    node: int
    value: float  # 0 to 1


class SearchPrune(BaseModel):
    type: Literal["search.prune"] = "search.prune"
    node: int
    why: Literal["beam", "threshold", "hopeless", "context"]


class SearchSelect(BaseModel):
    """A state on the way to the answer, from the root on."""

    type: Literal["search.select"] = "search.select"
    node: int


class SearchDone(BaseModel):
    """`solved`: by the task's checker or, where it says nothing, by a finished answer's value."""

    type: Literal["search.done"] = "search.done"
    node: int
    solved: bool
    ended: Literal["found", "exhausted", "depth", "tokens", "nodes", "seconds"]
    value: float
    nodes: int
    written: int
    read: int
    seconds: float


class CandidateDone(BaseModel):
    """One of several answers is whole, or was `stopped` before. `score` is a verifier's, or its weight in a vote;
    `vote` what it votes for."""

    type: Literal["candidate.done"] = "candidate.done"
    index: int
    text: str
    tokens: int
    score: float | None
    vote: str | None
    stopped: bool = False


class CandidateChosen(BaseModel):
    """The answer that is given, of `of` that had ended; `cancelled` were not written to their end."""

    type: Literal["candidate.chosen"] = "candidate.chosen"
    index: int
    of: int
    score: float | None
    cancelled: int


class StrategyEvent(BaseModel):
    """Something that a plugin's strategy tells, in its own words."""

    type: Literal["strategy.event"] = "strategy.event"
    name: str
    fields: dict[str, JsonValue]


class NoteKept(BaseModel):
    """`replaced`: the note's text before, of the same attribute."""

    number: int
    text: str
    replaced: str | None


class MemoryKept(BaseModel):
    """Facts that the question stated were kept for later chats. `full`: there was no room for others."""

    type: Literal["memory.kept"] = "memory.kept"
    notes: list[NoteKept]
    full: bool = False


class LimitReached(BaseModel):
    """Calling is over: the model answers with what it has."""

    type: Literal["limit.reached"] = "limit.reached"
    limit: Literal["steps", "tokens", "seconds", "context"]


class Metrics(BaseModel):
    """At most four a second while the answer grows, and once at its end."""

    type: Literal["metrics"] = "metrics"
    ttft_s: float
    tokens_per_s: float
    completion_tokens: int
    seconds: float | None = None  # since the run began; logs before 2026-11-27 have none


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
    | RunReduced
    | PrefillProgress
    | ThinkingStarted
    | ThinkingDelta
    | ThinkingProgress
    | ThinkingWait
    | ThinkingDone
    | AnswerDelta
    | AnswerChecking
    | AnswerDone
    | CitationSources
    | CitationRef
    | ToolCall
    | ToolProgress
    | ToolOutput
    | ToolResult
    | ToolError
    | AgentStarted
    | AgentDone
    | ApprovalRequested
    | ApprovalResolved
    | QuestionAsked
    | QuestionAnswered
    | RouteTried
    | RouteAnswering
    | RemoteSent
    | SearchNode
    | SearchMerge
    | SearchScore
    | SearchPrune
    | SearchSelect
    | SearchDone
    | CandidateDone
    | CandidateChosen
    | StrategyEvent
    | LimitReached
    | MemoryKept
    | Metrics
    | RunCompleted
    | RunFailed
    | RunCancelled,
    Field(discriminator="type"),
]

TERMINAL = frozenset({"run.completed", "run.failed", "run.cancelled"})
