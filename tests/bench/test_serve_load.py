"""The load generator: what it draws, what it sends to a real server, and what it says of it."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.serve import asks as arrivals
from bench.serve import serve_report
from bench.serve.asks import KINDS, LoadKind, LoadRequest, LoadTurn, azure, mixed, mooncake
from bench.serve.command import serve
from bench.serve.load_client import Load, LoadTarget, TurnOutcome, load
from bench.serve.measured import Objective, in_the_way, percentiles, summary
from tests.app.conftest import Server, new_database, server

pytestmark = pytest.mark.slow

__all__ = ["new_database", "server"]  # fixtures


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("variation", [0.3, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(variation: float) -> None:
    drawn = gaps(arrivals.bursty(20, 2000, variation, Random(1)))
    mean = statistics.mean(drawn)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(drawn) / mean == pytest.approx(variation, rel=0.1)


def test_a_ramp_grows_evenly() -> None:
    times = arrivals.ramp(2, 20, 1000, Random(1))
    first, last = sum(t < 100 for t in times), sum(t >= 900 for t in times)
    assert first == pytest.approx(100 * 2.9, rel=0.2) and last == pytest.approx(100 * 19.1, rel=0.2)


def test_the_same_seed_draws_the_same_conversations() -> None:
    def drawn(seed: int) -> list[LoadRequest]:
        rng = Random(seed)
        shares = [(KINDS["chat"], 0.7), (KINDS["agent"], 0.3)]
        return mixed(arrivals.poisson(5, 60, rng), shares, rng, prefixes=2, prefix_words=30)

    asks = drawn(3)
    assert asks == drawn(3) != drawn(4)
    agents = [ask for ask in asks if ask.kind == "agent"]
    assert 0.15 < len(agents) / len(asks) < 0.45
    assert {len(ask.turns) for ask in agents} == {4} and all(ask.turns[1].after > 0 for ask in agents)
    assert len({ask.turns[0].words.split(" ", 30)[0:30].__str__() for ask in asks}) == 2  # what they share
    assert all(60 <= len(ask.turns[0].words.split()) - 30 <= 300 for ask in asks)


def test_traces_keep_their_times_and_what_they_share(tmp_path: Path) -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"]
    rows += ["2023-11-16 18:15:50.6805900,4000,109", "2023-11-16 18:16:46.6805900,1,1"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    asks = azure(tmp_path / "a.csv", seconds=20, speed=2, scale=0.5, longest=1000, rng=Random(0))
    assert [(ask.at, len(ask.turns[0].words.split()), ask.turns[0].max_tokens) for ask in asks] == [
        (0.0, 187, 22), (2.0, 1000, 54)
    ]  # fmt: skip
    lines = [
        {"timestamp": at, "input_length": 9, "output_length": 5, "hash_ids": ids}
        for at, ids in ((0, [1, 2, 3]), (3000, [1, 2, 4]), (90_000, [7]))
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first, second = mooncake(tmp_path / "m.jsonl", seconds=60, speed=1, block_words=4, scale=1, longest=100)
    one, other = first.turns[0].words.split(), second.turns[0].words.split()
    assert one[:8] == other[:8] and one[8:] != other[8:] and (second.at, len(one)) == (3.0, 12)


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", "WHEN,HOW\n1,2"), ("m.jsonl", '{"timestamp": 0}'), ("m.jsonl", "x")]
)
def test_a_file_that_is_no_trace_is_told(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="trace|columns"):
        if name == "a.csv":
            azure(tmp_path / name, seconds=9, speed=1, scale=1, longest=9, rng=Random(0))
        else:
            mooncake(tmp_path / name, seconds=9, speed=1, block_words=4, scale=1, longest=9)


def asked(server: Server, asks: list[LoadRequest], **more: Any) -> Load:
    return asyncio.run(load(LoadTarget("tiny", f"{server.url}/v1", "tiny"), asks, extra={"ignore_eos": True}, **more))


def test_a_real_server_is_asked_in_time_and_every_token_counted(server: Server) -> None:
    asks = [
        LoadRequest(0.05 * at, (LoadTurn("hello there", 12), LoadTurn("and more", 5, after=0.05)), "talk")
        for at in range(8)
    ]
    made = asked(server, asks)
    assert len(made.outcomes) == 16 and all(outcome.answered for outcome in made.outcomes)
    assert sorted(o.completion_tokens for o in made.outcomes) == [5] * 8 + [12] * 8
    assert all(o.due <= o.sent <= o.pieces[0] <= o.ended and o.prompt_tokens > 0 for o in made.outcomes)
    told = summary(made, Objective(ttft_s=30, itl_s=30, e2e_s=30))
    assert told["good"] == 1.0 and told["completion_tokens"] == 8 * 17 and told["statuses"] == {"200": 16}
    assert told["kinds"]["talk"]["ttft_s"]["n"] == 16 and 0 < told["itl_s"]["p50"] <= told["itl_s"]["p99"]
    assert summary(made, Objective(ttft_s=0.0))["good"] == 0.0
    serve_report.table([told], "talk")


def test_what_fails_counts_as_asked_and_not_as_good(server: Server) -> None:
    target = LoadTarget("tiny", f"{server.url}/v1", "no-such-model")
    made = asyncio.run(load(target, [LoadRequest(0.0, (LoadTurn("hi", 3), LoadTurn("more", 3)))]))
    [outcome] = made.outcomes  # the conversation ends with its first failure
    assert (outcome.status, outcome.answered) == (404, False) and "no-such-model" in outcome.error
    nobody = asyncio.run(
        load(LoadTarget("gone", "http://127.0.0.1:9/v1", "x"), [LoadRequest(0.0, (LoadTurn("hi", 3),))])
    )
    told = summary(nobody, Objective())
    assert told["statuses"] == {"0": 1} and told["good"] == 0.0 and told["ttft_s"] == {"n": 0}


def test_what_takes_too_long_is_given_up(server: Server) -> None:
    made = asked(server, [LoadRequest(0.0, (LoadTurn("hello", 1500),))], patience_s=0.05)
    assert made.outcomes[0].error == "given up" and made.seconds < 5


def test_a_client_that_is_short_of_time_says_so() -> None:
    async def hindered() -> Load:
        asks = [LoadRequest(0.01 * at, (LoadTurn("hi", 2),)) for at in range(20)]
        task = asyncio.create_task(load(LoadTarget("gone", "http://127.0.0.1:9/v1", "x"), asks))
        await asyncio.sleep(0.03)
        time.sleep(0.3)  # as a busy machine does
        return await task

    assert "late" in in_the_way(asyncio.run(hindered()))
    calm = Load(LoadTarget("t", "u", "m"), [], 1.0, [0.001] * 50, 0.1)
    assert in_the_way(calm) == "" and "core" in in_the_way(Load(calm.target, [], 1.0, [0.001], 0.95))


def test_goodput_counts_what_kept_every_bound() -> None:
    def outcome(ttft: float, itl: float) -> TurnOutcome:
        pieces = [1 + ttft, 1 + ttft + 9 * itl]
        return TurnOutcome("chat", 0, 1.0, 1.0, pieces, pieces[-1], 200, completion_tokens=10)

    outcomes = [
        outcome(0.1, 0.01),
        outcome(0.3, 0.01),
        outcome(0.1, 0.05),
        TurnOutcome("chat", 0, 1.0, 1.0, [], 2.0, 429),
    ]
    told = summary(Load(LoadTarget("t", "u", "m"), outcomes, 10.0, [0.0], 0.1), Objective(ttft_s=0.2, itl_s=0.02))
    assert (told["good"], told["goodput_per_s"]) == (0.25, 0.1) and told["refusal_s"]["n"] == 1
    assert percentiles([1.0, 2.0, 3.0])["p50"] == 2.0


def test_the_command_loads_a_server_and_its_peer_and_keeps_what_it_found(server: Server, tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(serve)
    out = tmp_path / "found" / "load.json"
    url = f"{server.url}/v1"
    flags = ["--url", url, "--peer", f"twin={url}", "--rate", "8", "--seconds", "1.5", "--scale", "0.1", "--seed", "2"]
    done = CliRunner().invoke(app, [*flags, "--mix", "chat=0.5,write=0.5", "--slo-ttft", "20", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    ours, twin = found["servers"]
    assert (ours["target"], twin["target"]) == ("server", "twin") and ours["requests"] == twin["requests"] > 3
    assert ours["good"] == 1.0 and out.with_suffix(".png").stat().st_size > 5000
    for bad in (["--mix", "chat=0"], ["--mix", "poem=1"], ["--peer", "nobody"], ["--url", "http://127.0.0.1:9/v1"],
                ["--model", "other"], ["--trace", str(tmp_path / "none.csv")]):  # fmt: skip
        refused = CliRunner().invoke(app, [*flags, *bad])
        assert refused.exit_code == 2, refused.output


def test_kinds_are_named_as_they_are_chosen() -> None:
    assert all(isinstance(kind, LoadKind) and kind.name == name for name, kind in KINDS.items())
