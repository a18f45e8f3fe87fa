"""Deep research in runs and over OpenAI's API: branches, notes, a cited report, and what a stop leaves of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from app.runs import rag
from app.runs.rag import REFUSAL
from app.runs.research import DocumentResearch
from reasoning.strategy import FoundPassage
from tests.app.conftest import Server, all_is_back
from tests.app.library import error
from tests.app.runs.test_grounded_runs import DAM, of_type, upload
from tests.app.runs.test_runs import events

pytestmark = pytest.mark.slow

BOTH = "When was the dam of Orsk finished, and how many wheels has the mill of Kel?"
MILL = "The mill of Kel has nine wheels. It stands at a pond."


def begun(client: httpx.Client, question: str = BOTH, **fields: Any) -> httpx.Response:
    chat = client.post("/api/chats", json={}).json()["id"]
    wanted = {"content": question, "collections": "own", "strategy": "deep_research", "max_tokens": 500, **fields}
    return client.post(f"/api/chats/{chat}/runs", json=wanted)


def answered(client: httpx.Client, question: str = BOTH, **fields: Any) -> list[dict[str, Any]]:
    reply = begun(client, question, **fields)
    assert reply.status_code == 202, reply.text
    return [data for _, _, data in events(client, reply.json()["run_id"])]


def text_of(log: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in of_type(log, "answer.delta"))


@pytest.fixture
def library(ana: httpx.Client) -> None:
    upload(ana, DAM)
    upload(ana, MILL, "mill.txt")


@pytest.mark.usefixtures("library")
def test_a_model_that_is_not_able_leaves_notes_word_for_word(shelf: Server, ana: httpx.Client) -> None:
    log = answered(ana)
    nodes = of_type(log, "search.node")
    assert [node["depth"] for node in nodes] == [0, 1, 1, 2, 2] and nodes[0]["text"] == BOTH
    assert {node["parent"] for node in nodes[3:]} == {1, 2}, "a note stands below its question"
    (done,) = of_type(log, "search.done")
    assert (done["solved"], done["ended"], done["nodes"], done["written"]) == (True, "found", 5, 0)
    text = text_of(log)
    assert "The dam of Orsk was finished in 1931. [S" in text and "The mill of Kel has nine wheels. [S" in text
    assert "partial" not in text and text == of_type(log, "answer.done")[0]["text"]
    (found,) = of_type(log, "citation.sources")
    labels = {source["label"]: source["text"] for source in found["sources"]}
    cited = [(ref, ref["citations"][0]) for ref in of_type(log, "citation.ref") if ref["citations"]]
    assert len(cited) == 2 and all(ref["support"] == "supported" for ref, _ in cited)
    assert all(each["text"] in labels[each["label"]] for _, each in cited)
    kinds = [event["type"] for event in log]
    assert kinds.index("search.node") < kinds.index("thinking.delta") < kinds.index("citation.sources")
    assert log[-1]["type"] == "run.completed"
    all_is_back(shelf)


@pytest.mark.usefixtures("library")
def test_a_model_that_writes_is_held_to_its_sources(
    shelf: Server, ana: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf.app.state.ponder.runs, "_way", lambda served: rag.GENERATIVE)
    log = answered(ana, strategy_options={"questions": 2, "note_tokens": 24}, temperature=0)
    assert log[-1]["type"] == "run.completed", log[-1]
    (done,) = of_type(log, "search.done")
    assert done["written"] > 0 and done["read"] > 0
    # A random model's plan and notes: what is shown as a note is nonetheless a sentence of a source, or nothing is.
    for node in of_type(log, "search.node"):
        if node["depth"] == 2:
            bare = node["text"].partition(" [")[0]
            assert bare in DAM or bare in MILL, node
    assert text_of(log)
    assert of_type(log, "run.completed")[0]["usage"]["completion_tokens"] >= done["written"]
    all_is_back(shelf)


@pytest.mark.usefixtures("library")
def test_what_nothing_is_found_for_is_not_known(ana: httpx.Client) -> None:
    log = answered(ana, "Who painted the ceiling of the opera in Zurnia?")
    assert text_of(log) == REFUSAL and of_type(log, "answer.done")[0]["outcome"] == "unknown"
    assert [node["why"] for node in of_type(log, "search.prune")] == ["hopeless"]
    assert not of_type(log, "citation.sources")


@pytest.mark.usefixtures("library")
def test_a_limit_leaves_a_partial_report_that_says_so(ana: httpx.Client) -> None:
    log = answered(ana, strategy_options={"searches": 1})
    text = text_of(log)
    assert text.startswith("*This report is partial: the limit of searches was reached.* Not looked into: ")
    assert "how many wheels has the mill of Kel" in text.partition("\n\n")[0]
    assert text.endswith("The dam of Orsk was finished in 1931. [S1]")
    assert of_type(log, "search.done")[0]["ended"] == "nodes"


@pytest.mark.usefixtures("library")
def test_time_that_is_up_leaves_what_was_found(ana: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck_at_the_mill(monkeypatch)
    log = answered(ana, strategy_options={"seconds": 5.0})
    text = text_of(log)
    assert text.startswith("*This report is partial: the time was up.* Not looked into: how many wheels")
    assert "The dam of Orsk was finished in 1931. [S1]" in text and log[-1]["type"] == "run.completed"


@pytest.mark.usefixtures("library")
def test_a_stop_keeps_the_notes_as_a_partial_report(
    shelf: Server, ana: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck_at_the_mill(monkeypatch)
    started = begun(ana).json()
    log = list[dict[str, Any]]()
    for _, _, event in events(ana, started["run_id"]):
        log.append(event)
        if event["type"] == "search.score":
            assert ana.post(f"/api/runs/{started['run_id']}/cancel").status_code == 202
    assert log[-1]["type"] == "run.cancelled"
    text = text_of(log)
    assert text == "*This report is partial: it was stopped.*\n\nThe dam of Orsk was finished in 1931. [S1]"
    assert [ref["support"] for ref in of_type(log, "citation.ref")][-1] == "supported"
    assert ana.get(f"/api/runs/{started['run_id']}").json()["answer"] == text
    all_is_back(shelf)


def stuck_at_the_mill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the mill never ends."""
    find = DocumentResearch.find

    async def slow(self: DocumentResearch, query: str, limit: int) -> Sequence[FoundPassage]:
        if "mill" in query:
            await asyncio.Event().wait()
        return await find(self, query, limit)

    monkeypatch.setattr(DocumentResearch, "find", slow)


