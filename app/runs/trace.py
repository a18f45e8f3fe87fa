"""Record of a run for replay: its inputs, its tokens, and its tools' results.

The samples of a sequence depend on the seed and the place of a token alone, so with the recorded results the same model
makes the same tokens, where its numerics are the same and batch-invariant: `doubts` says where that is not so. A trace
is JSON lines: first the recipe, then the run's events. Knows nothing of HTTP.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from app.answering.answer_plan import AnswerPlan, plan_calls, select_call
from app.answering.reasoning_config import ReasoningResolver, restored
from app.runs.prompt_builder import quoting
from engine.model.numerics import Numerics
from engine.params import RepetitionDetection, Sampling, Span
from engine.tool_parsers import read_tools
from reasoning.agent import Agent, Limit, Limits
from tools.outcome import Call

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from app.db.store import LoggedEvent

FORMAT = 1


class BadTrace(Exception):
    """A file that is no trace, or of another format; the message names the fault."""


@dataclass(slots=True)
class Trace:
    """The recipe. `tokens` is the whole sequence at the end, its first `prompt_tokens` the prompt.

    `results`: the texts of each step's calls, as the model read them. `limit`: which ended the calling, after how many
    steps. `selected`: the tool that the first turn had to call, its parameters as they were constrained. `quotable`:
    labels and texts that the answer was constrained to quote. `manner`: the answer's recorded `ReasoningConfig`.
    `fingerprint` is of the model's files, in hex; `numerics` and `repetition`, which would have ended the answer, are
    None in traces of old. Any: JSON.
    """

    model: str
    sampling: dict[str, Any]
    max_tokens: int
    room: int
    variables: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    results: list[list[str]] = field(default_factory=list)
    limit: tuple[int, Limit] | None = None
    manner: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    numerics: dict[str, Any] | None = None
    repetition: dict[str, int] | None = None
    selected: list[dict[str, Any]] = field(default_factory=list)
    quotable: list[tuple[str, str]] = field(default_factory=list)
    format: int = FORMAT
    type: Literal["trace"] = "trace"

    def dumps(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def loads(cls, text: str) -> Trace:
        """
        Raises:
            BadTrace: it is none, or of another format.
        """
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict) and "seq" in value:
            raise BadTrace(
                "The run has its events alone: it asked no model, or its server crashed. It can't be made again."
            )
        names = {each.name for each in dataclasses.fields(cls)}
        if isinstance(value, dict):  # those of old have none of these
            old: dict[str, Any] = {
                "manner": {},
                "fingerprint": "",
                "numerics": None,
                "repetition": None,
                "selected": [],
                "quotable": [],
            }
            value = {**old, **value}
        if not isinstance(value, dict) or value.get("type") != "trace" or value.keys() != names:
            raise BadTrace("Its first line is not a trace of Ponder's; accepted: what GET /api/runs/{id}/trace gives.")
        if value["format"] != FORMAT:
            raise BadTrace(f"The trace has format {value['format']}; this Ponder replays format {FORMAT}.")
        if value["numerics"] is not None:
            try:
                Numerics.restored(value["numerics"])
            except (TypeError, ValueError) as error:
                raise BadTrace(f"Its numerics cannot be read: {error}") from None
        value["limit"] = None if value["limit"] is None else tuple(value["limit"])
        return cls(**value)


@dataclass(frozen=True, slots=True)
class ReplayDoubts:
    """Reasons why a replay may give other tokens: `other` are changes since, `reasons` all else."""

    other: Sequence[str]
    reasons: Sequence[str]


def doubts(trace: Trace, served: ServedModel) -> ReplayDoubts:
    """Returns the doubts that `served` makes the trace's tokens again."""
    other, reasons = list[str](), list[str]()
    now = served.engine.numerics
    if trace.fingerprint and trace.fingerprint != served.engine.fingerprint.hex():
        other.append(f"the files of the model {served.name} are others than those of {trace.model} were")
    if trace.numerics is None:
        reasons.append("the trace does not say with which numerics it was made")
    else:
        was = Numerics.restored(trace.numerics)
        other += now.differences(was)
        if not was.batch_invariant:
            reasons.append(
                "the run was made where a token's bits depend on what else runs, and on how its prompt was cut "
                f"({was.dtype} on {was.kernels} kernels, not deterministic)"
            )
    return ReplayDoubts(other, reasons)


