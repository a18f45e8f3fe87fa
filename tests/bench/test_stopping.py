"""Replays of votes that stop early: who is given, and what was written until then."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from bench.reasoning.stopping import WINDOW, N, Replay, SampledAnswer, StopRule, paired, replayed, sampled_answer
from engine import Engine, EngineConfig
from reasoning.candidate import CandidateChosen, Candidates
from reasoning.deep_conf import DeepConfOptions, deep_conf
from reasoning.self_consistency import SelfConsistencyOptions, self_consistency
from reasoning.strategy import Spent
from tests.reasoning.candidates.test_candidates import context, run


def answer(vote: str | None, tokens: int, confidence: float = 5.0, low_at: int | None = None) -> SampledAnswer:
    """An answer that is right where it votes for "a"; from the token `low_at` on a group of it is at 1."""
    series = tuple(1.0 if low_at is not None and at >= low_at else confidence for at in range(1, tokens + 1))
    return SampledAnswer(vote == "a", tokens, vote, series)


ANSWERS = [answer("b", 10), answer("a", 20), answer("a", 30), answer("a", 40), answer(None, 50), answer("a", 60)]


@pytest.mark.parametrize(
    ("rule", "right", "tokens"),
    [
        (StopRule(6, 6), True, 10 + 20 + 30 + 40 + 50 + 50),  # a leads by two when one is left
        (StopRule(6, 6, m=1), False, 6 * 10),
        (StopRule(6, 6, m=3), True, 10 + 20 + 4 * 30),
        (StopRule(6, 1, posterior=0.7), False, 10),  # one vote has .75
        (StopRule(6, 1, posterior=0.8), True, 10 + 20 + 30 + 40),  # 3 to 1: .8125
        (StopRule(6, 2, posterior=0.8), True, 10 + 20 + 30 + 40 + 20),  # the fifth is begun at step 40, and cut at 60
        (StopRule(4, 4), True, 10 + 20 + 30 + 40),
    ],
)
def test_a_vote_is_replayed_step_by_step(rule: StopRule, right: bool, tokens: int) -> None:
    assert replayed(ANSWERS, rule)[:2] == (right, tokens)


def test_answers_below_the_warm_ups_confidence_are_stopped() -> None:
    first = [answer("b", 40, 9.0), answer("a", 40, 8.0)]
    later = [answer("a", 90, 5.0, low_at=50), answer("a", 90, 8.5)]
    half = StopRule(4, warm_up=2, keep=0.5, consensus=1.0)  # the threshold is 9: both end with their first group
    assert replayed([*first, *later], half)[:2] == (False, 80 + 2 * WINDOW)
    every = StopRule(4, warm_up=2, keep=1.0, consensus=1.0)  # the threshold is 8
    assert replayed([*first, *later], every)[:2] == (True, 80 + WINDOW + 90)
    late = [answer("a", 90, 9.5, low_at=50), answer("a", 90, 9.5)]
    assert replayed([*first, *late], half)[:2] == (True, 80 + 50 + 90)
    agreed = StopRule(4, warm_up=2, keep=0.5)
    assert replayed([answer("a", 40), answer("a", 60), *later], agreed)[:2] == (True, 100)


async def test_a_replay_is_what_the_strategies_do(model: Path) -> None:
    """Of the same answers: which is given, and how many had ended by then."""
    votes = {"compare": "text", "n": N}
    ways: list[tuple[Any, Any, StopRule]] = [  # Any: a strategy and its options
        (self_consistency, SelfConsistencyOptions(**votes, m=4), StopRule(m=4)),
        (
            self_consistency,
            SelfConsistencyOptions(**votes, posterior=0.8, at_once=4),
            StopRule(posterior=0.8, at_once=4),
        ),
        (deep_conf, DeepConfOptions(**votes, keep=0.5, window=WINDOW), StopRule(warm_up=4, keep=0.5)),
        (deep_conf, DeepConfOptions(**votes, keep=0.9, window=WINDOW), StopRule(warm_up=4, keep=0.9)),
    ]
    async with await Engine.start(EngineConfig(str(model), dtype="float32", kv_blocks=1024)) as engine:
        ctx = context(engine, max_tokens=400)
        async with await engine.open(engine.tokenizer.encode("<think>", special=True)) as seq:
            candidates = Candidates(seq, ctx, N, measured=True)
            async with aclosing(candidates.written()) as written:
                whole = {made.index: made async for made in written}
        for strategy, options, rule in ways:
            events, pieces, _ = await run(engine, strategy, ctx, options)
            (chosen,) = [event for event in events if isinstance(event, CandidateChosen)]
            (spent,) = [event for event in events if isinstance(event, Spent)]
            answers = [sampled_answer(whole[at], at == chosen.index, "text") for at in range(N)]
            replay = replayed(answers, rule)
            assert (replay.right, replay.ended) == (True, chosen.of), rule
            # The others end a few steps after the engine is told so.
            assert replay.tokens <= spent.written + sum(piece.spent for piece in pieces)


def test_differences_are_taken_question_by_question() -> None:
    plain = [Replay(True, 100, 1), Replay(False, 300, 1)] * 20
    made = paired(plain, [Replay(True, 50, 1), Replay(True, 150, 1)] * 20)
    assert made["points"] == 50 and made["tokens_share"] == made["tokens_low"] == made["tokens_high"] == 0.5
    assert 30 < made["points_low"] < 50 < made["points_high"] < 70
