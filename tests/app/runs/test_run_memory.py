"""Memory in runs: the facts that are read from messages, and the notes that later chats' prompts begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.db.memory_store import NoteInPrompt, Origin
from app.runs.memory import FEW, HEADING, rank
from app.runs.stated_facts import attribute_of, stated_facts
from app.runs.trace import Trace
from tests.app.chatting import begin, log_of, new_chat
from tests.app.conftest import Server
from tests.retrieval.words import WordEmbedder

PHRASES: dict[str, Any] = json.loads(Path(__file__).with_name("stated_phrases.json").read_text(encoding="utf-8"))

# A chat each: what is said in it, and what its prompt must have and must not have from the chats before.
CHATS: list[tuple[str, list[str], list[str]]] = [
    ("My name is Ana Lopez. I live in Lyon.", [], []),
    ("What is my name?", ["My name is Ana Lopez", "I live in Lyon"], []),
    ("I'm vegetarian. What do I cook tonight?", ["My name is Ana Lopez"], []),
    ("Suggest a restaurant for me.", ["I'm vegetarian", "I live in Lyon"], []),
    ("I work as a nurse. I prefer short answers.", ["I'm vegetarian"], []),
    ("How do I plan my week?", ["I work as a nurse", "I prefer short answers"], []),
    ("My friend's name is Bo. She lives in Rome.", ["My name is Ana Lopez"], []),
    ("What do you know of me?", ["My name is Ana Lopez", "I work as a nurse"], ["Bo", "Rome"]),
    ("I moved to Lisbon.", ["I live in Lyon"], []),
    ("Where do I live?", ["I moved to Lisbon"], ["I live in Lyon"]),
    ("Remember that my car is parked on level 4.", ["I moved to Lisbon"], []),
    ("Where is my car?", ["My car is parked on level 4"], []),
    ("Ich heiße Anna.", ["My name is Ana Lopez"], []),
    ("How am I called?", ["Ich heiße Anna"], ["Ana Lopez"]),
    ("I am allergic to peanuts. My birthday is on 3 May.", ["Ich heiße Anna"], []),
    ("Is satay safe for me?", ["I am allergic to peanuts"], []),
    ("If I live in Paris, is it cheaper?", ["I moved to Lisbon"], []),
    ("When is my birthday?", ["My birthday is on 3 May", "I moved to Lisbon"], ["Paris"]),
    ("I'm a vegan now? No: I'm vegan.", ["I'm vegetarian"], []),
    ("Plan a dinner with all you know of me.", ["Ich heiße Anna", "I moved to Lisbon", "I work as a nurse",
     "I prefer short answers", "I am allergic to peanuts", "My car is parked on level 4"], ["Lyon", "Rome", "Paris"]),
]  # fmt: skip


def prompt_of(server: Server, http: httpx.Client, run: str) -> str:
    """The text that the engine got for a run."""
    recipe = Trace.loads(http.get(f"/api/runs/{run}/trace").text.partition("\n")[0])
    return server.engine.tokenizer.decode(recipe.tokens[: recipe.prompt_tokens])


def ask(server: Server, http: httpx.Client, content: str, chat: str | None = None, **fields: Any) -> str:
    """Asks in a chat, a new one where none is given; returns the prompt once the answer is made."""
    run = begin(http, chat or new_chat(http), content, **fields)["run_id"]
    log_of(http, run)
    return prompt_of(server, http, run)


def kept(http: httpx.Client) -> list[str]:
    return [note["text"] for note in http.get("/api/memory").json()["notes"]]


@pytest.mark.parametrize(("name", "misses"), [("development", 13), ("held_out", 2)])
def test_stated_facts_are_read_precisely(name: str, misses: int) -> None:
    """docs/features.md has the figures."""
    stated: dict[str, list[list[str | None]]] = PHRASES[name]["stated"]
    wanted = [(message, *fact) for message, facts in stated.items() for fact in facts]
    found = [
        (each, fact.attribute, fact.text) for each in [*stated, *PHRASES[name]["traps"]] for fact in stated_facts(each)
    ]
    assert [each for each in found if each not in wanted] == []
    assert len(found) == len(wanted) - misses and len(PHRASES[name]["traps"]) >= 66


@pytest.mark.parametrize(
    ("note", "attribute"),
    [
        ("The user's name is Ana.", "name"), ("The user lives in Lyon.", "home"), ("user is vegan", "diet"),
        ("I live in Lyon", "home"), ("The user likes rivers.", None), ("Ana lives in Lyon.", None),
    ],
)  # fmt: skip
def test_a_models_note_has_the_attribute_that_it_tells(note: str, attribute: str | None) -> None:
    assert attribute_of(note) == attribute


@pytest.mark.slow
def test_twenty_chats_recall_what_was_said_and_the_latest_wins(
    shelf: Server, ana: httpx.Client, bob: httpx.Client
) -> None:
    planted = recalled = 0
    for said, wanted, unwanted in CHATS:
        prompt = ask(shelf, ana, said)
        planted += len(wanted)
        recalled += sum(fact in prompt for fact in wanted)
        assert not [fact for fact in unwanted if fact in prompt.partition(said)[0]]
        assert HEADING not in ask(shelf, bob, "What do you know of me?"), "bob has stated nothing"
    assert recalled == planted == 29
    name = next(note for note in ana.get("/api/memory").json()["notes"] if note["attribute"] == "name")
    assert (name["text"], [each["text"] for each in name["earlier"]]) == ("Ich heiße Anna", ["My name is Ana Lopez"])
    assert kept(bob) == []


@pytest.mark.slow
def test_notes_follow_the_system_prompt_and_a_chat_keeps_its_prefix(shelf: Server, ana: httpx.Client) -> None:
    ask(shelf, ana, "My name is Ana.")
    chat = new_chat(ana)
    first = ask(shelf, ana, "I live in Lyon.", chat, system="Be brief.")
    second = ask(shelf, ana, "And now?", chat, system="Be brief.")
    notes = f"{HEADING}\n- My name is Ana"
    assert f"Be brief.\n\n{notes}" in first and second.count("I live in Lyon") == 1
    assert second.startswith(first.partition("I live in Lyon.")[0])


@pytest.mark.slow
def test_a_private_chat_neither_reads_nor_writes_memory(shelf: Server, ana: httpx.Client) -> None:
    ask(shelf, ana, "My name is Ana.")
    private = ana.post("/api/chats", json={"private": True}).json()["id"]
    assert "Ana" not in ask(shelf, ana, "I live in Lyon.", private)
    assert kept(ana) == ["My name is Ana"]


@pytest.mark.slow
def test_a_user_switches_memory_off_and_on(shelf: Server, ana: httpx.Client) -> None:
    ask(shelf, ana, "My name is Ana.")
    assert ana.patch("/api/memory", json={"enabled": False}).json()["enabled"] is False
    assert "Ana" not in ask(shelf, ana, "I live in Lyon.")
    assert kept(ana) == ["My name is Ana"]
    ana.patch("/api/memory", json={"enabled": True})
    assert "My name is Ana" in ask(shelf, ana, "Who am I?")


@pytest.mark.slow
def test_an_old_question_answered_again_changes_nothing(shelf: Server, ana: httpx.Client) -> None:
    chat = new_chat(ana)
    old = begin(ana, chat, "I live in Lyon.")
    log_of(ana, old["run_id"])
    ask(shelf, ana, "I live in Rome.")
    log_of(ana, begin(ana, chat, regenerate=old["question_id"])["run_id"])
    assert kept(ana) == ["I live in Rome"]


@pytest.mark.slow
def test_the_log_tells_what_was_kept(shelf: Server, ana: httpx.Client) -> None:
    ask(shelf, ana, "I live in Lyon.")
    run = begin(ana, new_chat(ana), "I live in Rome.")["run_id"]
    (told,) = [event for event in log_of(ana, run) if event["type"] == "memory.kept"]
    assert told["notes"] == [{"number": 1, "text": "I live in Rome", "replaced": "I live in Lyon"}] and not told["full"]


def test_of_many_notes_those_that_fit_are_given() -> None:
    notes = [NoteInPrompt(number, f"Item {number} is called thing{number}.") for number in range(1, 301)]
    for embedder in (None, WordEmbedder()):
        chosen = rank(notes, ["What is thing7 and thing250?", "And thing99?"], embedder)
        assert len(chosen) == FEW and {7, 99, 250} <= {note.number for note in chosen}


@pytest.mark.slow
def test_many_notes_are_ranked_and_bounded_in_the_prompt(shelf: Server, ana: httpx.Client) -> None:
    user = ana.headers["X-User"]
    memory = shelf.app.state.ponder.store.memory
    for number in range(60):
        shelf.on_loop(memory.keep(user, f"My {number}th river is river{number}.", None, Origin("user")))
    prompt = ask(shelf, ana, "Tell of river41.")
    assert "river41." in prompt.partition("Tell of")[0]
    assert 0 < prompt.count("th river is") <= FEW
    assert (
        np.mean([f"river{n}." in ask(shelf, ana, f"Tell of river{n}.").partition("Tell of")[0] for n in (3, 33)]) == 1
    )
