"""Classes, deadlines and longest answers: of requests, keys, users and the server, over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.admission.request_budget import RequestBudget, RequestTerms
from app.db.account_store import Accounts
from app.db.quotas import Quota
from app.errors import from_exception
from engine.errors import DeadlineExceeded, SequenceClosed
from tests.app.chatting import begin, log_of, new_chat
from tests.app.conftest import Server, serving

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **fields}


@pytest.fixture(scope="module")
def classed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that goes by classes, one answer at a time."""
    data = tmp_path_factory.mktemp("classed")
    with serving(model, data, policy="priority", max_running=1) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    """A server with keys: `ana` may have class 2 at best, 5 s and 20 tokens; `bob`'s user has class 3."""
    data = tmp_path_factory.mktemp("keyed")
    accounts = Accounts.open(data)
    for user in ("ana", "bob", "eve", "root"):
        accounts.create_user(user, user, "operator" if user == "root" else "user")
    accounts.change_user("bob", quota=Quota(priority=3, max_output_tokens=30))
    limits = Quota(priority=2, deadline_s=5, max_output_tokens=20)
    keys = {user: accounts.create_key(user, quota=limits if user == "ana" else Quota())[1] for user in
            ("ana", "bob", "eve", "root")}  # fmt: skip
    accounts.close()
    with serving(model, data, auth="keys", max_output_tokens=50) as server:
        yield server, keys


def client(server: Server, key: str = "") -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key}"} if key else {})


def shown(server: Server) -> dict[str, int]:
    """Requests under way by class, as an operator sees them."""
    with client(server) as http:
        return dict(http.get("/api/operator/stats").json()["by_priority"])


def test_a_better_class_is_answered_first(classed: Server) -> None:
    """While one answer runs, two wait: the later one, of a better class, ends before the other."""
    ended: list[str] = []

    def ask(name: str, **fields: Any) -> None:
        with client(classed) as http:
            assert http.post(CHAT, json=body(**fields)).status_code == 200
        ended.append(name)

    long = {"max_tokens": 1000, "n": 4, "ignore_eos": True}
    before = {**long, "stream": True, "priority": -100}
    with client(classed) as http, http.stream("POST", CHAT, json=body(**before)) as first:
        assert first.status_code == 200
        chunks = first.iter_raw()  # kept: without it the connection would be closed
        next(chunks)
        asked = []
        for name, fields in (("low", {**long, "priority": 50}), ("high", {"priority": -50})):
            priority = fields["priority"]
            asked.append(threading.Thread(target=ask, args=(name,), kwargs=fields))
            asked[-1].start()
            classed.until(lambda stats: str(priority) in shown(classed))  # noqa: B023  (called before the next round)
        assert shown(classed) == {"-100": 1, "-50": 1, "50": 1}
    for thread in asked:
        thread.join()
    assert ended == ["high", "low"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_at_its_deadline(http: httpx.Client, server: Server, stream: bool) -> None:
    before = time.monotonic()
    fields = {"ignore_eos": True, "deadline_s": 3.0, "stream": stream}  # seconds: all 32 begin on a busy machine, too
    limit = server.engine.max_model_len - 100
    reply = http.post(CHAT, json=body(**fields, max_tokens=limit, n=32))
    assert reply.status_code == 200 and '"finish_reason":"length"' in reply.text.replace(" ", "")
    assert time.monotonic() - before < 30
    server.until(lambda stats: stats.sequences == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_waits_until_its_deadline_is_refused(classed: Server, stream: bool) -> None:
    """The only place is taken by answers of a better class meanwhile."""
    taking = body(max_tokens=1000, n=8, ignore_eos=True, stream=True, priority=-100)
    with client(classed) as http, http.stream("POST", CHAT, json=taking) as first:
        chunks = first.iter_raw()  # kept: without it the connection would be closed
        next(chunks)
        for n in (1, 3):
            reply = http.post(CHAT, json=body(deadline_s=0.2, n=n, stream=stream))
            assert reply.status_code == 408 and reply.json()["error"]["code"] == "deadline_exceeded", reply.text
    classed.until(lambda stats: stats.sequences == 0)


def test_a_deadline_between_the_spans_of_an_answer_keeps_what_was_written(http: httpx.Client, server: Server) -> None:
    """Answers of a random model go to and fro between thinking and answering, with a span for each."""
    for tried in range(20):
        deadline_s = 0.4 + tried / 100
        fields = {"ignore_eos": True, "deadline_s": deadline_s, "temperature": 1.5, "seed": tried, "max_tokens": 1000}
        reply = http.post(CHAT, json=body(**fields, n=16))
        assert reply.status_code == 200, (deadline_s, reply.text)


@pytest.mark.parametrize("strategy", ["best_of_n", "self_consistency", "deep_conf", "beam"])
def test_a_strategy_gives_the_best_so_far_at_its_deadline(http: httpx.Client, server: Server, strategy: str) -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "deadline_s": 3.0, "max_tokens": server.engine.max_model_len - 100}
    fields |= {"strategy": strategy, "strategy_options": {"width": 16} if strategy == "beam" else {"n": 32}}
    reply = http.post(CHAT, json=body(**fields))
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] or choice["message"].get("reasoning_content")
    server.until(lambda stats: stats.sequences == 0)


