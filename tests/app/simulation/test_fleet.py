"""Fleets of simulated replicas: routing, admission, and what `ponder simulate` prints and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.main import cli
from app.config import Settings
from app.routing.policies import POLICIES, PolicyName
from app.simulation.cost_model import LinearCost, SimulatedDevice, device_json
from app.simulation.fleet import FleetConfig, FleetResult, run
from app.simulation.recorded_trace import RecordedRequest
from engine.config import EngineConfig

COST = LinearCost(0.004, 2e-4, 1e-4, 1e-8, 1e-9)
ENGINE = EngineConfig("none", max_batch_tokens=512, max_running=8, max_waiting=20)
FLEET = FleetConfig(ENGINE, 2000, COST, 4, "least_loaded", 4096)


def chats(count: int, turns: int, *, gap_s: float = 0.2) -> list[RecordedRequest]:
    """Conversations side by side: each turn's prompt is the one before and another block of 512 tokens."""
    requests = [
        RecordedRequest(gap_s * (turn * count + chat), 512 * (turn + 1), 20,
                        tuple(1000 * chat + at for at in range(turn + 1)), number=turn * count + chat)
        for turn in range(turns) for chat in range(count)
    ]  # fmt: skip
    return sorted(requests, key=lambda each: each.at)


def alone(count: int, gap_s: float) -> list[RecordedRequest]:
    return [RecordedRequest(at * gap_s, 400, 30, number=at) for at in range(count)]


def of(router: PolicyName) -> FleetResult:
    return run(replace(FLEET, router=router, blocks=8000, engine=replace(ENGINE, max_waiting=999)), chats(30, 6))


def test_prefix_aware_routing_finds_what_others_miss() -> None:
    found = {router: of(router) for router in POLICIES}
    assert all(each.answered == 180 and each.refused == 0 for each in found.values())
    shared = sum(512 * turn for turn in range(6)) / sum(512 * (turn + 1) for turn in range(6))
    assert found["prefix_aware"].hit_rate == pytest.approx(shared, abs=0.03)
    assert found["random"].hit_rate < 0.7 * shared
    mean = {router: sum(each.ttfts) / len(each.ttfts) for router, each in found.items()}
    assert mean["prefix_aware"] < 0.8 * mean["random"]


def test_a_run_is_the_same_again_and_counts_every_token() -> None:
    first, second = of("least_loaded"), of("least_loaded")
    assert first.summary() == second.summary()
    assert first.output_tokens == 180 * 20 and first.prompt_tokens == 30 * 512 * 21
    assert sum(first.gaps.bins.values()) == 180 * 19
    assert max(first.busy) <= 1.0 and first.steps > 0
    assert len(first.line.at) == len(first.line.busy) and max(first.line.busy) > 0.1


def test_a_replica_alone_takes_as_long_as_its_steps() -> None:
    result = run(replace(FLEET, replicas=1), [RecordedRequest(5.0, 400, 3)])
    read = COST.step + COST.prefill_token * 400 + COST.prefill_pair * 400 * 401 / 2
    assert result.ttfts[0] == pytest.approx(read, rel=1e-9)
    write = [COST.step + COST.decode + COST.context_token * (401 + at) for at in range(2)]
    assert result.e2es[0] == pytest.approx(read + sum(write), rel=1e-9)
    assert result.summary()["seconds"] == pytest.approx(5.0 + read + sum(write))


@pytest.mark.slow
def test_admission_refuses_what_would_wait_too_long() -> None:
    crowd = alone(1500, 0.01)
    config = replace(FLEET, replicas=1, engine=replace(ENGINE, max_waiting=5000))
    settings = Settings(max_running=8, max_waiting=5000, max_wait_s=2.0)
    everybody = run(config, crowd)
    some = run(replace(config, settings=settings), crowd)
    assert everybody.refused == 0 and max(everybody.ttfts) > 20
    assert some.refused > 300 and some.answered + some.refused == 1500
    assert max(some.ttfts) < 3 * 2.0


def test_a_full_queue_and_a_long_prompt_are_refused() -> None:
    result = run(replace(FLEET, replicas=1), [*alone(60, 1e-4), RecordedRequest(1.0, 4090, 30)])
    assert result.too_long == 1
    assert result.refused > 0 and result.answered + result.refused == 60
    small = run(replace(FLEET, replicas=1, blocks=10), [RecordedRequest(0.0, 100, 100)])
    assert small.too_long == 1 and small.answered == 0


def test_simulate_prints_a_table_json_and_a_picture(tmp_path: Path) -> None:
    trace, cost, plot = tmp_path / "t.csv", tmp_path / "cost.json", tmp_path / "run.svg"
    lines = [f"2023-11-16 18:15:{at:02}.0,{100 + at},{10 + at}\n" for at in range(40)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    cost.write_text(json.dumps(device_json(SimulatedDevice("", COST, 8192, 512, 4096))))
    options = ["simulate", str(trace), "--replicas", "2", "--cost", str(cost), "--copies", "3", "--price", "3.6"]
    made = CliRunner().invoke(cli, [*options, "--json", "--plot", str(plot)])
    assert made.exit_code == 0, made.output
    figures = json.loads(made.stdout)
    assert figures["requests"] == figures["answered"] == 120
    tokens = figures["prompt_tokens"] + figures["output_tokens"]
    assert figures["cost_per_million_tokens"] == pytest.approx(2 * 0.001 * figures["seconds"] / tokens * 1e6)
    assert "<svg" in plot.read_text()
    shown = CliRunner().invoke(cli, options)
    assert "120: 120 answered, 0 refused, 0 too long" in shown.stdout and "a million tokens" in shown.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["{trace}", "--cost", "h300"], "h300 is no cost of steps"),
        (["{trace}", "--plot", "run.pdf"], "accepted: a file that ends in .png or .svg"),
        (["{trace}", "--block-size", "16", "--kv-tokens", "8"], "fewer tokens than a block"),
        (["{trace}", "--policy", "sloppy"], "policy"),
        (["{bad}"], "line 2: "),
        (["none.csv"], "cannot be read"),
    ],
)
def test_simulate_refuses_with_a_sentence(tmp_path: Path, options: list[str], says: str) -> None:
    trace, bad = tmp_path / "t.csv", tmp_path / "bad.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,10,4\n")
    bad.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnever,10,4\n")
    arguments = [each.format(trace=trace, bad=bad) for each in options]
    made = CliRunner().invoke(cli, ["simulate", *arguments])
    assert made.exit_code != 0 and says in made.stderr and "Traceback" not in made.stderr
