"""Beam search, as a short program on sequence handles: every beam is a fork, and all beams of a step are one batch.

Scores are sums of the model's own log-probabilities, divided by length ** length_penalty when hypotheses are compared
(Wu et al. 2016, without the constant). Knows nothing of batches or K/V.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.errors import DeadlineExceeded, InvalidParameter
from engine.handle import Sequence
from engine.params import GREEDY, MAX_LOGPROBS, Span


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One result: the tokens after the prompt (an end-of-sequence token included), and its score."""

    token_ids: tuple[int, ...]
    logprob: float  # sum over its tokens, natural logarithm
    score: float  # logprob / len(token_ids) ** length_penalty
    ended: bool  # by an end-of-sequence token, rather than by max_tokens or the deadline


@dataclass(slots=True)
class _Beam:
    seq: Sequence
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0


async def beam_search(
    seq: Sequence, *, width: int, max_tokens: int, eos: tuple[int, ...] = (), length_penalty: float = 1.0
) -> list[Hypothesis]:
    """Returns the `width` best continuations of `seq` found, best first; `seq` itself does not change.

    Ends when `width` hypotheses have ended and no live beam can still beat the worst of them at its present length, or
    after `max_tokens` or at the deadline, when live beams count as hypotheses too.

    Raises:
        DeadlineExceeded: it passed before the first token.
        InvalidParameter: `width` or `max_tokens` is out of range.
        EngineError: of `Sequence.generate` and `Sequence.fork`.
    """
    if not 1 <= width <= MAX_LOGPROBS // 2:
        raise InvalidParameter("width", f"width is {width}; accepted: 1 to {MAX_LOGPROBS // 2}.")
    if max_tokens < 1:
        raise InvalidParameter("max_tokens", f"max_tokens is {max_tokens}; accepted: at least 1.")
    (root,) = seq.fork()
    beams = [_Beam(root.fork()[0])]
    ended: list[Hypothesis] = []
    try:
        for _ in range(max_tokens):
            if not (candidates := await _expand(beams, 2 * width)):
                break
            ended += [
                _hypothesis((*beam.token_ids, token), logprob, length_penalty, ended=True)
                for beam, token, logprob in candidates[:width]
                if token in eos
            ]
            ended = sorted(ended, key=lambda h: -h.score)[:width]
            beams = _advance(beams, [c for c in candidates if c[1] not in eos][:width], root)
            best = _hypothesis(beams[0].token_ids, beams[0].logprob, length_penalty, ended=False)
            if len(ended) == width and ended[-1].score >= best.score:
                return ended
        if not beams[0].token_ids:
            raise DeadlineExceeded("Beam search was not begun before the deadline.")
        live = [_hypothesis(b.token_ids, b.logprob, length_penalty, ended=False) for b in beams]
        return sorted(ended + live, key=lambda h: -h.score)[:width]
    finally:
        root.close()


async def _expand(beams: list[_Beam], k: int) -> list[tuple[_Beam, int, float]]:
    """Returns the `k` likeliest next tokens over all beams, as (beam, token, summed log-probability), best first; none
    at the deadline."""
    look = Span(GREEDY, max_tokens=1, logprobs=k, ignore_eos=True, min_confidence=0.0)
    results = await asyncio.gather(*(beam.seq.generate_all(look) for beam in beams))
    if any(result.finish_reason == "deadline" for result in results):
        return []
    for beam in beams:
        beam.seq.truncate(len(beam.seq) - 1)
    candidates = [
        (beam, token, beam.logprob + logprob)
        for beam, result in zip(beams, results, strict=True)
        for token, logprob in result.logprobs[0].top
    ]
    return sorted(candidates, key=lambda c: -c[2])[:k]


def _advance(beams: list[_Beam], chosen: list[tuple[_Beam, int, float]], root: Sequence) -> list[_Beam]:
    """Makes the next generation: forks a beam with several continuations, closes one with none."""
    kept: list[_Beam] = []
    for beam in beams:
        mine = [(token, logprob) for parent, token, logprob in chosen if parent is beam]
        if not mine:
            beam.seq.close()
            continue
        spare = beam.seq.fork(len(mine) - 1, scope=root) if len(mine) > 1 else []
        for seq, (token, logprob) in zip([beam.seq, *spare], mine, strict=True):
            seq.append([token])
            kept.append(_Beam(seq, (*beam.token_ids, token), logprob))
    return sorted(kept, key=lambda b: -b.logprob)


def _hypothesis(tokens: tuple[int, ...], logprob: float, penalty: float, *, ended: bool) -> Hypothesis:
    return Hypothesis(tokens, logprob, logprob / len(tokens) ** penalty, ended)
