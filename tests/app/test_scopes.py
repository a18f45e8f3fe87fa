"""Tests what a key is for and what it may cost: each route is in one scope, and a key of another scope does not get
in."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.auth import SCOPES, KeyScope, is_metered, scope_of
from app.db.account_store import Accounts
from app.db.quotas import Quota, Used, exhausted
from tests.app import postgres
from tests.app.api.test_keys import listed, run
from tests.app.chatting import ask, begin, log_of, new_chat
from tests.app.conftest import NewDatabase, Server
from tests.app.keyed import asking_for_keys, beside, client_of, key_of
from tests.app.library import error
from tests.app.test_user_isolation import routes

DATABASES = postgres.DATABASES_SLOW

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
NO_SCOPE = {"/health", "/api/session", "/openapi.json", "/share/{token}"}
METERED = {
    "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v1/audio/transcriptions", "POST /v1/audio/translations", "POST /v1/audio/speech",
    "POST /api/chats/{chat_id}/runs", "POST /api/sequences", "POST /api/sequences/{sequence_id}/generate",
    "POST /api/sequences/{sequence_id}/score", "POST /api/search", "POST /api/diffusion",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("scopes")
    with new_database() as address, asking_for_keys(model, data, database=address) as server:
        yield server


def of(server: Server, user: str, *scopes: KeyScope, **quota: int) -> httpx.Client:
    """A client with a new key."""
    key_of(server, user, "operator" if user == "root" else None)
    wanted = list(scopes) or None
    return client_of(server, beside(server, lambda a: a.create_key(user, "", None, wanted, Quota(**quota))[1]))


def test_each_route_is_in_one_scope(server: Server) -> None:
    found = routes(server.app.routes)
    assert len(found) > 60
    without = {route.split()[1] for route in found if scope_of(route.split()[1]) is None}
    assert without <= NO_SCOPE, "these need a line in app/auth.py"
    assert {scope_of(route.split()[1]) for route in found} - {None} | {"tools"} == set(SCOPES)
    assert scope_of("/mcp") == "tools" and scope_of("/v1beta") is None and scope_of("/metrics") == "metrics"


def test_what_costs_is_metered_and_nothing_else(server: Server) -> None:
    for route in routes(server.app.routes):
        method, path = route.split()
        assert is_metered(method, re.sub(r"\{\w+(:path)?\}", "x", path)) == (route in METERED), route


@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_is_for_its_scope_alone(server: Server, scope: KeyScope) -> None:
    with of(server, "root", scope) as client:
        for route in sorted(routes(server.app.routes)):
            method, path = route.split()
            asked = client.request(method, re.sub(r"\{\w+(:path)?\}", "none", path), json={})
            refused = asked.status_code == 403 and "needs a key with the scope" in asked.json()["error"]["message"]
            assert refused == (scope_of(path) not in (scope, None)), (route, asked.text)
        assert client.get("/api/session").json()["user"]["id"] == "root"


def test_a_refusal_says_what_is_missing(server: Server) -> None:
    with of(server, "ana", "v1", "chat") as client:
        reply = client.get("/api/documents")
        assert reply.status_code == 403
        assert "'documents'" in reply.json()["error"]["message"] and "chat, v1" in reply.json()["error"]["message"]
        assert client.get("/api/operator/keys").json()["error"]["code"] == "scope_required"


def test_an_answer_reaches_no_further_than_its_key(server: Server) -> None:
    with of(server, "ana", "chat", "v1") as client:
        chat = new_chat(client)
        for more in ({"collections": "all"}, {"tools": "all"}):
            assert error(client.post(f"/api/chats/{chat}/runs", json={"content": "a", **more}), 403, "scope_required")
        served = [{"type": "mcp", "server_label": "ponder", "require_approval": "never"}]
        reply = client.post("/v1/responses", json={"model": "default", "input": "a", "tools": served})
        assert error(reply, 403, "scope_required")
        assert ask(client, chat, "a")["status"] == "completed"


def test_a_session_reaches_no_further_than_its_key(server: Server) -> None:
    with of(server, "ana", "chat") as client:
        key = client.headers.pop("authorization").removeprefix("Bearer ")
        origin = {"Origin": server.url}
        assert client.post("/api/session", json={"key": key}, headers=origin).status_code == 200
        assert client.get("/api/chats").status_code == 200
        assert error(client.get("/v1/models"), 403, "scope_required")


# -- quotas


def test_what_a_key_uses_is_counted_and_its_quota_ends_it(server: Server) -> None:
    with of(server, "bob", tokens_per_day=60) as client, of(server, "root") as root:
        used = client.post(CHAT, json=ASK).json()["usage"]["total_tokens"]
        log_of(client, begin(client, new_chat(client), "abc")["run_id"])
        (key,) = [each for each in until_used(root, "bob", 2) if each["quota"]["tokens_per_day"]]
        assert key["used"]["tokens_today"] == key["used"]["tokens_this_month"] > used
        while (reply := client.post(CHAT, json=ASK)).status_code == 200:
            until_used(root, "bob", None)
        assert error(reply, 429, "insufficient_quota") and "60 tokens" in reply.text and "a day (UTC)" in reply.text
        now = datetime.now(UTC)
        left = 86_400 - (now.hour * 3600 + now.minute * 60 + now.second)
        assert abs(int(reply.headers["retry-after"]) - left) < 30
        changed = root.patch(f"/api/operator/keys/{key['id']}", json={"quota": {"tokens_per_day": 100_000}})
        assert changed.json()["quota"]["tokens_per_day"] == 100_000
        assert client.post(CHAT, json=ASK).status_code == 200, "it holds from the next request on"


def until_used(root: httpx.Client, user: str, requests: int | None) -> list[dict[str, Any]]:
    """The user's keys once what was asked so far is counted."""
    deadline = time.monotonic() + 20
    while True:
        keys: list[dict[str, Any]] = root.get("/api/operator/keys", params={"user": user}).json()["keys"]
        if requests is None or any(each["used"]["requests_today"] >= requests for each in keys):
            return keys
        assert time.monotonic() < deadline, keys
        time.sleep(0.01)


