"""The list of chats: folders, pins, pages, changes, and whose they are."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.app import postgres
from tests.app.chatting import ask, change, new_chat, read
from tests.app.library import error

DATABASES = postgres.DATABASES_SLOW


def listed(http: httpx.Client, **parameters: Any) -> list[str]:
    """The ids of all pages, one after the other."""
    ids: list[str] = []
    while True:
        reply = http.get("/api/chats", params=parameters)
        assert reply.status_code == 200, reply.text
        page = reply.json()
        assert len(page["chats"]) <= parameters.get("limit", 100)
        ids += [chat["id"] for chat in page["chats"]]
        if page["next"] is None:
            return ids
        parameters["before"] = page["next"]


def folder(http: httpx.Client, name: str) -> str:
    reply = http.post("/api/folders", json={"name": name})
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pins=st.lists(st.booleans(), max_size=7), limit=st.integers(1, 8))
def test_pages_together_are_the_list(ana: httpx.Client, pins: list[bool], limit: int) -> None:
    ids = [new_chat(ana) for _ in pins]
    try:
        for id, pinned in zip(ids, pins, strict=True):
            change(ana, id, pinned=pinned)
        expected = [id for wanted in (True, False) for id, pinned in zip(ids, pins, strict=True) if pinned is wanted]
        expected = sorted(expected, key=lambda id: (pins[ids.index(id)], ids.index(id)), reverse=True)
        assert listed(ana) == listed(ana, limit=limit) == expected
        first = ana.get("/api/chats", params={"limit": limit}).json()
        if first["next"] is not None:  # a page goes on where it was, though its last chat is deleted meanwhile
            ana.delete(f"/api/chats/{first['chats'][-1]['id']}")
            assert listed(ana, limit=limit, before=first["next"]) == expected[limit:]
    finally:
        for id in ids:
            ana.delete(f"/api/chats/{id}")


def test_a_question_brings_its_chat_to_the_front_but_not_before_a_pin(ana: httpx.Client) -> None:
    old, pinned, new = (new_chat(ana) for _ in range(3))
    change(ana, pinned, pinned=True)
    assert listed(ana) == [pinned, new, old]
    ask(ana, old, "x")
    assert listed(ana) == [pinned, old, new]


def test_folders_hold_chats_that_outlive_them(ana: httpx.Client) -> None:
    work, home = folder(ana, "work"), folder(ana, "home")
    one, two, three = (new_chat(ana) for _ in range(3))
    change(ana, one, folder_id=work)
    change(ana, two, folder_id=home)
    assert listed(ana, folder_id=work) == [one] and listed(ana, folder_id=home) == [two]
    assert listed(ana) == [three, two, one] and listed(ana, folder_id="none") == [three]
    assert [(each["name"], each["chats"]) for each in ana.get("/api/folders").json()["folders"]] == [
        ("home", 1), ("work", 1)
    ]  # fmt: skip
    assert ana.patch(f"/api/folders/{work}", json={"name": "jobs"}).json()["name"] == "jobs"
    assert change(ana, two, folder_id=None)["folder_id"] is None and listed(ana, folder_id=home) == []
    assert ana.delete(f"/api/folders/{work}").status_code == 200
    assert read(ana, one)["folder_id"] is None and listed(ana) == [three, two, one]
    error(ana.get("/api/chats", params={"folder_id": work}), 404, "folder_not_found")
    error(ana.delete(f"/api/folders/{work}"), 404, "folder_not_found")


def test_a_folder_needs_a_name_of_its_own(ana: httpx.Client, bob: httpx.Client) -> None:
    work, home = folder(ana, "work"), folder(ana, "home")
    error(ana.post("/api/folders", json={"name": "work"}), 409, "name_taken", "name")
    error(ana.patch(f"/api/folders/{home}", json={"name": "work"}), 409, "name_taken", "name")
    assert ana.patch(f"/api/folders/{work}", json={"name": "work"}).status_code == 200
    for name in ("", " ", " x", "x" * 101, 3):
        error(ana.post("/api/folders", json={"name": name}), 400, "invalid_value", "name")
    error(ana.post("/api/folders", json={}), 400, "missing_required_parameter", "name")
    assert folder(bob, "work")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", None), ({"title": ""}, "invalid_value", "title"),
        ({"title": "  "}, "invalid_value", "title"), ({"title": "x" * 201}, "invalid_value", "title"),
        ({"title": None}, "invalid_value", "title"), ({"pinned": 1}, "invalid_value", "pinned"),
        ({"pinned": None}, "invalid_value", "pinned"), ({"leaf_id": None}, "invalid_value", "leaf_id"),
        ({"name": "x"}, "unknown_parameter", "name"), ({"title": "y", "colour": 1}, "unknown_parameter", "colour"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_change_is_refused_and_changes_nothing(
    ana: httpx.Client, body: dict[str, Any], code: str, param: str | None
) -> None:
    chat = new_chat(ana)
    before = read(ana, chat)
    error(ana.patch(f"/api/chats/{chat}", json=body), 400, code, param)
    error(ana.patch(f"/api/chats/{chat}", json={"title": "y", "folder_id": "folder_x"}), 404, "folder_not_found")
    assert read(ana, chat) == before


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"), ("limit=501", "limit"), ("limit=x", "limit"), ("before=x", "before"),
        ("before=1_nan_3", "before"), ("before=0_1.5_3x", "before"), ("after=x", "after"), ("limit=1&limit=2", "limit"),
    ],
)  # fmt: skip
def test_a_bad_page_is_refused_by_name(ana: httpx.Client, query: str, param: str) -> None:
    reply = ana.get(f"/api/chats?{query}")
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_routes_refuse_parameters_that_they_do_not_know(ana: httpx.Client) -> None:
    chat = new_chat(ana)
    run = ask(ana, chat, "x")["run_id"]
    for method, path in (
        ("GET", "/api/server"), ("POST", "/api/chats"), ("DELETE", f"/api/chats/{chat}"), ("GET", "/api/folders"),
        ("GET", f"/api/chats/{chat}"), ("GET", f"/api/chats/{chat}/export"), ("GET", "/api/chats/export"),
        ("POST", "/api/chats/import"), ("POST", f"/api/chats/{chat}/runs"), ("GET", f"/api/runs/{run}"),
        ("GET", f"/api/runs/{run}/events"), ("GET", f"/api/runs/{run}/trace"), ("POST", f"/api/runs/{run}/cancel"),
        ("PATCH", f"/api/chats/{chat}"),
    ):  # fmt: skip
        error(ana.request(method, f"{path}?colour=red"), 400, "unknown_parameter", "colour")
    assert read(ana, chat)


def test_nothing_of_anothers_is_there(ana: httpx.Client, bob: httpx.Client) -> None:
    chat, work = new_chat(ana), folder(ana, "work")
    answer = ask(ana, chat, "x")
    run = answer["run_id"]
    assert listed(bob) == [] and bob.get("/api/folders").json()["folders"] == []
    for method, path, body in (
        ("GET", f"/api/chats/{chat}", None), ("PATCH", f"/api/chats/{chat}", {"title": "mine"}),
        ("DELETE", f"/api/chats/{chat}", None), ("POST", f"/api/chats/{chat}/runs", {"content": "x"}),
        ("POST", f"/api/chats/{chat}/runs", {"regenerate": answer["parent_id"]}),
    ):  # fmt: skip
        error(bob.request(method, path, json=body), 404, "chat_not_found")
    for method, path in (("GET", ""), ("GET", "/events"), ("GET", "/trace"), ("POST", "/cancel")):
        error(bob.request(method, f"/api/runs/{run}{path}"), 404, "run_not_found")
    for method, path, body in (
        ("PATCH", f"/api/folders/{work}", {"name": "x"}), ("DELETE", f"/api/folders/{work}", None),
        ("PATCH", f"/api/chats/{new_chat(bob)}", {"folder_id": work}),
    ):  # fmt: skip
        error(bob.request(method, path, json=body), 404, "folder_not_found")
    assert read(ana, chat)["title"] == "x" and listed(ana) == [chat]
