"""A run that was traced makes the same tokens again, whatever its tools would say today."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.answering.reasoning_config import AnswerGenerator, ReasoningResolver, restored
from app.answering.served_model import ServedModel
from app.cli.main import cli
from app.runs.trace import BadTrace, ReplayDoubts, Replayed, Trace, doubts, lines, recorded_sampling, replay
from engine import Engine, EngineConfig, Sampling, Span
from tests.app.conftest import DTYPE, PEBBLE, Server, serving
from tests.app.library import error
from tests.app.runs.test_runs import events
from tests.app.runs.test_tool_runs import CALCULATOR, http, log_of, plugin, start, there

pytestmark = pytest.mark.slow

__all__ = ["http", "plugin"]  # fixtures


@pytest.fixture
def as_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands compute with the numerics of these tests' servers."""
    for name, value in (("DEVICE", "cpu"), ("DTYPE", DTYPE), ("THREADS", "1")):
        monkeypatch.setenv(f"PONDER_{name}", value)


def made(http: httpx.Client, body: dict[str, Any]) -> str:
    chat = http.post("/api/chats", json={}).json()["id"]
    return str(http.post(f"/api/chats/{chat}/runs", json=body).json()["run_id"])


def trace_of(http: httpx.Client, run: str) -> str:
    reply = http.get(f"/api/runs/{run}/trace")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("application/x-ndjson"), reply.text
    return reply.text


def again(pebble: Server, text: str) -> Replayed:
    engine: Engine = pebble.engine
    return pebble.on_loop(
        replay(ServedModel(engine, "pebble"), Trace.loads(text.partition("\n")[0]), ReasoningResolver())
    )


@pytest.mark.parametrize("body", [{"temperature": 0}, {"temperature": 1.5}, {}, {"thinking": False, "temperature": 1}])
def test_an_answer_replays_to_the_same_tokens(pebble: Server, http: httpx.Client, body: dict[str, Any]) -> None:
    run = made(http, {"content": "What is the sea?", "max_tokens": 60, **body})
    log = log_of(http, run)
    replayed = again(pebble, trace_of(http, run))
    assert replayed.differs_at is None
    assert replayed.tokens >= log[-1]["usage"]["completion_tokens"] - 1  # the token that ends is not in the sequence


def test_tools_are_replayed_by_what_they_gave_then(pebble: Server, http: httpx.Client, plugin: Any) -> None:
    plugin(CALCULATOR, there)
    run = start(http)
    log = log_of(http, run)
    assert any(event["type"] == "tool.result" for event in log)
    plugin(CALCULATOR.replace("391", "7"), there)
    assert again(pebble, trace_of(http, run)).differs_at is None


def test_a_result_that_is_another_makes_other_tokens(pebble: Server, http: httpx.Client, plugin: Any) -> None:
    plugin(CALCULATOR, there)
    run = start(http)
    log_of(http, run)
    forged = trace_of(http, run).replace('"results": [["391"]]', '"results": [["864"]]')
    replayed = again(pebble, forged)
    assert replayed.differs_at is not None and list(replayed.was) != list(replayed.now)


def test_a_trace_has_the_events_behind_its_recipe(http: httpx.Client) -> None:
    run = made(http, {"content": "Hello", "max_tokens": 5})
    logged = [{"seq": int(number), **data} for number, _, data in events(http, run)]
    assert [json.loads(line) for line in trace_of(http, run).splitlines()[1:]] == logged


def test_a_run_that_asked_no_model_has_its_events_alone(http: httpx.Client) -> None:
    run = made(http, {"content": "zebras?", "collections": "all"})
    logged = log_of(http, run)
    assert [{"type": line["type"]} for line in map(json.loads, trace_of(http, run).splitlines())] == [
        {"type": event["type"]} for event in logged
    ]
    assert next(event["outcome"] for event in logged if event["type"] == "answer.done") == "unknown"
    with pytest.raises(BadTrace, match="asked no model"):
        Trace.loads(trace_of(http, run).splitlines()[0])
    error(http.get("/api/runs/run_x/trace"), 404, "run_not_found")


@pytest.mark.usefixtures("as_the_server")
def test_the_command_says_whether_it_agrees(http: httpx.Client, pebble: Server, tmp_path: Path) -> None:
    run = made(http, {"content": "What is the sea?", "max_tokens": 20, "temperature": 1})
    log_of(http, run)
    text = trace_of(http, run)
    other = Trace.loads(text.partition("\n")[0])
    other.tokens[-3] ^= 1
    file = tmp_path / "run.jsonl"
    for content, code, said in (
        (text, 0, "the same as recorded"),
        (other.dumps(), 1, "differ from number"),
        ('{"type": "trace"}\n', 1, "not a trace"),
    ):
        file.write_text(content, "utf-8")
        ended = CliRunner().invoke(cli, ["replay", str(file), "--model", str(pebble.engine.model_path)])
        assert ended.exit_code == code and said in ended.output, ended.output


