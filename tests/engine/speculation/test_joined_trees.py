"""Trees of several proposers in one: shared prefixes once, agreement believed, the likeliest tokens verified."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig
from engine.core.request import NO_ADAPTER, SpanJob
from engine.core.step import Row
from engine.core.token_tree import path_to
from engine.speculation.joined_trees import RatedTree, joined
from engine.speculation.proposer import DraftTokens, Proposer
from engine.speculation.speculator import Speculator
from tests.engine.speculation.test_same_tokens import Recorder, answers, many, requests
from tests.engine.speculation.test_suffix import sequence
from tests.engine.speculation.test_trees import Fixed, PlantedTrees


def rated(name: str, tokens: list[int], probability: list[float], parents: tuple[int, ...] = ()) -> RatedTree:
    return RatedTree.of(name, DraftTokens(tuple(tokens), tuple(probability), parents), lambda each: each)


def paths(tree: RatedTree) -> dict[tuple[int, ...], int]:
    """Returns each token by the tokens up to it."""
    return {tuple(tree.tokens[at] for at in path_to(tree.parents, node)): node for node in range(len(tree.tokens))}


@st.composite
def trees(draw: st.DrawFn) -> RatedTree:
    tokens, parents = list[int](), list[int]()
    for at in range(draw(st.integers(1, 6))):
        parent, token = draw(st.integers(-1, at - 1)), draw(st.integers(0, 3))
        if (parent, token) not in zip(parents, tokens, strict=True) and parent < len(tokens):
            tokens.append(token)
            parents.append(parent)
    probability = draw(st.lists(st.floats(0, 1), min_size=len(tokens), max_size=len(tokens)))
    chain = parents == list(range(-1, len(parents) - 1))
    return rated(draw(st.sampled_from("abc")), tokens, probability, () if chain else tuple(parents))


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 8), st.floats(0, 1))
def test_a_joined_tree_has_each_path_once_and_its_likeliest_tokens_come_first(
    of: list[RatedTree], count: int, trust: float
) -> None:
    whole = joined(of)
    DraftTokens(whole.tokens, whole.probability, whole.parents).check()
    found = paths(whole)
    assert len(found) == len(whole.tokens) and found.keys() == {path for tree in of for path in paths(tree)}
    for path, node in found.items():
        assert sorted(whole.sources[node]) == sorted(
            s for t in of if path in paths(t) for s in t.sources[paths(t)[path]]
        )
    if len(of) > 1:
        for parent in {-1, *whole.parents} if whole.parents else ():
            beside = [p for p, above in zip(whole.probability, whole.parents, strict=True) if above == parent]
            assert sum(beside) <= 1.0 + 0.02 * len(beside)
    chosen, alive = whole.likeliest(count, trust, chain=False)
    DraftTokens(chosen.tokens, chosen.probability, chosen.parents).check()
    assert paths(chosen).keys() <= found.keys() and len(alive) == len(chosen.tokens) == min(count, len(whole.tokens))
    assert all(before >= after for before, after in pairwise(alive))
    left = sorted(whole.survival(trust), reverse=True)
    assert sorted(alive, reverse=True) == pytest.approx(left[: len(alive)])
    best, of_best = whole.likeliest(count, trust, chain=True)
    assert not best.parents and len(of_best) == len(best.tokens) <= count


def test_proposers_that_agree_are_believed_more_and_others_share_what_is_left() -> None:
    one, other = rated("a", [5, 6, 7], [0.6, 0.5, 0.5]), rated("b", [5, 6, 9], [0.5, 0.5, 0.9])
    third = rated("c", [8, 6], [0.7, 0.5], (-1, 0))
    tree = joined([one, other, third])
    found, probability = paths(tree), dict[tuple[int, ...], float]()
    for path, node in found.items():
        probability[path] = tree.probability[node]
    assert probability == pytest.approx(
        {(5,): 0.8, (5, 6): 0.75, (5, 6, 9): 0.9, (5, 6, 7): 0.1, (8,): 0.2, (8, 6): 0.5}
    )
    assert tree.sources[found[5,]] == (("a", 0.6), ("b", 0.5))
    chosen, _ = tree.likeliest(4, 1.0, chain=False)
    assert chosen.tokens == (5, 6, 9, 8) and chosen.parents == (-1, 0, 1, -1)
    assert tree.likeliest(4, 1.0, chain=True)[0].tokens == (5, 6, 9)
    assert joined([one]) is one


class Named(Fixed):
    """Proposes one draft under a name of its own."""

    def __init__(self, name: str, draft: DraftTokens, *, model: bool = False) -> None:
        super().__init__(draft)
        self.name, self.model, self.asked = name, model, 0

    def propose(self, seq, budget):  # type: ignore[no-untyped-def]  # as Fixed
        self.asked += 1
        return super().propose(seq, budget)


def drafted(speculator: Speculator) -> Row:
    seq = sequence([1, 2, 3, 4])
    assert isinstance(seq.job, SpanJob)
    seq.job.speculates, seq.job.produced, seq.cursor = True, 1, 3
    tokens, parents = speculator.drafts([seq])[seq.id]
    return Row(seq, 3, 1, 3, draft=tokens, parents=parents)


def test_what_was_right_is_learnt_of_each_that_proposed_it() -> None:
    drafts = DraftTokens((5, 6), (0.9, 0.6)), DraftTokens((5, 7), (0.8, 0.4))
    speculator = Speculator([Named("one", drafts[0]), Named("other", drafts[1])], ("one", "other"), 3, trees=True)
    row = drafted(speculator)
    assert row.draft == (5, 6, 7) and row.parents == (-1, 0, 0)
    one, other = (speculator._learnt[name, NO_ADAPTER].calibration for name in ("one", "other"))
    before = [one.probability(0.9), one.probability(0.6), other.probability(0.8), other.probability(0.4)]
    for _ in range(9):
        speculator.verified(row, [0, 2], ended=False)
    after = [one.probability(0.9), one.probability(0.6), other.probability(0.8), other.probability(0.4)]
    assert after[0] > before[0] and after[2] > before[2], "both proposed the first token"
    assert after[1] < before[1] and after[3] > before[3], "the second was that of the other"
    assert speculator.stats().accepted_at == (9, 9, 0)


@pytest.mark.parametrize(("sure", "asked"), [(0.95, 0), (0.3, 1)])
def test_a_model_is_asked_where_what_costs_nothing_is_not_likely(sure: float, asked: int) -> None:
    first, model = Named("first", DraftTokens((5,), (sure,))), Named("model", DraftTokens((6,), (0.9,)), model=True)
    last = Named("last", DraftTokens((7,), (0.2,)))
    speculator = Speculator([first, model, last], ("first", "model", "last"), 3, trees=True)
    speculator.times.ran(1, 1.0)
    speculator.times.ran(8, 1.0)
    row = drafted(speculator)
    assert (model.asked, last.asked) == (asked, 1)
    assert set(row.draft) == ({5, 6, 7} if asked else {5, 7})


class Renamed(PlantedTrees):
    name = "beside"


async def test_joined_trees_change_nothing(wide_model: Path) -> None:
    recorder = Recorder()
    config = EngineConfig(
        str(wide_model), deterministic=True, kv_blocks=400, threads=1, speculation="auto", speculation_tokens=12
    )
    asked = requests(many(25), seed=17)
    plain, _ = await answers(replace(config, speculation="planted"), asked, recorder)
    both: tuple[Proposer, ...] = PlantedTrees(recorder.spans, 0.3), Renamed(recorder.spans, 0.3, seed=1)
    got, stats = await answers(config, asked, *both)
    assert got == plain
    assert stats.speculation.accepted > 100
