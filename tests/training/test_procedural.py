"""Procedural sequences: all that is learned of them can be copied from before."""

from __future__ import annotations

from random import Random

import pytest

from training import mixture, procedural


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_what_is_learned_stands_in_a_segment_before(progress: float) -> None:
    rng = Random(int(progress * 10))
    for _ in range(200):
        ids, weights = procedural.row(rng, 6144, progress)
        assert len(ids) == len(weights) and min(ids) >= procedural.ORDINARY and max(ids) < 6144
        begins = next(at for at, weight in enumerate(weights) if weight)
        spans, at = list[tuple[int, int]](), begins
        while at < len(ids):
            end = next((other for other in range(at, len(ids)) if not weights[other]), len(ids))
            spans.append((at, end))
            at = next((other for other in range(end, len(ids)) if weights[other]), len(ids))
        mark = ids[0]
        for first, end in spans:
            wanted = ids[first:end]
            assert wanted[-1] == mark  # the segment's end is learned, too
            copied = wanted[:-1]
            places = [at for at in range(begins) if ids[at : at + len(copied)] == copied]
            assert places and all(weights[at] == 0 for at in range(begins))


def test_few_different_tokens_at_first_and_all_of_them_later() -> None:
    def largest(progress: float) -> int:
        rng = Random(0)
        return max(max(procedural.row(rng, 6144, progress)[0]) for _ in range(100))

    assert largest(0.0) < procedural.FEW and largest(procedural.ALONE) < procedural.FEW
    assert procedural.FEW < largest(0.5) < 2000
    assert largest(1.0) > 6000


def test_their_share_falls_once_copying_is_learned() -> None:
    shares = [mixture.procedural_share(at / 10) for at in range(11)]
    assert shares[0] == shares[3] == 1 and 0 < shares[5] < 1 and shares[10] == mixture.PROCEDURAL
    assert shares == sorted(shares, reverse=True)
