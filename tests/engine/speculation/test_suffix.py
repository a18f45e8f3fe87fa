"""Looked-up drafts: the longest earlier occurrence of a text's end, in the sequence, its prediction or its tenant's
answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import SequenceState, SpanJob
from engine.params import Span, Speculation
from engine.speculation.proposer import NOTHING
from engine.speculation.suffix import (
    FEED,
    MAX_INDEXES,
    MAX_MATCH,
    MAX_OCCURRENCES,
    MAX_POOL,
    MAX_TENANTS,
    GramIndex,
    SuffixProposer,
    longest_match,
)

texts = st.lists(st.integers(0, 2), max_size=60)


def sequence(
    tokens: list[int], *, id: int = 1, root: bytes = b"tenant", prediction: tuple[int, ...] = ()
) -> SequenceState:
    seq = SequenceState(id, [], root, 1)
    seq.append(tokens, generated=False)
    span = Span(speculation=Speculation(prediction=prediction)) if prediction else Span()
    seq.job = SpanJob(1, span, seed=0, max_tokens=100, stop_ids=frozenset(), prompt_tokens=len(tokens))
    return seq


def slow_match(known: list[int], text: list[int], gram: int) -> tuple[int, int]:
    """Compares every place, the newest first; of occurrences of the last gram only as many as the index looks at."""
    found, occurrences = (0, 0), 0
    for position in range(len(known), 0, -1):
        length = 0
        while length < min(position, len(text), MAX_MATCH) and known[position - 1 - length] == text[-1 - length]:
            length += 1
        if length >= gram:
            occurrences += 1
            if occurrences <= MAX_OCCURRENCES + 1 and position < len(known) and length > found[1]:
                found = position, length
    return found


@given(texts, texts, st.integers(1, 4), st.booleans())
def test_the_longest_match_is_found(known: list[int], text: list[int], gram: int, same: bool) -> None:
    text = known if same else text
    index = GramIndex(gram)
    for token in known:
        index.extend([token])
    expected = slow_match(known, text, gram) if len(text) >= gram else (0, 0)
    assert longest_match(index, known, text) == expected


def test_a_draft_is_what_followed_the_longest_match() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 9, 2, 3, 4, 5, 7, 8, 0, 1, 2, 3, 4, 5]
    assert SuffixProposer().propose(sequence(tokens), 3).tokens == (6, 9, 2)
    assert SuffixProposer().propose(sequence([*tokens, 11]), 3) == NOTHING


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert SuffixProposer().propose(sequence([1, 2, 3] * 4), 8).tokens == (1, 2, 3, 1, 2, 3, 1, 2)


def test_a_long_prompt_is_indexed_bit_by_bit() -> None:
    tokens = [*range(10_000), 1, 2, 3, 4]
    seq, proposer = sequence(tokens), SuffixProposer()
    drafts = [proposer.propose(seq, 2).tokens for _ in range(-(-len(tokens) // FEED))]
    assert drafts[-1] == (5, 6)


def test_a_sequence_that_was_cut_is_indexed_anew() -> None:
    seq, proposer = sequence([1, 2, 3, 4, 5, 6, 7, 8]), SuffixProposer()
    proposer.propose(seq, 2)
    seq.truncate(6, 16)
    seq.append([1, 2, 3, 4], generated=True)
    proposer.propose(seq, 2)
    seq.truncate(4, 16)
    seq.append([9, 1, 2, 3, 4], generated=True)
    assert proposer.propose(seq, 3).tokens == (9, 1, 2)


def test_answers_are_found_by_their_tenant_alone() -> None:
    proposer = SuffixProposer()
    answered = sequence([1, 2, 3, 4, 5, 6, 7], root=b"mine")
    proposer.ended(answered, 2)
    assert proposer.propose(sequence([3, 4, 5, 6], id=2, root=b"mine"), 4).tokens == (7,)
    assert proposer.propose(sequence([3, 4, 5, 6], id=3, root=b"another"), 4) == NOTHING
    alone = SuffixProposer("ngram", 2, pooled=False)
    alone.ended(answered, 2)
    assert alone.propose(sequence([3, 4, 5, 6], id=4, root=b"mine"), 4) == NOTHING


def test_the_pool_of_answers_is_bounded() -> None:
    proposer = SuffixProposer()
    for n in range(40):
        proposer.ended(sequence(list(range(n * 2000, n * 2000 + 2000))), 0)
    index, answers = proposer._pools[b"tenant"]
    assert index.length == len(answers) <= MAX_POOL
    newest = 39 * 2000
    assert proposer.propose(sequence(list(range(newest, newest + 4)), id=2), 1).tokens == (newest + 4,)
    for n in range(100):
        proposer.ended(sequence([1, 2, 3, 4, 5], root=b"%d" % n), 0)
    assert len(proposer._pools) == MAX_TENANTS
    for n in range(500):
        proposer.propose(sequence([1, 2, 3, 4, 5], id=1000 + n), 1)
    assert len(proposer._indexes) == MAX_INDEXES


def test_a_prediction_is_proposed_from_its_beginning_and_found_again_after_a_change() -> None:
    prediction = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    seq, proposer = sequence([30, 31], prediction=prediction), SuffixProposer()
    assert isinstance(seq.job, SpanJob)

    def write(*tokens: int) -> tuple[int, ...]:
        assert isinstance(seq.job, SpanJob)
        seq.append(list(tokens), generated=True)
        seq.job.produced += len(tokens)
        return proposer.propose(seq, 3).tokens

    assert write(1) == (2, 3, 4)
    assert write(20) == ()
    assert write(3, 4, 5, 6) == (7, 8, 9)


def test_what_is_kept_of_a_closed_sequence_is_dropped() -> None:
    seq, proposer = sequence([1, 2, 3, 4] * 3, prediction=(1, 2, 3, 4, 5)), SuffixProposer()
    proposer.propose(seq, 2)
    proposer.forget(seq)
    assert not proposer._indexes
    assert not proposer._predictions