WEB = '''
from ponder import Context, Source, tool

PAGES = {
    "dam": ("Dams", "https://example.org/dams", "The dam of Orsk was finished in 1931. It is high."),
    "mill": ("Mills", "https://example.org/mills", "Many mills stand there. The mill of Kel has nine wheels."),
}

@tool(permission="network", approval="never")
def web_search(ctx: Context, query: str, count: int = 5) -> str:
    """Search the web."""
    for word, (title, url, text) in PAGES.items():
        if word in query:
            ctx.cite(Source(title, url=url, text=text))
    return "found"
'''


def test_the_web_is_searched_where_the_run_allows_it(shelf: Server, ana: httpx.Client) -> None:
    (shelf.data / "plugins").mkdir(exist_ok=True)
    plugin = shelf.data / "plugins" / "web.py"
    plugin.write_text(WEB)
    try:
        shelf.until(lambda _: "web_search" in str(ana.get("/api/tools").json()["tools"]))
        log = answered(ana, collections=None, tools="all")
        calls = of_type(log, "tool.result")
        assert [call["name"] for call in calls] == ["web_search"] * 2 and not of_type(log, "approval.requested")
        text = text_of(log)
        assert "The dam of Orsk was finished in 1931. [S" in text and "The mill of Kel has nine wheels. [S" in text
        cited = [ref["citations"][0] for ref in of_type(log, "citation.ref") if ref["citations"]]
        assert sorted(each["title"] for each in cited) == [
            "Dams (https://example.org/dams)", "Mills (https://example.org/mills)",
        ]  # fmt: skip
        assert all(each["document"] < 0 for each in cited)
        upload(ana, DAM)
        both = answered(ana, "When was the dam of Orsk finished?", tools=["web_search"])
        titles = [source["title"] for source in of_type(both, "citation.sources")[0]["sources"]]
        assert titles == ["dam.txt", "Dams (https://example.org/dams)"]
    finally:
        plugin.unlink()
        shelf.until(lambda _: "web_search" not in str(ana.get("/api/tools").json()["tools"]))


