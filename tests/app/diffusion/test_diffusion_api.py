"""`POST /api/diffusion` on a random checkpoint: passes as they are made, refusals, limits, and runs that are left."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from torch import Tensor
from typer.testing import CliRunner

from app.cli.main import cli
from app.db.quotas import Quota
from app.diffusion.routes import DiffusionRequest
from app.diffusion.service import MAX_RUNS, DiffusionService
from engine.diffusion import DiffuseRequest, load_masked_diffusion, shown_text
from engine.diffusion.unmasking import MAX_BLOCK
from engine.model.batch import Batch, KVCache
from tests.app.conftest import Server, serving
from tests.app.keyed import asking_for_keys, beside, client_of, key_of
from tests.app.library import error
from tests.engine.diffusion.conftest import random_model
from training.diffusion.byte_tokenizer import byte_tokenizer
from training.diffusion.pair import export_pair

GAP = "one two th______ur five"
Event = dict[str, Any]  # Any: JSON


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("diffusion") / "gaps"
    export_pair(random_model(), byte_tokenizer(), out, diffuses=True)
    return out


@pytest.fixture(scope="module")
def gaps(model: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("gaps"), diffusion_model=str(checkpoint)) as server:
        yield server


@pytest.fixture
def asked(gaps: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gaps.url, timeout=30) as client:
        yield client


def passes(client: httpx.Client, **body: Any) -> list[Event]:
    reply = client.post("/api/diffusion", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *lines, done = [line for line in reply.text.split("\n") if line and not line.startswith(":")]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def drawn(events: list[Event]) -> list[str | None]:
    """The places after the last pass, as a page draws them; each was masked, and was filled once."""
    places: list[str | None] = list(events[0]["places"])
    for event in events[1:-1]:
        for position, token, confidence in zip(event["positions"], event["tokens"], event["confidences"], strict=True):
            assert places[position] is None and 0 <= confidence <= 1
            places[position] = token
    return places


def test_a_gap_is_filled_pass_by_pass_as_the_engine_fills_it(asked: httpx.Client, checkpoint: Path) -> None:
    events = passes(asked, text=GAP, tokens_per_step=2)
    assert [event["type"] for event in events] == ["start", "pass", "pass", "pass", "end"]
    assert events[0]["places"] == [None if each == "_" else each for each in GAP]
    model = load_masked_diffusion(str(checkpoint), device="cpu")
    run = DiffuseRequest(GAP, tokens_per_step=2).start(model)
    for event, step in zip(events[1:-1], run, strict=True):
        assert event["positions"] == list(step.positions) and event["text"] == shown_text(model, run)
    end = events[-1]
    assert (end["finish_reason"], end["passes"], end["length"]) == ("stop", 3, len(GAP))
    assert end["usage"]["completion_tokens"] == 6 and end["usage"]["prompt_tokens"] == len(GAP) - 6
    assert None not in drawn(events)


def test_a_prompt_is_answered_up_to_its_length(asked: httpx.Client) -> None:
    events = passes(asked, text="27+5 =", length=8, block_size=4)
    assert events[0]["places"] == [*"27+5 =", *[None] * 8]
    assert events[-1]["finish_reason"] == "length" and events[-1]["length"] == 14
    order = [position for event in events[1:-1] for position in event["positions"]]
    assert sorted(order[:4]) == [6, 7, 8, 9] and sorted(order[4:]) == [10, 11, 12, 13]  # block after block


def test_each_option_changes_what_is_done(asked: httpx.Client) -> None:
    def of(**options: Any) -> list[tuple[list[int], list[str]]]:
        return [(event["positions"], event["tokens"]) for event in passes(asked, text=GAP, **options)[1:-1]]

    assert len(of()) == 6 and len(of(tokens_per_step=6)) == 1 and len(of(threshold=0)) == 1
    assert [at for positions, _ in of(block_size=1) for at in positions] == [10 + at for at in range(6)]
    warm = of(temperature=1.0, seed=7)
    assert warm == of(temperature=1.0, seed=7) and warm != of(temperature=1.0, seed=8) and warm != of()


def test_characters_of_several_bytes_stand_at_their_last_place(asked: httpx.Client) -> None:
    events = passes(asked, text="é_€")
    assert events[0]["places"] == ["", "é", None, "", "", "€"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "text", "text is missing; accepted: a text of 1 to"),
        ({"text": ""}, "text", "accepted: a text of 1 to"),
        ({"text": "a_", "length": 4}, "length", "length is for a text without '_'"),
        ({"text": "a", "length": 0}, "length", "accepted: an integer of 1 or more"),
        ({"text": "a_", "block_size": MAX_BLOCK + 1}, "block_size", f"accepted: 1 to {MAX_BLOCK}"),
        ({"text": "a_", "tokens_per_step": MAX_BLOCK + 1}, "tokens_per_step", f"accepted: 1 to {MAX_BLOCK}"),
        ({"text": "a_", "threshold": 1.5}, "threshold", "accepted: a number from 0 to 1"),
        ({"text": "a_", "threshold": 0.5, "tokens_per_step": 2}, "threshold", "exclude each other"),
        ({"text": "a_", "temperature": 3}, "temperature", "accepted: a number from 0 (greedy) to 2"),
        ({"text": "a_", "seed": "x"}, "seed", "accepted: a 64-bit signed integer"),
        ({"text": "9" * 60}, "text", "this model accepts at most 64"),
        ({"text": "a_", "model": "x"}, "model", "model"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_field(
    asked: httpx.Client, body: dict[str, Any], param: str, words: str
) -> None:
    reply = asked.post("/api/diffusion", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]


def test_descriptions_name_the_engines_limits() -> None:
    for name in ("block_size", "tokens_per_step"):
        assert f"from 1 to {MAX_BLOCK}:" in str(DiffusionRequest.model_fields[name].description)


def test_the_page_is_told_of_the_model(asked: httpx.Client, http: httpx.Client) -> None:
    assert asked.get("/api/server").json()["diffusion"] == {
        "model": "gaps", "mask": "_", "ends": ["<|endoftext|>"], "block_sizes": [4, 8, 16], "answer_tokens": 16,
        "max_tokens": 64,
    }  # fmt: skip
    assert http.get("/api/server").json()["diffusion"] is None


def test_a_server_without_a_model_says_how_to_have_one(http: httpx.Client) -> None:
    reply = http.post("/api/diffusion", json={"text": "a_"})
    assert "--diffusion-model DIR" in error(reply, 404, "diffusion_off")


class HeldPasses:
    """Holds the model's passes until they are let go, and counts those that were begun."""

    def __init__(self, server: Server) -> None:
        self.service: DiffusionService = server.app.state.ponder.diffusion
        self.begun, self._one, self._go = 0, threading.Semaphore(0), threading.Event()
        self._forward = self.service.model.decoder.forward

    def __enter__(self) -> Self:
        def forward(batch: Batch, kv: KVCache) -> Tensor:
            self.begun += 1
            self._one.release()
            assert self._go.wait(30)
            return self._forward(batch, kv)

        self._set(forward)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        self._set(self._forward)

    def _set(self, forward: Callable[..., Tensor]) -> None:
        self.service.model.decoder.forward = forward  # type: ignore[method-assign]  # the model's own, again

    def until_one_runs(self) -> None:
        assert self._one.acquire(timeout=30)

    def let_go(self) -> None:
        self._go.set()


