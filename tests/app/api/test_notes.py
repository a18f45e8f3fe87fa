"""Tests what a model keeps of a person is shown to that person, can be forgotten, and is the only thing written
unasked."""

from __future__ import annotations

from typing import Any

import httpx

from app.auth import LOCAL
from tests.app.conftest import Server
from tools.outcome import Call, Outcome
from tools.session import Session


def remember(server: Server, text: str, user: str, run: str) -> Outcome:
    state: Any = server.app.state.ponder
    call = Call("call_1", "remember", {"text": text})
    (outcome,) = server.on_loop(state.tool_service.executor.run([call], Session(user, run)))
    assert isinstance(outcome, Outcome)
    return outcome


def test_a_note_is_listed_and_forgotten_by_its_user_alone(http: httpx.Client, server: Server) -> None:
    mine, theirs = remember(server, "Likes tea.", LOCAL.id, "a"), remember(server, "Likes rum.", "somebody", "b")
    assert mine.ok and theirs.ok
    (note,) = http.get("/api/notes").json()["notes"]
    assert note["text"] == "Likes tea."
    assert mine.result.text == f"Kept as note {note['number']}."  # which the page reads, to offer to forget it
    assert http.delete(f"/api/notes/{note['number']}").status_code == 204
    assert http.get("/api/notes").json() == {"notes": []}
    again = http.delete(f"/api/notes/{note['number']}")
    assert again.status_code == 404 and "no note" in again.json()["error"]["message"]
    for wrong in ("x", "-1", "9" * 40):
        assert http.delete(f"/api/notes/{wrong}").status_code == 404


def test_what_writes_or_executes_asks_unless_it_can_be_undone_or_touches_nothing(server: Server) -> None:
    """README, docs/tools.md and docs/api.md name the two that do not."""
    state: Any = server.app.state.ponder
    server.on_loop(state.tool_service.ready())
    unasked = {
        t.name for t in state.tool_service.registry if t.permission in ("write", "execute") and t.approval == "never"
    }
    assert unasked <= {"python", "remember"} and "remember" in unasked
    assert state.tool_service.registry.get("forget").approval == "always"
