"""One run: an answer being made for the chat page, written to its log as it grows.

Its log ends with exactly one terminal event in any case, and the chat's message says the same. Knows nothing of other
runs, nor of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from app.answering.answer_pipeline import Admitted, AnswerPipeline
from app.answering.answer_plan import AnswerPlan
from app.answering.model_cascade import ModelCascade, Plan, allowed_models
from app.answering.reasoning_config import ReasoningConfig
from app.answering.remote_model import RemoteModel, RemotePlan
from app.answering.served_model import ServedModel
from app.answering.sub_agents import ToolLoop
from app.answering.thinking_summary import ThinkingSummary
from app.answering.tool_selection import ToolSelector
from app.config import AUTO_NAME, LOCAL_USER
from app.db.answer_steps import Usage
from app.db.run_store import Place, RunAnswer
from app.errors import from_exception
from app.observability import tracing
from app.observability.metrics import RequestWatch
from app.runs.event_log import Deltas, RunLog, StepRecorder
from app.runs.event_mapping import map_event, without_text
from app.runs.events import (
    AnswerDone,
    CitationRef,
    LimitReached,
    MemoryKept,
    Metrics,
    NoteKept,
    PrefillProgress,
    RouteAnswering,
    RunCancelled,
    RunCompleted,
    RunFailed,
    RunReduced,
    RunStarted,
    ThinkingDone,
    ThinkingProgress,
    ThinkingStarted,
)
from app.runs.prompt_builder import DOCUMENTS, History, answer_messages, plan_remote_run, plan_run, usage_of
from app.runs.rag import GENERATIVE, REFUSAL, AnswerWay, CheckedAnswer, RetrievedContext, quote, retrieve_context
from app.runs.research import DocumentResearch
from app.runs.trace import Trace, recorded_sampling
from engine.outputs import Prefill
from reasoning.agent import Called, Limited, Returned, Wrote
from reasoning.deep_research import PARTIAL
from reasoning.strategy import Event
from reasoning.thinking import Piece, Tally
from reasoning.turn import Content, Delta, Reasoning
from retrieval.citations import is_refusal
from retrieval.query_rewriting import is_small_talk
from retrieval.records import among_of

if TYPE_CHECKING:
    from app.runs.memory import RunMemory
    from app.runs.run_tools import RunTools
    from retrieval import Library

_METRICS_S = 0.25
_PREFILL_S = 0.1

Finish = Literal["stop", "length", "sources", "repetition"]


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A person's request, checked already. None: the model authors' defaults."""

    place: Place
    system: str | None = None  # the system prompt
    sampling: Mapping[str, Any] = field(default_factory=dict)  # overrides of the model authors' defaults
    max_tokens: int | None = None
    collections: Literal["own", "all"] | list[int] | None = None  # to answer from
    tools: Literal["all"] | list[str] | None = None  # that the model may call
    skills: Literal["all"] | list[str] | None = None  # that it may read; None: all, with tools that read them
    served: ServedModel | RemoteModel | None = None  # None: the default model
    auto: ModelCascade | None = None  # where several models may answer
    reasoning_config: ReasoningConfig = field(default_factory=ReasoningConfig)
    user: str = LOCAL_USER

    def params(self) -> Mapping[str, Any]:
        """All but the question and its user."""
        names = ("system", "max_tokens", "collections", "tools", "skills")
        said = {**self.sampling, **{name: getattr(self, name) for name in names}}
        model = AUTO_NAME if self.auto is not None else None if self.served is None else self.served.name
        return {**said, "thinking": self.reasoning_config.thinks, "model": model, **self.reasoning_config.recorded()}