def test_others_are_answered_while_a_pass_runs(gaps: Server, asked: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool, HeldPasses(gaps) as held:
        running = pool.submit(passes, asked, text=GAP)
        held.until_one_runs()
        assert httpx.get(f"{gaps.url}/health", timeout=5).status_code == 200
        held.let_go()
        assert running.result()[-1]["type"] == "end"


def test_more_runs_than_there_are_places_for_are_refused_for_now(gaps: Server, asked: httpx.Client) -> None:
    with ThreadPoolExecutor(MAX_RUNS) as pool, HeldPasses(gaps) as held:
        running = [pool.submit(passes, asked, text=GAP) for _ in range(MAX_RUNS)]
        gaps.until(lambda _: held.service.runs == MAX_RUNS)
        refused = asked.post("/api/diffusion", json={"text": GAP})
        assert f"{MAX_RUNS} texts" in error(refused, 429, "queue_full") and int(refused.headers["retry-after"]) >= 1
        held.let_go()
        assert all(each.result()[-1]["type"] == "end" for each in running)
    assert passes(asked, text=GAP)[-1]["type"] == "end"


def test_a_client_that_leaves_ends_its_run(gaps: Server) -> None:
    with HeldPasses(gaps) as held:
        with httpx.stream("POST", f"{gaps.url}/api/diffusion", json={"text": GAP}, timeout=30) as reply:
            lines = reply.iter_lines()  # kept: without it the response is closed
            assert '"type":"start"' in next(lines)
            held.until_one_runs()
        gaps.until(lambda _: held.service.runs == 0)
        held.let_go()
        gaps.on_loop(held.service.compute(lambda: None))  # behind all that was asked of the thread
        assert held.begun == 1


def test_answers_keep_to_the_servers_longest(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    changed: dict[str, Any] = {"diffusion_model": str(checkpoint), "max_output_tokens": 4}
    with serving(model, tmp_path, **changed) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert passes(client, text="27+5 =")[0]["places"] == [*"27+5 =", *[None] * 4]
        refused = client.post("/api/diffusion", json={"text": GAP})
        assert "text has 6 masks; accepted: at most 4" in error(refused, 400, "invalid_value", "text")
        refused = client.post("/api/diffusion", json={"text": "a", "length": 5})
        assert "accepted: at most 4" in error(refused, 400, "invalid_value", "length")


def test_a_run_ends_at_the_servers_deadline_as_it_is(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    changed: dict[str, Any] = {"diffusion_model": str(checkpoint), "deadline_s": 1.0}
    with (
        serving(model, tmp_path, **changed) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
        HeldPasses(server) as held,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(passes, client, text=GAP)
        held.until_one_runs()
        threading.Event().wait(1.1)  # the deadline itself
        held.let_go()
        events = running.result()
    assert [event["type"] for event in events] == ["start", "pass", "end"]
    assert events[-1]["finish_reason"] == "deadline" and events[-1]["passes"] == 1


def test_tokens_count_towards_a_keys_limits(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    with asking_for_keys(model, tmp_path, diffusion_model=str(checkpoint)) as server:
        key_of(server, "ana")
        quota, text = Quota(tokens_per_minute=70), "a" * 20 + "_" * 40  # fits twice, but for what was written
        with client_of(server, beside(server, lambda a: a.create_key("ana", "", None, ["chat"], quota)[1])) as ana:
            assert passes(ana, text=text, tokens_per_step=40)[-1]["type"] == "end"
            error(ana.post("/api/diffusion", json={"text": text}), 429, "rate_limit_exceeded")
        assert httpx.post(f"{server.url}/api/diffusion", json={"text": GAP}).status_code == 401


def test_a_model_that_decodes_in_order_is_refused_before_any_other_is_loaded(model: Path, tmp_path: Path) -> None:
    command = ["serve", "--port", "0", "--model", "/no/such", "--data-dir", str(tmp_path)]
    shown = CliRunner().invoke(cli, [*command, "--diffusion-model", str(model)])
    assert shown.exit_code == 1
    assert "diffusion_model cannot be loaded: " in shown.stderr and "no masked-diffusion model" in shown.stderr
