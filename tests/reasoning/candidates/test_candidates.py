"""Best of n, self-consistency and beams on the scripted model: who wins, when they stop, and what stays behind."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine import Engine, EngineConfig, InvalidParameter, Sampling, Span, TokenLogprob
from engine.beam_search import beam_search
from engine.model.value_head import ValueHead
from reasoning.beam import BeamOptions, beam
from reasoning.best_of_n import BestOfNOptions, best_of_n
from reasoning.candidate import Candidate, CandidateChosen, CandidateDone, Candidates
from reasoning.self_consistency import SelfConsistencyOptions, leader, self_consistency, vote_of
from reasoning.strategy import Context, Event, Spent, StrategyQuota
from reasoning.thinking import Markers, Piece
from reasoning.verify import Confidence, Judge, ValueVerifier, read_labels

SEED = Sampling(temperature=1.0, seed=4)


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(EngineConfig(str(model), dtype="float32", kv_blocks=1024)) as engine:
        yield engine


def context(engine: Engine, *, opened: bool = True, **fields: Any) -> Context:
    markers = Markers.of(engine.tokenizer)
    return Context(engine.tokenizer, Span(SEED, fields.pop("max_tokens", 200)), markers, opened=opened, **fields)


async def run(engine: Engine, strategy: Any, ctx: Context, options: Any) -> tuple[list[Event], list[Piece], list[int]]:
    """Events, pieces, and what the strategy left in the sequence."""
    prompt = engine.tokenizer.encode("<think>" if ctx.opened else "Say:\n", special=True)
    async with await engine.open(prompt) as seq:
        items = [item async for item in strategy.run(seq, ctx, options)]
        left = seq.tokens[len(prompt) :]
        assert (await engine.stats()).sequences == 1, "a fork is still there"
    events = [item for item in items if isinstance(item, Event)]
    pieces = [item for item in items if isinstance(item, Piece)]
    assert [piece.finish_reason is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (await engine.stats()).blocks_used == 0
    return events, pieces, left


def text(pieces: list[Piece], part: str = "answer") -> str:
    return "".join(piece.text for piece in pieces if piece.part == part)


async def test_the_best_of_n_is_the_one_that_is_scored_highest(engine: Engine) -> None:
    def vowels(answer: str) -> float:
        return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))

    ctx = context(engine, checker=vowels)
    events, pieces, left = await run(engine, best_of_n, ctx, BestOfNOptions(n=12, verifier="checker"))
    done = [event for event in events if isinstance(event, CandidateDone)]
    assert sorted(event.index for event in done) == list(range(12)) and len({event.text for event in done}) > 6
    (chosen,) = [event for event in events if isinstance(event, CandidateChosen)]
    assert chosen.score == max(event.score or 0.0 for event in done) == vowels(text(pieces))
    assert text(pieces) == next(event.text for event in done if event.index == chosen.index)
    assert text(pieces, "thinking").isupper() and text(pieces).islower()
    assert sum(piece.spent for piece in pieces) == len(left)
    (spent,) = [event for event in events if isinstance(event, Spent)]
    assert spent.written == sum(event.tokens for event in done) - len(left)


async def test_the_value_head_chooses(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "valued"
    shutil.copytree(model, path)
    size = json.loads((path / "config.json").read_text())["hidden_size"]
    ValueHead(torch.randn(size, generator=torch.Generator().manual_seed(1)), torch.tensor(0.0)).save(path)
    async with await Engine.start(EngineConfig(str(path), dtype="float32", kv_blocks=1024)) as engine:
        ctx = context(engine, value_head=engine.value_head)
        events, pieces, left = await run(engine, best_of_n, ctx, BestOfNOptions(n=8, verifier="value"))
        done = [event for event in events if isinstance(event, CandidateDone)]
        (chosen,) = [event for event in events if isinstance(event, CandidateChosen)]
        assert len({event.score for event in done}) > 2
        assert chosen.score == max(event.score or 0.0 for event in done)
        assert text(pieces) == next(event.text for event in done if event.index == chosen.index)
        prompt = engine.tokenizer.encode("<think>", special=True)
        async with await engine.open([*prompt, *left]) as seq:
            assert await seq.value() == pytest.approx(chosen.score, abs=1e-5)
        async with await engine.open(prompt, deadline_s=0.01) as late:
            await asyncio.sleep(0.05)
            assert await ValueVerifier().score(Candidate(0, (), ()), late) == 0.0
        options = SelfConsistencyOptions(n=3, compare="text", weight="value")
        events, _, _ = await run(engine, self_consistency, ctx, options)
        assert any(isinstance(event, CandidateChosen) for event in events)


async def test_without_a_value_head_it_is_refused_before_anything_is_written(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="no value head"):
        await run(engine, best_of_n, context(engine), BestOfNOptions(n=2, verifier="value"))
    assert (await engine.stats()).generated_tokens == 0


async def test_an_answer_that_is_good_enough_ends_the_others(engine: Engine) -> None:
    ctx = context(engine, checker=lambda answer: 1.0, max_tokens=2000)
    events, _, _ = await run(engine, best_of_n, ctx, BestOfNOptions(n=12, verifier="checker", enough=1.0))
    (chosen,) = [event for event in events if isinstance(event, CandidateChosen)]
    assert chosen.of < 12 and chosen.cancelled == 12 - chosen.of


async def test_confidence_is_the_mean_probability_of_what_was_written(engine: Engine) -> None:
    events, pieces, left = await run(engine, best_of_n, context(engine), BestOfNOptions(n=4, verifier="confidence"))
    assert not any(piece.logprobs for piece in pieces)
    scores = [event.score for event in events if isinstance(event, CandidateDone)]
    assert all(score is not None and 0 < score < 1 for score in scores) and len(set(scores)) == 4
    prompt = engine.tokenizer.encode("<think>", special=True)
    async with await engine.open([*prompt, *left]) as seq:
        read = await seq.generate_all(Span(max_tokens=1, prompt_logprobs=0))
    closing = engine.tokenizer.token_id("</think>")
    assert read.prompt_logprobs is not None
    logprobs = [each.logprob for each in read.prompt_logprobs[1:] if each is not None and each.token_id != closing]
    assert max(score or 0 for score in scores) == pytest.approx(math.exp(sum(logprobs) / len(logprobs)), abs=1e-4)


def test_entropy_is_that_of_the_distribution() -> None:
    even = TokenLogprob(0, math.log(0.25), tuple((i, math.log(0.25)) for i in range(4)))
    sure = TokenLogprob(0, 0.0, ((0, 0.0),))
    assert Candidate(0, (), (), (even,)).entropy == pytest.approx(math.log(4))
    assert Candidate(0, (), (), (even, sure)).entropy == pytest.approx(math.log(4) / 2)
    assert Candidate(0, (), ()).entropy == Candidate(0, (), ()).confidence == 0.0


async def test_a_judge_reads_two_words_against_each_other(engine: Engine) -> None:
    judge = Judge(engine.tokenizer, good="a", bad="b")
    ctx = context(engine)
    async with await engine.open(engine.tokenizer.encode("<think>", special=True)) as seq:
        candidates = Candidates(seq, ctx, 2)
        async with aclosing(candidates.written()) as written:
            async for candidate in written:
                fork = candidates.forks[candidate.index]
                length = len(fork)
                score = await judge.score(candidate, fork)
                assert 0 < score < 1 and len(fork) == length
        words = [engine.tokenizer.encode(word) for word in ("ab", "ac")]
        alone = await seq.score(words)
        assert await read_labels(seq, words) == pytest.approx([math.exp(sum(each)) for each in alone])
    assert Confidence().measures and not judge.measures


async def test_what_the_deadline_leaves_no_time_to_judge_is_an_answer_still(engine: Engine) -> None:
    ctx = context(engine, max_tokens=1_500)
    ctx = replace(ctx, span=replace(ctx.span, ignore_eos=True))
    async with await engine.open(engine.tokenizer.encode("<think>", special=True), deadline_s=0.3) as seq:
        items = [item async for item in best_of_n.run(seq, ctx, BestOfNOptions(n=3, verifier="judge"))]
        assert isinstance(items[-1], Piece) and items[-1].finish_reason == "deadline"
        assert [item.score for item in items if isinstance(item, CandidateDone)] == [0.0] * 3


async def test_the_majority_wins_and_stops_the_rest(engine: Engine) -> None:
    ctx = context(engine, max_tokens=400)
    events, pieces, _ = await run(engine, self_consistency, ctx, SelfConsistencyOptions(n=16, compare="text"))
    done = [event for event in events if isinstance(event, CandidateDone)]
    votes = [event.vote for event in done if event.vote is not None]
    winner = vote_of(text(pieces), "text")
    assert winner is not None and votes.count(winner) == max(map(votes.count, votes))
    assert len(done) <= 16


async def test_without_any_vote_the_first_answer_is_given(engine: Engine) -> None:
    events, pieces, _ = await run(engine, self_consistency, context(engine), SelfConsistencyOptions(n=3))
    assert all(event.vote is None for event in events if isinstance(event, CandidateDone))
    (chosen,) = [event for event in events if isinstance(event, CandidateChosen)]
    assert chosen.index == 0 and chosen.score is None and text(pieces)


async def test_votes_can_be_weighted(engine: Engine) -> None:
    best = {"weight": 0.0, "vote": ""}

    def weight(answer: str) -> float:
        return 1.0 if answer == best["vote"] else 0.01

    first, _, _ = await run(engine, self_consistency, context(engine), SelfConsistencyOptions(n=8, compare="text"))
    rare = [event.text for event in first if isinstance(event, CandidateDone) and event.vote][-1]
    best["vote"] = rare
    options = SelfConsistencyOptions(n=8, compare="text", weight="checker")
    _, pieces, _ = await run(engine, self_consistency, context(engine, checker=weight), options)
    assert text(pieces) == rare


@given(votes=st.lists(st.sampled_from("abc"), min_size=1, max_size=12), n=st.integers(12, 14))
def test_a_vote_is_decided_only_when_nothing_can_change_it(votes: list[str], n: int) -> None:
    counts: dict[str, float] = {}
    for at, vote in enumerate(votes):
        counts[vote] = counts.get(vote, 0.0) + 1
        winner, decided = leader(counts, n - at - 1)
        if decided and at < n - 1:
            for other in "abcd":
                final = {**counts, other: counts.get(other, 0.0) + (n - at - 1)}
                assert leader(final, 0)[0] == winner
        assert decided or n - at - 1 > 0


@pytest.mark.parametrize(
    ("answer", "compare", "vote"),
    [
        ("It is 1,234.50.", "last_number", "1234.5"), ("12 then -3", "last_number", "-3"), ("no", "last_number", None),
        ("(9 - 7) * 12 = 24", "last_number", "24"), ("a\nThe  End \n", "last_line", "the end"),
        (" A\n b ", "text", "a b"), ("  \n", "text", None), ("100", "last_number", "100"),
    ],
)  # fmt: skip
def test_what_an_answer_votes_for(answer: str, compare: Any, vote: str | None) -> None:
    assert vote_of(answer, compare) == vote


@pytest.mark.parametrize("seconds", [1e-9, 0.002, 0.01])
async def test_a_deadline_gives_the_best_so_far(engine: Engine, seconds: float) -> None:
    ctx = context(engine, max_tokens=1500)
    for strategy, options in (
        (best_of_n, BestOfNOptions(n=6, seconds=seconds)),
        (self_consistency, SelfConsistencyOptions(n=6, seconds=seconds)),
    ):
        events, pieces, left = await run(engine, strategy, ctx, options)
        (chosen,) = [event for event in events if isinstance(event, CandidateChosen)]
        assert chosen.of + chosen.cancelled == 6 and len(left) == sum(piece.spent for piece in pieces)


@pytest.mark.slow
async def test_two_hundred_cancels_leak_no_block(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("<think>", special=True)

    async def whole(strategy: Any, options: Any) -> None:
        async with await engine.open(prompt) as seq:
            async for _ in strategy.run(seq, context(engine), options):
                pass

    ways = [
        (best_of_n, BestOfNOptions(n=5)), (best_of_n, BestOfNOptions(n=5, verifier="judge")),
        (self_consistency, SelfConsistencyOptions(n=5, compare="text")), (beam, BeamOptions(width=3)),
    ]  # fmt: skip
    cancelled = 0
    for at in range(200):
        task = asyncio.ensure_future(whole(*ways[at % 4]))
        for _ in range(at % 23):
            await engine.stats()
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        cancelled += isinstance(result, asyncio.CancelledError)
        assert result is None or isinstance(result, asyncio.CancelledError), result
    stats = await engine.stats()
    assert cancelled > 100 and (stats.blocks_used, stats.sequences) == (0, 0)


async def test_the_beam_is_the_engines_own(engine: Engine) -> None:
    ctx = context(engine, opened=True, max_tokens=12)
    _, pieces, left = await run(engine, beam, ctx, BeamOptions(width=4))
    async with await engine.open(engine.tokenizer.encode("<think>", special=True)) as seq:
        found = await beam_search(seq, width=4, max_tokens=12, eos=engine.tokenizer.eos_token_ids)
    best = found[0]
    assert tuple(left) == (best.token_ids[:-1] if best.ended else best.token_ids)
    assert sum(piece.spent for piece in pieces) == len(left)
    assert text(pieces, "thinking").isupper() or not text(pieces, "thinking")


@pytest.mark.parametrize("name", ["constraint", "stop", "logprobs"])
async def test_a_beam_refuses_what_it_cannot_keep_to(engine: Engine, name: str) -> None:
    from engine.structured_output.layout import Constrained
    from engine.structured_output.spec import Literal

    value: Any = {"constraint": Constrained(Literal("a")), "stop": ("a",), "logprobs": 1}[name]
    ctx = context(engine)
    with pytest.raises(InvalidParameter, match=name):
        await run(engine, beam, replace(ctx, span=replace(ctx.span, **{name: value})), BeamOptions())


async def test_more_candidates_than_the_quota_are_refused(engine: Engine) -> None:
    ctx = context(engine, quota=StrategyQuota(branches=3))
    for strategy, options in (
        (best_of_n, BestOfNOptions(n=4)), (self_consistency, SelfConsistencyOptions(n=4)), (beam, BeamOptions(width=4)),
    ):  # fmt: skip
        with pytest.raises(InvalidParameter, match="at most 3"):
            await run(engine, strategy, ctx, options)


async def test_a_checker_that_is_not_there_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="there is none"):
        await run(engine, best_of_n, context(engine), BestOfNOptions(verifier="checker"))


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (BestOfNOptions, {"n": 0}), (BestOfNOptions, {"n": 65}), (BestOfNOptions, {"enough": 0}),
        (BestOfNOptions, {"temperature": 0}), (BestOfNOptions, {"best": 1}), (SelfConsistencyOptions, {"compare": "x"}),
        (SelfConsistencyOptions, {"seconds": -1}), (BeamOptions, {"width": 0}), (BeamOptions, {"length_penalty": -1}),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(options: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        options(**fields)


async def test_candidates_of_a_greedy_request_still_differ(engine: Engine) -> None:
    ctx = context(engine)
    greedy = replace(ctx, span=replace(ctx.span, sampling=Sampling(temperature=0.0, seed=1)))
    events, _, _ = await run(engine, best_of_n, greedy, BestOfNOptions(n=6))
    assert len({event.text for event in events if isinstance(event, CandidateDone)}) > 1
