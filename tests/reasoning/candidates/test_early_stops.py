"""Votes that end early, and answers that are stopped: by a posterior, by their number, by the model's confidence."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine import Engine, EngineConfig, TokenLogprob
from engine.structured_output import Constrained, Regex
from reasoning.best_of_n import BestOfNOptions, best_of_n
from reasoning.candidate import CandidateChosen, CandidateDone, Candidates
from reasoning.deep_conf import DeepConfOptions, GroupConfidence, deep_conf, lowest_confidence, threshold
from reasoning.self_consistency import SelfConsistencyOptions, majority, self_consistency
from reasoning.strategy import Context, Event, Spent
from tests.reasoning.candidates.test_candidates import context, run


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(EngineConfig(str(model), dtype="float32", kv_blocks=1024)) as engine:
        yield engine


def agreeing(engine: Engine) -> Context:
    """A context in which all answers are the same."""
    ctx = context(engine, opened=False)
    return replace(ctx, span=replace(ctx.span, constraint=Constrained(Regex("abc"))))


def done_of(events: list[Event]) -> list[CandidateDone]:
    return [event for event in events if isinstance(event, CandidateDone)]


def chosen_of(events: list[Event]) -> CandidateChosen:
    (chosen,) = [event for event in events if isinstance(event, CandidateChosen)]
    return chosen


@pytest.mark.parametrize(("first", "second", "expected"), [(0, 0, 0.5), (1, 0, 0.75), (3, 0, 0.9375), (4, 0, 0.96875)])
def test_the_posterior_of_a_majority(first: int, second: int, expected: float) -> None:
    assert majority(first, second) == expected


@given(first=st.integers(0, 12), second=st.integers(0, 12))
def test_the_posterior_is_the_integral_of_the_beta_distribution(first: int, second: int) -> None:
    steps = 20_000
    weight = [((k + 0.5) / steps) ** first * (1 - (k + 0.5) / steps) ** second for k in range(steps)]
    assert majority(first, second) == pytest.approx(sum(weight[steps // 2 :]) / sum(weight), abs=1e-6)


async def test_answers_that_agree_stop_the_vote_at_a_posterior(engine: Engine) -> None:
    alone = {"n": 12, "at_once": 1, "compare": "text"}
    for posterior, votes in ((0.7, 1), (0.8, 2), (0.95, 4), (0.98, 5)):
        options = SelfConsistencyOptions.model_validate({**alone, "posterior": posterior})
        events, _, _ = await run(engine, self_consistency, agreeing(engine), options)
        assert len({event.vote for event in done_of(events)}) == 1
        assert (chosen_of(events).of, chosen_of(events).cancelled) == (votes, 12 - votes)
    everyone = SelfConsistencyOptions.model_validate(alone)
    events, _, _ = await run(engine, self_consistency, agreeing(engine), everyone)
    assert chosen_of(events).of == 7, "a lead that nobody can make up"


async def test_answers_that_differ_do_not(engine: Engine) -> None:
    options = SelfConsistencyOptions(n=6, compare="text", posterior=0.8, at_once=2)
    events, _, _ = await run(engine, self_consistency, context(engine), options)
    votes = [event.vote for event in done_of(events)]
    assert len(set(votes)) == len(votes) == 6


async def test_the_first_m_votes_decide(engine: Engine) -> None:
    every, _, _ = await run(engine, self_consistency, context(engine), SelfConsistencyOptions(n=8, compare="text"))
    options = SelfConsistencyOptions(n=8, compare="text", m=3)
    events, _, left = await run(engine, self_consistency, context(engine), options)
    first = done_of(events)
    assert len(first) == 3 and chosen_of(events).of == 3
    assert all(event in done_of(every) for event in first), "forks begin in one step or in two: their order may differ"
    assert len(left) <= max(event.tokens for event in done_of(events)), "the shortest are the first to end"


async def test_no_more_are_begun_than_at_once(engine: Engine) -> None:
    async with await engine.open(engine.tokenizer.encode("<think>", special=True)) as seq:
        candidates = Candidates(seq, context(engine), 6, at_once=2)
        ended = 0
        async with aclosing(candidates.written()) as written:
            async for _ in written:
                ended += 1
                at_most = min(6, 1 + ended)
                async with asyncio.timeout(30):  # two may end in one step, before the next has a token
                    while not all(len(fork) > len(seq) for fork in candidates.forks[:at_most]):
                        await asyncio.sleep(0.001)
                assert not any(len(fork) > len(seq) for fork in candidates.forks[at_most:])
                candidates.begin(1)
        assert ended == 6


def measured(values: list[float]) -> list[TokenLogprob]:
    return [TokenLogprob(0, -value, ((0, -value / 2), (1, -value * 3 / 2))) for value in values]


@given(values=st.lists(st.floats(0.01, 20), min_size=1, max_size=40), window=st.integers(8, 12), cut=st.integers(1, 9))
def test_a_groups_confidence_is_the_mean_of_a_window(values: list[float], window: int, cut: int) -> None:
    group = GroupConfidence(window)
    for at in range(0, len(values), cut):
        group.add(measured(values[at : at + cut]))
    means = [sum(values[at : at + window]) / window for at in range(len(values) - window + 1)]
    expected = min(means) if means else sum(values) / len(values)
    assert group.lowest == pytest.approx(expected) == lowest_confidence(measured(values), window)
    assert group.below(expected + 0.1) == bool(means) and not group.below(expected - 0.1)


@pytest.mark.parametrize(("keep", "expected"), [(1.0, 1.0), (0.9, 2.0), (0.5, 6.0), (0.1, 10.0), (0.01, 10.0)])
def test_the_threshold_keeps_a_share_of_the_warm_up(keep: float, expected: float) -> None:
    assert threshold([*map(float, range(1, 11))], keep) == expected


async def test_answers_below_the_threshold_are_stopped(engine: Engine) -> None:
    options = DeepConfOptions(n=10, warm_up=3, keep=0.3, window=8, consensus=1.0, compare="text")
    events, pieces, left = await run(engine, deep_conf, context(engine), options)
    done = done_of(events)
    warm_up, later = done[:3], done[3:]
    least = max(event.score or 0.0 for event in warm_up)
    stopped = [event for event in later if event.stopped]
    assert not any(event.stopped for event in warm_up) and len(done) == 10 and len(stopped) > 2
    assert all(event.vote is None and event.score is not None and event.score < least for event in stopped)
    assert all((event.score or 0.0) >= least for event in later if not event.stopped)
    every, _, _ = await run(engine, best_of_n, context(engine), BestOfNOptions(n=10, verifier="confidence"))
    whole = {event.index: event.tokens for event in done_of(every)}
    assert all(event.tokens < whole[event.index] for event in stopped)
    assert all(event.tokens == whole[event.index] for event in done if not event.stopped)
    (spent,) = [event for event in events if isinstance(event, Spent)]
    assert spent.written == sum(event.tokens for event in done) - len(left)
    voters = [event for event in done if event.vote is not None]
    assert chosen_of(events).index == max(voters, key=lambda event: event.score or 0.0).index
    assert pieces[-1].finish_reason == "stop"
    again, _, _ = await run(engine, deep_conf, context(engine), options)
    assert {event.index: event.stopped for event in done_of(again)} == {event.index: event.stopped for event in done}


async def test_a_stopped_answers_fork_is_closed(engine: Engine) -> None:
    async with await engine.open(engine.tokenizer.encode("<think>", special=True)) as seq:
        candidates = Candidates(seq, context(engine), 3, measured=True, stops=lambda: lambda _: True)
        async with aclosing(candidates.written()) as written:
            async for candidate in written:
                assert candidate.stopped and not candidate.whole and candidate.logprobs
                assert candidates.forks[candidate.index].closed
        assert candidates.spent > 0


async def test_a_consensus_of_the_warm_up_begins_no_more(engine: Engine) -> None:
    options = DeepConfOptions(n=10, warm_up=3, window=8, compare="text")
    events, _, _ = await run(engine, deep_conf, agreeing(engine), options)
    assert (chosen_of(events).of, chosen_of(events).cancelled) == (3, 7)
    assert math.isclose(chosen_of(events).score or 0.0, sum(event.score or 0.0 for event in done_of(events)))


async def test_without_any_vote_or_time_the_first_answer_is_given(engine: Engine) -> None:
    events, _, _ = await run(engine, deep_conf, context(engine), DeepConfOptions(n=4, warm_up=2, keep=0.01, window=8))
    assert all(event.vote is None for event in done_of(events))
    assert (chosen_of(events).index, chosen_of(events).score) == (0, None)
    options = DeepConfOptions(n=4, warm_up=2, seconds=1e-9)
    events, pieces, _ = await run(engine, deep_conf, context(engine, max_tokens=1500), options)
    assert chosen_of(events).of == 1 and pieces[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("model", "options", "names"),
    [
        (SelfConsistencyOptions, {"n": 4, "m": 5}, "m of at most n"),
        (SelfConsistencyOptions, {"posterior": 0.9, "weight": "judge"}, "weight 'one'"),
        (SelfConsistencyOptions, {"posterior": 0.5}, "posterior"),
        (DeepConfOptions, {"n": 4, "warm_up": 4}, "warm_up below n"),
        (DeepConfOptions, {"window": 4}, "window"),
    ],
)  # fmt: skip
def test_what_is_refused(model: Any, options: dict[str, Any], names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        model.model_validate(options)
