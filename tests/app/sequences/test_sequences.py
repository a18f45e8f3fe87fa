"""Sequences over HTTP: what the engine's handle can do, for as long as somebody holds it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import Settings
from app.server import create_app
from engine import Engine, EngineConfig, Sampling, Span
from retrieval import Library
from tests.app.conftest import Server, all_is_back
from tests.app.gate import GatedEmbedder
from tests.app.runs.test_runs import BusyEngine

ENDLESS = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_stays(shelf: Server, ana: httpx.Client, bob: httpx.Client) -> Iterator[None]:
    """Yields what a test leaves open is closed, and then every block is back."""
    yield
    for client in (ana, bob):
        for left in client.get("/api/sequences").json()["sequences"]:
            client.delete(f"/api/sequences/{left['id']}")
    all_is_back(shelf)


def opened(client: httpx.Client, prompt: str | list[int] = "123", **more: Any) -> str:
    """The address of a new sequence."""
    reply = client.post("/api/sequences", json={"prompt": prompt, **more})
    assert reply.status_code == 201, reply.text
    return f"/api/sequences/{reply.json()['id']}"


def generated(client: httpx.Client, at: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a span, which must end as they should."""
    reply = client.post(f"{at}/generate", json={"temperature": 0, **fields})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert [event["type"] for event in events] == ["piece"] * (len(events) - 1) + ["end"]
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("text", "") for event in events)


def state(client: httpx.Client, at: str) -> Any:
    reply = client.get(at)
    assert reply.status_code == 200, reply.text
    return reply.json()


def forked(client: httpx.Client, at: str, n: int, **more: Any) -> list[str]:
    reply = client.post(f"{at}/fork", json={"n": n, **more})
    assert reply.status_code == 201, reply.text
    return [f"/api/sequences/{each['id']}" for each in reply.json()["sequences"]]


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


@contextmanager
def writing(client: httpx.Client, at: str) -> Iterator[Iterator[str]]:
    """A span under way that does not end soon, after its first piece."""
    with client.stream("POST", f"{at}/generate", json=ENDLESS) as reply:
        assert reply.status_code == 200
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        yield lines


# -- what the handle does


def test_a_sequence_is_opened_extended_generated_from_and_cut_back(ana: httpx.Client) -> None:
    at = opened(ana, "123")
    assert ana.post(f"{at}/append", json={"text": "45"}).json()["length"] == 5
    events = generated(ana, at, max_tokens=3)
    assert text_of(events) == "678"
    assert events[-1]["finish_reason"] == "length" and events[-1]["length"] == 8
    assert events[-1]["usage"]["prompt_tokens"] == 5 and events[-1]["usage"]["completion_tokens"] == 3
    assert state(ana, at)["text"] == "12345678"
    assert ana.post(f"{at}/truncate", json={"length": 2}).json()["length"] == 2
    assert text_of(generated(ana, at, max_tokens=2)) == "34"
    assert state(ana, at)["text"] == "1234" and state(ana, at)["busy"] is False
    assert ana.delete(at).status_code == 204 and code(ana.get(at)) == (404, "sequence_not_found")


def test_what_was_computed_before_is_not_computed_again(ana: httpx.Client, shelf: Server) -> None:
    at = opened(ana, "0123456789" * 20)
    generated(ana, at, max_tokens=4)
    before = shelf.stats()
    (fork,) = forked(ana, at, 1)
    generated(ana, fork, max_tokens=4)
    generated(ana, at, max_tokens=4)
    after = shelf.stats()
    assert after.prompt_tokens - before.prompt_tokens <= 1


