"""Full-text search of chats: what it finds, what it marks, and that no query can break it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.app import postgres
from tests.app.chatting import ask, change, file, imported, message, new_chat, read
from tests.app.library import error

DATABASES = postgres.DATABASES_SLOW


def find(http: httpx.Client, q: str, **more: Any) -> list[dict[str, Any]]:
    reply = http.get("/api/chats/search", params={"q": q, **more})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["results"])


def told(http: httpx.Client, *texts: str, title: str = "t") -> str:
    """A chat with these words, questions and answers in turn."""
    roles = ("user", "assistant")
    chain = [message(str(at), str(at - 1) if at else None, roles[at % 2], text) for at, text in enumerate(texts)]
    return imported(http, file(*chain, title=title))[0]


def marked(found: dict[str, Any]) -> list[str]:
    return [found["snippet"][mark["start"] : mark["end"]] for mark in found["marks"]]


@pytest.mark.parametrize(
    ("query", "marks"),
    [
        ("granite", ["granite"]), ("GRANITE", ["granite"]), ("uber", ["Über"]), ("gran", ["granite"]),
        ("dam built", ["dam", "built"]), ('"dam"', ["dam"]), ("dam -bees", []), ("bees", []), ("dam OR", []),
    ],
)  # fmt: skip
def test_a_text_is_found_by_all_of_its_words(ana: httpx.Client, query: str, marks: list[str]) -> None:
    chat = told(ana, "The dam, Über all, is built of granite.", "Is it?")
    found = find(ana, query)
    assert [each["chat_id"] for each in found] == ([chat] if marks else [])
    if marks:
        assert sorted(marked(found[0])) == sorted(marks)
        assert found[0]["message_id"] == read(ana, chat)["messages"][0]["id"] and found[0]["title"] == "t"


@pytest.mark.parametrize(
    ("query", "marks"),
    [
        ("lighthuose", ["lighthouse"]), ("LIGHTHOSE granit", ["lighthouse", "granite"]),
        ("granate built", ["granite", "built"]), ("lit", []), ("lighthuose copper", []), ("zeplin", []), ("!! ???", []),
    ],
)  # fmt: skip
def test_words_that_nothing_has_are_taken_for_others_near_to_them(
    ana: httpx.Client, bob: httpx.Client, query: str, marks: list[str]
) -> None:
    told(ana, "The lighthouse is built of granite.", "Is it?")
    told(bob, "A zeppelin of copper.", "Is it?")
    assert [sorted(marked(each)) for each in find(ana, query)] == ([sorted(marks)] if marks else [])


def test_what_is_in_a_title_is_found_without_a_message(ana: httpx.Client) -> None:
    chat = told(ana, "?", "!", title="Granite dams")
    (found,) = find(ana, "granite")
    assert (found["chat_id"], found["message_id"], marked(found)) == (chat, None, ["Granite"])
    change(ana, chat, title="Bees")
    assert find(ana, "granite") == [] and len(find(ana, "bees")) == 1


def test_a_chat_is_found_once_and_the_best_comes_first(ana: httpx.Client) -> None:
    long = told(ana, "granite " + "and other words " * 50, "granite, once more, among many other words than that")
    short = told(ana, "granite", "!")
    assert [each["chat_id"] for each in find(ana, "granite")] == [short, long]
    assert [each["chat_id"] for each in find(ana, "granite", limit=1)] == [short]


def test_new_and_deleted_messages_are_seen_at_once(ana: httpx.Client) -> None:
    chat = new_chat(ana)
    answer = ask(ana, chat, "zebra")
    assert [each["message_id"] for each in find(ana, "zebra")] == [answer["parent_id"]]
    assert [each["message_id"] for each in find(ana, answer["content"])] == [answer["id"]]
    ana.delete(f"/api/chats/{chat}")
    assert find(ana, "zebra") == find(ana, answer["content"]) == []


def test_another_branch_is_found_too_and_can_be_opened(ana: httpx.Client) -> None:
    chat = new_chat(ana)
    first = ask(ana, chat, "the old zebra question", max_tokens=1)
    ask(ana, chat, "a new one", parent_id=None)
    change(ana, chat, title="other")
    (found,) = find(ana, "zebra")
    assert found["message_id"] == first["parent_id"]
    change(ana, chat, leaf_id=found["message_id"])
    assert found["message_id"] in [each["id"] for each in read(ana, chat)["messages"]]


def test_nobody_finds_what_is_anothers(ana: httpx.Client, bob: httpx.Client) -> None:
    told(ana, "granite", "!")
    assert find(bob, "granite") == [] and len(find(ana, "granite")) == 1


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("", "missing_required_parameter", "q"), ("q=", "missing_required_parameter", "q"),
        ("q=%20", "invalid_value", "q"),
        (f"q={'x' * 501}", "invalid_value", "q"), ("q=x&q=y", "invalid_value", "q"),
        ("q=x&page=2", "unknown_parameter", "page"),
        ("q=x&limit=0", "invalid_value", "limit"), ("q=x&limit=101", "invalid_value", "limit"),
    ],
)  # fmt: skip
def test_a_bad_query_is_refused_by_name(http: httpx.Client, query: str, code: str, param: str) -> None:
    error(http.get(f"/api/chats/search?{query}"), 400, code, param)


SYNTAX = st.sampled_from(
    ['"', "*", "^", "(", ")", "AND", "OR", "NOT", "NEAR(", "text:", "-", "+", ":", "\0", "a", " ", "é"]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=st.text(max_size=20) | st.lists(SYNTAX, max_size=12).map("".join))
def test_no_query_is_an_error_of_the_index(ana: httpx.Client, query: str) -> None:
    if query.strip():
        find(ana, query)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.text("abcé<>*\"'", min_size=1, max_size=6), min_size=1, max_size=60),
    which=st.integers(0, 59),
)
def test_marks_are_the_words_that_were_searched_for(ana: httpx.Client, words: list[str], which: int) -> None:
    word = words[which % len(words)]
    plain = "".join(letter for letter in word if letter.isalpha())
    if plain != word:
        return
    chat = told(ana, f"Q {' '.join(words)}", "!")
    try:
        (found,) = find(ana, word)
        assert found["marks"]
        for text in marked(found):
            assert text.lower().replace("é", "e").startswith(plain.replace("é", "e"))
        assert found["snippet"].strip("…") in f"Q {' '.join(words)}"
    finally:
        ana.delete(f"/api/chats/{chat}")
