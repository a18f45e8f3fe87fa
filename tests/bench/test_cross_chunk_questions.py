"""The test of questions before chunks are reused, on planted cases."""

from __future__ import annotations

from random import Random

import pytest

from app.runs.cross_chunk import needs_several
from bench.kv.cross_chunk_questions import PLANTED, sample


@pytest.mark.parametrize("family", sorted(PLANTED))
def test_planted_questions_are_refused(family: str) -> None:
    rng = Random(f"planted {family}")
    cases = [one for one in (sample(rng, planted=True) for _ in range(1200)) if one.family == family]
    refused = sum(needs_several(one.question, one.passages) is not None for one in cases)
    assert len(cases) > 200 and refused / len(cases) >= 0.95


def test_most_plain_questions_are_let_through() -> None:
    rng = Random("plain")
    cases = [sample(rng, planted=False) for _ in range(300)]
    assert sum(needs_several(one.question, one.passages) is None for one in cases) / len(cases) > 0.6


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("When was the Orsk dam finished, and who paid for it?", "several things"),
        ("Is the dam longer than the mole?", "'than'"),
        ("zebra prices?", "no passage has a word"),
        ("How old is the man that built the dam?", "told by another"),
        ("Which keeper counts ships by lamplight?", "words are in several"),
        ("How was the dam financed?", "another passage says more"),
        ("Where is Holt?", "several passages have its words"),
    ],
)
def test_reasons(question: str, why: str) -> None:
    passages = (
        "The dam of Orsk was begun by Mira Holt in 1922, near the old town.",
        "A portrait of the engineer Holt, from 1940, hangs in the school of Orsk beside the keeper.",
        "Ships are counted by lamplight.",
    )
    assert why in (needs_several(question, passages) or "")
    assert needs_several("When was the dam begun?", passages) is None
