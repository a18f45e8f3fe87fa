"""Titles of chats: the first question, or one that the model writes when it is idle, and never over a person's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.config import LOCAL_USER
from app.db.run_store import Place, question_title
from app.db.store import Store
from app.runs.chat_titles import title_in
from tests.app import postgres
from tests.app.chatting import ask, new_chat
from tests.app.conftest import serving
from tests.e2e.support.scripted_model import write_scripted

DATABASES = postgres.DATABASES_SLOW

WAIT_S = 30.0


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("What is the sea?", "What is the sea?"), ("Explain tides.", "Explain tides"), ("...", "..."),
        ("Hello!\n\nWhy,  then…", "Hello! Why, then"), ("x" * 70, "x" * 60 + "…"),
        (
            "Compare the tides of the Baltic Sea and the North Sea, please, and",
            "Compare the tides of the Baltic Sea and the North Sea…",
        ),
    ],
)  # fmt: skip
def test_a_question_as_a_title_is_cut_at_a_word_without_punctuation(question: str, title: str) -> None:
    assert question_title(question) == title


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("Boiling eggs", "Boiling eggs"), ('Title: "Boiling eggs."\nMore.', "Boiling eggs"),
        ("**Ebbe und Flut**", "Ebbe und Flut"),
        ("", None), ("no", None), ("I cannot write that. A larger model can: `ponder serve --model Qwen", None),
        ("One two three four five six seven eight nine", None), ("<b>Boiling eggs</b>", None),
    ],
)  # fmt: skip
def test_what_is_no_title_is_dropped(written: str, title: str | None) -> None:
    assert title_in(written) == title


async def test_a_title_that_a_person_gave_stays(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    chat = (await store.chats.create(LOCAL_USER))["id"]
    await store.runs.begin(LOCAL_USER, chat, "run_1", Place("Why tides?", at_leaf=True), {})
    assert not await store.chats.entitle("another", chat, "Why tides?", "Ebb")
    assert await store.chats.entitle(LOCAL_USER, chat, "Why tides?", "Ebb and flow")
    await store.chats.change(LOCAL_USER, chat, {"title": "Mine"})
    assert not await store.chats.entitle(LOCAL_USER, chat, "Why tides?", "Ebb")
    assert (await store.chats.get(LOCAL_USER, chat))["title"] == "Mine"
    await store.close()


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose model answers "red", "blue", and writes a title."""
    folder = tmp_path_factory.mktemp("titles")
    model = write_scripted(folder / "model", {"red": "It is red.", "blue": "Now blue!", "Give": "Colours of things"})
    with serving(model, folder, titles="model") as server, httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def title_once(http: httpx.Client, chat: str, title: str) -> str:
    """The chat's title once it is this one, or after a while."""
    until = time.monotonic() + WAIT_S
    while (held := http.get(f"/api/chats/{chat}").json()["title"]) != title and time.monotonic() < until:
        threading.Event().wait(0.02)
    return str(held)


@pytest.mark.slow
def test_the_model_writes_a_title_after_the_first_exchange_alone(http: httpx.Client) -> None:
    chat = new_chat(http)
    ask(http, chat, "red as what?", max_tokens=20)
    assert title_once(http, chat, "Colours of things") == "Colours of things"
    named = new_chat(http)
    http.patch(f"/api/chats/{named}", json={"title": "Mine"})
    ask(http, named, "red as what?", max_tokens=20)
    http.patch(f"/api/chats/{chat}", json={"title": "red as what?"})
    ask(http, chat, "blue now?", max_tokens=20)
    last = new_chat(http)
    ask(http, last, "red as what?", max_tokens=20)
    assert title_once(http, last, "Colours of things") == "Colours of things"  # those before it had their turn
    assert [http.get(f"/api/chats/{each}").json()["title"] for each in (named, chat)] == ["Mine", "red as what?"]
