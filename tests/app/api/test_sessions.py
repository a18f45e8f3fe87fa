"""Signing in: a key opens a session, a cookie holds it, and nobody else's page can use it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from sqlalchemy import update

from app.auth import COOKIE, FREE, MAX_S, LoginThrottle
from app.db.account_store import Accounts
from app.db.tables import keys
from tests.app import postgres
from tests.app.chatting import ask, begin, new_chat
from tests.app.conftest import NewDatabase, Server
from tests.app.keyed import asking_for_keys, beside, client_of, key_of
from tests.app.library import error

DATABASES = postgres.DATABASES_SLOW


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("keyed")
    with new_database() as address, asking_for_keys(model, data, database=address) as server:
        yield server


@pytest.fixture
def page(keyed: Server) -> Iterator[httpx.Client]:
    """A browser's page: it keeps cookies and says where it is from."""
    with httpx.Client(base_url=keyed.url, headers={"Origin": keyed.url}, timeout=30) as client:
        yield client


def signed_in(page: httpx.Client, key: str) -> dict[str, Any]:
    reply = page.post("/api/session", json={"key": key})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_key_opens_a_session_until_one_signs_out(keyed: Server, page: httpx.Client) -> None:
    assert page.get("/api/session").json() == {"auth": "keys", "user": None, "expires_at": None}
    assert page.get("/api/chats").status_code == 401
    me = signed_in(page, key_of(keyed, "cara"))
    assert me["user"] == {"id": "cara", "name": "cara", "role": "user"}
    assert 29 * 86_400 < me["expires_at"] - time.time() <= 30 * 86_400
    assert page.get("/api/session").json() == me
    chat = new_chat(page)
    assert ask(page, chat, "hi")["status"] == "completed"
    token = page.cookies[COOKIE]
    assert page.delete("/api/session").status_code == 204
    assert COOKIE not in page.cookies and page.get("/api/chats").status_code == 401
    page.cookies.set(COOKIE, token)
    assert page.get("/api/chats").status_code == 401, "the token still counts"
    assert page.delete("/api/session").status_code == 204


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(keyed: Server, page: httpx.Client) -> None:
    key = key_of(keyed, "cara")
    told = page.post("/api/session", json={"key": key}).headers["set-cookie"]
    assert re.search(r"; HttpOnly", told) and re.search(r"; SameSite=strict", told, re.IGNORECASE)
    assert "; Path=/" in told and "Secure" not in told and key not in told
    over_tls = page.post("/api/session", json={"key": key}, headers={"X-Forwarded-Proto": "https"})
    assert "; Secure" in over_tls.headers["set-cookie"]


def test_a_page_elsewhere_cannot_use_the_cookie(keyed: Server, page: httpx.Client) -> None:
    signed_in(page, key_of(keyed, "cara"))
    token = {"Cookie": f"{COOKIE}={page.cookies[COOKIE]}"}

    def change(**headers: str) -> int:
        return httpx.post(f"{keyed.url}/api/chats", headers={**token, **headers}).status_code

    assert change() == 403  # no word of where it is from
    assert change(Origin="http://evil.example") == 403
    assert change(**{"Sec-Fetch-Site": "cross-site"}) == change(**{"Sec-Fetch-Site": "same-site"}) == 403
    assert change(Origin=keyed.url) == change(**{"Sec-Fetch-Site": "same-origin"}) == 201
    assert change(Authorization="Basic abc") == 403, "a scheme that browsers send by themselves is no proof"
    reading = httpx.get(f"{keyed.url}/api/chats", headers=token)
    assert reading.status_code == 200 and "access-control-allow-origin" not in reading.headers


def test_a_key_in_the_header_needs_no_origin_and_beats_the_cookie(keyed: Server, page: httpx.Client) -> None:
    signed_in(page, key_of(keyed, "cara"))
    both = {"Cookie": f"{COOKIE}={page.cookies[COOKIE]}", "Authorization": f"Bearer {key_of(keyed, 'dora')}"}
    assert httpx.post(f"{keyed.url}/api/chats", headers=both).status_code == 201
    assert httpx.get(f"{keyed.url}/api/session", headers=both).json()["user"]["id"] == "dora"


def test_revoking_a_key_ends_the_sessions_that_it_opened(keyed: Server, page: httpx.Client) -> None:
    key, other = key_of(keyed, "cara"), key_of(keyed, "cara")
    signed_in(page, key)
    with client_of(keyed, other) as client:
        assert page.get("/api/chats").status_code == client.get("/api/chats").status_code == 200
        beside(keyed, lambda accounts: accounts.revoke((accounts.find(key) or never())[1].id).id)
        assert page.get("/api/chats").status_code == 401 and client.get("/api/chats").status_code == 200
    assert page.get("/api/session").json()["user"] is None
    with client_of(keyed, key) as client:
        assert "was revoked" in error(client.get("/api/chats"), 401, "invalid_api_key")


def test_a_key_that_expires_ends_with_its_sessions(keyed: Server, page: httpx.Client) -> None:
    key = key_of(keyed, "cara", expires_s=3600)
    assert signed_in(page, key)["expires_at"] <= time.time() + 3600
    beside(keyed, lambda accounts: expire(accounts, key))
    assert page.get("/api/chats").status_code == 401
    with client_of(keyed, key) as client:
        assert "has expired" in error(client.get("/api/chats"), 401, "invalid_api_key")


def test_a_stream_goes_on_though_its_key_is_revoked_meanwhile(keyed: Server) -> None:
    key = key_of(keyed, "cara")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "ignore_eos": True}
    with (
        client_of(keyed, key) as client,
        client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply,
    ):
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        beside(keyed, lambda accounts: accounts.revoke((accounts.find(key) or never())[1].id).id)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert client.get("/api/chats").status_code == 401


