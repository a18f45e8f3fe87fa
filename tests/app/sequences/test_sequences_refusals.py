"""Sequences over HTTP under bad input and long histories: refused by name, never a 500, nothing leaked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule, run_state_machine_as_test

from app.sequences.sequence_requests import (
    GENERATE_FIELDS,
    AppendRequest,
    ForkRequest,
    GenerateRequest,
    OpenRequest,
    ScoreRequest,
    TruncateRequest,
)
from tests.app.conftest import Server, all_is_back

ROOT = "/api/sequences"
CALLS = ("append", "generate", "fork", "score", "truncate")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def eve(shelf: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shelf.url, headers={"X-User": "eve"}, timeout=60) as client:
        yield client


@pytest.fixture
def wild(shelf: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shelf.url, headers={"X-User": "wild"}, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def at(shelf: Server, eve: httpx.Client) -> Iterator[str]:
    """The address of a sequence of "123" that bad calls must leave as it is."""
    address = f"{ROOT}/{eve.post(ROOT, json={'prompt': '123', 'lease_s': 600}).json()['id']}"
    yield address
    assert eve.delete(address).status_code == 204
    all_is_back(shelf)


@pytest.fixture
def only_eves(shelf: Server, eve: httpx.Client, at: str) -> Callable[[], object]:
    """Waits until nothing is left in the engine but the sequence `at`, which has never run."""

    def wait() -> None:
        assert eve.get(at).is_success  # its lease begins anew
        shelf.until(lambda stats: stats.sequences == 1 and stats.blocks_used == stats.running == 0)

    return wait


# (the call, its body, the field blamed, a word that the message must have)
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("", {}, "prompt", "prompt or messages"),
    ("", {"prompt": "a", "messages": HI}, "messages", "both"),
    ("", {"prompt": 5}, "prompt", "token ids"),
    ("", {"prompt": [1, "a"]}, "prompt", "token ids"),
    ("", {"prompt": [10**7]}, "prompt", "10000000"),
    ("", {"prompt": [-1]}, "prompt", "token ids"),
    ("", {"prompt": "x" * 3000}, "prompt", "2048"),
    ("", {"prompt": [20] * 2048}, "prompt", "2048"),
    ("", {"messages": []}, "messages", "non-empty"),
    ("", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
    ("", {"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "2048"),
    ("", {"messages": HI, "special": True}, "special", "text"),
    ("", {"prompt": [1], "special": False}, "special", "text"),
    ("", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "messages"),
    ("", {"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
    ("", {"prompt": "a", "lease_s": 0}, "lease_s", "above 0"),
    ("", {"prompt": "a", "lease_s": 601}, "lease_s", "600"),
    ("", {"prompt": "a", "lease_s": "long"}, "lease_s", "seconds"),
    ("", {"prompt": "a", "tools": []}, "tools", "accepted"),
    ("append", {}, "text", "text or tokens"),
    ("append", {"text": ""}, "text", "1 character"),
    ("append", {"tokens": []}, "tokens", "1 token"),
    ("append", {"text": "a", "tokens": [1]}, "tokens", "both"),
    ("append", {"tokens": [300_000]}, "tokens", "300000"),
    ("append", {"tokens": [1], "special": True}, "special", "text"),
    ("append", {"text": "x" * 2048}, "text", "2048"),
    ("append", {"tokens": [20] * 2048}, "tokens", "2048"),
    ("generate", {"max_tokens": 0}, "max_tokens", "1 or more"),
    ("generate", {"max_tokens": 5000}, "max_tokens", "2045"),
    ("generate", {"temperature": 3}, "temperature", "2"),
    ("generate", {"min_tokens": 17}, "min_tokens", "16"),
    ("generate", {"stop": ""}, "stop", "non-empty"),
    ("generate", {"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ("generate", {"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
    ("generate", {"logprobs": 21}, "logprobs", "20"),
    ("generate", {"logprobs": True}, "logprobs", "20"),
    ("generate", {"keep_stop_token": 1}, "keep_stop_token", "true or false"),
    ("generate", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one of them"),
    ("generate", {"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
    ("generate", {"n": 2}, "n", "fork"),
    ("generate", {"stream": True}, "stream", "always"),
    ("generate", {"model": "tiny"}, "model", "opened"),
    ("generate", {"prompt": "a"}, "prompt", "append"),
    ("generate", {"temprature": 1}, "temprature", "temperature"),
    ("fork", {"n": 0}, "n", "1 to 128"),
    ("fork", {"n": 129}, "n", "1 to 128"),
    ("fork", {"n": 1.5}, "n", "1 to 128"),
    ("fork", {"scope": "seq-0"}, "scope", "no sequence"),
    ("fork", {"lease_s": 601}, "lease_s", "600"),
    ("score", {}, "candidates", "missing"),
    ("score", {"candidates": []}, "candidates", "1 to 256"),
    ("score", {"candidates": ["a"] * 257}, "candidates", "1 to 256"),
    ("score", {"candidates": ["a", ""]}, "candidates[1]", "empty"),
    ("score", {"candidates": [[1], []]}, "candidates[1]", "empty"),
    ("score", {"candidates": ["a", [99_999]]}, "candidates[1]", "99999"),
    ("score", {"candidates": [[1]], "special": True}, "special", "text"),
    ("score", {"candidates": ["x" * 2046]}, "candidates", "2048"),
    ("truncate", {}, "length", "missing"),
    ("truncate", {"length": 4}, "length", "0 to 3"),
    ("truncate", {"length": -1}, "length", "0 to"),
    ("truncate", {"length": True}, "length", "integer"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "body", "param", "word"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_call_is_refused_by_name(
    eve: httpx.Client, at: str, call: str, body: dict[str, Any], param: str, word: str
) -> None:
    reply = eve.post(f"{at}/{call}" if call else ROOT, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and word in error["message"] and error["code"]
    assert eve.get(at).json()["text"] == "123"


def test_a_model_that_is_not_served_is_not_found(eve: httpx.Client) -> None:
    reply = eve.post(ROOT, json={"prompt": "a", "model": "gpt-4"})
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("call", ["", *CALLS])
def test_parameters_in_an_address_are_refused(eve: httpx.Client, at: str, call: str) -> None:
    reply = eve.post(f"{at}/{call}?lease_s=5" if call else f"{ROOT}?lease_s=5", json={})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "lease_s"


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b'{"text": "\\ud800"}', b'{"length": NaN}', b"[" * 9999])
@pytest.mark.parametrize("call", CALLS)
def test_a_body_that_is_no_json_object_is_refused(eve: httpx.Client, at: str, call: str, body: bytes) -> None:
    assert eve.post(f"{at}/{call}", content=body).json()["error"]["code"] == "invalid_json"


def test_a_generate_request_takes_nothing_that_its_list_does_not_have() -> None:
    assert set(GenerateRequest.model_fields) >= GENERATE_FIELDS


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_small = st.sampled_from([None, True, False, 0, 1, 2, -1, 0.5, "", "a", [], {}, [1], ["a"], [[1, 2]], {"a": 1}, 2**70])
_FIELDS: dict[str, set[str]] = {
    "": set(OpenRequest.model_fields), "append": set(AppendRequest.model_fields), "generate": set(GENERATE_FIELDS),
    "fork": set(ForkRequest.model_fields), "score": set(ScoreRequest.model_fields),
    "truncate": set(TruncateRequest.model_fields),
}  # fmt: skip


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_json_makes_the_server_fail(
    wild: httpx.Client, only_eves: Callable[[], object], data: st.DataObject
) -> None:
    id = wild.post(ROOT, json={"prompt": "12"}).json()["id"]
    call = data.draw(st.sampled_from(sorted(_FIELDS)))
    names = st.sampled_from(sorted(_FIELDS[call])) | st.text(max_size=5)
    body = data.draw(st.dictionaries(names, _small | _json, max_size=3))
    if call == "generate" and not isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = 2
    reply = wild.post(f"{ROOT}/{id}/{call}" if call else ROOT, json=body)
    assert reply.status_code in (200, 201, 400, 404), (call, reply.status_code, reply.text, body)
    assert reply.status_code != 404 or "model" in body
    if reply.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in reply.text
    for held in wild.get(ROOT).json()["sequences"]:
        assert wild.delete(f"{ROOT}/{held['id']}").status_code in (204, 404)  # a fork closes with its parent
    only_eves()


_ids = st.integers(0, 250)
_some_ids = st.lists(_ids, min_size=1, max_size=9)


class Histories(RuleBasedStateMachine):
    """Holds each sequence to the tokens that a plain list would have, after any steps in any order."""

    url: str  # these two are set by the test
    only_eves: Callable[[], object]
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.client = httpx.Client(base_url=self.url, headers={"X-User": "history"})
        self.tokens: dict[str, list[int]] = {}
        self.scopes: dict[str, str | None] = {}

    @rule(target=sequences, tokens=st.lists(_ids, max_size=40))
    def open(self, tokens: list[int]) -> str:
        made = self.client.post(ROOT, json={"prompt": tokens}).json()
        self.tokens[made["id"]], self.scopes[made["id"]] = tokens, None
        return str(made["id"])

    @rule(id=sequences, tokens=st.lists(_ids, min_size=1, max_size=40))
    def append(self, id: str, tokens: list[int]) -> None:
        if self.call(id, "append", {"tokens": tokens}) is not None:
            self.tokens[id] = self.tokens[id] + tokens

    @rule(id=sequences, n=st.integers(1, 9), stop=_ids, keep=st.booleans())
    def generate(self, id: str, n: int, stop: int, keep: bool) -> None:
        fields = {"max_tokens": n, "stop_token_ids": [stop], "keep_stop_token": keep}
        reply = self.call(id, "generate", fields, empty=not self.tokens.get(id))
        if reply is None:
            return
        events = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
        new = [token for event in events for token in event.get("tokens", ())]
        self.tokens[id] = self.tokens[id] + new
        assert events[-1]["length"] == len(self.tokens[id]) and len(new) <= n
        assert keep or stop not in new

    @rule(target=sequences, id=sequences, n=st.integers(1, 3), up=st.booleans())
    def fork(self, id: str, n: int, up: bool) -> Any:
        scope = self.scopes.get(id) if up else None
        reply = self.call(id, "fork", {"n": n} | ({"scope": scope} if scope else {}))
        made = [] if reply is None else [str(each["id"]) for each in reply.json()["sequences"]]
        for each in made:
            self.tokens[each], self.scopes[each] = self.tokens[id], scope or id
        return multiple(*made)

    @rule(id=sequences, candidates=st.lists(st.lists(_ids, min_size=1, max_size=9), min_size=1, max_size=4))
    def score(self, id: str, candidates: list[list[int]]) -> None:
        reply = self.call(id, "score", {"candidates": candidates}, empty=not self.tokens.get(id))
        if reply is not None:
            assert [scored["tokens"] for scored in reply.json()["scores"]] == candidates
            assert all(len(scored["logprobs"]) == len(scored["tokens"]) for scored in reply.json()["scores"])

    @rule(id=sequences, part=st.floats(0, 1))
    def truncate(self, id: str, part: float) -> None:
        length = int(part * len(self.tokens.get(id, ())))
        if self.call(id, "truncate", {"length": length}) is not None:
            self.tokens[id] = self.tokens[id][:length]

    @rule(id=consumes(sequences))
    def close(self, id: str) -> None:
        assert self.client.delete(f"{ROOT}/{id}").status_code == (204 if id in self.tokens else 404)
        gone = [id]
        for each in gone:
            self.tokens.pop(each, None)
            gone += [child for child, scope in self.scopes.items() if scope == each and child in self.tokens]

    def call(self, id: str, name: str, body: dict[str, Any], empty: bool = False) -> httpx.Response | None:
        """The reply where there is to be one."""
        reply = self.client.post(f"{ROOT}/{id}/{name}", json=body)
        if id not in self.tokens:
            assert reply.status_code == 404
            return None
        if empty:
            assert reply.status_code == 400
            return None
        assert reply.is_success, reply.text
        shown = self.client.get(f"{ROOT}/{id}").json()
        assert shown["length"] == len(shown["tokens"]) and not shown["busy"]
        return reply

    def teardown(self) -> None:
        held = [each["id"] for each in self.client.get(ROOT).json()["sequences"]]
        shown = {id: self.client.get(f"{ROOT}/{id}").json()["tokens"] for id in held}
        for id in held:  # whatever failed: the next history begins with nothing
            self.client.delete(f"{ROOT}/{id}")
        assert shown == self.tokens
        self.client.close()
        self.only_eves()


@pytest.mark.slow
def test_any_history_leaves_the_tokens_that_it_should(shelf: Server, only_eves: Callable[[], object]) -> None:
    class Here(Histories):
        url = shelf.url

    Here.only_eves = staticmethod(only_eves)
    steps = settings(max_examples=15, stateful_step_count=25, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Here, settings=steps)
