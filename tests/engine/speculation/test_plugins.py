"""Proposers of other packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from engine import GREEDY, Engine, EngineConfig, Span
from engine.core.request import SequenceState
from engine.speculation import proposer
from engine.speculation.proposer import GROUP, DraftTokens, Proposer


class Echo(Proposer):
    """Proposes the newest token again; the third time it raises."""

    name = "echo"

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        self.asked += 1
        if self.asked == 3:
            raise RuntimeError("no echo")
        return DraftTokens((seq.tokens[-1],) * 100, (0.9,) * 100)


class Beyond(Proposer):
    """Proposes tokens that there are not."""

    name = "beyond"

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        return DraftTokens((10**7, -5)[len(seq) % 2 :], (0.9, 0.9)[len(seq) % 2 :])


class Tangled(Proposer):
    """Proposes a token that follows itself."""

    name = "tangled"

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        return DraftTokens((7, 8), (0.9, 0.9), (-1, 1))


def broken() -> Proposer:
    raise ImportError("not installed")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(*, group: str) -> Sequence[EntryPoint]:
        assert group == GROUP
        return [EntryPoint(name, f"{__name__}:{name}", group) for name in ("broken", "Echo", "Beyond", "Tangled")]

    monkeypatch.setattr(proposer, "entry_points", points)


async def test_a_plugin_is_asked_until_it_fails(wide_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(str(wide_model), deterministic=True, threads=1, kv_blocks=100)
    span = Span(GREEDY, max_tokens=20, ignore_eos=True)
    async with await Engine.start(config) as engine, await engine.open([7, 8, 9]) as seq:
        plain = await seq.generate_all(span)
    caplog.clear()
    drafting = EngineConfig(
        str(wide_model), deterministic=True, threads=1, kv_blocks=100, speculation="echo", speculation_tokens=4
    )
    async with await Engine.start(drafting) as engine, await engine.open([7, 8, 9]) as seq:
        assert "the proposer broken cannot be loaded" in caplog.text
        found = await seq.generate_all(span)
        stats = (await engine.stats()).speculation
    assert found.token_ids == plain.token_ids
    assert 2 <= stats.drafted <= 8, "twice at most four tokens, then it had failed"
    assert "the proposer echo failed, and is asked no more" in caplog.text


async def test_tokens_that_there_are_not_are_cut_off(wide_model: Path) -> None:
    config = EngineConfig(str(wide_model), speculation="beyond", threads=1, kv_blocks=100)
    async with await Engine.start(config) as engine, await engine.open([7, 8, 9]) as seq:
        assert len((await seq.generate_all(Span(GREEDY, max_tokens=9, ignore_eos=True))).token_ids) == 9
        assert (await engine.stats()).speculation.drafted == 0


async def test_a_plugin_with_a_malformed_tree_is_asked_no_more(
    wide_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(str(wide_model), speculation="tangled", threads=1, kv_blocks=100)
    async with await Engine.start(config) as engine, await engine.open([7, 8, 9]) as seq:
        assert len((await seq.generate_all(Span(GREEDY, max_tokens=9, ignore_eos=True))).token_ids) == 9
        assert (await engine.stats()).speculation.drafted == 0
    assert "the proposer tangled failed, and is asked no more" in caplog.text
    assert "a token of a draft comes before the one that it follows" in caplog.text
