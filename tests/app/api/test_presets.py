"""Presets and prompts: one's own, shared ones, their limits, and the file that they travel in."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import select

from app.db import preset_store
from app.db.tables import chats
from tests.app import postgres
from tests.app.chatting import Json, change, read
from tests.app.conftest import Server
from tests.app.library import error

DATABASES = postgres.DATABASES_SLOW

pytestmark = pytest.mark.slow

PIRATE: Json = {
    "name": "Pirate", "icon": "🏴‍☠️", "description": "Speaks like one.",
    "settings": {"system": "Arr.", "temperature": 0.5, "max_tokens": 3},
}  # fmt: skip


def made(http: httpx.Client, path: str, **fields: Any) -> Json:
    reply = http.post(f"/api/{path}", json=fields)
    assert reply.status_code == 201, reply.text
    return dict(reply.json())


def test_a_chat_of_a_preset_has_a_copy_of_its_settings(ana: httpx.Client) -> None:
    preset = made(ana, "presets", **PIRATE)
    assert {name: preset[name] for name in PIRATE} == PIRATE
    assert (preset["role"], preset["everybody"], preset["members"]) == ("owner", False, [])
    chat = made(ana, "chats", preset_id=preset["id"])
    assert chat["settings"] == PIRATE["settings"]
    reply = ana.patch(f"/api/presets/{preset['id']}", json={"settings": {"system": "Ahoy."}, "icon": None})
    shown = {name: reply.json()[name] for name in ("settings", "icon", "name")}
    assert shown == {"settings": {"system": "Ahoy."}, "icon": None, "name": "Pirate"}
    assert read(ana, chat["id"])["settings"] == PIRATE["settings"]
    change(ana, chat["id"], settings={})
    assert ana.get(f"/api/presets/{preset['id']}").json()["settings"] == {"system": "Ahoy."}
    assert ana.delete(f"/api/presets/{preset['id']}").status_code == 204
    error(ana.post("/api/chats", json={"preset_id": preset["id"]}), 404, "preset_not_found")
    error(ana.post("/api/chats", json={"preset_id": "x", "settings": {}}), 404, "preset_not_found")


@pytest.mark.parametrize(
    ("fields", "param", "accepted"),
    [
        ({}, "name", "1 to 60"), ({"name": ""}, "name", "1 to 60"), ({"name": " a"}, "name", "without white space"),
        ({"name": "x" * 61}, "name", "1 to 60"), ({"icon": "a b"}, "icon", "emoji"), ({"icon": "x" * 17}, "icon", "16"),
        ({"description": "x" * 501}, "description", "500"), ({"more": 1}, "more", "description, icon"),
        ({"settings": {"temperature": 3}}, "settings.temperature", "0 (greedy) to 2"),
        ({"settings": {"model": "nobody"}}, "model", "tiny"), ({"settings": {"tools": ["x"]}}, "tools", "accepted"),
    ],
)  # fmt: skip
def test_what_a_preset_cannot_be_is_refused_by_name(ana: httpx.Client, fields: Json, param: str, accepted: str) -> None:
    named = fields if param == "name" else {"name": "a", **fields}
    refused = ana.post("/api/presets", json=named)
    told = refused.json()["error"]
    assert refused.status_code in (400, 404) and told["param"] == param and accepted in told["message"], told
    assert ana.get("/api/presets").json()["presets"] == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "t"}, "name"), ({"name": "a"}, "text"), ({"name": "a b", "text": "t"}, "name"),
        ({"name": "/a", "text": "t"}, "name"), ({"name": "a", "text": " "}, "text"),
        ({"name": "a", "text": "x" * 20_001}, "text"), ({"name": "x" * 61, "text": "t"}, "name"),
    ],
)  # fmt: skip
def test_what_a_prompt_cannot_be_is_refused_by_name(ana: httpx.Client, fields: Json, param: str) -> None:
    refused = ana.post("/api/prompts", json=fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_prompts_are_made_changed_and_deleted(ana: httpx.Client, bob: httpx.Client) -> None:
    later = made(ana, "prompts", name="sum", text="Sum up {{text}}.")
    first = made(ana, "prompts", name="Fix", text="Correct: {{text}}")
    assert [each["name"] for each in ana.get("/api/prompts").json()["prompts"]] == ["Fix", "sum"]
    assert bob.get("/api/prompts").json()["prompts"] == []
    changed = ana.patch(f"/api/prompts/{later['id']}", json={"text": "In short: {{text}}"}).json()
    assert (changed["name"], changed["text"]) == ("sum", "In short: {{text}}")
    error(ana.patch(f"/api/prompts/{later['id']}", json={"name": "Fix"}), 409, "name_taken", "name")
    error(ana.patch(f"/api/prompts/{later['id']}", json={}), 400, "missing_required_parameter")
    assert ana.delete(f"/api/prompts/{first['id']}").status_code == 204
    error(ana.delete(f"/api/prompts/{first['id']}"), 404, "prompt_not_found")


def test_names_are_ones_own(ana: httpx.Client, bob: httpx.Client) -> None:
    preset = made(ana, "presets", **PIRATE)
    assert "choose another name" in error(ana.post("/api/presets", json=PIRATE), 409, "name_taken", "name")
    made(bob, "presets", **PIRATE)
    other = made(ana, "presets", name="Other")
    error(ana.patch(f"/api/presets/{other['id']}", json={"name": "Pirate"}), 409, "name_taken", "name")
    for name in ("name", "settings", "everybody"):
        error(ana.patch(f"/api/presets/{preset['id']}", json={name: None}), 400, "invalid_value", name)


def test_a_preset_for_everybody_is_seen_by_all_and_changed_by_its_owner(ana: httpx.Client, bob: httpx.Client) -> None:
    preset = made(ana, "presets", **PIRATE)
    assert bob.get("/api/presets").json()["presets"] == []
    ana.patch(f"/api/presets/{preset['id']}", json={"everybody": True})  # as an operator: this server asks for no keys
    (shown,) = bob.get("/api/presets").json()["presets"]
    assert (shown["id"], shown["role"], shown["everybody"]) == (preset["id"], "reader", True)
    error(bob.delete(f"/api/presets/{preset['id']}"), 403, "not_allowed")
    error(bob.delete(f"/api/presets/{preset['id']}/members/bob"), 403, "not_allowed")
    ana.patch(f"/api/presets/{preset['id']}", json={"everybody": False})
    error(bob.get(f"/api/presets/{preset['id']}"), 404, "preset_not_found")


def test_sharing_is_taken_back_and_has_a_limit(
    ana: httpx.Client, bob: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = f"/api/presets/{made(ana, 'presets', **PIRATE)['id']}/members"
    name = bob.headers["x-user"]
    assert ana.put(f"{members}/{name}").json()["members"] == [name] == ana.put(f"{members}/{name}").json()["members"]
    assert [each["name"] for each in bob.get("/api/presets").json()["presets"]] == ["Pirate"]
    monkeypatch.setattr(preset_store, "MAX_MEMBERS", 1)
    assert "1 members" in error(ana.put(f"{members}/carol"), 409, "too_many_members")
    error(ana.put(f"{members}/{'x' * 201}"), 400, "invalid_value", "user")
    assert ana.delete(f"{members}/{name}").status_code == 204
    error(ana.delete(f"{members}/{name}"), 404, "member_not_found")
    assert bob.get("/api/presets").json()["presets"] == []


def test_a_file_brings_presets_and_prompts_under_names_of_their_own(ana: httpx.Client, bob: httpx.Client) -> None:
    made(ana, "presets", **PIRATE)
    made(ana, "prompts", name="sum", text="Sum up {{text}}.")
    reply = ana.get("/api/presets/export")
    assert "attachment" in reply.headers["content-disposition"]
    sent = reply.json()
    assert sent["presets"] == [PIRATE] and sent["prompts"] == [{"name": "sum", "text": "Sum up {{text}}."}]
    made(bob, "presets", **PIRATE)
    taken = bob.post("/api/presets/import", json=sent)
    assert taken.status_code == 201 and [len(each) for each in taken.json().values()] == [1, 1]
    assert [each["name"] for each in bob.get("/api/presets").json()["presets"]] == ["Pirate", "Pirate-2"]
    assert bob.get("/api/presets/export").json()["presets"][1] == {**PIRATE, "name": "Pirate-2"}
    elsewhere = {**PIRATE, "name": "Elsewhere", "settings": {"model": "of another server"}}
    assert bob.post("/api/presets/import", json={**sent, "presets": [elsewhere], "prompts": []}).status_code == 201


def imported(shelf: Server, chat: str) -> bool:
    """Returns the mark by which what has effects asks first in a chat."""
    found = shelf.on_loop(shelf.app.state.ponder.store.database.rows(select(chats).where(chats.c.id == chat)))
    return bool(found[0]["imported"])


def test_a_chat_of_somebody_elses_preset_counts_as_imported(
    shelf: Server, ana: httpx.Client, bob: httpx.Client
) -> None:
    preset = made(ana, "presets", **PIRATE)
    ana.put(f"/api/presets/{preset['id']}/members/{bob.headers['x-user']}")
    assert imported(shelf, made(bob, "chats", preset_id=preset["id"])["id"])
    changed = made(bob, "chats", preset_id=preset["id"], settings={"system": "Mine."})
    assert changed["settings"] == {"system": "Mine."} and imported(shelf, changed["id"])
    assert not imported(shelf, made(ana, "chats", preset_id=preset["id"])["id"])
    file = ana.get("/api/presets/export").json()
    (copy,) = ana.post("/api/presets/import", json=file).json()["preset_ids"]
    assert ana.get(f"/api/presets/{copy}").json()["imported"]
    assert imported(shelf, made(ana, "chats", preset_id=copy)["id"])


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"format": "x"}, "format"), ({"version": 2}, "version"), ({"presets": [{"name": ""}]}, "presets[0].name"),
        ({"presets": [PIRATE, {**PIRATE, "settings": {"top_p": 0}}]}, "presets[1].settings.top_p"),
        ({"prompts": [{"name": "a b", "text": "t"}]}, "prompts[0].name"), ({"prompts": [{}] * 501}, "prompts"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_sound_is_refused_as_a_whole(ana: httpx.Client, part: Json, param: str) -> None:
    sound: Json = {"format": "ponder.presets", "version": 1, "presets": [PIRATE], "prompts": []}
    refused = ana.post("/api/presets/import", json={**sound, **part})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert ana.get("/api/presets").json()["presets"] == []


def test_one_may_have_so_many_and_no_more(ana: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset_store, "_LIMITS", {"presets": 1, "prompts": 1})
    two = {"format": "ponder.presets", "version": 1, "presets": [PIRATE, {**PIRATE, "name": "B"}], "prompts": []}
    error(ana.post("/api/presets/import", json=two), 409, "too_many_presets")
    assert ana.get("/api/presets").json()["presets"] == [], "all or none"
    made(ana, "presets", **PIRATE)
    error(ana.post("/api/presets", json={"name": "B"}), 409, "too_many_presets")
    made(ana, "prompts", name="a", text="t")
    assert "1 prompts" in error(ana.post("/api/prompts", json={"name": "b", "text": "t"}), 409, "too_many_prompts")
