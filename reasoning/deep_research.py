"""Deep research: a plan of questions, a search and a note for each on a fork of its own, and a report that cites them.

As STORM (Shao et al. 2024) does, it asks before it writes, and writes from notes alone. The host searches and says
which sentences of a note its sources support; where the model is not able to write notes, they are sentences of the
sources, word for word, and so is the report. Whatever limit is met, what was found by then is reported.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ponder import (
    GREEDY,
    Constrained,
    ContextLengthExceeded,
    Event,
    FoundPassage,
    InvalidParameter,
    JsonSchema,
    NodeAdded,
    NodeChosen,
    NodePruned,
    NodeScored,
    Options,
    Piece,
    SearchEnded,
    SearchSource,
    Span,
    Spent,
    Yields,
    after_answer,
    empty_thinking,
    prefill,
    refuse_fields,
    strategy,
)
from ponder import StrategyContext as Context

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence

PARTIAL = "*This report is partial:"
NOTHING = "I don't know. The sources do not say."
MAX_QUESTION = 200  # characters
HELD_CHARS = 400  # of a report, which is given up where its sources support nothing in them
PLAN_TOKENS = 400
NEVER = -100.0

_PLAN = (
    "Before you answer: which questions have to be looked up? Write at most {count}, each by itself and in few words, "
    'as JSON: {{"questions": ["…"]}}.{known}'
)
_NOTE = (
    "{passages}\n\nAnswer from these sources alone, in at most three sentences, each with the label of its source: "
    "{question} If they do not say, say that they do not."
)
_REPORT = (
    "Notes:\n\n{notes}\n\nAnswer my first question as a report from these notes alone. Keep the label of the source "
    "behind each sentence, as the notes have it. Add nothing that they do not say."
)

Limit = Literal["searches", "tokens", "seconds", "stopped"]
_LIMITS: dict[Limit, str] = {
    "searches": "the limit of searches was reached",
    "tokens": "the limit of tokens was reached",
    "seconds": "the time was up",
    "stopped": "it was stopped",
}


_ENDED: dict[Limit, Literal["tokens", "seconds", "nodes"]] = {
    "searches": "nodes", "tokens": "tokens", "seconds": "seconds", "stopped": "seconds",
}  # fmt: skip


class ResearchOptions(Options):
    """Up to `questions` are looked up in each of `rounds`; later rounds ask what the notes leave open. `sources`:
    passages of one search.

    Limits: `searches` of all rounds; `tokens` that plans and notes may have together, each note `note_tokens`;
    `seconds` until the report begins, None: half of the time that strategies may take.

    `collections`: of the documents to search, where the request has no such field of its own.
    """

    questions: int = Field(4, ge=1, le=16)
    rounds: int = Field(1, ge=1, le=4)
    searches: int = Field(12, ge=1, le=64)
    sources: int = Field(4, ge=1, le=10)
    note_tokens: int = Field(160, ge=16, le=2_000)
    tokens: int = Field(4_000, ge=64, le=200_000)
    seconds: float | None = Field(None, gt=0, le=3_600)
    collections: Literal["own", "all"] | list[int] | None = None


@dataclass(frozen=True, slots=True)
class ResearchNote:
    """The answer to one question, from its sources. `written`: by the model, else sentences of the sources."""

    question: str
    text: str
    score: float
    written: bool = False


def composed(notes: Sequence[ResearchNote]) -> str:
    """Returns a report that has the notes as they are, each under its question."""
    if len(notes) == 1:
        return notes[0].text
    return "\n\n".join(f"**{_as_heading(note.question)}**\n\n{note.text}" for note in notes)


def _as_heading(question: str) -> str:
    return f"{question[:1].upper()}{question[1:].rstrip(' ?.!')}?"


def partial_notice(limit: Limit, open_questions: Sequence[str]) -> str:
    """Returns the first lines of a report that is not whole."""
    missing = f" Not looked into: {'; '.join(open_questions)}." if open_questions else ""
    return f"{PARTIAL} {_LIMITS[limit]}.*{missing}\n\n"


@dataclass(slots=True)
class _Asked:
    """A question under way: `passages` once they are found."""

    node: int
    question: str
    passages: Sequence[FoundPassage] = ()
    note: ResearchNote | None = None
    over: bool = False


@dataclass(slots=True)
class _Research:
    """One answer's research: what was asked, found and spent."""

    seq: EngineSequence
    context: Context
    options: ResearchOptions
    search: SearchSource
    ends: float
    asked: list[_Asked] = field(default_factory=list)
    limit: Limit | None = None
    searches: int = 0
    written: int = 0
    read: int = 0
    nodes: int = 1
    _events: list[Event] = field(default_factory=list)

    @property
    def notes(self) -> list[ResearchNote]:
        return [each.note for each in self.asked if each.note is not None]

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def take(self) -> Iterator[Event]:
        """Yields the events since the last time."""
        while self._events:
            yield self._events.pop(0)

    def reach(self, limit: Limit) -> None:
        self.limit = self.limit or limit

    # -- questions

    async def plan(self) -> list[str]:
        """The questions of a round, without those that were asked before; at least the first question itself."""
        known = [each.question for each in self.asked]
        found = await self._planned(known) if self.search.writes else []
        folded = {question.casefold() for question in known}
        new = [each for each in found if each.casefold() not in folded][: self.options.questions]
        return new or ([] if known else self.own_parts())

    def own_parts(self) -> list[str]:
        """The question's own parts that were not asked as they are."""
        folded = {each.question.casefold() for each in self.asked}
        return [each for each in self.search.parts if each.casefold() not in folded][: self.options.questions]

    async def _planned(self, known: Sequence[str]) -> list[str]:
        shape = {"type": "string", "minLength": 3, "maxLength": MAX_QUESTION}
        questions = {"type": "array", "items": shape, "minItems": 1, "maxItems": self.options.questions}
        schema = {
            "type": "object", "properties": {"questions": questions}, "required": ["questions"],
            "additionalProperties": False,
        }  # fmt: skip
        notes = f"\n\nThese are known by now, ask for what is still open:\n{composed(self.notes)}" if known else ""
        asked = _PLAN.format(count=self.options.questions, known=notes)
        text = await self._write(asked, PLAN_TOKENS, Constrained(JsonSchema.of(schema)))
        try:
            found = json.loads(text or "")["questions"]
        except (ValueError, KeyError, TypeError):  # cut by its limit
            return []
        return list(dict.fromkeys(" ".join(str(each).split()) for each in found))

    # -- notes

    async def look_up(self, questions: Sequence[str]) -> AsyncGenerator[ResearchNote | None, None]:
        """Looks the questions up side by side, and yields after each; None for one without an answer."""
        some = [_Asked(self.nodes + at, question) for at, question in enumerate(questions)]
        self.nodes += len(some)
        self.asked += some
        self._events += [NodeAdded(each.node, 0, 1, each.question) for each in some]
        room = asyncio.Semaphore(self.context.quota.branches)
        tasks = {asyncio.ensure_future(self._looked_up(each, room)): each for each in some}
        left = set(tasks)
        yield None
        try:
            while left:
                done, left = await asyncio.wait(
                    left, timeout=max(0.0, self.left_s), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    self.reach("seconds")
                    break
                for task in sorted(done, key=lambda task: tasks[task].node):
                    task.result()
                    yield tasks[task].note
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in left:
            if (each := tasks[task]).passages:
                self._keep(each, _quoted(each.passages), written=False)
                yield each.note

    async def _looked_up(self, asked: _Asked, room: asyncio.Semaphore) -> None:
        async with room:
            if self.searches >= self.options.searches:
                self.reach("searches")
                return
            self.searches += 1
            asked.passages = await self.search.find(asked.question, self.options.sources)
            text, written = "", False
            if asked.passages and self.search.writes:
                texts = (f"[{each.label}] {each.title}\n{each.text}" for each in asked.passages)
                prompt = _NOTE.format(passages="\n\n".join(texts), question=asked.question)
                wrote = await self._write(prompt, self.options.note_tokens)
                text = await self.search.supported(wrote, [each.label for each in asked.passages]) if wrote else ""
                written = bool(text) and not self._is_known(text)
            self._keep(asked, text if written else _quoted(asked.passages), written=written)

    def _keep(self, asked: _Asked, text: str, *, written: bool) -> None:
        asked.over = True
        score = max((each.score for each in asked.passages), default=0.0)
        self._events.append(NodeScored(asked.node, min(1.0, max(0.0, score))))
        if not text or self._is_known(text):
            self._events.append(NodePruned(asked.node, "beam" if text else "hopeless"))
            return
        asked.note = ResearchNote(asked.question, text, score, written)
        self.search.noted(asked.question, text)
        self._events += [NodeAdded(self.nodes, asked.node, 2, text), NodeChosen(asked.node), NodeChosen(self.nodes)]
        self.nodes += 1

    def _is_known(self, text: str) -> bool:
        return any(note.text == text for note in self.notes)

    async def _write(self, prompt: str, most: int, constraint: Constrained | None = None) -> str | None:
        """Asks the model on a fork; returns the text, None where a limit or the context has no room for it."""
        most = min(most, self.options.tokens - self.written)
        if most < 16:
            self.reach("tokens")
            return None
        self.written += most  # set aside, so that those side by side stay within the limit together
        (fork,) = self.seq.fork()
        spent = 0
        try:
            self.read += self._ask(fork, prompt, opened=self.context.opened and not self.context.closed)
            sampling = GREEDY
            if constraint is None and self.context.markers is not None:
                sampling = replace(sampling, logit_bias={self.context.markers.opening: NEVER})
            result = await fork.generate_all(Span(sampling, max_tokens=most, constraint=constraint))
            spent = len(result.token_ids)
            return result.text.strip()
        except ContextLengthExceeded:
            return None
        finally:
            self.written -= most - spent
            fork.close()

    def _ask(self, fork: EngineSequence, prompt: str, *, opened: bool) -> int:
        """Appends a question to the model, with no thinking before its answer; returns how many tokens these are.
        `opened`: the fork ends in a thought."""
        tokenizer, markers = self.context.tokenizer, self.context.markers
        head = empty_thinking(tokenizer, markers, opened=True) if markers is not None and opened else []
        spoken = tokenizer.encode("I look it up first.")
        tokens = [*head, *spoken, *after_answer(tokenizer, prompt, self.context.variables)]
        if markers is not None:
            last = next((each for each in reversed(tokens) if each in (markers.opening, markers.closing)), None)
            if last == markers.opening:
                tokens += empty_thinking(tokenizer, markers, opened=True)
        fork.append(tokens)
        return len(tokens)

    # -- the report

    async def report(self) -> AsyncGenerator[Piece, None]:
        """The pieces of the answer, which is then in the sequence."""
        context, notes = self.context, self.notes
        left = context.span.max_tokens
        assert left is not None
        if context.markers is not None and not context.closed:
            head = empty_thinking(context.tokenizer, context.markers, opened=context.opened)[:left]
            self.seq.append(head)
            left -= len(head)
            yield Piece("thinking", "", len(head), tuple(head))
        open_questions = [each.question for each in self.asked if not each.over]
        notice = "" if self.limit is None else partial_notice(self.limit, open_questions)
        if notice:
            piece = self._said(notice, left)
            left -= piece.spent
            yield piece
            if piece.finish_reason is not None:
                return
        if not notes or not self.search.writes or self.seq.past_deadline:
            yield self._said(self._as_noted(notes), left, last=True)
            return
        async with aclosing(self._written_report(notes, left)) as written:
            async for piece in written:
                yield piece

    async def _written_report(self, notes: Sequence[ResearchNote], left: int) -> AsyncGenerator[Piece, None]:
        """By the model, on a fork that has the notes; as the notes are where the context has no room for them, or where
        the beginning has nothing that the sources support."""
        (fork,) = self.seq.fork()
        begun = 0
        try:
            span = replace(self.context.span, max_tokens=max(1, left))
            if self.context.markers is not None:
                bias = {**span.sampling.logit_bias, self.context.markers.opening: NEVER}
                span = replace(span, sampling=replace(span.sampling, logit_bias=bias))
            try:
                self.read += self._ask(fork, _REPORT.format(notes=composed(notes)), opened=False)
                begun = len(fork)
                try:
                    stream = fork.generate(span)
                except ContextLengthExceeded:
                    stream = fork.generate(replace(span, max_tokens=None))
            except ContextLengthExceeded:
                yield self._said(self._as_noted(notes), left, last=True)
                return
            text, finish, spent, shown = "", None, 0, False
            held = list[Piece]()  # until it is known that the beginning is of use
            with stream as outputs:
                async for out in outputs:
                    text, spent, finish = text + out.text, spent + len(out.token_ids), out.finish_reason
                    held.append(Piece("answer", out.text, len(out.token_ids), out.token_ids))
                    if not shown and len(text) < HELD_CHARS and finish is None:
                        continue
                    shown = shown or bool(await self.search.supported(text, []))
                    if not shown:
                        break
                    for piece in held:
                        yield piece
                    held.clear()
            if not shown:
                self.written += spent
                yield self._said(self._as_noted(notes), left, last=True)
                return
            self.seq.append(fork.tokens[begun:])
            references = self.search.references(text) if finish == "stop" else ""
            if references:
                yield self._said(references, left - spent, last=True)
            else:
                yield Piece("answer", "", 0, finish_reason=finish or "length")
        finally:
            fork.close()

    def _as_noted(self, notes: Sequence[ResearchNote]) -> str:
        text = composed(notes) or NOTHING
        return text + self.search.references(text)

    def _said(self, text: str, most: int, *, last: bool = False) -> Piece:
        """Appends a text of ours; a piece of it that is cut at its end where `most` tokens are fewer."""
        tokens = self.context.tokenizer.encode(text)
        cut = len(tokens) > most
        if cut:
            tokens = tokens[: max(0, most)]
            text = self.context.tokenizer.decode(tokens).rstrip("\N{REPLACEMENT CHARACTER}")
        self.seq.append(tokens)
        finish: Literal["length", "stop"] | None = "length" if cut else "stop"
        return Piece("answer", text, len(tokens), tuple(tokens), finish_reason=finish if last or cut else None)


def _quoted(passages: Sequence[FoundPassage]) -> str:
    """Returns the sentences of the passages that answer, each with the label of its source."""
    return " ".join(f"{quote} [{each.label}]" for each in passages for quote in each.quotes)


@strategy("deep_research", ResearchOptions, takes_search=True)
async def deep_research(seq: EngineSequence, context: Context, options: ResearchOptions) -> Yields:
    """Plans questions, looks them up side by side, takes notes from what is found, and writes a report that cites it.

    Sub-questions are branches of the search that is shown; notes are shown as thinking. A limit, or a stop, leaves a
    report of what was found by then, which says so.

    Raises:
        InvalidParameter: there is nothing to search in, or the options go beyond what strategies may take.
    """
    search = context.search
    if search is None:
        raise InvalidParameter(
            "collections", "collections are missing, so that deep_research has nothing to search in; accepted: "
            '"own", "all" or a list of ids; in a run, as its field collections.',
        )  # fmt: skip
    if context.calls:
        raise InvalidParameter("tools", "tools are given, and deep_research calls none; accepted: no tools.")
    refuse_fields(context, "deep research", "constraint", "logprobs", "prompt_logprobs")
    most = context.quota.seconds
    if options.seconds is not None and options.seconds > most:
        raise InvalidParameter("seconds", f"seconds is {options.seconds:g}; accepted: at most {most:g}.")
    began = time.monotonic()
    ends = began + (most / 2 if options.seconds is None else options.seconds)
    if seq.deadline is not None:
        ends = min(ends, seq.deadline)
    research = _Research(seq, context, options, search, ends)
    yield NodeAdded(0, None, 0, search.question)
    await prefill(seq)
    shown = not context.closed
    for number in range(options.rounds + 1):
        if research.limit is not None or research.left_s <= 0:
            break
        # What the model planned may find nothing: then the question itself is looked up, whatever the rounds.
        lost = number == 1 and not research.notes
        questions = research.own_parts() if lost else await research.plan() if number < options.rounds else []
        if not questions:
            break
        async with aclosing(research.look_up(questions)) as looked_up:
            async for note in looked_up:
                for event in research.take():
                    yield event
                if note is not None and shown:
                    yield Piece("thinking", f"{note.question}\n{note.text}\n\n", 0)
        for event in research.take():
            yield event
    if research.left_s <= 0:
        research.reach("seconds")
    notes = research.notes
    yield NodeChosen(0)
    yield SearchEnded(
        node=0, answer="", solved=bool(notes) and research.limit is None,
        ended="found" if research.limit is None else _ENDED[research.limit],
        value=min(1.0, max((note.score for note in notes), default=0.0)), nodes=research.nodes,
        written=research.written, read=research.read, seconds=time.monotonic() - began,
    )  # fmt: skip
    written, read = research.written, research.read
    yield Spent(written, read)
    async with aclosing(research.report()) as pieces:
        async for piece in pieces:
            yield piece
    if (more := (research.written - written, research.read - read)) != (0, 0):
        yield Spent(*more)  # for the report
