"""`ponder eval reasoning`, as a shell sees it, with the bundled model on a handful of tasks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli.evaluation import grid, ways_of
from app.cli.main import cli
from app.cli.task_file import read_tasks
from reasoning.evaluate.judging import COMPARISONS

PEBBLE = Path(__file__).resolve().parents[3] / "models/pebble"
TASKS = [
    {"question": "What is 17 + 25?", "answer": 42},
    {"question": "What is 48 + 31?", "answer": "79", "compare": "number"},
    {"messages": [{"role": "user", "content": "What is 12 + 9?"}], "answer": ["21"]},
    {"question": "What is 30 + 9?", "answer": "no such thing"},
]
Ponder = Callable[..., Result]


@pytest.fixture
def ponder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ponder:
    monkeypatch.chdir(tmp_path)
    without: dict[str, str | None] = {name: None for name in os.environ if name.startswith("PONDER_")}

    def run(*arguments: str) -> Result:
        env = {**without, "PONDER_MODEL": str(PEBBLE), "PONDER_DEVICE": "cpu", "NO_COLOR": "1", "COLUMNS": "100"}
        return CliRunner().invoke(cli, ["eval", "reasoning", *arguments], env=env)

    return run


def write(path: Path, *tasks: Any) -> str:
    path.write_text("\n".join(task if isinstance(task, str) else json.dumps(task) for task in tasks), encoding="utf-8")
    return path.name


def test_a_table_json_and_a_plot(ponder: Ponder, tmp_path: Path) -> None:
    file = write(tmp_path / "sums.jsonl", *TASKS)
    ways = ("--strategy", "plain", "--strategy", 'best_of_n:{"n": [1, 2]}', "--effort", "none", "--effort", "16")
    shown = ponder(file, *ways, "--json", "rows.json", "--plot", "rows.png")
    assert shown.exit_code == 0, shown.output
    made = json.loads((tmp_path / "rows.json").read_text())
    rows = {row["name"]: row for row in made["rows"]}
    assert list(rows) == ["plain", "best_of_n n=1", "best_of_n n=2", "no thinking", "thinking ≤ 16"]
    assert all(row["n"] == 4 and 0 <= row["low"] <= row["share"] <= row["high"] <= 1 for row in rows.values())
    assert rows["plain"]["right"] == 3  # pebble can add, and nobody can say the fourth
    assert rows["best_of_n n=2"]["tokens"] > 1.5 * rows["best_of_n n=1"]["tokens"]
    assert rows["no thinking"]["thinking"] == 0 < rows["thinking ≤ 16"]["thinking"] <= 16
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert all(name in shown.stdout for name in rows) and "75.0%" in shown.stdout
    assert "1/5 plain: 75.0%" in shown.stderr


def test_fallback_weights_have_columns(ponder: Ponder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "sums.jsonl", *TASKS)
    sweep = 'fallback:{"min_confidence": [0, 1]}'
    monkeypatch.setenv("PONDER_FALLBACK_MODEL", str(PEBBLE))
    ways = ("--model", str(PEBBLE.parent / "pebble-draft"), "--strategy", sweep, "--json", "rows.json")
    shown = ponder(file, *ways)
    assert shown.exit_code == 0, shown.output
    never, always = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (never["deferred"], never["fallback"]) == (0, 0) and always["deferred"] == 4
    assert 0 < always["fallback"] <= always["tokens"] and always["right"] == 3  # as pebble alone
    assert all(column in shown.stdout for column in ("deferred", "by fallback", "GB read", "100%"))
    monkeypatch.setenv("PONDER_FALLBACK_CONFIDENCE", "0.1")
    assert "fallback_confidence 0.3 (now 0.1)" in ponder(file, *ways).stderr


def test_rows_that_are_there_are_not_measured_again(ponder: Ponder, tmp_path: Path) -> None:
    file, kept = write(tmp_path / "sums.jsonl", *TASKS[:2]), tmp_path / "rows.json"
    assert ponder(file, "--strategy", "plain", "--json", "rows.json").exit_code == 0
    made = json.loads(kept.read_text())
    made["rows"][0]["tokens"] = 12345.0
    kept.write_text(json.dumps(made))
    shown = ponder(file, "--strategy", "plain", "--effort", "none", "--json", "rows.json")
    assert shown.exit_code == 0 and "12345" in shown.stdout and "no thinking" in shown.stdout
    assert len(json.loads(kept.read_text())["rows"]) == 2
    other = ponder(file, "-n", "1", "--strategy", "plain", "--json", "rows.json")
    assert other.exit_code == 1 and "rows.json was measured with" in other.stderr and "n 2 (now 1)" in other.stderr
    kept.write_text("{}")
    assert "accepted: another file" in ponder(file, "--strategy", "plain", "--json", "rows.json").stderr
    assert kept.read_text() == "{}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["no JSON", "question"]), ("[]", ["question"]), ({"question": "q"}, ["answer"]),
        ({"answer": "a"}, ["question or messages"]), ({"question": "q", "answer": "a", "hint": 1}, ["hint"]),
        ({"question": "q", "answer": "a", "compare": "vibes"}, ["vibes", "exact"]),
        ({"question": "q", "answer": "(", "compare": "regex"}, ["regular expression"]),
        ({"question": "q", "answer": "c", "choices": ["a", "b"]}, ["choices"]),
        ({"question": "q", "answer": "a", "choices": ["a", "b"], "compare": "exact"}, ["'choice'"]),
        ({"question": "q", "answer": {"numbers": []}}, ["answer"]), ({"question": "q", "answer": None}, ["answer"]),
        ({"question": "q", "answer": 3, "compare": "exact"}, ["some text"]),
        ({"messages": [{"role": "assistant", "content": "a"}], "answer": "a"}, ["assistant", "user"]),
        ({"messages": [{"role": "tool", "content": "a"}], "answer": "a"}, ["messages"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_line_is_told_with_its_number(ponder: Ponder, tmp_path: Path, line: Any, words: list[str]) -> None:
    shown = ponder(write(tmp_path / "bad.jsonl", TASKS[0], "", line))
    assert shown.exit_code == 1 and "bad.jsonl, line 3: " in shown.stderr, shown.output
    assert all(word in shown.stderr for word in words), shown.stderr
    assert "no strategy 'wish'" in ponder("bad.jsonl", "-n", "1", "--strategy", "wish").stderr  # line 3 is not read


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.jsonl"], ["absent.jsonl"]), (["empty.jsonl"], ["no tasks"]),
        (["sums.jsonl", "--strategy", "wish"], ["wish", "best_of_n", "plain"]),
        (["sums.jsonl", "--strategy", "best_of_n:{"], ["no JSON"]),
        (["sums.jsonl", "--strategy", "best_of_n:3"], ["JSON object"]),
        (["sums.jsonl", "--strategy", 'best_of_n:{"n": []}'], ["empty"]),
        (["sums.jsonl", "--strategy", 'best_of_n:{"n": 900}'], ["strategy_options.n", "64"]),
        (["sums.jsonl", "--strategy", 'best_of_n:{"verifier": "checker"}'], ["confidence, judge"]),
        (["sums.jsonl", "--effort", "lots"], ["lots", "none", "xhigh", "tokens"]),
        (["sums.jsonl", "--strategy", "plain", "--plot", "p.bmp"], [".png"]),
        (["sums.jsonl", "--strategy", "plain", "--json", "no/rows.json"], ["folder no"]),
        (["sums.jsonl", "--strategy", "plain", "--model", "./empty"], ["config.json"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_measured_is_told(
    ponder: Ponder, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    write(tmp_path / "sums.jsonl", *TASKS[:1])
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty").mkdir()
    shown = ponder(*arguments)
    assert shown.exit_code == 1 and all(word in shown.stderr for word in words), shown.output


def test_a_plot_without_matplotlib_says_what_to_install(
    ponder: Ponder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "matplotlib" else find(name, *more),
    )
    shown = ponder(write(tmp_path / "sums.jsonl", *TASKS[:1]), "--plot", "p.png")
    assert shown.exit_code == 1 and "pip install matplotlib" in shown.stderr


def test_the_pages_own_tasks_are_tasks(tmp_path: Path) -> None:
    page = (PEBBLE.parents[1] / "docs/strategies.md").read_text(encoding="utf-8")
    (tmp_path / "tasks.jsonl").write_text(page.split("```json\n")[1].split("```")[0], encoding="utf-8")
    sums, letters, game = read_tasks(tmp_path / "tasks.jsonl").tasks
    assert sums.judge("17 + 25 = 42") and letters.judge("a is smaller, so b.") and game.judge("6 * (9 - 4 - 1) = 24")
    assert (sums.checker, letters.checker) == (None, None) and game.checker is not None
    named = set(re.findall(r"^\| `(\w+)` \|.*\|.*\|.*\|$", page, re.MULTILINE))
    assert set(COMPARISONS) <= named


def test_lists_of_options_are_swept_as_one_curve() -> None:
    ways = ways_of('tree:{"beam": [1, 5], "search": "bfs", "depth": [2, 3]}')
    assert [(way.options["beam"], way.options["depth"]) for way in ways] == [(1, 2), (1, 3), (5, 2), (5, 3)]
    assert {way.curve for way in ways} == {"tree search=bfs"} and len({way.name for way in ways}) == 4


def test_the_default_grid_thinks_only_where_the_model_can() -> None:
    assert {"no thinking", "thinking ≤ 64", "budget waits=4", "best_of_n n=8"} <= {way.name for way in grid(True)}
    assert not [way for way in grid(False) if way.strategy == "budget" or not way.thinking]
