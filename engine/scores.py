"""Log-probabilities of candidate continuations: which children read them, and what they read.

Candidates of one token share one child, as one row of logits decides them all; each longer one has its own. Knows
nothing of scheduling or replies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from engine.jobs import ScoreJob, ScoreRequest
from engine.reading import chosen_logprobs

Targets = dict[int, list[tuple[int, int, int]]]  # position -> (candidate, index in it, token id) triples


def score_jobs(
    request: int, candidates: Sequence[Sequence[int]], length: int
) -> tuple[ScoreRequest, int, list[tuple[Sequence[int], Targets]]]:
    """What to read after a sequence of `length` tokens.

    Returns the request, the first position whose logits matter, and each child's tokens to append and targets.
    """
    first = length - 1
    jobs: list[tuple[Sequence[int], Targets]] = []
    singles = [(i, 0, c[0]) for i, c in enumerate(candidates) if len(c) == 1]
    if singles:
        jobs.append(((), {first: singles}))
    for i, candidate in enumerate(candidates):
        if len(candidate) > 1:
            jobs.append((candidate[:-1], {first + j: [(i, j, token)] for j, token in enumerate(candidate)}))
    return ScoreRequest(request, [[0.0] * len(c) for c in candidates]), first, jobs


def read_scores(logits: Tensor, reads: Iterable[tuple[ScoreJob, int, range]]) -> None:
    """Note what logits (any, vocabulary) decide, all that a step has in one go: of each job that reads, the position
    of its first row and its rows."""
    rows: list[int] = []
    tokens: list[int] = []
    places: list[tuple[list[float], int]] = []
    for job, first, its_rows in reads:
        for position, row in enumerate(its_rows, first):
            for candidate, index, token in job.targets.get(position, ()):
                rows.append(row)
                tokens.append(token)
                places.append((job.request.logprobs[candidate], index))
    for (scores, index), value in zip(places, chosen_logprobs(logits, rows, tokens), strict=True):
        scores[index] = value
