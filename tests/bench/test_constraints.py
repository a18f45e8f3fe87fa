"""The benchmark of constraints on next to nothing: it runs, its JSON adds up, its tables show every goal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.__main__ import app
from bench.constraints import Scale, constraint_pages, constraints, material, on_hardware
from bench.constraints.peers import Contestant
from tests.engine.structured_output import bfcl, sources

pytestmark = pytest.mark.slow

TINY = Scale(
    tool_schemas=6, suite_schemas=6, sets=1, tools=4, walks=2, rows=4, steps=3, repeats=2, batch=4, tokens=8, turns=1,
    streams=2, stream_tokens=8, bomb_turns=1, peer_schemas=2, groups=6,
)  # fmt: skip


needs_material = pytest.mark.skipif(material.missing() is not None, reason=str(material.missing()))


@needs_material
def test_a_tiny_run_yields_figures_that_can_be_true() -> None:
    heard: list[str] = []
    measured = asyncio.run(constraints(sources.pebble(), 6144, sources.PEBBLE, TINY, heard.append))
    results = json.loads(json.dumps(on_hardware(measured, "test")))
    assert len(heard) == 6
    spreads = list(_holding(results, "percentiles"))
    assert len(spreads) >= 14
    for each in spreads:
        assert 0 < each["p50"] <= each["p95"] <= each["p99"] <= each["max"] < 60 and each["n"] > 0
    for each in _holding(results, "median"):
        assert each["min"] <= each["low"] <= each["median"] <= each["high"] <= each["max"]
    ours = results["peers"][0], results["suite"][0]
    assert ours[0]["compiled"] == 2 and ours[0]["not_taken"] == 0
    assert ours[1]["admitted"] > 0 and ours[1]["false_accepts"] == 0
    assert [run["forced"] for run in results["side_by_side"]] == [False, True]
    assert results["bombs"]["bombs"]

    shown = constraint_pages.tables(results)
    for goal in ("≤ 50 ms", "≤ 100 ms", "≤ 100 µs", "≤ 0.5 ms", "≤ 1.03×", "≤ 1.00×", "less than 5%"):
        assert goal in shown


def test_a_library_that_is_not_there_is_said_to_be_missing() -> None:
    row = {"name": "xgrammar", "package": "xgrammar", "version": None}
    for lines in (constraint_pages._peers([row]), constraint_pages._suite([row])):
        assert any("xgrammar | not installed" in line for line in lines)


def test_a_contestant_that_takes_too_long_is_given_up() -> None:
    with Contestant("Ponder", material.bytes_vocabulary(), deadline_s=0) as contestant:
        answer = contestant.ask('{"type":"integer"}', [b"1"])
    assert answer.timed_out and answer.refused == "longer than 0 s"


def test_a_contestant_tells_valid_texts_from_others() -> None:
    with Contestant("Ponder", material.bytes_vocabulary()) as contestant:
        answer = contestant.ask('{"type":"integer"}', [b"1", b"-12", b"1.5", b'"1"', b""])
        refused = contestant.ask('{"type":"integer","unheard-of":1,"contains":{}}', [])
    assert answer.taken == (True, True, False, False, False) and len(answer.mask_s) == 7
    assert refused.refused is not None and "contains" in refused.refused


@needs_material
def test_texts_are_of_known_schemas_and_end_where_they_should() -> None:
    for sample in material.samples(sources.pebble(), 5):
        assert sources.pebble().decode(sample.ids) == sample.text
        assert json.loads(sample.schema)["type"] == "object"


def test_the_command_is_one_of_the_benchmarks() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "constraints" in shown and "--quick" in shown


def test_without_material_the_command_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bfcl, "SHARED", tmp_path)
    done = CliRunner().invoke(app, ["constraints", "--quick"])
    assert done.exit_code == 1
    assert "PONDER_SHARED" in done.output


def _holding(value: Any, key: str) -> Iterator[dict[str, Any]]:
    """Every object in JSON that has a key. Any: JSON."""
    if isinstance(value, dict):
        if key in value:
            yield value
        for part in value.values():
            yield from _holding(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from _holding(part, key)
