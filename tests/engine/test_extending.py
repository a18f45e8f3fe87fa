"""The engine's parts of docs/extending.md run as they are shown."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import GREEDY, Engine, EngineConfig, Span
from engine.core.policies import PrefillBudget

PAGE = (Path(__file__).resolve().parents[2] / "docs/extending.md").read_text(encoding="utf-8")


def code_under(heading: str) -> dict[str, Any]:
    """Runs the Python code of a section; returns its names."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    names: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], names)  # type: ignore[index]  # there is one
    return names


def test_the_policy_runs_short_prompts_first() -> None:
    policy = code_under("A scheduling policy")["ShortestPrompt"](10.0, PrefillBudget(64))
    waiting = [SimpleNamespace(tokens=[0] * length, cursor=0) for length in (5, 2, 9)]
    turns = list(policy.turns([], waiting, 0.0))
    assert [len(turn.seq.tokens) for turn in turns] == [2, 5, 9]


async def test_the_engine_runs_under_the_policy(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = code_under("A scheduling policy")["ShortestPrompt"]
    made = []

    def policy_of(config: EngineConfig) -> object:
        made.append(kind(config.ageing_s, PrefillBudget(config.step_tokens)))
        return made[-1]

    monkeypatch.setattr("engine.core.scheduler.policy_of", policy_of)
    config = EngineConfig(model=str(model), device="cpu", dtype="float32", kv_blocks=64, threads=1)
    async with await Engine.start(config) as engine:
        sequences = [await engine.open([1] * length) for length in (9, 3, 6)]
        results = await asyncio.gather(*(seq.generate_all(Span(GREEDY, max_tokens=4)) for seq in sequences))
    assert len(made) == 1 and all(len(result.token_ids) == 4 for result in results)


def test_the_family_reads_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    code_under("A model family")
    assert "embedding_multiplier=12.0" in capsys.readouterr().out
