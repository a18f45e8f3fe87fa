"""Answers of the page that would not end: they repeat themselves, or grow longer than their sources."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.runs import prompt_builder, rag
from app.runs.prompt_builder import REPETITION
from app.runs.trace import Trace
from engine import Span, Tokenizer
from engine.core.repetition import RepetitionDetector
from reasoning.thinking import Markers, Piece, think_and_answer
from tests.app.conftest import PEBBLE
from tests.app.runs.test_grounded_runs import of_type, upload, written
from tests.app.runs.test_runs import events
from tests.reasoning.test_thinking import CLOSE, OPEN, ScriptedSequence

__all__ = ["written"]  # a fixture

ORDINARY = {
    "laughter": "ha " * 15,
    "a rule": "-" * 80,
    "another rule": "=" * 80,
    "a rule of a table": "| " + " | ".join(["---"] * 12) + " |",
    "a row of zeros": "[" + ", ".join(["0"] * 24) + "]",
    "a grid of zeros": "[\n" + ",\n".join([f"    [{', '.join(['0'] * 9)}]"] * 9) + "\n]",
    "indentation": " " * 72 + "x = 1\n",
    "dots": "." * 60,
    "a list": "".join(f"- item {number}\n" for number in range(40)),
    "a table": "".join(f"| {number} | 0 | 0 | 0 |\n" for number in range(40)),
    "things to do": "- [ ] \n" * 9,
    "closing braces": "".join(f"{'    ' * depth}}}\n" for depth in range(12, 0, -1)),
}
RUNAWAY = {
    "a sentence": "The dam is in Orsk. " * 40,
    "a long sentence": "- The dam was finished in 1931, and the city paid for it.\n" * 40,
    "a word": "dam " * 200,
    "a line": "=" * 400,
}


def ended_at(tokenizer: Tokenizer, text: str) -> int | None:
    """Returns how many tokens of a text are written until it is seen to repeat itself."""
    detector = RepetitionDetector(REPETITION)
    return next((at for at, token in enumerate(tokenizer.encode(text), 1) if detector.push(token)), None)


@pytest.fixture(params=["pebble", "bytes"])
def tokenizer(request: pytest.FixtureRequest, model: Path) -> Tokenizer:
    """Small vocabularies: with others these texts have fewer tokens."""
    return Tokenizer.load(PEBBLE if request.param == "pebble" else model)


@pytest.mark.parametrize("text", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_text_is_not_taken_for_a_repetition(tokenizer: Tokenizer, text: str) -> None:
    assert ended_at(tokenizer, f"So it is:\n\n{text}\n\nAnd that is all.") is None


@pytest.mark.parametrize("text", RUNAWAY.values(), ids=RUNAWAY)
def test_text_that_runs_in_circles_is(tokenizer: Tokenizer, text: str) -> None:
    assert ended_at(tokenizer, text) is not None


def run_of(client: httpx.Client, content: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a greedy run in a new chat: the tiny model then runs in circles."""
    chat = client.post("/api/chats", json={}).json()["id"]
    body = {"content": content, "temperature": 0, "thinking": False, **fields}
    reply = client.post(f"/api/chats/{chat}/runs", json=body)
    assert reply.status_code == 202, reply.text
    return [data for _, _, data in events(client, reply.json()["run_id"])]


def test_a_run_that_repeats_itself_ends_and_says_so(http: httpx.Client) -> None:
    log = run_of(http, "go", max_tokens=1000)
    (done,) = of_type(log, "answer.done")
    assert done["finish_reason"] == "repetition" and log[-1]["type"] == "run.completed"
    assert log[-1]["usage"]["completion_tokens"] < 400


def test_a_trace_says_what_would_have_ended_its_run(http: httpx.Client) -> None:
    chat = http.post("/api/chats", json={}).json()["id"]
    run = http.post(f"/api/chats/{chat}/runs", json={"content": "go", "max_tokens": 5}).json()["run_id"]
    list(events(http, run))
    trace = Trace.loads(http.get(f"/api/runs/{run}/trace").text.partition("\n")[0])
    assert trace.repetition == asdict(REPETITION)


def test_a_run_that_its_limit_ends_says_that(http: httpx.Client) -> None:
    log = run_of(http, "go", max_tokens=50)
    assert of_type(log, "answer.done")[0]["finish_reason"] == "length"


@pytest.mark.usefixtures("written")
def test_an_answer_is_no_longer_than_its_sources(ana: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_builder, "REPETITION", None)
    monkeypatch.setattr(rag, "MIN_ANSWER_LIMIT", 8)
    text = "The dam of Orsk was finished in 1931."
    upload(ana, text)
    log = run_of(ana, "when was the dam of Orsk finished?", collections="all", max_tokens=900)
    sources = "".join(source["text"] for source in of_type(log, "citation.sources")[0]["sources"])
    (done,) = of_type(log, "answer.done")
    assert done["finish_reason"] == "sources"
    assert log[-1]["usage"]["completion_tokens"] == len(sources.encode()) < 900, "a token of this model is a byte"
    log = run_of(ana, "when was the dam of Orsk finished?", collections="all", max_tokens=20)
    assert of_type(log, "answer.done")[0]["finish_reason"] == "length"


@pytest.mark.usefixtures("written")
def test_a_short_source_leaves_an_answer_its_minimum(ana: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_builder, "REPETITION", None)
    upload(ana, "The dam of Orsk was finished in 1931.")
    log = run_of(ana, "when was the dam of Orsk finished?", collections="all", max_tokens=900)
    assert log[-1]["usage"]["completion_tokens"] == rag.MIN_ANSWER_LIMIT


def test_the_bound_of_an_answer_leaves_its_thinking_alone() -> None:
    script = [OPEN, *map(ord, "A" * 50), CLOSE, *map(ord, "b" * 50), OPEN, *map(ord, "CC"), CLOSE, ord("d")]

    async def written_with(answer_tokens: int | None) -> list[Piece]:
        seq: Any = ScriptedSequence(list(script), itertools.cycle([1]))
        span = Span(max_tokens=200)
        return [
            piece
            async for piece in think_and_answer(
                seq, span, Markers(OPEN, CLOSE), opened=False, answer_tokens=answer_tokens
            )
        ]

    def text(pieces: list[Piece], part: str) -> str:
        return "".join(piece.text for piece in pieces if piece.part == part)

    cut, whole = asyncio.run(written_with(7)), asyncio.run(written_with(None))
    assert (text(cut, "thinking"), text(cut, "answer")) == ("A" * 50, "b" * 7)
    assert cut[-1].finish_reason == "length"
    assert (text(whole, "thinking"), text(whole, "answer")) == ("A" * 50 + "CC", "b" * 50 + "d")
    between = asyncio.run(written_with(51))
    assert (text(between, "answer"), between[-1].finish_reason) == ("b" * 50 + "d", "length")
