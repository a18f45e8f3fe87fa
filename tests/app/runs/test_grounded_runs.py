"""Runs that answer from documents: sources before anything else, sentences with what supports them, and rights."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.answering.served_model import ServedModel
from app.runs import rag
from app.runs.rag import REFUSAL, CheckedAnswer, RetrievedContext
from retrieval import PromptSource
from retrieval.sentence_ranking import RankedSentence
from retrieval.spans import statements
from tests.app.conftest import Server
from tests.app.runs.test_runs import events

DAM = "The dam of Orsk was finished in 1931. The city of Orsk paid for the dam."


def answered(client: httpx.Client, question: str, collections: Any = "all") -> list[dict[str, Any]]:
    """The events of a run in a new chat."""
    chat = client.post("/api/chats", json={}).json()["id"]
    wanted = {"content": question, "collections": collections, "max_tokens": 40}
    reply = client.post(f"/api/chats/{chat}/runs", json=wanted)
    assert reply.status_code == 202, reply.text
    return [data for _, _, data in events(client, reply.json()["run_id"])]


def of_type(log: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in log if event["type"] == kind]


def upload(client: httpx.Client, text: str, name: str = "dam.txt") -> int:
    reply = client.post("/api/documents", files={"file": (name, text)})
    assert reply.status_code == 201, reply.text
    return int(reply.json()["documents"][0]["id"])


@pytest.fixture
def written(shelf: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model writes the answers, as with `document_answers = "generative"`."""
    monkeypatch.setattr(shelf.app.state.ponder.runs, "_way", lambda served: rag.GENERATIVE)


@pytest.mark.usefixtures("written")
def test_sources_come_before_the_answer_and_sentences_name_their_support(ana: httpx.Client) -> None:
    document = upload(ana, DAM)
    log = answered(ana, "when was the dam of Orsk finished?")
    kinds = [event["type"] for event in log]
    assert kinds.index("citation.sources") < kinds.index("run.started") < kinds.index("answer.done")
    (found,) = of_type(log, "citation.sources")
    (source,) = found["sources"]
    assert found["verdict"] in ("answer", "partial") and source["label"] == "S1"
    assert source["document"] == document and DAM[source["start"] : source["end"]] == source["text"]
    text = of_type(log, "answer.done")[0]["text"]
    assert text == "".join(event["text"] for event in of_type(log, "answer.delta"))
    spans = [(event["start"], event["end"]) for event in of_type(log, "citation.ref")]
    assert spans and spans == sorted(spans) and spans[-1][1] <= len(text)


def test_a_small_model_is_spared_and_the_sentence_that_answers_is_quoted(ana: httpx.Client) -> None:
    document = upload(ana, f"{DAM}\n\nThe mill of Kel\nhas nine wheels.", "two.txt")
    log = answered(ana, "when was the dam of Orsk finished?")
    assert not of_type(log, "run.started") and log[-1]["type"] == "run.completed"
    assert of_type(log, "answer.done")[0]["text"] == "The dam of Orsk was finished in 1931. [S1]"
    (ref,) = of_type(log, "citation.ref")
    (cited,) = ref["citations"]
    assert ref["support"] == "supported" and (ref["start"], ref["end"]) == (0, 42)
    assert ref["answers"] == cited["score"] > 0.5
    assert cited["document"] == document and DAM[cited["start"] : cited["end"]] == cited["text"] == DAM[:37]


def test_each_part_of_a_question_is_answered_by_its_sentence(ana: httpx.Client) -> None:
    upload(ana, f"{DAM} The mill of Kel has nine wheels.", "parts.txt")
    log = answered(ana, "when was the dam of Orsk finished, and how many wheels has the mill of Kel?")
    text = of_type(log, "answer.done")[0]["text"]
    assert text == "The dam of Orsk was finished in 1931. [S1]\n\nThe mill of Kel has nine wheels. [S1]"
    refs = of_type(log, "citation.ref")
    assert [text[ref["start"] : ref["end"]] for ref in refs] == text.split("\n\n")


def test_a_part_that_nothing_answers_is_named(ana: httpx.Client) -> None:
    upload(ana, DAM, "one-part.txt")
    log = answered(ana, "when was the dam of Orsk finished, and who sells zebras?")
    text = of_type(log, "answer.done")[0]["text"]
    assert text == "The dam of Orsk was finished in 1931. [S1]\n\nThe sources do not say: who sells zebras"
    refs = of_type(log, "citation.ref")
    assert [ref["support"] for ref in refs] == ["supported", "plain"]
    assert [text[ref["start"] : ref["end"]] for ref in refs] == text.split("\n\n")