@pytest.mark.usefixtures("library")
def test_small_talk_is_answered_without_research(ana: httpx.Client) -> None:
    log = answered(ana, "hello", max_tokens=4)
    assert log[-1]["type"] == "run.completed" and not of_type(log, "search.node")


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"collections": None}, "collections", 'accepted: "own", "all" or ids'),
        ({"collections": None, "tools": "all"}, "collections", "or tools with web_search"),
        ({"tools": ["calculator"]}, "tools", "does not call; accepted: web_search, or all"),
        ({"skills": "all"}, "skills", "accepted: no skills"),
        ({"strategy_options": {"collections": "own"}}, "strategy_options.collections", "accepted: that field"),
        ({"strategy_options": {"questions": 17}}, "strategy_options.questions", "less than or equal to 16"),
        ({"strategy_options": {"searches": 0}}, "strategy_options.searches", "greater than or equal to 1"),
        ({"strategy_options": {"tokens": 10}}, "strategy_options.tokens", "greater than or equal to 64"),
        ({"strategy_options": {"seconds": 4000}}, "strategy_options.seconds", "less than or equal to 3600"),
        ({"strategy_options": {"depth": 3}}, "strategy_options.depth", "accepted: questions, rounds, searches"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_by_name(ana: httpx.Client, fields: Any, param: str, told: str) -> None:
    reply = begun(ana, **fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert told in reply.json()["error"]["message"]


@pytest.mark.usefixtures("library")
def test_over_openais_api_the_report_lists_its_sources(shelf: Server, ana: httpx.Client) -> None:
    asked = {
        "model": "default", "messages": [{"role": "user", "content": BOTH}], "strategy": "deep_research",
        "max_tokens": 500,
    }  # fmt: skip
    reply = ana.post("/v1/chat/completions", json={**asked, "strategy_options": {"collections": "own"}})
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    text = choice["message"]["content"]
    assert "The dam of Orsk was finished in 1931. [S1]" in text and choice["finish_reason"] == "stop"
    assert text.partition("\n\nSources:\n")[2].splitlines() == ["[S1] dam.txt", "[S2] mill.txt"]
    assert "The dam of Orsk" in choice["message"]["reasoning_content"]
    said = error(ana.post("/v1/chat/completions", json=asked), 400, "invalid_value", "strategy_options.collections")
    assert said.startswith("strategy_options.collections are missing") and 'accepted: "own"' in said
    missing = {**asked, "strategy_options": {"collections": [10**6]}}
    assert ana.post("/v1/chat/completions", json=missing).status_code in (400, 404)
    all_is_back(shelf)


def test_it_reads_nobody_elses_documents(ana: httpx.Client, bob: httpx.Client) -> None:
    upload(bob, DAM)
    assert text_of(answered(ana)) == REFUSAL
    asked = {
        "model": "default", "messages": [{"role": "user", "content": BOTH}], "strategy": "deep_research",
        "strategy_options": {"collections": "all"}, "max_tokens": 500,
    }  # fmt: skip
    assert ana.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"] == REFUSAL