def lines(recipe: str | None, events: Iterable[LoggedEvent]) -> Iterable[str]:
    """A trace as its file has it. A run that asked no model, or that a crash ended, has its events alone."""
    if recipe is not None:
        yield recipe
    for event in events:
        yield json.dumps({"seq": event.seq, **json.loads(event.data)}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Replayed:
    """`differs_at`: the first recorded token that is another one, counted from the start; None where all agree."""

    tokens: int
    differs_at: int | None
    was: Sequence[int] = ()
    now: Sequence[int] = ()


class _Recorded:
    """Tools that return their recorded results."""

    def __init__(self, results: Sequence[Sequence[str]]) -> None:
        self._results = iter(results)

    def only_reads(self, call: Call) -> bool:
        return False

    async def run(self, calls: Sequence[Call]) -> list[str]:
        texts = list(next(self._results, []))
        return [*texts, *[""] * len(calls)][: len(calls)]  # a replay that went astray may call otherwise


class _SameLimits(Agent):
    """The loop, with its calling ended where it was: time passes otherwise the second time."""

    __slots__ = ("ended",)
    ended: tuple[int, Limit] | None

    def _limit(self, began: float, whole: int, remaining: int, coming: int) -> Limit | None:
        return self.ended[1] if self.ended is not None and self.steps == self.ended[0] else None


async def replay(served: ServedModel, trace: Trace, reasoning_resolver: ReasoningResolver) -> Replayed:
    """Make the run again with its recorded results. A strategy that ended by the clock may end elsewhere.

    Raises:
        ApiError, EngineError: this model cannot make it.
    """
    tools = read_tools(trace.tools)
    tool_plan = await plan_calls(served, tools, "auto", True, "replay") if tools else None
    selected = await select_call(served, read_tools(trace.selected), tools, True, "replay")
    prompt = trace.tokens[: trace.prompt_tokens]
    repetition = None if trace.repetition is None else RepetitionDetection(**trace.repetition)
    span = Span(sampling=_sampling(trace), max_tokens=trace.max_tokens, repetition_detection=repetition)
    if trace.quotable:
        span = quoting(span, served, trace.quotable)
    reasoning_config = restored(trace.manner, served, reasoning_resolver)
    plan = AnswerPlan(served, prompt, span, trace.room, reasoning_config, trace.variables, tool_plan, selected=selected)
    async with await served.open(prompt, tenant="replay") as seq:
        if trace.tools:
            limits = Limits(steps=10**6, tokens=trace.max_tokens, seconds=float("inf"))
            made = plan.agent(_Recorded(trace.results), limits)
            agent = _SameLimits(made.style, made.tools, made.span, made.limits, answers=made.answers)
            agent.ended = trace.limit
            async with aclosing(agent.run(seq, trace.room)) as happening:
                async for _ in happening:
                    pass
        else:
            async with aclosing(plan.generate(seq)) as pieces:
                async for _ in pieces:
                    pass
        now = seq.tokens
    pairs = enumerate(zip(trace.tokens, now, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(now), len(trace.tokens)))
    if at == len(trace.tokens):  # a run that was stopped may go on here
        return Replayed(at - trace.prompt_tokens, None)
    return Replayed(len(now) - trace.prompt_tokens, at, trace.tokens[at : at + 8], now[at : at + 8])


def recorded_sampling(sampling: Sampling) -> dict[str, Any]:
    """As JSON: token ids of a bias become strings there."""
    return {**asdict(sampling), "logit_bias": {str(id): bias for id, bias in sampling.logit_bias.items()}}


def _sampling(trace: Trace) -> Sampling:
    bias: Mapping[str, float] = trace.sampling["logit_bias"]
    return Sampling(**{**trace.sampling, "logit_bias": {int(id): value for id, value in bias.items()}})
