"""Two servers of one database over HTTP: a run of one is read, decided and ended at the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from app.runs.events import TERMINAL
from tests.app import postgres
from tests.app.chatting import new_chat
from tests.app.cluster.redis_server import RedisServer
from tests.app.conftest import PEBBLE, Server, serving
from tests.app.gate import GatedEmbedder
from tests.app.keyed import client_of, key_of
from tests.app.library import error
from tests.app.runs.test_runs import events, start

pytestmark = pytest.mark.slow

ASKING = '''
from ponder import Context, tool
from tools.builtin import builtin_tools

@tool(permission="none", approval="always")
async def calculate(ctx: Context, expression: str) -> str:
    """Work out an arithmetic expression."""
    return await builtin_tools.ask_user(ctx, "Which do you mean?", ["391", "23"])
'''
QUESTION = "What is 23 * 17?"
Clients = tuple[httpx.Client, httpx.Client]


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, postgres_address: str, redis: RedisServer
) -> Iterator[list[Server]]:
    with ExitStack() as closing:
        address = closing.enter_context(postgres.schema(postgres_address))
        made = list[Server]()
        for name in "ab":
            data = tmp_path_factory.mktemp(name)
            (data / "plugins").mkdir()
            (data / "plugins/calculate.py").write_text(ASKING, "utf-8")
            limits: dict[str, Any] = {"requests_per_minute": 100}
            made.append(
                closing.enter_context(
                    serving(PEBBLE, data, GatedEmbedder(), database=address, redis=redis.address, auth="keys", **limits)
                )
            )
            made[-1].app.dependency_overrides.clear()
        yield made


@pytest.fixture(scope="module")
def ana(servers: list[Server]) -> Iterator[Clients]:
    """A user's clients of both servers."""
    key = key_of(servers[0], "ana")
    with client_of(servers[0], key) as first, client_of(servers[1], key) as second:
        yield first, second


@pytest.fixture(scope="module")
def bob(servers: list[Server]) -> Iterator[httpx.Client]:
    """Somebody else, at the second server."""
    with client_of(servers[1], key_of(servers[1], "bob")) as http:
        yield http


def long_run(http: httpx.Client) -> tuple[str, str]:
    """Begins a run that takes a while."""
    chat = new_chat(http)
    return chat, start(http, chat, "Use 3, 5, 7 and 9 to make 24.", thinking={"min_tokens": 2000}, temperature=1.5)


def test_a_run_is_read_and_ended_at_another_server(ana: Clients, bob: httpx.Client) -> None:
    first, second = ana
    chat, run = long_run(first)
    assert second.get("/api/chats").json()["chats"][0]["running"] is True
    assert second.get(f"/api/runs/{run}").json()["status"] == "running"
    error(bob.get(f"/api/runs/{run}"), 404, "run_not_found")
    error(bob.get(f"/api/runs/{run}/events"), 404, "run_not_found")
    error(bob.post(f"/api/runs/{run}/cancel"), 404, "run_not_found")
    error(second.post(f"/api/chats/{chat}/runs", json={"content": "Another?"}), 409, "chat_busy")
    seen = list[tuple[int, str]]()
    for seq, kind, _ in events(second, run):
        seen.append((seq, kind))
        if len(seen) == 20:
            assert second.post(f"/api/runs/{run}/cancel").status_code == 202
    assert [seq for seq, _ in seen] == list(range(1, len(seen) + 1)) and seen[-1][1] == "run.cancelled"
    assert [(seq, kind) for seq, kind, _ in events(first, run)] == seen
    assert second.get("/api/chats").json()["chats"][0]["running"] is False
    messages = second.get(f"/api/chats/{chat}").json()["messages"]
    assert messages[-1]["status"] == "cancelled"


def test_what_a_run_asks_is_answered_at_another_server(ana: Clients, bob: httpx.Client) -> None:
    first, second = ana
    chat = new_chat(first)
    run = start(first, chat, QUESTION, tools=["calculate", "ask_user"])
    waits = list[str | None]()
    kinds = list[str]()
    for _, kind, event in events(second, run):
        kinds.append(kind)
        if kind == "approval.requested":
            address = f"/api/runs/{run}/approvals/{event['approval_id']}"
            waits.append(second.get("/api/chats").json()["chats"][0]["waiting_for"])
            error(bob.post(address, json={"decision": "once"}), 404, "run_not_found")
            error(second.post(f"/api/runs/{run}/approvals/none", json={"decision": "once"}), 404, "not_waiting")
            assert second.post(address, json={"decision": "once"}).status_code == 202
            error(second.post(address, json={"decision": "once"}), 404, "not_waiting")
        if kind == "question.asked":
            address = f"/api/runs/{run}/questions/{event['question_id']}"
            waits.append(second.get("/api/chats").json()["chats"][0]["waiting_for"])
            error(second.post(address, json={"text": "neither"}), 400, "invalid_value", "text")
            assert second.post(address, json={"text": "391"}).status_code == 202
    assert waits == ["approval", "answer"] and kinds[-1] == "run.completed" and "tool.result" in kinds
    error(second.post(address, json={"text": "391"}), 404, "not_waiting")


def test_a_chat_that_is_deleted_elsewhere_ends_its_run(ana: Clients) -> None:
    first, second = ana
    chat, run = long_run(first)
    ended = list[str]()
    reading = threading.Thread(target=lambda: ended.extend(kind for _, kind, _ in events(first, run)))
    reading.start()
    assert second.delete(f"/api/chats/{chat}").status_code == 200
    reading.join(20)
    assert ended[-1] == "run.cancelled"


def test_a_key_finds_its_run_at_every_server(ana: Clients) -> None:
    chat = new_chat(ana[0])
    body, headers = {"content": "hello", "max_tokens": 2}, {"Idempotency-Key": "the same"}
    replies = [http.post(f"/api/chats/{chat}/runs", json=body, headers=headers).json() for http in ana]
    assert replies[0]["run_id"] == replies[1]["run_id"]


def test_limits_are_those_of_all_servers(servers: list[Server]) -> None:
    key = key_of(servers[0], "eve")
    with client_of(servers[0], key) as first, client_of(servers[1], key) as second:
        body = {"model": "default", "prompt": "a", "max_tokens": 1}
        left = [
            int(http.post("/v1/completions", json=body).headers["x-ratelimit-remaining-requests"])
            for http in (first, second, first, second)
        ]
    assert left == [99, 98, 97, 96]


def test_a_user_signs_in_at_one_server_and_out_at_the_other(servers: list[Server]) -> None:
    key = key_of(servers[0], "ana")
    with httpx.Client(base_url=servers[0].url, headers={"Origin": servers[0].url}) as page:
        assert page.post("/api/session", json={"key": key}).status_code == 200
        cookies = dict(page.cookies.items())
    with httpx.Client(base_url=servers[1].url, headers={"Origin": servers[1].url}, cookies=cookies) as page:
        assert page.get("/api/chats").status_code == 200
        assert page.delete("/api/session").status_code == 204
    reply = httpx.get(f"{servers[0].url}/api/chats", cookies=cookies, headers={"Origin": servers[0].url})
    assert reply.status_code == 401


def test_a_user_who_is_deleted_has_no_run_at_any_server(servers: list[Server]) -> None:
    with client_of(servers[0], key_of(servers[0], "mallory")) as http:
        _, run = long_run(http)
        with client_of(servers[1], key_of(servers[1], "boss", "operator")) as boss:
            assert boss.delete("/api/operator/users/mallory").json()["chats"] == 1
    until = time.monotonic() + 10
    while servers[0].stats().running:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert TERMINAL and run