def test_a_keys_own_limits_come_before_the_servers(server: Server) -> None:
    with of(server, "carl", requests_per_minute=2) as client:
        replies = [client.post(CHAT, json=ASK) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert replies[0].headers["x-ratelimit-limit-requests"] == "2"


def test_days_and_months_end_when_they_do() -> None:
    quota = Quota(requests_per_day=3, tokens_per_day=100, tokens_per_month=1000)
    evening = datetime(2028, 2, 28, 23, 0, tzinfo=UTC).timestamp()
    assert exhausted(quota, Used(2, 99, 999), evening) is None
    assert exhausted(quota, Used(3, 0, 0), evening) == ("requests_per_day", 3, 3600)
    assert exhausted(quota, Used(3, 100, 100), evening) == ("tokens_per_day", 100, 3600)
    assert exhausted(quota, Used(3, 100, 1000), evening) == ("tokens_per_month", 1000, 3600 + 86_400)  # a leap year


def test_use_is_counted_by_day(tmp_path: Path, address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [datetime(2027, 1, 31, 12, tzinfo=UTC).timestamp()]
    monkeypatch.setattr("app.db.account_store.time.time", lambda: now[0])
    accounts = Accounts.open(tmp_path, address)
    key, _ = accounts.create_key("local")
    for tokens in (5, 7):
        accounts.add_use(key.id, 1, tokens)
    assert accounts.used(key.id) == Used(2, 12, 12)
    now[0] += 86_400
    accounts.add_use(key.id, 1, 3)
    assert accounts.used(key.id) == Used(1, 3, 3), "another day, and another month"
    now[0] += 86_400
    assert accounts.used(key.id) == Used(0, 0, 3)
    accounts.add_use("key_gone", 1, 3)
    accounts.close()


# -- who changes it


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"scopes": ["everything"]}, ["scopes", "documents"]),
        ({"scopes": []}, ["scopes", "null for all"]),
        ({"quota": {"tokens_per_year": 1}}, ["quota", "tokens_per_month"]),
        ({"quota": {"tokens_per_day": 0}}, ["quota", "1 or more"]),
        ({}, ["changes nothing", "scopes"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_accepted_changes_no_key(server: Server, body: dict[str, Any], words: list[str]) -> None:
    with of(server, "root") as root:
        key = root.post("/api/operator/keys", json={"user": "local", "scopes": ["v1"]}).json()
        reply = root.patch(f"/api/operator/keys/{key['id']}", json=body)
        assert reply.status_code == 400 and all(word in reply.json()["error"]["message"] for word in words), reply.text
        if body:
            assert root.post("/api/operator/keys", json={"user": "local", **body}).status_code == 400
        (same,) = [each for each in root.get("/api/operator/keys").json()["keys"] if each["id"] == key["id"]]
        assert same["scopes"] == ["v1"]


def test_nobody_takes_the_operators_right_from_themselves(server: Server) -> None:
    with of(server, "root") as root:
        me = next(each for each in root.get("/api/operator/keys").json()["keys"] if each["current"])
        assert error(root.patch(f"/api/operator/keys/{me['id']}", json={"scopes": ["v1"]}), 409, "own_role", "scopes")
        assert error(root.patch("/api/operator/users/root", json={"disabled": True}), 409, "own_role", "disabled")


def test_a_disabled_user_is_nobody_until_enabled_again(server: Server) -> None:
    with of(server, "dora") as dora, of(server, "root") as root:
        chat = new_chat(dora)
        with httpx.Client(base_url=server.url, headers={"Origin": server.url}) as page:
            page.post("/api/session", json={"key": dora.headers["authorization"].removeprefix("Bearer ")})
            assert page.get("/api/chats").status_code == 200
            told = root.patch("/api/operator/users/dora", json={"disabled": True}).json()
            assert told["disabled_at"] is not None
            reply = dora.get("/api/chats")
            assert reply.status_code == 401 and "disabled" in reply.text
            assert page.get("/api/chats").status_code == 401
            root.patch("/api/operator/users/dora", json={"disabled": False})
            assert page.get("/api/chats").status_code == 401, "the session is over"
        assert dora.get(f"/api/chats/{chat}").status_code == 200


def test_the_command_line_changes_keys(tmp_path: Path) -> None:
    made = run(tmp_path, "create", "--user", "ana", "--scope", "chat", "--scope", "v1", "--quota", "tokens_per_day=5")
    assert made.exit_code == 0, made.output
    (key,) = listed(tmp_path)
    assert key["scopes"] == ["chat", "v1"] and key["quota"]["tokens_per_day"] == 5
    assert "chat v1, tokens_per_day=5" in run(tmp_path, "list").stdout
    changed = run(tmp_path, "change", key["id"], "--scope", "all", "--quota", "tokens_per_day=none", "--quota",
                  "concurrent_requests=2")  # fmt: skip
    assert changed.exit_code == 0 and "everything, concurrent_requests=2" in changed.stdout
    changed = run(tmp_path, "change", key["id"], "--models", "sql, poem")
    assert "everything, the models sql poem, concurrent_requests=2" in changed.stdout
    assert listed(tmp_path)[0]["models"] == ["sql", "poem"]
    assert run(tmp_path, "change", key["id"], "--models", "all").exit_code == 0
    assert listed(tmp_path)[0]["models"] is None
    assert run(tmp_path, "disable", "ana").exit_code == 0
    assert listed(tmp_path)[0]["state"] == "disabled"
    assert run(tmp_path, "enable", "ana").exit_code == 0
    assert listed(tmp_path)[0]["state"] == "valid"
    for arguments, words in [
        (["change", key["id"]], ["--scope"]),
        (["change", key["id"], "--models", "sql,"], ["'sql,'", "comma-separated"]),
        (["change", key["id"], "--scope", "root"], ["'root'", "documents"]),
        (["change", key["id"], "--quota", "tokens_per_day=-1"], ["tokens_per_day=-1", "NAME=none"]),
        (["change", "key_x", "--scope", "v1"], ["'key_x'", "keys list"]),
        (["disable", "nobody"], ["'nobody'"]),
    ]:
        refused = run(tmp_path, *arguments)
        assert refused.exit_code == 1 and all(word in refused.stderr for word in words), refused.stderr
