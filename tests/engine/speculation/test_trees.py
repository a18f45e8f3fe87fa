"""Token trees: the same tokens, log-probabilities and K/V as without drafts, wherever the right path is in a tree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from engine import Engine, EngineConfig, Sampling, Span
from engine.builder import build
from engine.config import LoopName
from engine.core.request import NO_ADAPTER, SequenceState, SpanJob
from engine.core.step import Row
from engine.core.token_tree import child_of, path_to, preorder, reordered, runs
from engine.model.runner import ModelRunner
from engine.outputs import SpeculationStats
from engine.speculation.control import StepTimes
from engine.speculation.proposer import NOTHING, DraftTokens, Proposer
from engine.speculation.speculator import Speculator
from tests.engine.speculation.test_same_tokens import Recorder, Request, Spans, _key, answers, requests
from tests.engine.speculation.test_suffix import sequence

VOCAB = 300


class PlantedTrees(Proposer):
    """Proposes trees of `nodes` random tokens, among them what a span has written in another run, as far as no token of
    it is left out, each with probability `wrong`."""

    name = "planted"

    def __init__(self, spans: Spans, wrong: float, nodes: int = 12, seed: int = 0) -> None:
        self._spans, self._wrong, self._nodes, self._draw = spans, wrong, nodes, random.Random(seed)

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        assert isinstance(seq.job, SpanJob)
        known = self._spans.get(_key(seq), ())[len(seq) - seq.job.prompt_tokens :]
        budget = min(budget, self._nodes)
        right = next((n for n in range(budget) if n == len(known) or self._draw.random() < self._wrong), budget)
        right = min(right, self._draw.randint(budget // 3, budget))
        tokens, parents = list(known[:right]), list(range(-1, right - 1))
        while len(tokens) < budget:
            parent = self._draw.randrange(-1, len(tokens))
            token = self._draw.randrange(VOCAB)
            if all((parent, token) != each for each in zip(parents, tokens, strict=True)):
                tokens.append(token)
                parents.append(parent)
        order, ahead = list[int](), [at for at, parent in enumerate(parents) if parent < 0]
        while ahead:  # any order in which each token comes after its parent
            order.append(ahead.pop(self._draw.randrange(len(ahead))))
            ahead += [at for at, parent in enumerate(parents) if parent == order[-1]]
        return DraftTokens(
            tuple(tokens[at] for at in order),
            tuple(self._draw.choice((0.3, 0.6, 0.9)) for _ in order),
            reordered(parents, order),
        )


async def assert_same_answers(
    config: EngineConfig, asked: Sequence[Request], wrong: float, *, trees: bool = True
) -> tuple[SpeculationStats, Any]:
    """Asserts that all requests get the same with trees as without drafts, and that trees were verified, or their best
    paths."""
    recorder, shapes = Recorder(), set[bool]()
    config = replace(config, speculation="planted", speculation_tokens=12)
    plain, _ = await answers(config, asked, recorder)
    whole = Speculator.verified

    def watched(self: Speculator, row: Row, path: Sequence[int], *, ended: bool) -> None:
        assert trees or not row.parents
        shapes.add(any(at != to for to, at in enumerate(path)))
        whole(self, row, path, ended=ended)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculator, "verified", watched)
        # Which trees are verified is decided by the times of steps, which a loaded machine changes.
        patch.setattr(StepTimes, "ran", lambda self, tokens, seconds: None)
        got, stats = await answers(config, asked, PlantedTrees(recorder.spans, wrong))
    assert got == plain
    if wrong < 1 and trees:
        assert shapes == {False, True}, "some paths lie in place, and others move"
    return stats.speculation, stats


@pytest.mark.slow
@pytest.mark.parametrize("loop", get_args(LoopName))
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
async def test_tokens_are_those_of_a_run_without_drafts(wide_model: Path, loop: LoopName, wrong: float) -> None:
    config = EngineConfig(str(wide_model), loop=loop, deterministic=True, kv_blocks=400, threads=1)
    found, _ = await assert_same_answers(config, requests(40), wrong)
    assert found.drafted > 100
    assert found.accepted > (100 if wrong < 0.5 else -1)


async def test_prompts_are_read_beside_trees(wide_model: Path) -> None:
    config = EngineConfig(str(wide_model), max_batch_tokens=20, deterministic=True, kv_blocks=400, threads=1)
    made = requests(20, seed=13)
    asked = [replace(each, span=replace(each.span, prompt_logprobs=at % 3)) for at, each in enumerate(made)]
    await assert_same_answers(config, asked, 0.2)


async def test_preempted_sequences_are_drafted_for_again(wide_model: Path) -> None:
    config = EngineConfig(
        str(wide_model), block_size=4, kv_blocks=100, deterministic=True, threads=1, prefix_cache=False
    )
    asked = [replace(each, span=replace(each.span, max_tokens=40)) for each in requests(12, seed=3)]
    _, stats = await assert_same_answers(config, asked, 0.2)
    assert stats.preemptions > 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
async def test_torchs_layers_verify_trees(random_model: Path, kv_dtype: Any) -> None:
    config = EngineConfig(str(random_model), dtype="float32", deterministic=True, kv_blocks=400, kv_dtype=kv_dtype)
    await assert_same_answers(config, requests(12, seed=5), 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["random_gemma4", "random_hybrid", "random_latent"])
async def test_every_kind_of_cache_takes_the_accepted_path(model: str, request: pytest.FixtureRequest) -> None:
    """Layers that share their K/V, heads of several sizes, short convolutions, and latents."""
    config = EngineConfig(str(request.getfixturevalue(model)), dtype="float32", deterministic=True, kv_blocks=400)
    await assert_same_answers(config, requests(12, seed=5), 0.2)


@pytest.mark.parametrize("model", ["random_recurrent", "random_beside"])
async def test_of_a_model_with_a_state_the_best_path_is_verified(model: str, request: pytest.FixtureRequest) -> None:
    config = EngineConfig(str(request.getfixturevalue(model)), dtype="float32", deterministic=True, kv_blocks=400)
    found, _ = await assert_same_answers(config, requests(8, seed=5), 0.2, trees=False)
    assert 0 < found.accepted < found.drafted


async def test_the_cache_is_that_of_a_run_without_drafts(wide_model: Path) -> None:
    """Bit by bit, and a later sequence finds it."""
    recorder = Recorder()
    config = EngineConfig(
        str(wide_model), block_size=4, kv_blocks=200, threads=1, speculation="planted", speculation_tokens=12
    )
    stored: list[list[torch.Tensor]] = []
    cached: list[int] = []
    prompt = list(range(3, 22))
    for proposer in (recorder, PlantedTrees(recorder.spans, 0.1)):
        async with await Engine.start(config, partial(build, proposers=(proposer,))) as engine:
            async with await engine.open(prompt) as seq:
                await seq.generate_all(Span(Sampling(seed=1), max_tokens=60, ignore_eos=True))
                state, runner = engine._core._sequences[seq._id], engine._core._steps.runner
                assert isinstance(runner, ModelRunner)
                slots = [state.table[at // 4] * 4 + at % 4 for at in range(state.kv_len)]
                stored.append([part.flatten(2, 3)[:, :, slots].clone() for part in runner._kv.tensors])
                text = list(seq.tokens)
            async with await engine.open([*text, 7]) as seq:
                found = await seq.generate_all(Span(Sampling(seed=2), max_tokens=20, ignore_eos=True, logprobs=0))
                cached.append(found.cached_tokens)
                last = found.token_ids, found.logprobs
            stats = (await engine.stats()).speculation
        stored[-1].append(torch.tensor([*text, *last[0]]))
    assert stats.accepted > 20
    assert cached[0] == cached[1] > len(prompt) + 50
    assert all(torch.equal(one, other) for one, other in zip(*stored, strict=True))


def test_a_tree_falls_into_runs() -> None:
    parents = (-1, -1, 0, 1, 0, 2, 5)  # 0 has 2 and 4, 1 has 3, 2 has 5, which has 6
    order = preorder(parents)
    assert order == [0, 2, 5, 6, 4, 1, 3]
    sorted_parents = reordered(parents, order)
    assert runs(len(order), sorted_parents) == [range(4), range(4, 5), range(5, 7)]
    assert [path_to(sorted_parents, at) for at in (3, 4, 6, -1)] == [[0, 1, 2, 3], [0, 4], [5, 6], []]
    tokens = (9, 8, 7, 6, 5, 4, 3)
    assert [child_of(tokens, sorted_parents, 0, token) for token in (8, 5, 4)] == [1, 4, None]


def test_a_chain_needs_no_parents() -> None:
    assert reordered((-1, 0, 1, 0), [0, 1, 2]) == ()
    assert runs(3, ()) == [range(3)]
    assert path_to((), 2) == [0, 1, 2]
    assert [child_of((5, 6), (), node, 6) for node in (-1, 0, 1)] == [None, 1, None]


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        (DraftTokens((1, 2), (0.5,)), "confidence for each"),
        (DraftTokens((1, 2), (0.5, 0.5), (-1,)), "parent for each"),
        (DraftTokens((1, 2), (0.5, 0.5), (1, -1)), "before the one"),
        (DraftTokens((1, 1), (0.5, 0.5), (-1, -1)), "one token twice"),
    ],
)
def test_a_malformed_tree_is_refused(draft: DraftTokens, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        draft.check()
    DraftTokens((1, 1, 2), (0.5,) * 3, (-1, 0, 0)).check()
    NOTHING.check()


@pytest.mark.slow
async def test_tritons_kernels_verify_trees(random_model: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
    config = EngineConfig(str(random_model), dtype="float16", kernels="triton", deterministic=True, kv_blocks=100)
    asked = [replace(each, span=replace(each.span, max_tokens=12), forks=0) for each in requests(40, seed=5)]
    plain = [each for each in asked if len(each.prompt) < 10][:4]
    await assert_same_answers(replace(config, graphs=False), plain, 0.0)


class Fixed(Proposer):
    """Proposes one draft."""

    name = "fixed"

    def __init__(self, draft: DraftTokens) -> None:
        self._draft = draft

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        return self._draft


def test_of_a_tree_the_likeliest_tokens_are_verified_and_learnt_from() -> None:
    tree = DraftTokens((5, 6, 7, 8, 9), (0.3, 0.9, 0.5, 0.9, 0.05), (-1, -1, 1, 2, 0))  # 6 7 8 is its best path
    seq = sequence([1, 2, 3, 4])
    assert isinstance(seq.job, SpanJob)
    seq.job.speculates, seq.job.produced, seq.cursor = True, 1, 3
    assert Speculator([Fixed(tree)], ("fixed",), 5).drafts([seq]) == {seq.id: ((6, 7, 8), ())}
    speculator = Speculator([Fixed(tree)], ("fixed",), 5, trees=True)
    tokens, parents = speculator.drafts([seq])[seq.id]
    assert tokens == (6, 7, 8, 5, 9)
    assert parents == (-1, 0, 1, -1, 3)
    calibration = speculator._learnt["fixed", NO_ADAPTER].calibration
    before = {each: calibration.probability(each) for each in tree.confidence}
    speculator.verified(Row(seq, 3, 1, 3, draft=tokens, parents=parents), [0, 1], ended=False)
    after = {each: calibration.probability(each) for each in tree.confidence}
    assert after[0.5] > before[0.5] and after[0.3] < before[0.3], "7 was right, 5 was not"
    assert after[0.05] == before[0.05], "nothing is known of what follows 5"
    stats = speculator.stats()
    assert stats.drafted_at == (2, 2, 1, 0, 0)
    assert stats.accepted_at == (1, 1, 0, 0, 0)
