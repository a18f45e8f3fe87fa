"""A router with a server that reads prompts for another one: where requests go, what is predicted, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.cli.route_command import RouteOptions
from app.config import BadSetting
from app.routing.disaggregation import (
    DecodeLoad,
    Objectives,
    PrefillLoad,
    decode_request,
    is_disaggregable,
    prefill_request,
)
from app.routing.replicas import ReplicaAddress, ReplicaSet
from tests.app.conftest import Server, serving
from tests.app.routing.test_router import free_port, routing, until

CHAT = "/v1/chat/completions"


# -- predictions


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_to_the_first_token_counts_the_prompts_before() -> None:
    clock = Clock()
    load = PrefillLoad(clock)
    assert load.ttft_s(100) is None  # nothing was read yet, so nothing is refused
    load.begin(1000)
    clock.now = 2.0
    load.end(1000, read=True)
    assert load.ttft_s(250) == pytest.approx(0.5)
    load.begin(1000)
    load.begin(500)
    assert load.ttft_s(250) == pytest.approx(1750 / 500)


def test_a_rate_is_of_the_time_in_which_prompts_were_read() -> None:
    """Two prompts that came at once are read one after the other, and a pause counts for neither."""
    clock = Clock()
    load = PrefillLoad(clock)
    clock.now = 100.0
    load.begin(400)
    load.begin(400)
    clock.now = 101.0
    load.end(400, read=True)
    clock.now = 102.0
    load.end(400, read=True)
    assert load.per_s == pytest.approx(400)
    load.begin(400)
    clock.now = 103.0
    load.end(400, read=False)  # a refusal says nothing of the rate
    assert load.per_s == pytest.approx(400) and load.tokens == 0


def test_the_time_between_tokens_is_a_line_through_the_answers() -> None:
    load = DecodeLoad()
    assert load.tpot_s(1) is None
    for n in (1, 2, 4, 6, 3, 5):
        load.answered(n, 0.01 + 0.002 * n)
    assert load.tpot_s(10) == pytest.approx(0.03)
    flat = DecodeLoad()
    for n, seconds in ((1, 0.05), (4, 0.01)):
        flat.answered(n, seconds)
    assert flat.tpot_s(8) == flat.tpot_s(1) == pytest.approx(0.03, rel=0.1)  # more requests never seem faster


def test_an_objective_that_would_be_missed_is_named() -> None:
    both = Objectives(max_ttft_s=2.0, max_tpot_s=0.1)
    assert both.refusal(None, None) is None and both.refusal(2.0, 0.1) is None
    assert both.refusal(2.5, 0.3) == ("TTFT", 0.5)
    missed = both.refusal(None, 0.3)
    assert missed is not None and missed[0] == "TPOT" and missed[1] == pytest.approx(0.2)
    assert Objectives().refusal(1e9, 1e9) is None


# -- requests


@pytest.mark.parametrize(
    ("path", "fields", "accepted"),
    [
        (CHAT, {"messages": []}, True),
        ("/v1/completions", {"prompt": "a"}, True),
        ("/v1/completions", {"prompt": [1, 2]}, True),
        ("/v1/completions", {"prompt": ["a", "b"]}, False),
        ("/v1/completions", {"prompt": "a", "echo": True}, False),
        (CHAT, {"messages": [], "n": 2}, False),
        (CHAT, {"messages": [], "strategy": "beam"}, False),
        (CHAT, {"messages": [], "kv_transfer_params": {"do_remote_decode": True}}, False),
        ("/v1/embeddings", {"input": "a"}, False),
    ],
)
def test_one_prompt_with_one_answer_may_be_read_elsewhere(path: str, fields: dict[str, Any], accepted: bool) -> None:
    assert is_disaggregable(path, fields) is accepted


def test_the_prompt_is_the_same_for_both_servers_and_the_rest_is_the_decoding_ones() -> None:
    fields = {"model": "m", "messages": ["x"], "tools": ["t"], "stream": True, "max_tokens": 50, "response_format": {}}
    assert prefill_request(fields) == {
        "model": "m", "messages": ["x"], "tools": ["t"], "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip
    where = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 5}
    assert decode_request(fields, "h", 5) == {**fields, "kv_transfer_params": where}


@pytest.mark.parametrize(
    ("text", "kv"),
    [
        ("http://a:8000", ("a", 14579)),
        ("http://a:8000/,10.0.0.1:5", ("10.0.0.1", 5)),
        ("https://[::1]:8000,[::1]:6", ("::1", 6)),
    ],
)
def test_a_prefill_server_says_where_its_kv_is(text: str, kv: tuple[str, int]) -> None:
    address = ReplicaAddress.prefill(text)
    assert (address.role, address.kv) == ("prefill", kv)


@pytest.mark.parametrize("text", ["a:8000", "http://a:8000,b", "http://a:8000,b:0", "http://a:8000,b:99999", "http://"])
def test_what_is_no_prefill_server_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="accepted: http://HOST:PORT"):
        ReplicaAddress.prefill(text)


def test_a_router_needs_a_server_that_answers() -> None:
    options = RouteOptions((), "127.0.0.1", 0, None, False, 1.0, 1, None, ("http://a:1",))
    with pytest.raises(BadSetting, match="at least one server that answers"):
        options.addresses()


# -- roles


def replicas(**roles: str) -> ReplicaSet:
    """Servers that are up, by name and role."""
    made = ReplicaSet(
        [
            ReplicaAddress(f"http://{name}", role=role, kv=None if role == "decode" else (name, 1))  # type: ignore[arg-type]  # a role's name
            for name, role in roles.items()
        ],
        "least_loaded",
    )
    for each in made.replicas.values():
        each.up = True
    return made


def prefiller(made: ReplicaSet) -> str | None:
    found = made.prefiller(1000)
    return None if found is None else found.name.removeprefix("http://")


def answering(made: ReplicaSet) -> list[str]:
    return [each.name.removeprefix("http://") for each in made.usable()]


def test_a_server_of_both_roles_reads_prompts_while_the_prefill_servers_are_busy() -> None:
    made = replicas(p="prefill", b="both", d="decode")
    p, b = made.replicas["http://p"], made.replicas["http://b"]
    assert prefiller(made) == "p" and answering(made) == ["b", "d"]
    p.prefills.begin(5000)
    assert prefiller(made) == "b"
    b.prefills.begin(1000)
    assert answering(made) == ["d"]  # it reads: answers would wait
    assert prefiller(made) == "b"  # its backlog is the shorter one
    b.prefills.end(1000, read=True)
    b.in_flight = 1
    assert prefiller(made) == "p" and answering(made) == ["b", "d"]  # it answers: a prompt would delay its tokens


def test_the_last_server_that_answers_reads_no_prompts_for_others() -> None:
    made = replicas(b="both", d="decode")
    assert prefiller(made) == "b"
    made.replicas["http://d"].up = False
    assert prefiller(made) is None and answering(made) == ["b"]
    made.replicas["http://b"].prefills.begin(10)
    assert answering(made) == ["b"]  # it reads one already, and there is no other


def test_without_prefill_servers_every_server_reads_its_own_prompts() -> None:
    assert prefiller(replicas(d="decode", e="decode")) is None


# -- servers


@dataclass
class Apart:
    prefill: Server
    decode: Server
    addresses: tuple[ReplicaAddress, ReplicaAddress]


@pytest.fixture(scope="module")
def apart(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    folder = tmp_path_factory.mktemp("apart")
    (folder / "secret").write_text("a secret that both servers share")
    port = free_port()
    extra = {"secret_file": str(folder / "secret"), "peers": ["127.0.0.1"]}
    transfer = {"kv_port": port, "kv_connector_extra_config": extra}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(model, folder / role, kv_transfer={**transfer, "kv_role": role}))
            for role in ("kv_producer", "kv_consumer")
        ]
        prefill = ReplicaAddress(servers[0].url, role="prefill", kv=("127.0.0.1", port))
        yield Apart(servers[0], servers[1], (prefill, ReplicaAddress(servers[1].url)))


def chat(http: httpx.Client, content: str, **more: Any) -> httpx.Response:
    body = {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 6, "seed": 1}
    return http.post(CHAT, json={**body, **more})


def said(answer: httpx.Response) -> tuple[Any, Any]:
    assert answer.status_code == 200, answer.text
    made = answer.json()
    return made["choices"][0]["message"], made["usage"]["completion_tokens"]


@pytest.mark.slow
def test_a_long_prompt_is_read_by_one_server_and_answered_by_the_other(apart: Apart, model: Path) -> None:
    with httpx.Client(base_url=apart.prefill.url, timeout=60) as alone:
        expected = said(chat(alone, "never seen " * 30))
    before = apart.decode.stats()
    with routing(*apart.addresses, min_remote_tokens=50) as routed:
        assert said(chat(routed.http, "never seen " * 30)) == expected
        assert said(chat(routed.http, "short")) is not None
        until(lambda: routed.count("prefills_total", apart.prefill.url, status="200") == 1)
        assert routed.count("requests_total", apart.decode.url) == 2
        assert routed.count("requests_total", apart.prefill.url) == 0
    told = httpx.get(f"{apart.prefill.url}/metrics").text
    assert f"ponder_kv_transfer_sent_blocks_total {float(apart.prefill.stats().kv_transfer.sent_blocks)}" in told
    stats = apart.decode.stats()
    read = stats.kv_transfer.received_blocks - before.kv_transfer.received_blocks
    assert read >= 330 // stats.block_size and stats.kv_transfer.failed_loads == 0
    assert stats.prompt_tokens - before.prompt_tokens < 200  # the short prompt, and the end of the long one


@pytest.mark.slow
def test_a_stream_goes_on_through_both(apart: Apart) -> None:
    with (
        routing(*apart.addresses, min_remote_tokens=50) as routed,
        openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        stream = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "streamed " * 40}], stream=True, max_tokens=20
        )
        assert len([chunk for chunk in stream if chunk.choices]) > 1
        until(lambda: routed.count("prefills_total", apart.prefill.url, status="200") == 1)


@pytest.mark.slow
def test_a_prefill_server_that_is_away_costs_no_answer(apart: Apart) -> None:
    away = ReplicaAddress(f"http://127.0.0.1:{free_port()}", role="prefill", kv=("127.0.0.1", free_port()))
    with routing(away, apart.addresses[1], min_remote_tokens=50) as routed:
        assert said(chat(routed.http, "nobody reads it " * 30))
        assert routed.count("prefills_total", away.url) == 0
        routed.router.replicas.replicas[away.url].up = True  # as if it had died since its last health check
        assert said(chat(routed.http, "and it just died " * 30))
        until(lambda: routed.count("prefills_total", away.url, status="failed") == 1)


@pytest.mark.slow
def test_a_prefill_server_answers_no_other_request(apart: Apart) -> None:
    with routing(apart.addresses[0]) as routed:
        assert routed.http.get("/health").status_code == 503
        assert routed.http.get("/v1/models").status_code == 503
        assert routed.http.get("/api/chats").status_code == 503


@pytest.mark.slow
def test_a_request_that_would_miss_an_objective_is_refused_at_once(apart: Apart) -> None:
    with routing(*apart.addresses, min_remote_tokens=50, objectives=Objectives(max_ttft_s=1.0)) as routed:
        assert said(chat(routed.http, "first " * 60))  # nothing is known yet
        prefills = routed.router.replicas.replicas[apart.prefill.url].prefills
        until(lambda: prefills.per_s is not None)
        prefills.per_s = 10.0
        answer = chat(routed.http, "second " * 60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "objective_missed")
        assert int(answer.headers["Retry-After"]) >= 1 and "TTFT" in answer.json()["error"]["message"]
        assert said(chat(routed.http, "short"))
        assert routed.router.metrics.refused.labels("TTFT")._value.get() == 1