def test_an_openai_client_is_let_in_by_its_key_and_told_why_not(keyed: Server) -> None:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key_of(keyed, "cara"), max_retries=0) as client:
        assert "tiny" in {each.id for each in client.models.list()}
        made = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=2, stream=True
        )
        assert list(made)[-1].choices[0].finish_reason in ("stop", "length")
    with (
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.models.list()
    assert refused.value.code == "invalid_api_key" and "'none' is not known" in str(refused.value)


async def test_tools_are_served_over_mcp_to_whoever_has_a_key(keyed: Server) -> None:
    key = key_of(keyed, "cara")
    with client_of(keyed, key) as cara:
        cara.put("/api/permissions", json={"classes": ["none"]})
        offered = {each["name"] for each in cara.get("/api/tools").json()["tools"] if each["permission"] == "none"}
    names = await mcp_tools(keyed, key)
    assert names and names <= offered, "the classes of another user"
    assert names < await mcp_tools(keyed, key_of(keyed, "dora"))


async def mcp_tools(server: Server, key: str) -> set[str]:
    async with (
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as http,
        Client(streamable_http_client(f"{server.url}/mcp", http_client=http)) as client,
    ):
        return {each.name for each in (await client.list_tools()).tools}


def test_wrong_keys_have_to_wait_and_right_ones_do_not(keyed: Server) -> None:
    key, address = key_of(keyed, "cara"), {"X-Forwarded-For": "203.0.113.7"}

    http = httpx.Client(base_url=keyed.url)  # one connection: the time to wait must not pass between two requests

    def tried(text: str, at: dict[str, str] = address) -> httpx.Response:
        return http.get("/api/chats", headers={"Authorization": f"Bearer {text}", **at})

    assert tried(key).status_code == 200
    for number in range(FREE):
        assert tried(f"ponder_wrong{number}").status_code == 401
    late = tried("ponder_wrong")
    assert "try again in" in error(late, 429, "too_many_wrong_keys") and int(late.headers["retry-after"]) >= 1
    signing_in = http.post("/api/session", json={"key": "ponder_wrong"}, headers=address)
    assert signing_in.status_code == 429
    assert tried(key).status_code == 200, "one that was good a moment ago"
    assert tried(key_of(keyed, "dora")).status_code == 429, "a new one from there has to wait as well"
    elsewhere = {"X-Forwarded-For": "203.0.113.8"}
    beside(keyed, lambda accounts: accounts.revoke((accounts.find(key) or never())[1].id).id)
    assert [tried(key, elsewhere).status_code for _ in range(FREE + 3)] == [401] * (FREE + 3)
    assert tried(key_of(keyed, "dora"), elsewhere).status_code == 200, "a forgotten client locks nobody out"
    http.close()


def test_waits_double_up_to_five_minutes_and_are_forgotten() -> None:
    clock = [1000.0]
    attempts = LoginThrottle(lambda: clock[0])
    waits = []
    for _ in range(16):
        attempts.failed("2001:db8::1")
        waits.append(attempts.wait_s("2001:db8::beef", "another"))  # of the same network
        clock[0] += waits[-1]
    assert waits[: FREE - 1] == [0] * (FREE - 1) and waits[FREE - 1 : FREE + 3] == [1, 2, 4, 8]
    assert waits[-1] == MAX_S and attempts.wait_s("2001:db8:0:1::1", "another") == 0
    attempts.failed("2001:db8::1")
    attempts.accepted("known")
    assert attempts.wait_s("2001:db8::1", "known") == 0 < attempts.wait_s("2001:db8::1", "another")
    clock[0] += 901
    assert attempts.wait_s("2001:db8::1", "another") == 0


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "key"),
        ({"key": ""}, "invalid_value", "key"),
        ({"key": 7}, "invalid_value", "key"),
        ({"key": "x" * 201}, "invalid_value", "key"),
        ({"key": "x", "user": "y"}, "unknown_parameter", "user"),
    ],
    ids=str,
)
def test_a_bad_form_is_told(keyed: Server, page: httpx.Client, body: object, code: str, param: str) -> None:
    error(page.post("/api/session", json=body), 400, code, param)
    assert not page.cookies


def test_where_nobody_is_asked_everybody_is_the_local_operator(http: httpx.Client) -> None:
    me = {"auth": "off", "user": {"id": "local", "name": "local", "role": "operator"}, "expires_at": None}
    assert http.get("/api/session").json() == me
    error(http.post("/api/session", json={"key": "x"}), 409, "auth_off")
    error(http.delete("/api/session"), 409, "auth_off")
    assert http.get("/api/chats", headers={"Authorization": "Bearer whatever"}).status_code == 200


def test_a_run_belongs_to_the_user_and_not_to_the_session(keyed: Server, page: httpx.Client) -> None:
    key = key_of(keyed, "cara")
    signed_in(page, key)
    run = begin(page, new_chat(page), "hi", max_tokens=20)["run_id"]
    page.delete("/api/session")
    assert page.get(f"/api/runs/{run}/events").status_code == 401
    signed_in(page, key)
    assert "event: run.completed" in page.get(f"/api/runs/{run}/events").text


def never() -> Any:
    raise AssertionError("the key is not there")


def expire(accounts: Accounts, key: str) -> str:
    _, found = accounts.find(key) or never()
    with accounts._writing():  # no hour has to pass
        accounts._db.execute(update(keys).where(keys.c.id == found.id).values(expires_at=time.time() - 1))
    return found.id