def test_a_deadline_before_the_answer_begins_is_told(http: httpx.Client, server: Server) -> None:
    """Deadlines fall before the prompt is read, while it is, or between that and the answers."""
    late, in_time = 0.0, 2.0
    for _ in range(20):  # closing in on the deadline that lets an answer begin
        deadline_s = (late + in_time) / 2
        reply = http.post(CHAT, json=body(deadline_s=deadline_s, n=32, max_tokens=100, ignore_eos=True))
        if reply.status_code == 200:
            in_time = deadline_s
        else:
            assert reply.status_code == 408 and reply.json()["error"]["code"] == "deadline_exceeded", reply.text
            late = deadline_s
    assert 0 < late < in_time
    server.until(lambda stats: stats.sequences == 0)


def test_a_run_ends_at_its_deadline_and_keeps_what_it_wrote(http: httpx.Client) -> None:
    run = begin(http, new_chat(http), "hello", deadline_s=0.5, max_tokens=900, temperature=0)
    log = log_of(http, run["run_id"])
    assert log[-1]["type"] == "run.completed"


def test_a_sequence_that_closed_at_its_deadline_is_no_fault_of_the_server() -> None:
    late = from_exception(DeadlineExceeded("It is closed."))
    assert (late.status, late.code) == (408, "deadline_exceeded")
    assert from_exception(SequenceClosed("It is closed.")).status == 503


def test_a_deadline_that_has_passed_is_told() -> None:
    request_budget = RequestBudget.__new__(RequestBudget)
    request_budget.terms, request_budget.began = RequestTerms(deadline_s=1.0), time.monotonic() - 2
    with pytest.raises(Exception, match="deadline") as caught:
        _ = request_budget.left_s
    assert getattr(caught.value, "status", 0) == 408


@pytest.mark.parametrize(
    ("user", "fields", "param", "says"),
    [
        ("ana", {"priority": 1}, "priority", "2 (the best class of this key)"),
        ("ana", {"deadline_s": 6}, "deadline_s", "at most 5 seconds"),
        ("ana", {"max_tokens": 21}, "max_tokens", "at most 20"),
        ("bob", {"priority": 0}, "priority", "3 (the best class of this key)"),
        ("bob", {"max_tokens": 31}, "max_tokens", "at most 30"),
        ("eve", {"max_tokens": 51}, "max_tokens", "at most 50"),
        ("eve", {"priority": 101}, "priority", "-100 to 100"),
        ("eve", {"deadline_s": 0}, "deadline_s", "above 0"),
    ],
)
def test_what_a_key_may_not_have_is_refused_by_name(
    keyed: tuple[Server, dict[str, str]], user: str, fields: dict[str, Any], param: str, says: str
) -> None:
    server, keys = keyed
    with client(server, keys[user]) as http:
        reply = http.post(CHAT, json=body(**fields))
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == param and says in error["message"], reply.text


def test_answers_are_no_longer_than_the_server_or_the_key_allows(keyed: tuple[Server, dict[str, str]]) -> None:
    server, keys = keyed
    asked = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    for user, longest in (("ana", 20), ("bob", 30), ("eve", 50)):
        with client(server, keys[user]) as http:
            reply = http.post(CHAT, json=asked).json()
            assert reply["usage"]["completion_tokens"] == longest
            said = http.post("/v1/responses", json={"model": "default", "input": "hello", "max_output_tokens": 51})
            assert said.status_code == 400 and said.json()["error"]["param"] == "max_output_tokens"
            chat = http.post("/api/chats", json={}).json()["id"]
            run = http.post(f"/api/chats/{chat}/runs", json={"content": "x", "max_tokens": 51})
            assert run.status_code == 400 and run.json()["error"]["param"] == "max_tokens"


def test_an_operator_gives_users_and_keys_a_class(keyed: tuple[Server, dict[str, str]]) -> None:
    server, keys = keyed
    with client(server, keys["root"]) as http:
        changed = http.patch("/api/operator/users/eve", json={"quota": {"priority": 7}})
        assert changed.status_code == 200 and changed.json()["quota"]["priority"] == 7
        wrong = http.patch("/api/operator/users/eve", json={"quota": {"priority": 101}})
        assert wrong.status_code == 400 and "-100 to 100" in wrong.text
        made = http.post("/api/operator/keys", json={"user": "eve", "quota": {"priority": 9}}).json()
    for key, best in ((keys["eve"], 7), (made["key"], 9)):
        with client(server, key) as http:
            reply = http.post(CHAT, json=body(priority=best - 1))
            assert reply.status_code == 400 and f"{best} (the best" in reply.text
            assert http.post(CHAT, json=body(priority=best)).status_code == 200
    with client(server, keys["root"]) as http:
        assert http.patch("/api/operator/users/eve", json={"quota": {}}).json()["quota"]["priority"] is None


def test_a_class_that_the_policy_does_not_know_is_refused(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, policy="fcfs") as server, client(server) as http:
        reply = http.post(CHAT, json=body(priority=1))
        assert reply.status_code == 400 and "fcfs" in reply.json()["error"]["message"]
        assert http.post(CHAT, json=body(priority=0)).status_code == 200