def recipe_of(http: httpx.Client) -> dict[str, Any]:
    run = made(http, {"content": "What is the sea?", "max_tokens": 12, "temperature": 1})
    log_of(http, run)
    recipe: dict[str, Any] = json.loads(trace_of(http, run).partition("\n")[0])
    return recipe


def test_a_trace_says_with_what_its_tokens_were_computed(http: httpx.Client, pebble: Server) -> None:
    recipe = recipe_of(http)
    assert recipe["numerics"] == pebble.engine.numerics.recorded()
    assert recipe["fingerprint"] == pebble.engine.fingerprint.hex()
    recipe["numerics"]["threads"] = "two"
    with pytest.raises(BadTrace, match="numerics cannot be read"):
        Trace.loads(json.dumps(recipe))


@pytest.mark.usefixtures("as_the_server")
def test_the_command_refuses_what_it_cannot_make_the_same_and_warns_where_it_may_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In float32 on torch, where what else runs changes a token's bits."""
    monkeypatch.setenv("PONDER_DTYPE", "float32")
    with serving(PEBBLE, tmp_path / "data", dtype="float32") as server, httpx.Client(base_url=server.url) as http:
        recipe = recipe_of(http)
    file, numerics = tmp_path / "run.jsonl", recipe["numerics"]

    def replayed(*options: str, **changed: Any) -> tuple[int, str]:
        file.write_text(json.dumps({**recipe, **changed}), "utf-8")
        ended = CliRunner().invoke(cli, ["replay", str(file), "--model", str(PEBBLE), *options])
        return ended.exit_code, ended.output

    code, said = replayed()
    assert code == 0 and "may differ: the run was made where a token's bits depend on what else runs" in said
    other: dict[str, Any] = {"numerics": {**numerics, "dtype": "bfloat16", "torch": "1.0"}, "fingerprint": "00"}
    told = ("dtype was bfloat16, is float32", "torch was 1.0, is", "the files of the model")
    code, said = replayed(**other)
    assert code == 1 and all(each in said for each in (*told, "--force")) and "same as recorded" not in said, said
    code, said = replayed("--force", **other)
    assert code == 0 and all(each in said for each in (*told, "same as recorded")), said
    code, said = replayed(numerics=None, fingerprint="")
    assert code == 0 and "does not say with which numerics" in said


@pytest.mark.parametrize("options", [{}, {"kernels": "torch", "deterministic": True}], ids=["default", "deterministic"])
async def test_in_bfloat16_runs_that_were_made_beside_others_replay_to_the_same_tokens(options: dict[str, Any]) -> None:
    config = EngineConfig(str(PEBBLE), dtype="bfloat16", kv_blocks=200, device="cpu", threads=1, **options)
    async with await Engine.start(config) as engine:
        if not engine.numerics.batch_invariant:
            pytest.skip("no kernels in C++ here: bfloat16 on torch is the same with deterministic alone")
        served = ServedModel(engine, "pebble")
        prompts = [engine.tokenizer.encode(f"Tell me of {thing}.") for thing in ("rain", "bees", "a long road", "seas")]

        async def run(index: int, prompt: list[int]) -> Trace:
            span = Span(sampling=Sampling(1.0, seed=index), max_tokens=60)
            writer = AnswerGenerator(restored({}, served, ReasoningResolver()), served, {})
            opened, closed = served.opens_thinking(prompt), served.closes_thinking(prompt)
            async with await engine.open(prompt) as seq:
                async for _ in writer(seq, span, served.markers, opened=opened, closed=closed):
                    pass
                return Trace(
                    served.name, recorded_sampling(span.sampling), 60, 60, prompt_tokens=len(prompt),
                    tokens=seq.tokens, fingerprint=engine.fingerprint.hex(), numerics=engine.numerics.recorded(),
                )  # fmt: skip

        traces = await asyncio.gather(*(run(index, prompt) for index, prompt in enumerate(prompts)))
        for trace in traces:
            assert doubts(trace, served) == ReplayDoubts([], [])
            assert (await replay(served, trace, ReasoningResolver())).differs_at is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"type": "trace"}', '{"type": "run"}'])
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(BadTrace):
        Trace.loads(text)


def test_another_format_is_refused() -> None:
    recipe = Trace("m", {}, 1, 1)
    recipe.format = 2
    with pytest.raises(BadTrace, match="format 2"):
        Trace.loads(recipe.dumps())
    assert list(lines(recipe.dumps(), [])) == [recipe.dumps()]
