"""Questions over the API that the bundled model answers with tools that really run: over files, a database and sums.

It is a very small model, so the questions are such as it understands; what is shown is the way there and back, and that
a turn with a tool computes its new tokens and nothing else.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.app.conftest import PEBBLE, Server, serving
from tests.app.runs.test_runs import events
from tests.clients.script import Turn, play
from tests.clients.scripted_model import assemble, write_checkpoint

pytestmark = pytest.mark.slow

NOTES = "The Kestrel project began in 1987."
ORDERS = [("Ana", "lamp", 40), ("Ben", "chair", 85), ("Ana", "desk", 210), ("Cleo", "lamp", 40)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a document and a database."""
    shop = tmp_path_factory.mktemp("databases") / "shop.db"
    with sqlite3.connect(shop) as db:
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, item TEXT, amount INTEGER)")
        db.executemany("INSERT INTO orders (customer, item, amount) VALUES (?, ?, ?)", ORDERS)
    db.close()
    with serving(PEBBLE, tmp_path_factory.mktemp("desk"), databases={"shop": shop}) as server:
        give_notes(server)
        yield server


@pytest.fixture(scope="module")
def scripted_desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the document, whose model plays what the question says."""
    folder = tmp_path_factory.mktemp("scripted_desk")
    with serving(write_checkpoint(folder / "scripted"), folder / "data", assemble=assemble) as server:
        give_notes(server)
        yield server


def give_notes(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        job = http.post("/api/documents", files={"file": ("notes.txt", NOTES.encode())}).json()["job"]
        server.until(lambda _: http.get(f"/api/jobs/{job['id']}").json()["status"] == "done")


@dataclass(frozen=True)
class Told:
    calls: list[str]
    results: list[str]
    answer: str
    trace: dict[str, Any]
    usage: dict[str, int]
    prefilled: int


def ask(server: Server, question: str, tools: list[str]) -> Told:
    before = server.stats()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        chat = http.post("/api/chats", json={}).json()["id"]
        body = {"content": question, "tools": tools, "temperature": 0, "max_tokens": 300}
        run = http.post(f"/api/chats/{chat}/runs", json=body).json()["run_id"]
        log = [event for _, _, event in events(http, run)]
        trace = json.loads(http.get(f"/api/runs/{run}/trace").text.splitlines()[0])
    assert log[-1]["type"] == "run.completed", log[-1]
    return Told(
        [e["name"] for e in log if e["type"] == "tool.call"],
        [e["text"] for e in log if e["type"] == "tool.result"],
        next(e["text"] for e in log if e["type"] == "answer.done"),
        trace, log[-1]["usage"], server.stats().prompt_tokens - before.prompt_tokens,
    )  # fmt: skip


def check_computed_once(told: Told) -> None:
    """Checks that the engine read results of tools, and hardly any token twice."""
    whole, prompt = len(told.trace["tokens"]), told.trace["prompt_tokens"]
    appended = whole - prompt - told.usage["completion_tokens"]
    again = told.prefilled - (prompt - told.usage["cached_tokens"]) - appended
    assert appended > 0 and again <= 0.02 * whole, f"{again} of {whole} tokens were computed again"


CASES = {
    "a sum": ("What is 23 * 17?", ["calculator"], ["calculator"], ["391"]),
    "a document": ("When did the Kestrel project begin?", ["search_documents"], ["search_documents"], ["1987"]),
    "SQL": ("Run the SQL query SELECT sum(amount) FROM orders", ["sql_query"], ["sql_query"], ["375"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_question_is_answered_with_what_its_tools_gave(desk: Server, name: str) -> None:
    question, tools, called, said = CASES[name]
    told = ask(desk, question, tools)
    assert told.calls == called and all(value in told.answer for value in said), told
    assert all(any(value in result for result in told.results) for value in said)


def test_two_tools_in_a_row_have_their_results_in_one_answer(scripted_desk: Server) -> None:
    """The bundled model calls one tool a question: a script does here what a larger model would."""
    turns = (
        Turn(calls=[("search_documents", {"query": "When did the Kestrel project begin?"})]),
        Turn(calls=[("calculator", {"expression": "23 * 17"})]),
        Turn("It began in 1987, and 23 * 17 is 391."),
    )
    told = ask(scripted_desk, play(*turns), ["calculator", "search_documents"])
    assert told.calls == ["search_documents", "calculator"] and told.answer == turns[-1].text, told
    assert "1987" in told.results[0] and "391" in told.results[1]
    check_computed_once(told)


@pytest.mark.parametrize("name", CASES)
def test_a_turn_with_a_tool_computes_its_new_tokens_alone(desk: Server, name: str) -> None:
    question, tools, _, _ = CASES[name]
    told = ask(desk, question + " ", tools)
    assert len(told.results) == len(told.calls)
    check_computed_once(told)


MISTAKEN = (
    "SELECT sum(amounts) FROM orders",
    "SELECT price FROM lamps",
    "SELECT item FROM orders WHERE colour = 'red'",
)


@pytest.mark.parametrize("statement", MISTAKEN)
def test_a_small_model_queries_the_tables_that_there_are(desk: Server, statement: str) -> None:
    told = ask(desk, f"Run the SQL query {statement}", ["sql_query"])
    assert told.calls == ["sql_query"]
    assert '"columns"' in told.results[0], told.results
