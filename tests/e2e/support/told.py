"""Events of runs on the way to an answer, for scripts of the fake server: calls, sources, searches, several answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

from app.runs.events import (
    AgentDone,
    AgentStarted,
    ApprovalRequested,
    CandidateChosen,
    CandidateDone,
    CitationRef,
    CitationSources,
    Event,
    QuestionAsked,
    SearchDone,
    SearchMerge,
    SearchNode,
    SearchPrune,
    SearchScore,
    SearchSelect,
    SourceShown,
    ToolCall,
    ToolResult,
)
from tests.e2e.support.fake_documents import PASSAGE
from tests.e2e.support.fake_server import Gate


def call(name: str, arguments: str, call_id: str = "call_1", agent: str | None = None) -> ToolCall:
    return ToolCall(call_id=call_id, name=name, arguments=arguments, agent=agent)


def agent(number: int, instructions: str, *tools: str) -> AgentStarted:
    """A sub-agent of the call "call_1"."""
    return AgentStarted(agent=f"agent_{number}", call_id="call_1", instructions=instructions, tools=list(tools))


def agent_done(number: int, text: str, *, failed: bool = False) -> AgentDone:
    tokens = 0 if failed else 40
    return AgentDone(agent=f"agent_{number}", text=text, failed=failed, limit=None, tokens=tokens, seconds=1.5)


def result(name: str, text: str, call_id: str = "call_1", ms: float = 12.0) -> ToolResult:
    return ToolResult(call_id=call_id, name=name, text=text, truncated=0, untrusted=False, sources=[], ms=ms)


def approval(preview: str, *, seconds: float = 600) -> ApprovalRequested:
    return ApprovalRequested(
        approval_id="approval_1", call_id="call_1", name="write_file", reason="It writes to your files.",
        risk="medium", preview=preview, arguments_hash="0" * 64, expires_at=time.time() + seconds,
    )  # fmt: skip


def question(text: str, choices: list[str] | None) -> QuestionAsked:
    return QuestionAsked(
        question_id="question_1", call_id="call_1", name="book_table", text=text, choices=choices,
        expires_at=time.time() + 600,
    )  # fmt: skip


def source(label: str, title: str, text: str, start: int = 0, page: int | None = None) -> SourceShown:
    return SourceShown(
        label=label, document=int(label[1:]), title=title, page=page, start=start, end=start + len(text), text=text,
        score=0.87,
    )  # fmt: skip


def dam() -> tuple[list[SourceShown], SourceShown]:
    """Two sources, and what of the first says when the dam was finished."""
    sources = [source("S1", "The dam in the valley.pdf", PASSAGE, 1000, page=12), source("S2", "Minutes", "Nothing.")]
    said = "The dam was finished in 1931, two years late."
    start = 1000 + PASSAGE.index(said)
    return sources, source("S1", sources[0].title, said, start, page=12)


def found(verdict: str, sources: list[SourceShown], nearest: Sequence[SourceShown] = ()) -> CitationSources:
    return CitationSources.model_validate(
        {
            "verdict": verdict, "score": 0.8, "questions": ["when was the dam finished"], "sources": sources,
            "nearest": list(nearest),
        }
    )  # fmt: skip


def support(number: int, answer: str, sentence: str, kind: str, citations: list[SourceShown]) -> CitationRef:
    """Returns what supports `sentence`, which stands in `answer` as it is shown: with its labels."""
    start = answer.index(sentence)
    return CitationRef.model_validate(
        {
            "sentence": number, "start": start, "end": start + len(sentence), "support": kind, "citations": citations,
        }
    )  # fmt: skip


def searched(nodes: int, *, gate: str | None = None, seed: int = 1) -> list[Event | Gate]:
    """A search of so many states, with what becomes of each; the last is the answer. With a gate it stops before."""
    random = Random(seed)
    events: list[Event | Gate] = [SearchNode(node=0, parent=None, depth=0, text="Make 24 of 4, 7, 8, 8.")]
    depth = {0: 0}
    parents: dict[int, int | None] = {0: None}
    followed = [0]
    for node in range(1, nodes):
        parent = random.choice(followed[-12:])
        depth[node], parents[node] = depth[parent] + 1, parent
        text = f"{random.randint(2, 12)} × {random.randint(2, 12)} = {random.randint(4, 99)}; left: {node}, 8"
        value = round(random.random() * 0.6 + 0.2, 3)
        events += [
            SearchNode(node=node, parent=parent, depth=depth[node], text=text),
            SearchScore(node=node, value=value),
        ]
        if value < 0.45 and node < nodes - 1:
            events.append(SearchPrune(node=node, why="beam"))
        else:
            followed.append(node)
    if nodes > 8:
        events.append(SearchMerge(node=5, parent=2, text="the same by another way"))
    if gate is not None:
        events.append(Gate(gate))
    way: list[int] = []
    last: int | None = nodes - 1
    while last is not None:
        way.append(last)
        last = parents[last]
    events += [SearchSelect(node=node) for node in reversed(way)]
    events.append(
        SearchDone(
            node=nodes - 1, solved=True, ended="found", value=0.92, nodes=nodes, written=900, read=4000, seconds=3.4
        )
    )
    return events


def candidates(*texts: str, chosen: int) -> list[Event | Gate]:
    done = [
        CandidateDone(index=i, text=text, tokens=10 + i, score=0.25 * (i + 1), vote=None)
        for i, text in enumerate(texts)
    ]
    return [*done, CandidateChosen(index=chosen, of=len(texts), score=0.25 * (chosen + 1), cancelled=1)]