class Run:
    """An answer and its log. `on_end` hears how it ended, once, just before the log's readers do."""

    def __init__(
        self,
        id: str,
        chat_id: str,
        user: str,
        served: ServedModel,
        thoughts: ThinkingSummary,
        library: Library,
        log: RunLog,
        watch: RequestWatch,
        on_end: Callable[[RunAnswer], None],
        *,
        way: Callable[[ServedModel], AnswerWay],
        tool_selector: ToolSelector | None = None,
    ) -> None:
        """`way` tells how a model answers from documents. `tool_selector` chooses tools for small models."""
        self.id = id
        self.chat_id = chat_id
        self.user = user
        self.log = log
        self.started = False
        self.tools: RunTools | None = None  # once it begins
        self._memory: RunMemory | None = None  # the same
        self.trace: Trace | None = None  # once the model is asked
        self._served = served
        self._thoughts = thoughts
        self._library = library
        self._way = way
        self._tool_selector = tool_selector
        self._checked: CheckedAnswer | None = None  # where the answer rests on documents
        self._found: RetrievedContext | None = None
        self._research: DocumentResearch | None = None  # where a strategy searches
        self.watch = watch
        self._on_end = on_end
        self._deltas = Deltas(log)
        self._began = time.perf_counter()
        self._ending: RunFailed | None = None
        self._pipeline: AnswerPipeline | None = None  # once the prompt is there
        self._model: str | None = None  # the one that answers, once it is known
        self._content: list[str] = []
        self._steps = StepRecorder()
        self._reasoning_config = ReasoningConfig()
        self._thinking: list[str] = []
        self._thinking_began: float | None = None
        self._thinking_tokens = 0
        self._thinking_s: float | None = None
        self._first_token_at: float | None = None
        self._metrics_at = self._read_at = 0.0
        self._writing_at: float | None = None  # since when the model writes
        self._unseen = False  # a strategy or a router writes hidden tokens before the answer comes
        self._task: asyncio.Task[None] | None = None

    @property
    def _tally(self) -> Tally:
        return Tally() if self._pipeline is None else self._pipeline.tally

    def begin(
        self, history: History, ask: RunSpec, tools: RunTools | None, memory: RunMemory | None = None
    ) -> asyncio.Task[None]:
        """Start making the answer; the task ends when it is made, and raises nothing."""
        self.tools, self._memory = tools, memory
        self._task = asyncio.create_task(self._work(history, ask), name=self.id)
        # A task that is cancelled before its first step never runs: its log still ends.
        self._task.add_done_callback(lambda _: self._cut_short())
        return self._task

    async def cancel(self, ending: RunFailed | None = None) -> None:
        """End it, as cancelled or with `ending`, and wait until it has."""
        if self._task is not None and not self._task.done():
            self._ending = ending
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _work(self, history: History, ask: RunSpec) -> None:
        try:
            finish = await self._generate(history, ask)
            self._deltas.flush()
            self._close_thinking()
            text = "".join(self._content)
            outcome: Literal["answered", "unknown"] = "unknown" if is_refusal(text) else "answered"
            self.log.append(AnswerDone(text=text, finish_reason=finish, outcome=outcome))
            if metrics := self._metrics():
                self.log.append(metrics)
            await self._remember(history.question)
            self._end(RunCompleted(usage=await usage_of(self._pipeline)))
        except asyncio.CancelledError:
            self._cut_short()
        except Exception as error:
            self._keep_research()
            explained = from_exception(error)
            retryable = explained.status in (429, 500, 502, 503, 504) or explained.code == "constraint_timeout"
            self._end(RunFailed(code=explained.code or "error", message=explained.message, retryable=retryable))

    async def _remember(self, question: str) -> None:
        """Keeps what the question states of its user, at the end of the turn."""
        if self._memory is None:
            return
        notes, full = await self._memory.keep_stated(question)
        if notes or full:
            kept = [NoteKept(number=note.number, text=note.text, replaced=note.replaced) for note in notes]
            self.log.append(MemoryKept(notes=kept, full=full))

    async def _generate(self, history: History, ask: RunSpec) -> Finish:
        """Makes the answer; returns how it finished."""
        found: RetrievedContext | None = None
        files = frozenset[int]()
        if history.files:
            files = await asyncio.to_thread(self._library.files_of, ask.user, history.files)
        searches = ask.reasoning_config.searches and not is_small_talk(history.question)
        if searches:
            self._research = DocumentResearch(
                self._library, self._served, ask.user, history.question,
                None if ask.collections is None else among_of(ask.collections), files=files,
                writes=self._way(self._served).kind == "generative", earlier=history.turns, tools=self.tools,
            )  # fmt: skip
        elif (ask.collections is not None or files) and not is_small_talk(history.question):
            among = frozenset[int]() if ask.collections is None else among_of(ask.collections)
            with tracing.span("retrieval"):
                # Tools are for a model to call, and a strategy over documents is for it to write by.
                writes = self.tools is not None or ask.reasoning_config.reads_documents
                way = GENERATIVE if writes else self._way(self._served)
                found = await retrieve_context(
                    self._library, self._served, ask.user, history.question, history.turns, among, files=files, way=way,
                    about_files=history.asks_files,
                )  # fmt: skip
            strict = ask.collections is not None or history.asks_files or way.kind != "generative"
            found = None if found.verdict == "none" and not strict else found  # it is about no file of earlier ones
        if found is not None:
            self.log.append(found.event())
            if found.verdict == "none":
                self._answer(REFUSAL)
                return "stop"
            self._found = found
            if found.quoted:
                self._show(quote(found))
                return "stop"
            self._checked = CheckedAnswer(found)
            if self.tools is not None:
                self.tools.has_read(DOCUMENTS)
        reasoning_config = ask.reasoning_config
        reads = reasoning_config.reads_documents and (ask.collections is not None or bool(files))
        if found is None and not searches and (reads or reasoning_config.searches):  # small talk
            reasoning_config = replace(reasoning_config, strategy=None, options=None)
        self._reasoning_config = reasoning_config
        specs = [] if self.tools is None or searches else self.tools.specs

        async def make_remote(remote: RemoteModel) -> RemotePlan:
            return await plan_remote_run(
                remote, history, found, specs, sampling=ask.sampling, max_tokens=ask.max_tokens,
                collections=ask.collections,
            )  # fmt: skip

        async def make(served: ServedModel) -> AnswerPlan:
            said = history
            if self._memory is not None and self._memory.notes and found is None:  # an answer rests on sources alone
                said = await asyncio.to_thread(
                    self._memory.added_to, history, lambda text: len(served.engine.tokenizer.encode(text)),
                    served.engine.max_model_len,
                )  # fmt: skip
            plan = await plan_run(
                served, reasoning_config, said, found, specs, sampling=ask.sampling, max_tokens=ask.max_tokens,
                user=ask.user, tool_selector=None if self._checked is not None else self._tool_selector,
                endless=ask.auto is None,
            )  # fmt: skip
            return replace(plan, search=self._research)

        if reasoning_config.reduced and reasoning_config.budget is not None:
            self.log.append(RunReduced(thinking=reasoning_config.budget.max_tokens))
        self._unseen = reasoning_config.strategy is not None or ask.auto is not None
        auto = ask.auto
        plans: list[Plan]
        if isinstance(ask.served, RemoteModel):
            plans = [await make_remote(ask.served)]
        elif auto is None:
            plan = await make(self._served)
            plans = [plan]
            if self._research is None and plan.streaming is None:  # else it may be something else the next time
                self._record(plan)
        else:
            able = await auto.plans(make)
            if len(allowed := allowed_models(able)) < len(able):
                self.log.append(RunReduced(models=[each.served.name for each in allowed]))
            plans, auto = await auto.with_remote(allowed, make_remote)
        loop = None
        if self.tools is not None and not searches:
            limits = replace(self.tools.limits, tokens=min(plans[0].limit, self.tools.limits.tokens))
            loop = ToolLoop(self.tools, limits, self.tools.clock, self.tools.begin)
        pipeline = self._pipeline = AnswerPipeline(
            lambda: self.watch, plans, tenant=ask.user, auto=auto, loop=loop, on_event=self._hear,
            on_prefill=self._read, said=lambda: answer_messages("".join(self._content), self._steps.steps()),
        )  # fmt: skip
        try:
            finish = await self._write(pipeline)
        finally:
            if self.trace is not None and pipeline.sequence is not None:
                self.trace.tokens = pipeline.sequence.tokens
        if self._checked is not None:
            self._show(self._checked.finish())
        bound = pipeline.plan.answer_tokens
        if finish == "length" and bound is not None and self._tally.answer_tokens >= bound:
            return "sources"
        return finish

    def _record(self, plan: AnswerPlan) -> None:
        """Begins the trace. An answer by one of several models has none: most of the tokens are not the answer's; nor
        has a remote model's, whose tokens are not known."""
        served = plan.served
        self.trace = Trace(
            served.name, recorded_sampling(plan.span.sampling), plan.limit, plan.remaining, dict(plan.variables),
            [] if self.tools is None else self.tools.specs, len(plan.prompt), plan.prompt,
            manner=plan.reasoning_config.recorded(), fingerprint=served.engine.fingerprint.hex(),
            numerics=served.engine.numerics.recorded(),
            quotable=[] if self._found is None else self._found.quotable,
            repetition=None if plan.span.repetition_detection is None else asdict(plan.span.repetition_detection),
            selected=[] if plan.selected is None else [tool.spec() for tool in plan.selected.tools],
        )  # fmt: skip

    async def _write(self, pipeline: AnswerPipeline) -> Finish:
        finish: Finish = "length"
        async with aclosing(pipeline.stream()) as stream:
            async for _, each in stream:
                match each:
                    case Wrote(piece, deltas, reason):
                        await self._take(piece, deltas)
                        finish = "stop" if reason == "tool_calls" else reason or "length"
                    case Called():
                        self._steps.next()
                        self._deltas.flush()
                        self._close_thinking()
                    case Returned(call, text):
                        assert self.tools is not None
                        self._steps.returned(call, text, untrusted=call.name in self.tools.tainted_by)
                        if self.trace is not None and pipeline.agent is not None:
                            self.trace.results += [[] for _ in range(pipeline.agent.steps - len(self.trace.results))]
                            self.trace.results[-1].append(text)
                        if self._content and not self._content[-1].endswith("\n"):
                            self._say("\n\n")  # the model's text before its call is a paragraph of its own
                            if self._checked is not None:
                                self._checked.skip(2)
                    case Limited(limit):
                        if self.trace is not None and pipeline.agent is not None:
                            self.trace.limit = pipeline.agent.steps, limit
                        self.log.append(LimitReached(limit=limit))
        return finish

    def _start(self, limit: int) -> None:
        assert self._pipeline is not None
        self._model = self._pipeline.plan.served.name if self._pipeline.auto is None else None
        self.started = True
        self._writing_at = time.perf_counter()
        strategy = None if self._reasoning_config.strategy is None else self._reasoning_config.strategy.name
        model = self._model or AUTO_NAME
        self.log.append(RunStarted(model=model, started_at=time.time(), max_tokens=limit, strategy=strategy))

    async def _take(self, piece: Piece, deltas: Iterable[Delta]) -> None:
        now = time.perf_counter()
        if self._first_token_at is None and piece.spent:
            self._first_token_at = self._metrics_at = now
        self._thinking_tokens += piece.spent if piece.part == "thinking" else 0
        if any(isinstance(delta, Reasoning) for delta in deltas):
            self._open_thinking(now)
        for delta in await self._thoughts.seen(list(deltas), ended=piece.finish_reason is not None):
            match delta:
                case Reasoning(text):
                    self._thinking.append(text)
                    self._deltas.add("thinking", text)
                case Content(text, _, guessed) if text:
                    self._deltas.flush_unless("answer")
                    self._close_thinking()
                    self._cite_research()
                    if self._research is not None and text.startswith(PARTIAL):
                        self._notify(text)
                    elif self._checked is not None:
                        self._show(self._checked.feed(text))
                    else:
                        self._answer(text, guessed=guessed)
        if self._checked is not None and piece.part == "answer" and (held := self._checked.hold(piece.spent, now)):
            self._deltas.flush()
            self.log.append(held)
        if now - self._metrics_at >= _METRICS_S and (metrics := self._metrics()):
            self._metrics_at = now
            self.log.append(metrics)
            if self._thinking_began is not None:
                self.log.append(ThinkingProgress(tokens=self._tally.reasoning_tokens))

    def _read(self, prefill: Prefill) -> None:
        now = time.perf_counter()
        if now - self._read_at >= _PREFILL_S:
            self._read_at = now
            self.log.append(PrefillProgress(processed=prefill.processed, total=prefill.total, cached=prefill.cached))

    def _open_thinking(self, now: float) -> None:
        if self._thinking_began is None:
            self._deltas.flush()
            began = self._writing_at if self._unseen and self._thinking_s is None else None
            self._thinking_began = now if began is None else began
            budget = self._reasoning_config.budget
            most, waits = (None, 0) if budget is None else (budget.max_tokens, budget.waits)
            started_at = time.time() - (now - self._thinking_began)
            self.log.append(ThinkingStarted(started_at=started_at, max_tokens=most, waits=waits))

    def _hear(self, event: Event) -> None:
        """Logs an event of the pipeline, a strategy or a cascade."""
        if isinstance(event, Admitted):
            self._start(event.limit)
        elif (shown := map_event(event)) is not None:
            if isinstance(shown, RouteAnswering):
                self._model = shown.model
            self._deltas.flush()
            self.log.append(shown if self._thoughts.policy == "shown" else without_text(shown))

    def _answer(self, text: str, *, guessed: bool = False) -> None:
        self._steps.wrote(text)
        self._say(text, guessed=guessed)

    def _say(self, text: str, *, guessed: bool = False) -> None:
        self._content.append(text)
        self._deltas.add("answer", text, guessed=guessed)

    def _show(self, sentences: Iterable[tuple[str, CitationRef]]) -> None:
        """Checked sentences, each followed by its citations."""
        for text, supported in sentences:
            self._answer(text)
            self._deltas.flush()
            self.log.append(supported)

    def _cite_research(self) -> None:
        """Shows the sources that a strategy found; from then on the answer is checked against them."""
        if self._research is not None and self._checked is None and (found := self._research.found()).sources:
            self._found = found
            self.log.append(found.event())
            self._checked = CheckedAnswer(found)

    def _notify(self, text: str) -> None:
        """Says something about the answer in it, which no source is to support."""
        self._answer(text)
        if self._checked is not None:
            self._checked.skip(len(text))

    def _keep_research(self) -> None:
        """Makes a partial report of what a strategy has noted, where it was ended before its report began."""
        if self._research is None or self._content or self.log.ended or (partial := self._research.partial) is None:
            return
        notice, text = partial
        self._deltas.flush()
        self._close_thinking()
        self._cite_research()
        self._notify(notice)
        if self._checked is not None:
            self._show([*self._checked.feed(text), *self._checked.finish()])

    def _close_thinking(self) -> None:
        if self._thinking_began is None:
            return
        duration_s = time.perf_counter() - self._thinking_began
        self._thinking_s = (self._thinking_s or 0.0) + duration_s
        self.log.append(ThinkingDone(duration_s=duration_s, tokens=self._thinking_tokens))
        self._thinking_began = None
        self._thinking_tokens = 0

    def _metrics(self) -> Metrics | None:
        if self._first_token_at is None:
            return None
        made = self._tally.completion_tokens
        since = (self._unseen and self._writing_at) or self._first_token_at  # tokens that nobody sees come before it
        elapsed_s = (now := time.perf_counter()) - since
        rate = (made - 1) / elapsed_s if made > 1 and elapsed_s > 0 else 0.0
        ttft_s, seconds = self._first_token_at - self._began, now - self._began
        return Metrics(ttft_s=ttft_s, tokens_per_s=rate, completion_tokens=made, seconds=seconds)

    def _cut_short(self) -> None:
        self._keep_research()
        self._end(self._ending or RunCancelled(usage=Usage.of(self._tally)))

    def _end(self, terminal: RunCompleted | RunFailed | RunCancelled) -> None:
        if self.log.ended:
            return
        self._deltas.flush()
        if self._thinking_began is not None:
            self._thinking_s = (self._thinking_s or 0.0) + time.perf_counter() - self._thinking_began
        status = terminal.type.removeprefix("run.")
        metrics = self._metrics()
        answer = RunAnswer(
            status=status,
            content="".join(self._content),
            thinking="".join(self._thinking),
            thinking_s=self._thinking_s,
            ttft_s=metrics.ttft_s if metrics else None,
            tokens_per_s=metrics.tokens_per_s if metrics else None,
            usage=Usage.of(self._tally) if isinstance(terminal, RunFailed) else terminal.usage,
            error=terminal.message if isinstance(terminal, RunFailed) else None,
            steps=self._steps.steps(),
            model=self._model,
            error_code=terminal.code if isinstance(terminal, RunFailed) else None,
        )
        self._on_end(answer)
        self.log.append(terminal, answer)
        self.watch.end(status)