def test_messages_go_through_the_chat_template(ana: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"open_thinking": True}}
    made = ana.post("/api/sequences", json=asked).json()
    shown = state(ana, f"/api/sequences/{made['id']}")
    assert shown["text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>"


def test_special_tokens_in_a_text_are_text_where_asked(ana: httpx.Client, shelf: Server) -> None:
    think = shelf.engine.tokenizer.token_id("<think>")
    at = opened(ana, "<think>")
    assert state(ana, at)["tokens"] == [think]
    plain = ana.post(f"{at}/append", json={"text": "<think>", "special": False}).json()["tokens"]
    assert think not in plain and len(plain) == 7
    assert state(ana, opened(ana, "<think>", special=False))["tokens"] == plain
    one, other = (
        ana.post(f"{at}/score", json={"candidates": ["<think>"], "special": special}).json()["scores"][0]["tokens"]
        for special in (True, False)
    )
    assert one == [think] and other == plain


def test_a_sequence_may_begin_empty(ana: httpx.Client) -> None:
    at = opened(ana, [])
    reply = ana.post(f"{at}/generate", json={})
    assert code(reply) == (400, "invalid_value") and "empty" in reply.json()["error"]["message"]
    ana.post(f"{at}/append", json={"text": "7"})
    assert text_of(generated(ana, at, max_tokens=1)) == "8"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_program_elsewhere_draws_what_one_in_the_server_draws(ana: httpx.Client, shelf: Server, seed: int) -> None:
    async def here() -> list[str]:
        engine = shelf.engine
        span = Span(Sampling(temperature=1.0, top_k=9, seed=seed), max_tokens=12, ignore_eos=True)
        async with await engine.open(engine.tokenizer.encode("ab")) as seq:
            return [(await fork.generate_all(span)).text for fork in seq.fork(3)]

    at = opened(ana, "ab")
    asked = {"temperature": 1.0, "top_k": 9, "seed": seed, "max_tokens": 12, "ignore_eos": True}
    elsewhere = [text_of(generated(ana, fork, **asked)) for fork in forked(ana, at, 3)]
    assert elsewhere == shelf.on_loop(here()) and len(set(elsewhere)) > 1


def test_scores_are_what_completions_say_of_the_same_text(ana: httpx.Client) -> None:
    at = opened(ana, "ab")
    scores = ana.post(f"{at}/score", json={"candidates": ["cd", "x", [65, 66]]}).json()["scores"]
    assert state(ana, at)["length"] == 2
    for scored, text in zip(scores[:2], ("abcd", "abx"), strict=True):
        asked = {"model": "tiny", "prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}
        (choice,) = ana.post("/v1/completions", json=asked).json()["choices"]
        assert scored["logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"][2:], abs=1e-5)
        assert scored["logprob"] == pytest.approx(sum(scored["logprobs"]))
    assert scores[2]["tokens"] == [65, 66] and len(scores[2]["logprobs"]) == 2


def test_pieces_have_log_probabilities_where_asked(ana: httpx.Client) -> None:
    at = opened(ana, "12")
    (piece, *_, _) = generated(ana, at, max_tokens=2, logprobs=3)
    (entry,) = piece["logprobs"]
    assert [entry["token"]] == piece["tokens"] and entry["text"] == "3" and -0.1 < entry["logprob"] <= 0
    assert len(entry["top"]) == 3 and entry["top"][0]["token"] == entry["token"]
    assert all("logprobs" not in event for event in generated(ana, at, max_tokens=2))


def test_a_span_ends_at_a_stop_token_which_is_kept_where_asked(ana: httpx.Client, shelf: Server) -> None:
    nine = shelf.engine.tokenizer.encode("9")
    for keep, left in ((False, "678"), (True, "6789")):
        at = opened(ana, "6")
        (*_, end) = generated(ana, at, max_tokens=20, stop_token_ids=nine, keep_stop_token=keep)
        assert end["finish_reason"] == "stop" and end["stop_reason"] == nine[0]
        assert state(ana, at)["text"] == left


def test_a_span_may_be_held_to_a_form_and_the_next_one_is_free(ana: httpx.Client) -> None:
    at = opened(ana, "12")
    assert text_of(generated(ana, at, guided_choice=["x9", "x8"], temperature=1, max_tokens=9)) in ("x9", "x8")
    assert state(ana, at)["text"][:3] == "12x" and state(ana, at)["length"] == 4
    assert text_of(generated(ana, at, max_tokens=1)) in ("0", "9")
    reply = ana.post(f"{at}/generate", json={"guided_regex": "(?=a)"})
    assert code(reply) == (400, "constraint_refused") and reply.json()["error"]["param"] == "guided_regex"
    assert text_of(generated(ana, at, max_tokens=1))


def test_metrics_count_spans(ana: httpx.Client) -> None:
    generated(ana, opened(ana), max_tokens=1)
    assert 'ponder_requests_total{endpoint="sequences",outcome="completed"}' in ana.get("/metrics").text


# -- forks and what closes with what


def test_forks_close_with_what_they_were_forked_from(ana: httpx.Client, shelf: Server) -> None:
    root = opened(ana)
    child, other = forked(ana, root, 2)
    (grandchild,) = forked(ana, child, 1)
    ana.delete(child)
    assert [ana.get(at).status_code for at in (root, other, child, grandchild)] == [200, 200, 404, 404]
    ana.delete(root)
    assert ana.get(other).status_code == 404
    assert ana.get("/api/sequences").json()["sequences"] == []
    shelf.until(lambda stats: stats.sequences == 0)


def test_a_fork_may_outlive_its_parent_in_the_scope_of_the_root(ana: httpx.Client) -> None:
    root = opened(ana, "1")
    (child,) = forked(ana, root, 1)
    ana.post(f"{child}/append", json={"text": "23"})
    (grandchild,) = forked(ana, child, 1, scope=root.rpartition("/")[2])
    ana.delete(child)
    assert text_of(generated(ana, grandchild, max_tokens=2)) == "45"
    assert state(ana, grandchild)["scope"] == root.rpartition("/")[2]
    ana.delete(root)
    assert ana.get(grandchild).status_code == 404


def test_a_scope_is_of_the_same_line(ana: httpx.Client, bob: httpx.Client) -> None:
    root, stranger = opened(ana), opened(ana)
    (child,) = forked(ana, root, 1)
    for at, scope in ((root, stranger), (root, child), (root, opened(bob)), (root, "/x")):
        reply = ana.post(f"{at}/fork", json={"scope": scope.rpartition("/")[2]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "scope"


# -- leases


def test_a_sequence_that_nobody_touches_is_closed_with_its_forks(ana: httpx.Client, shelf: Server) -> None:
    at = opened(ana, lease_s=0.2)
    forked(ana, at, 3)
    shelf.until(lambda stats: stats.sequences == 0)
    assert code(ana.get(at)) == (404, "sequence_not_found")
    assert ana.get("/api/sequences").json()["sequences"] == []


def test_every_call_renews_the_lease_of_the_whole_line(ana: httpx.Client) -> None:
    root = opened(ana, lease_s=100)
    (child,) = forked(ana, root, 1)
    assert state(ana, child)["lease_s"] == 100
    calls: list[tuple[str, dict[str, Any]]] = [
        ("append", {"text": "1"}), ("generate", {"max_tokens": 1}), ("fork", {}), ("score", {"candidates": ["a"]}),
        ("truncate", {"length": 1}),
    ]  # fmt: skip

    def ends() -> dict[str, float]:  # the list is no touch
        held = ana.get("/api/sequences").json()["sequences"]
        return {f"/api/sequences/{each['id']}": each["expires_at"] for each in held}

    (untouched,) = forked(ana, root, 1)
    before = ends()
    for name, body in calls:
        assert ana.post(f"{child}/{name}", json=body).is_success
        after = ends()
        assert after[child] > before[child] and after[root] > before[root]
        assert after[untouched] == before[untouched]
        before = after
    state(ana, child)
    assert ends()[child] > before[child] and ends()[root] > before[root]


def test_a_lease_does_not_run_out_while_something_runs(ana: httpx.Client) -> None:
    root = opened(ana, "0", lease_s=0.15)
    made = ana.post(f"{root}/fork", json={"lease_s": 60})
    if made.status_code == 404:
        pytest.skip("the machine was too slow to fork within the lease")
    (child,) = (f"/api/sequences/{each['id']}" for each in made.json()["sequences"])
    reply = ana.post(f"{child}/generate", json={**ENDLESS, "temperature": 0})
    if reply.status_code == 404:
        pytest.skip("the machine was too slow to begin within the lease")
    assert '"length":1501' in reply.text and "error" not in reply.text


def test_the_state_says_when_the_lease_ends(ana: httpx.Client) -> None:
    at = opened(ana, lease_s=100)
    shown = state(ana, at)
    assert 0 <= shown["expires_at"] - shown["created_at"] - 100 < 60
    with writing(ana, at):
        shown = state(ana, at)
        assert shown["expires_at"] is None and shown["busy"] is True


def test_the_servers_end_closes_all(model: Path, tmp_path: Path) -> None:
    async def held_after() -> tuple[int, int]:
        async with await Engine.start(EngineConfig(model=str(model), device="cpu", kv_blocks=64)) as engine:
            library = Library.open(tmp_path / "documents", GatedEmbedder())
            app = create_app(engine, Settings(model=str(model), data_dir=tmp_path), library=library)
            address = "http://127.0.0.1"
            async with app.router.lifespan_context(app):
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=address) as client:
                    made = (await client.post("/api/sequences", json={"prompt": "12"})).json()
                    await client.post(f"/api/sequences/{made['id']}/fork", json={"n": 3})
                    await client.post(f"/api/sequences/{made['id']}/generate", json={"max_tokens": 4})
                during = (await engine.stats()).sequences
            stats = await engine.stats()
            assert stats.blocks_used == 0
            return during, stats.sequences

    assert asyncio.run(held_after()) == (4, 0)


# -- one call at a time, and whose it is


def test_a_second_call_is_refused_while_one_runs(ana: httpx.Client) -> None:
    at = opened(ana, "0")
    with writing(ana, at):
        for name, body in (
            ("append", {"text": "x"}), ("generate", {}), ("fork", {}), ("score", {"candidates": ["a"]}),
            ("truncate", {"length": 0}),
        ):  # fmt: skip
            reply = ana.post(f"{at}/{name}", json=body)
            assert code(reply) == (409, "sequence_busy") and "one at a time" in reply.json()["error"]["message"]
        assert state(ana, at)["busy"] is True


def test_forks_run_side_by_side(ana: httpx.Client) -> None:
    one, other = forked(ana, opened(ana, "0"), 2)
    with writing(ana, one):
        assert text_of(generated(ana, other, max_tokens=3)) == "123"
        assert state(ana, one)["busy"] is True


def test_a_client_that_goes_away_stops_the_span_and_keeps_the_sequence(ana: httpx.Client, shelf: Server) -> None:
    at = opened(ana, "0")
    with writing(ana, at):
        pass
    shelf.until(lambda stats: stats.running == 0 and not state(ana, at)["busy"])
    shown = state(ana, at)
    assert 2 <= shown["length"] < 1501 and shown["text"] == ("0123456789" * 200)[: shown["length"]]
    follows = text_of(generated(ana, at, max_tokens=2))
    assert ("0123456789" * 200).startswith(shown["text"] + follows)


@pytest.mark.parametrize(("call", "body"), [("generate", ENDLESS), ("score", {"candidates": ["12", "3"]})])
def test_a_client_that_goes_away_before_it_is_its_turn_leaves_nothing_behind(
    ana: httpx.Client, shelf: Server, call: str, body: dict[str, Any]
) -> None:
    at = opened(ana, "0")
    with BusyEngine(shelf):
        with pytest.raises(httpx.ReadTimeout):
            ana.post(f"{at}/{call}", json=body, timeout=0.3)
        shelf.until(lambda stats: stats.waiting == 0 and not state(ana, at)["busy"])
    assert state(ana, at)["text"] == "0"
    assert text_of(generated(ana, at, max_tokens=2)) == "12"


def test_a_client_that_goes_away_while_a_form_compiles_leaves_nothing_behind(ana: httpx.Client, shelf: Server) -> None:
    at = opened(ana, "0")
    hard = {"guided_regex": "(a|b|c){1,200}x(d|e){1,300}"}
    with suppress(httpx.TimeoutException):
        ana.post(f"{at}/generate", json=hard, timeout=0.05)
    shelf.until(lambda stats: stats.running == 0 and not state(ana, at)["busy"])
    assert text_of(generated(ana, opened(ana, "0"), max_tokens=2)) == "12"


def test_closing_ends_what_runs(ana: httpx.Client) -> None:
    root = opened(ana, "0")
    (child,) = forked(ana, root, 1)
    with writing(ana, child) as lines:
        assert ana.delete(root).status_code == 204
        *_, error, done = lines
    assert done == "data: [DONE]" and json.loads(error.removeprefix("data: "))["error"]["code"] == "sequence_closed"
    assert ana.get(child).status_code == 404


def test_a_sequence_of_somebody_else_is_not_there(ana: httpx.Client, bob: httpx.Client) -> None:
    at = opened(ana)
    refusals = [bob.get(at), bob.delete(at)]
    for name, body in (
        ("append", {"text": "x"}), ("generate", {}), ("fork", {}), ("score", {"candidates": ["a"]}),
        ("truncate", {"length": 0}),
    ):  # fmt: skip
        refusals.append(bob.post(f"{at}/{name}", json=body))
    nothing = bob.get("/api/sequences/seq-0")
    assert {code(reply) for reply in [*refusals, nothing]} == {(404, "sequence_not_found")}
    assert bob.get("/api/sequences").json()["sequences"] == []
    assert state(ana, at)["text"] == "123"


# -- quotas


def test_a_user_holds_only_so_many_sequences(ana: httpx.Client, bob: httpx.Client) -> None:
    limit = ana.get("/api/sequences").json()["limits"]["sequences"]
    root = opened(ana, "1")
    last = [at for _ in range(2) for at in forked(ana, root, 127)][-1]
    forked(ana, last, 1)
    assert limit == 256 == len(ana.get("/api/sequences").json()["sequences"])
    for reply in (ana.post("/api/sequences", json={"prompt": "1"}), ana.post(f"{root}/fork", json={})):
        error = reply.json()["error"]
        assert code(reply) == (429, "quota_exceeded") and error["type"] == "rate_limit_error"
        assert "256 sequences" in error["message"]
    opened(bob, "1")
    ana.delete(last)
    opened(ana, "1")


def test_a_user_holds_only_so_many_tokens(ana: httpx.Client, bob: httpx.Client) -> None:
    limit = ana.get("/api/sequences").json()["limits"]["tokens"]
    root = opened(ana, [20] * 2031)
    forked(ana, root, 128)
    held = ana.get("/api/sequences").json()["tokens"]
    assert held == 129 * 2031 and 0 < limit - held < 200
    for path, body in (
        ("", {"prompt": [20] * 200}),
        (f"/{root.rpartition('/')[2]}/fork", {}),
        (f"/{opened(ana, '1').rpartition('/')[2]}/append", {"tokens": [20] * 200}),
        (f"/{opened(ana, '1').rpartition('/')[2]}/generate", {"max_tokens": 200}),
        (f"/{opened(ana, '1').rpartition('/')[2]}/score", {"candidates": [[20] * 100, [21] * 100]}),
    ):
        reply = ana.post(f"/api/sequences{path}", json=body)
        assert code(reply) == (429, "quota_exceeded") and f"{limit} tokens" in reply.json()["error"]["message"]
    opened(bob, [20] * 200)
    for each in ana.get("/api/sequences").json()["sequences"][1:4]:
        assert ana.delete(f"/api/sequences/{each['id']}").status_code == 204
    assert text_of(generated(ana, opened(ana, "1"), max_tokens=200))


def test_what_a_running_span_may_still_write_counts(ana: httpx.Client) -> None:
    at = opened(ana, "0")
    with writing(ana, at):
        assert ana.get("/api/sequences").json()["tokens"] == 1501
