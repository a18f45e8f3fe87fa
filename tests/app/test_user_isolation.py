"""Tests whoever has a key sees what is theirs: no route shows alice, or lets her touch, what is bob's.

Every route of the app is tried, or in one of the tables below, where somebody says why it need not be.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route

from app import openai
from app.auth import is_open
from app.errors import is_anthropic
from app.openai import responses
from app.page import PageFiles
from app.server import ROUTERS
from tests.app import postgres
from tests.app.chatting import ask, begin, log_of, new_chat
from tests.app.conftest import NewDatabase, Server
from tests.app.keyed import asking_for_keys, client_of, key_of
from tests.app.library import add
from tools.context import AppView, FileContent
from tools.grants import Grant

DATABASES = postgres.DATABASES_SLOW

pytestmark = pytest.mark.slow

SECRET = "Zanzibar"  # in all that is bob's
BODIES: dict[str, Any] = {  # accepted, were the thing one's own
    "PATCH /api/chats/{chat_id}": {"title": "mine"},
    "POST /api/chats/{chat_id}/runs": {"content": "hi"},
    "PUT /api/chats/{chat_id}/permissions": {"classes": []},
    "PATCH /api/memory/{number}": {"text": "mine"},
    "POST /api/memory/{number}/undo": {"text": SECRET},
    "PATCH /api/folders/{folder_id}": {"name": "mine"},
    "PATCH /api/presets/{preset_id}": {"name": "mine"},
    "PATCH /api/prompts/{prompt_id}": {"name": "mine"},
    "PATCH /api/collections/{collection_id}": {"name": "mine"},
    "POST /api/collections/{collection_id}/folders": {"path": "/mine"},
    "PATCH /api/documents/{document_id}": {"source": "mine.txt"},
    "POST /api/files/{file_id}/keep": {},
    "PUT /api/collections/{collection_id}/members/{member}": {"role": "reader"},
    "POST /api/artifacts/{artifact_id}/app": {"method": "tools/call", "params": {"name": "look"}},
    "POST /api/runs/{run_id}/approvals/{approval_id}": {"decision": "once"},
    "POST /api/runs/{run_id}/questions/{question_id}": {"text": "yes"},
    "POST /api/sequences/{sequence_id}/append": {"text": "1"},
    "POST /api/sequences/{sequence_id}/generate": {"max_tokens": 1},
    "POST /api/sequences/{sequence_id}/fork": {"n": 1},
    "POST /api/sequences/{sequence_id}/score": {"candidates": ["1", "2"]},
    "POST /api/sequences/{sequence_id}/truncate": {"length": 1},
}
LISTS: dict[
    str, dict[str, Any]
] = {  # which must not have what is bob's: with the body or the parameters that would find it
    "GET /api/chats": {},
    "GET /api/chats/search": {"params": {"q": SECRET}},
    "GET /api/chats/export": {},
    "GET /api/folders": {},
    "GET /api/presets": {},
    "GET /api/presets/export": {},
    "GET /api/prompts": {},
    "GET /api/documents": {},
    "GET /api/collections": {},
    "GET /api/invitations": {},
    "GET /api/jobs": {},
    "GET /api/sequences": {},
    "GET /api/permissions": {},
    "GET /api/shares": {},
    "GET /api/memory": {},
    "GET /api/memory/export": {},
    "POST /api/search": {"json": {"query": SECRET}},
}
NOBODYS = {  # they make something new, or tell what is the same for everybody
    "GET /api/server", "GET /api/tools", "GET /api/strategies", "GET /v1/models", "GET /v1/models/{name:path}",
    "POST /api/memory", "PATCH /api/memory", "DELETE /api/memory",
    "POST /api/chats", "POST /api/chats/import", "POST /api/folders", "POST /api/collections", "POST /api/documents",
    "POST /api/files", "POST /api/presets", "POST /api/presets/import", "POST /api/prompts",
    "POST /api/sequences", "POST /api/diffusion", "PUT /api/permissions", "DELETE /api/permissions",
    "POST /v1/chat/completions",
    "POST /v1/completions", "POST /v1/embeddings", "POST /v1/rerank", "POST /v1/tokenize", "POST /v1/detokenize",
    "POST /v1/responses", "POST /v1/messages",
    "POST /v1/audio/transcriptions", "POST /v1/audio/translations", "POST /v1/audio/speech",
    "POST /v1/messages/count_tokens", "GET /health", "GET /metrics",
    "GET /share/{token}",  # its token is the permission
    "GET /api/session", "POST /api/session", "DELETE /api/session",
}  # fmt: skip
FORGIVING = {"DELETE /api/chats/{chat_id}/permissions"}  # of a chat that is gone too: it answers, and does nothing
NONE_OF_BOBS = {"GET /api/documents/{document_id}/boxes", "GET /api/documents/{document_id}/pages/{page}"}  # no PDF
MOUNTED = {"/mcp": "tried by tests/app/api/test_sessions.py", "/openapi.json": "the same for everybody"}


OPERATORS = [
    "GET /api/operator/stats", "GET /api/operator/runs", "GET /api/operator/tools", "GET /api/operator/users",
    "POST /api/operator/users", "PATCH /api/operator/users/{user_id}",
    "DELETE /api/operator/users/{user_id}", "GET /api/operator/keys",
    "POST /api/operator/keys", "PATCH /api/operator/keys/{key_id}", "DELETE /api/operator/keys/{key_id}",
    "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter",
]  # fmt: skip


def routes(found: Iterable[BaseRoute]) -> set[str]:
    """Method and path of each."""
    made = set[str]()
    for route in found:
        if isinstance(route, APIRoute):
            assert route.methods is not None
            made |= {f"{method} {route.path}" for method in route.methods}
        elif (included := getattr(route, "original_router", None)) is not None:  # newer FastAPI keeps routers whole
            made |= routes(included.routes)
        elif not isinstance(route, PageFiles):
            assert isinstance(route, Route) and route.path in MOUNTED, route
    return made


def by_id() -> list[str]:
    """Routes of one thing, of all parts of the API: a new one is tried without being named here."""
    named = set[str]().union(*(routes(router.routes) for router in (*ROUTERS, openai.router, responses.router)))
    return sorted(route for route in named - NOBODYS - {*OPERATORS} if "{" in route)


BY_ID = by_id()


@dataclass
class Two:
    server: Server
    alice: httpx.Client
    bob: httpx.Client
    ids: dict[str, str]  # bob's, by the names that paths give them

    def bobs(self) -> list[str]:
        """All that bob has, as he is told, but for until when a sequence is kept: looking at it prolongs that."""
        chats = (
            "/api/chats/export",
            "/api/permissions",
            "/api/folders",
            "/api/presets",
            "/api/prompts",
            "/api/memory",
            "/api/shares",
            f"/api/chats/{self.ids['chat_id']}/artifacts",
            f"/v1/responses/{self.ids['response_id']}",
        )
        own = f"/api/collections/{self.ids['collection_id']}"
        shelf = ("/api/documents", "/api/collections", f"{own}/members", f"{own}/folders")
        sequence = f"/api/sequences/{self.ids['sequence_id']}"
        told = (self.bob.get(path).text for path in (*chats, *shelf, sequence))
        return [re.sub(r'"(expires|exported)_at":[\d.]+', "", each) for each in told]


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Iterator[Two]:
    with (
        new_database() as address,
        asking_for_keys(model, tmp_path_factory.mktemp("keyed"), database=address) as server,
        client_of(server, key_of(server, "alice")) as alice,
        client_of(server, key_of(server, "bob")) as bob,
    ):
        yield Two(server, alice, bob, _things_of(server, bob))


def _things_of(server: Server, bob: httpx.Client) -> dict[str, str]:
    chat = new_chat(bob)
    sent = bob.post("/api/files", files={"file": (f"{SECRET}-sent.txt", f"{SECRET} is far.")}).json()["id"]
    ask(bob, chat, SECRET, files=[sent])
    run = begin(bob, chat, f"{SECRET} again")["run_id"]
    log_of(bob, run)
    bob.put(f"/api/chats/{chat}/permissions", json={"classes": ["read"]})
    bob.put("/api/permissions", json={"classes": ["none", "read"]})
    grant = Grant("bob", "weather", "built in", True, preview=SECRET)
    server.app.state.ponder.tool_service.grants.put(grant)
    share = bob.post(f"/api/chats/{chat}/share").json()["id"]
    note = bob.post("/api/memory", json={"text": SECRET}).json()["number"]
    server.app.state.ponder.library.rights.invite("carol", _carols(server), "bob", "reader")
    collection = bob.post("/api/collections", json={"name": SECRET}).json()["id"]
    document = add(bob, f"{SECRET}.txt", f"{SECRET} is an island.", collection=collection)
    papers = bob.post(f"/api/collections/{collection}/folders", json={"path": f"/home/bob/{SECRET}"}).json()["id"]
    job = bob.get("/api/jobs").json()["jobs"][0]["id"]
    folder = bob.post("/api/folders", json={"name": SECRET}).json()["id"]
    preset = bob.post("/api/presets", json={"name": SECRET, "settings": {"system": SECRET}}).json()["id"]
    prompt = bob.post("/api/prompts", json={"name": SECRET, "text": SECRET}).json()["id"]
    artifacts = server.app.state.ponder.store.artifacts
    app = AppView("maps", "look", f"ui://maps/{SECRET}", {}, {"content": []})
    (made,) = server.on_loop(artifacts.keep(chat, run, "c", [FileContent(f"{SECRET}.html", SECRET.encode(), app)])).kept
    sequence = bob.post("/api/sequences", json={"prompt": SECRET, "lease_s": 300}).json()["id"]
    said = bob.post("/v1/responses", json={"model": "tiny", "input": SECRET, "max_output_tokens": 2}).json()["id"]
    return {
        "chat_id": chat, "run_id": run, "folder_id": folder, "collection_id": str(collection), "job_id": job,
        "document_id": str(document["id"]), "sequence_id": sequence, "response_id": said, "grant_id": grant.id,
        "number": str(note), "member": "alice", "page": "1", "approval_id": "call-1", "question_id": "call-1",
        "document_folder": str(papers), "preset_id": preset, "prompt_id": prompt, "share_id": share,
        "file_id": sent,
        "artifact_id": made.id,
    }  # fmt: skip


def _carols(server: Server) -> int:
    """A collection that bob is invited to."""
    return int(server.app.state.ponder.library.collection("carol", f"{SECRET} of carol").id)


def test_every_route_is_open_to_all_the_operators_or_tried_here(two: Two) -> None:
    assert routes(two.server.app.router.routes) == {*BY_ID, *LISTS, *NOBODYS, *OPERATORS}


@pytest.mark.parametrize("route", BY_ID)
def test_what_is_bobs_is_not_there_for_alice(two: Two, route: str) -> None:
    method, path = route.split(" ")
    address = re.sub(r"\{(\w+)\}", lambda part: two.ids[part[1]], path)
    before = two.bobs()
    assert SECRET in "".join(before)
    reply = two.alice.request(method, address, json=BODIES.get(route))
    assert reply.status_code == (204 if route in FORGIVING else 404), reply.text
    assert SECRET not in reply.text
    assert two.bobs() == before
    if method == "GET":
        assert two.bob.get(address).status_code == (404 if route in NONE_OF_BOBS else 200)


@pytest.mark.parametrize("route", LISTS)
def test_no_list_of_alices_has_what_is_bobs(two: Two, route: str) -> None:
    method, path = route.split(" ")
    mine, his = (client.request(method, path, **LISTS[route]) for client in (two.alice, two.bob))
    assert (mine.status_code, his.status_code) == (200, 200), mine.text
    shown = {SECRET, *two.ids.values()} - {
        two.ids[name] for name in ("collection_id", "document_id", "document_folder", "number", "member", "page")
    }
    assert not [each for each in shown if each in mine.text]
    assert [each for each in shown if each in his.text], "bob does not see it either: this shows nothing"


@pytest.mark.parametrize("route", OPERATORS)
def test_what_is_the_operators_is_refused_to_users(two: Two, route: str) -> None:
    method, path = route.split(" ")
    reply = two.alice.request(method, re.sub(r"\{\w+\}", "bob", path))
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "operator_required"), reply.text


@pytest.mark.parametrize("route", sorted({*BY_ID, *LISTS, *NOBODYS, *OPERATORS, "POST /mcp", "GET /openapi.json"}))
def test_nobody_gets_in_without_a_key(two: Two, route: str) -> None:
    method, path = route.split(" ")
    address = re.sub(r"\{(\w+)(:path)?\}", "x", path)
    reply = httpx.request(method, f"{two.server.url}{address}")
    if is_open(method, path):
        assert path in ("/health", "/api/session", "/share/{token}")
        return
    assert reply.status_code == 401, reply.text
    assert reply.headers["www-authenticate"] == "Bearer"
    kind = ("type", "authentication_error") if is_anthropic(path) else ("code", "invalid_api_key")
    assert kind in reply.json()["error"].items() and "API key" in reply.json()["error"]["message"]


def test_sharing_a_collection_opens_that_and_nothing_else(two: Two) -> None:
    number = two.bob.post("/api/collections", json={"name": "shared"}).json()["id"]
    document = add(two.bob, "shared.txt", "For alice too.", collection=number)
    two.bob.put(f"/api/collections/{number}/members/alice", json={"role": "reader"})
    assert two.alice.get("/api/documents").json()["documents"] == []
    assert two.alice.post(f"/api/invitations/{number}/accept").status_code == 200
    listed = two.alice.get("/api/documents").json()["documents"]
    assert [each["id"] for each in listed] == [document["id"]]
    two.bob.delete(f"/api/collections/{number}")
    assert two.alice.get("/api/documents").json()["documents"] == []


def test_sharing_a_preset_shows_that_and_lets_nobody_change_it(two: Two) -> None:
    given = {"name": "shared", "settings": {"system": "For alice, too."}}
    number = two.bob.post("/api/presets", json=given).json()["id"]
    answers = [two.bob.put(f"/api/presets/{number}/members/{each}") for each in ("alice", "nobody")]
    assert [reply.status_code for reply in answers] == [200, 200]
    (shown,) = two.alice.get("/api/presets").json()["presets"]
    assert (shown["id"], shown["role"], shown["owner"], shown["members"]) == (number, "reader", "bob", [])
    assert two.alice.get("/api/presets/export").json()["presets"] == []
    for method, path, body in (
        ("PATCH", "", {"name": "mine"}), ("DELETE", "", None), ("PUT", "/members/carol", None),
        ("DELETE", "/members/nobody", None),
    ):  # fmt: skip
        assert two.alice.request(method, f"/api/presets/{number}{path}", json=body).status_code == 403
    chat = two.alice.post("/api/chats", json={"preset_id": number}).json()
    assert chat["settings"] == {"system": "For alice, too."}
    assert two.alice.delete(f"/api/presets/{number}/members/alice").status_code == 204  # she leaves
    assert two.alice.get(f"/api/presets/{number}").status_code == 404
    refused = two.bob.patch(f"/api/presets/{number}", json={"everybody": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_required")
    two.bob.delete(f"/api/presets/{number}")


def test_sharing_does_not_tell_which_users_there_are(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    number = two.bob.post("/api/collections", json={"name": "a probe"}).json()["id"]
    statements = list[str]()
    database = two.server.app.state.ponder.library.store.database
    writing = database.writing

    @contextmanager
    def watched() -> Iterator[sqlite3.Connection]:
        with writing() as db:
            db.set_trace_callback(lambda sql: statements.append(re.sub(r"'[^']*'|[\d.]+", "?", sql)))
            yield db
            db.set_trace_callback(None)

    monkeypatch.setattr(database, "writing", watched)

    def told(member: str) -> list[list[str] | tuple[int, str]]:
        address = f"/api/collections/{number}/members"
        replies = [
            two.bob.put(f"{address}/{member}", json={"role": "reader"}),
            two.bob.put(f"{address}/{member}", json={"role": "writer"}),
            two.bob.get(address),
            two.bob.delete(f"{address}/{member}"),
            two.bob.delete(f"{address}/{member}"),
        ]
        work, statements[:] = list(statements), []
        return [work, *((reply.status_code, reply.text.replace(member, "X")) for reply in replies)]

    assert told("alice") == told("nobody") == told("alice")
    assert told("alice")[1][0] == 200


def test_nobody_learns_from_the_cache_what_another_asked(two: Two) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a long secret " * 20}], "max_tokens": 1}

    def cached(client: httpx.Client) -> int:
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(two.bob) == 0 and cached(two.bob) > 0
    assert cached(two.alice) == 0


def test_a_deleted_user_leaves_nothing_behind(model: Path, tmp_path: Path, address: str | None) -> None:
    with (
        asking_for_keys(model, tmp_path, database=address) as server,
        client_of(server, key_of(server, "alice")) as alice,
        client_of(server, key_of(server, "bob")) as bob,
        client_of(server, key_of(server, "root", "operator")) as root,
    ):
        mine = new_chat(alice)
        ask(alice, mine, "to be kept")
        ids = _things_of(server, bob)
        state = server.app.state.ponder
        begin(bob, new_chat(bob), SECRET, max_tokens=900, temperature=0)
        assert state.sequences.of("bob")
        assert root.delete("/api/operator/users/root").status_code == 409
        assert root.delete("/api/operator/users/nobody").status_code == 404
        reply = root.delete("/api/operator/users/bob")
        assert reply.json() == {"id": "bob", "deleted": True, "chats": 2, "documents": 2}, reply.text
        assert bob.get("/api/chats").status_code == 401
        assert root.delete("/api/operator/users/bob").status_code == 404
        assert "bob" not in [user["id"] for user in root.get("/api/operator/users").json()["users"]]
        assert not [key for key in root.get("/api/operator/keys").json()["keys"] if key["user"] == "bob"]
        assert not state.sequences.of("bob") and not any(run.user == "bob" for run in state.runs.live.values())
        rights = state.library.rights
        assert (
            not rights.collections("bob")
            and not rights.attached("bob")
            and not rights.invitations("bob")
            and not state.library.ingest.jobs.of("bob")
        )
        assert not list((state.library.folder / "files").iterdir())
        assert state.tool_service.grants.classes("bob", ids["chat_id"]) is None
        assert [chat["id"] for chat in alice.get("/api/chats").json()["chats"]] == [mine]
    for name in ("ponder.db", "ponder.db-wal", "users.db", "notes.db", "permissions.db", "calls.db"):
        assert not (file := tmp_path / name).exists() or SECRET.lower().encode() not in file.read_bytes().lower(), name
    assert address is None or not postgres.tables_with(address, SECRET)