def test_a_follow_up_is_searched_for_with_what_it_leaves_out(ana: httpx.Client) -> None:
    upload(ana, f"{DAM}\n\nThe mill of Kel was finished in 1822. It has nine wheels.", "mill.txt")
    chat = ana.post("/api/chats", json={}).json()["id"]
    answers = list[str]()
    for question in ("when was the mill of Kel finished?", "and how many wheels has it?"):
        wanted = {"content": question, "collections": "all"}
        run = ana.post(f"/api/chats/{chat}/runs", json=wanted).json()["run_id"]
        log = [data for _, _, data in events(ana, run)]
        answers.append(of_type(log, "answer.done")[0]["text"])
    assert "1822" in answers[0] and "nine wheels" in answers[1]
    assert "mill" in of_type(log, "citation.sources")[0]["questions"][0]


def test_a_model_is_not_measured_before_it_is_asked_about_documents(
    shelf: Server, ana: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def way(served: ServedModel) -> rag.AnswerWay:
        asked.append(served.name)
        return rag.GENERATIVE

    monkeypatch.setattr(shelf.app.state.ponder.runs, "_way", way)
    upload(ana, DAM)
    answered(ana, "when was the dam of Orsk finished?", None)
    answered(ana, "Thanks!")
    assert asked == []
    answered(ana, "when was the dam of Orsk finished?")
    assert asked == ["tiny"]


def test_thanks_are_not_searched_for(ana: httpx.Client) -> None:
    upload(ana, DAM)
    log = answered(ana, "Thanks!")
    assert not of_type(log, "citation.sources") and of_type(log, "run.started")


def test_what_is_not_in_the_documents_is_not_asked_of_the_model(ana: httpx.Client) -> None:
    upload(ana, DAM)
    log = answered(ana, "zebras giraffes okapis?")
    assert of_type(log, "citation.sources")[0]["verdict"] == "none"
    assert of_type(log, "answer.done")[0]["text"] == REFUSAL and not of_type(log, "run.started")
    assert log[-1]["type"] == "run.completed" and log[-1]["usage"]["prompt_tokens"] == 0


def test_a_refusal_shows_the_sentences_that_come_nearest_and_cites_none(ana: httpx.Client) -> None:
    document = upload(ana, f"{DAM}\n\nThe mill of Kel has nine wheels.", "near.txt")
    log = answered(ana, "what colour did the mayor paint the wheels of the tractor?")
    (found,) = of_type(log, "citation.sources")
    assert found["verdict"] == "none" and not of_type(log, "citation.ref")
    nearest = found["nearest"][0]
    assert nearest["document"] == document and nearest["text"] == "The mill of Kel has nine wheels."
    assert nearest["score"] < 0.5 and found["sources"][0]["label"] == nearest["label"]


def test_an_answer_shows_no_nearest_sentences(ana: httpx.Client) -> None:
    upload(ana, DAM)
    assert of_type(answered(ana, "when was the dam of Orsk finished?"), "citation.sources")[0]["nearest"] == []


def test_a_supported_sentence_that_does_not_answer_is_told_from_one_that_does() -> None:
    source = PromptSource("S1", 1, "Dam", 0, len(DAM), DAM, 1.0)
    first, second = statements(DAM)
    ranked = (RankedSentence(source, (first,), 1.2, 0.91), RankedSentence(source, (second,), 0.3, 0.07))
    answer = CheckedAnswer(RetrievedContext((source,), "answer", 0.9, ranked=ranked))
    shown = [ref for _, ref in [*answer.feed(f"{DAM} It has nine green towers."), *answer.finish()]]
    assert [(ref.support, ref.answers) for ref in shown] == [
        ("supported", 0.91), ("supported", 0.07), ("unsupported", None),
    ]  # fmt: skip


def test_nobody_is_answered_from_the_documents_of_another(ana: httpx.Client, bob: httpx.Client) -> None:
    upload(ana, DAM)
    log = answered(bob, "when was the dam of Orsk finished?")
    assert of_type(log, "citation.sources")[0]["sources"] == []
    assert "1931" not in str(log)


def test_a_collection_that_is_not_there_is_said_before_anything_begins(ana: httpx.Client) -> None:
    chat = ana.post("/api/chats", json={}).json()["id"]
    reply = ana.post(f"/api/chats/{chat}/runs", json={"content": "when?", "collections": [987654]})
    assert reply.status_code == 404 and "987654" in reply.json()["error"]["message"]
    assert ana.get(f"/api/chats/{chat}").json()["messages"] == []


def test_a_question_too_long_to_search_for_fails_with_its_limit(pebble_http: httpx.Client) -> None:
    (failed,) = of_type(answered(pebble_http, "dam " * 1200), "run.failed")
    assert "4,000" in failed["message"] and failed["code"] != "internal_error"


def test_a_sentence_is_shown_when_it_is_whole_and_checked() -> None:
    found = RetrievedContext((PromptSource("S1", 1, "Dam", 0, len(DAM), DAM, 1.0),), "answer", 0.9)
    answer = CheckedAnswer(found)
    assert list(answer.feed("[S1] The dam of Orsk was finished in 1931")) == []
    (first,) = answer.feed(". [S1] It has nine")
    (second,) = [*answer.feed(" green towers."), *answer.finish()]
    assert first[0] == "The dam of Orsk was finished in 1931. [S1] " and first[1].support == "supported"
    assert second[0] == "It has nine green towers. [unsupported]" and second[1].start == len(first[0])


def test_a_sentence_that_is_held_back_is_told_of_once_a_second() -> None:
    answer = CheckedAnswer(RetrievedContext((PromptSource("S1", 1, "Dam", 0, len(DAM), DAM, 1.0),), "answer", 0.9))

    def told(words: int, now: float, text: str = "dam ") -> int | None:
        shown.extend(answer.feed(text))
        event = answer.hold(words, now)
        return None if event is None else event.tokens

    shown = list[Any]()
    slow = [told(1, now) for now in (10.0, 10.5, 11.0, 11.5, 11.9, 12.0)]
    assert slow == [None, None, 3, None, None, 6], "after a second, then each second"
    assert told(50, 12.1, "was. It") is None and len(shown) == 1, "a new sentence has been held for no time yet"
    assert told(5, 12.9) is None, "as many tokens as that were told of at once, but the last event is too near"
    assert told(5, 13.0) == 60
    assert [*answer.finish()] and answer.hold(1, 99.0) is None, "nothing is held"


@pytest.mark.usefixtures("written")
def test_a_run_tells_that_it_checks_a_sentence(ana: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rag, "HELD_TOKENS", 8)
    upload(ana, DAM)
    chat = ana.post("/api/chats", json={}).json()["id"]
    body = {"content": "when was the dam of Orsk finished?", "collections": "all", "thinking": False}
    run = ana.post(f"/api/chats/{chat}/runs", json={**body, "temperature": 0, "max_tokens": 40}).json()["run_id"]
    log = [data for _, _, data in events(ana, run)]
    kinds = [event["type"] for event in log]
    assert of_type(log, "answer.checking")[0]["tokens"] == 8
    assert kinds.index("answer.checking") < kinds.index("answer.delta") < kinds.index("answer.done")


@pytest.mark.usefixtures("written")
def test_the_kv_of_a_retrieved_prompt_is_found_by_its_user_alone(ana: httpx.Client, bob: httpx.Client) -> None:
    asked = "when was the dam of Orsk finished?"
    for who in (ana, bob):
        upload(who, DAM)
    ended = [answered(who, asked)[-1] for who in (ana, ana, bob, bob)]
    cached = [end["usage"]["cached_tokens"] for end in ended]
    assert cached[0] == 0 and cached[2] == 0
    assert cached[1] > 0 and cached[3] > 0


@pytest.mark.parametrize("strategy", ["rag_token", "rag_sequence"])
def test_a_strategy_over_documents_writes_from_each_source(ana: httpx.Client, strategy: str) -> None:
    upload(ana, DAM, "dam-one.txt")
    upload(ana, "The dam of Orsk has nine gates.", "dam-two.txt")
    chat = ana.post("/api/chats", json={}).json()["id"]
    wanted = {
        "content": "when was the dam of Orsk finished?", "collections": "all", "max_tokens": 40, "thinking": False,
        "strategy": strategy,
    }  # fmt: skip
    reply = ana.post(f"/api/chats/{chat}/runs", json=wanted)
    assert reply.status_code == 202, reply.text
    log = [data for _, _, data in events(ana, reply.json()["run_id"])]
    assert of_type(log, "run.started") and log[-1]["type"] == "run.completed", log[-1]
    assert len(of_type(log, "citation.sources")[0]["sources"]) == 2 and of_type(log, "answer.done")[0]["text"]


def test_a_strategy_over_documents_without_collections_says_what_it_needs(ana: httpx.Client) -> None:
    chat = ana.post("/api/chats", json={}).json()["id"]
    wanted = {"content": "when?", "max_tokens": 40, "thinking": False, "strategy": "rag_token"}
    run = ana.post(f"/api/chats/{chat}/runs", json=wanted).json()["run_id"]
    last = [data for _, _, data in events(ana, run)][-1]
    assert last["type"] == "run.failed" and "collections" in last["message"]
