"""The sampler against plain NumPy arithmetic, and the promise that a row's draw depends on that row alone."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.request import SequenceState
from engine.core.sampler import sample, uniform
from engine.core.sampling_types import RowSampling
from engine.params import Sampling


def draw(
    sampling: Sampling,
    *,
    seed: int = 1,
    position: int = 0,
    counts: Mapping[int, int] = MappingProxyType({}),
    seen: Set[int] = frozenset(),
    banned: Set[int] = frozenset(),
    logprobs: int | None = None,
) -> RowSampling:
    return RowSampling(sampling, seed, 0, position, counts, seen, banned, logprobs)


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def allowed(row: np.ndarray, s: Sampling) -> np.ndarray:
    """Returns which tokens may be drawn, by the definition of each filter, in vLLM's order: a boolean array
    (vocabulary,)."""
    scaled = row.astype(np.float64) / s.temperature
    keep = np.exp(scaled - scaled.max()) >= s.min_p
    if s.top_k:
        keep &= scaled >= np.sort(scaled)[-min(s.top_k, len(row))]
    p = np.where(keep, np.exp(scaled - scaled.max()), 0)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    keep[order[(before >= s.top_p) & (s.top_p < 1)]] = False
    return keep


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 400, 5000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


@settings(max_examples=150)
@given(
    samplings=st.lists(samplings, min_size=1, max_size=4), vocab=st.sampled_from([3, 50, 1000]), seed=st.integers(0, 50)
)
def test_only_tokens_that_the_filters_leave_are_drawn(samplings: list[Sampling], vocab: int, seed: int) -> None:
    rows = logits(len(samplings), vocab, seed)
    drawn = sample(rows.clone(), [draw(s, seed=seed) for s in samplings])
    for row, s, token in zip(rows.numpy(), samplings, drawn.token_ids, strict=True):
        assert allowed(row, s)[token]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.7),
        Sampling(temperature=2.5, top_p=0.5),
        Sampling(min_p=0.2),
        Sampling(top_p=0.8, min_p=0.02),
        Sampling(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [8, 600])  # the second has more tokens than are sorted at first
def test_draws_follow_the_filtered_distribution(sampling: Sampling, vocab: int) -> None:
    n = 20_000
    row = logits(1, vocab)
    drawn = sample(row.repeat(n, 1), [draw(sampling, position=i) for i in range(n)])
    counts = np.bincount(drawn.token_ids, minlength=vocab)
    keep = allowed(row[0].numpy(), sampling)
    p = np.where(keep, np.exp(row[0].double().numpy() / sampling.temperature), 0)
    p /= p.sum()
    assert counts[~keep].sum() == 0
    error = np.sqrt(p * (1 - p) / n)
    slack = np.where(p * n < 1, 3 / n, 1e-12)  # a token rarer than one in all samples may come three times
    assert (np.abs(counts / n - p) <= 5 * error + slack).all()


@pytest.mark.parametrize("unlikely", [40, 400])  # the second are more than are sorted at first
@pytest.mark.parametrize("top_k", [0, 30])
def test_min_p_drops_tokens_before_top_p_sums_what_is_left(unlikely: int, top_k: int) -> None:
    row = torch.tensor([[0.4, 0.2, *[0.4 / unlikely] * unlikely]]).log()
    for top_p, kept in ((0.65, {0}), (0.68, {0, 1})):  # of the two that min-p keeps, the likelier has two thirds
        asked = Sampling(top_k=top_k, top_p=top_p, min_p=0.3)
        drawn = sample(row.repeat(200, 1), [draw(asked, position=at) for at in range(200)])
        assert set(drawn.token_ids) == kept


@settings(max_examples=60)
@given(mine=samplings, others=st.lists(samplings, max_size=3), seed=st.integers(0, 1000))
def test_a_row_draws_the_same_whatever_shares_its_batch(mine: Sampling, others: list[Sampling], seed: int) -> None:
    row = logits(1, 700, seed)
    alone = sample(row.clone(), [draw(mine, seed=seed)])
    crowd = torch.cat([logits(len(others), 700, seed + 1), row]) if others else row.clone()
    together = sample(crowd, [*(draw(s, seed=9) for s in others), draw(mine, seed=seed)])
    assert together.token_ids[-1] == alone.token_ids[0]


def test_greedy_takes_the_likeliest_and_ignores_filters() -> None:
    rows = logits(3, 100)
    greedy = Sampling(temperature=0, top_k=5, top_p=0.1, seed=3)
    assert sample(rows.clone(), [draw(greedy)] * 3).token_ids == rows.argmax(-1).tolist()


def test_a_temperature_near_zero_is_greedy_and_not_nan() -> None:
    rows = logits(1, 100)
    assert sample(rows.clone(), [draw(Sampling(temperature=1e-40))]).token_ids[0] == int(rows.argmax())


def test_penalties_and_bias_change_the_logits_as_documented() -> None:
    row = torch.tensor([[2.0, 1.9, -1.0, 0.0]])
    cases = {
        0: Sampling(temperature=0),
        1: Sampling(temperature=0, presence_penalty=0.5),  # 2.0 - 0.5 < 1.9
        3: Sampling(temperature=0, logit_bias={3: 5.0}),
    }
    for expected, sampling in cases.items():
        assert sample(row.clone(), [draw(sampling, counts={0: 1})]).token_ids[0] == expected
    frequency = Sampling(temperature=0, frequency_penalty=0.05)
    assert [sample(row.clone(), [draw(frequency, counts={0: n})]).token_ids[0] for n in (1, 3)] == [0, 1]
    repetition = Sampling(temperature=0, repetition_penalty=1.2)
    assert sample(row.clone(), [draw(repetition, seen={0})]).token_ids[0] == 1
    negative = torch.tensor([[-1.0, -1.1]])  # a negative logit is multiplied: it gets less likely too
    assert sample(negative, [draw(repetition, seen={0})]).token_ids[0] == 1


def test_repetition_is_applied_to_the_biased_logit() -> None:
    row = torch.tensor([[1.0, 2.5]])
    sampling = Sampling(temperature=0, repetition_penalty=2.0, logit_bias={0: 3.0})
    assert sample(row.clone(), [draw(sampling, seen={0})]).token_ids[0] == 1  # (1 + 3) / 2 < 2.5


def test_banned_tokens_are_never_drawn() -> None:
    rows = logits(1, 10)
    best = int(rows.argmax())
    assert sample(rows.clone(), [draw(Sampling(temperature=0), banned={best})]).token_ids[0] != best


def test_logprobs_are_the_models_own() -> None:
    rows = logits(2, 30)
    changed = Sampling(temperature=0, logit_bias={7: 100.0})
    drawn = sample(rows.clone(), [draw(changed, logprobs=3), draw(Sampling())])
    expected = torch.log_softmax(rows[0], -1)
    record = drawn.logprobs[0]
    assert record.token_id == 7
    assert record.logprob == pytest.approx(float(expected[7]))
    values, ids = expected.topk(3)
    assert [t for t, _ in record.top] == ids.tolist()
    assert [lp for _, lp in record.top] == pytest.approx(values.tolist())
    assert list(drawn.logprobs) == [0]


def test_the_uniform_numbers_are_uniform_and_differ_by_every_key() -> None:
    numbers = np.array(
        [uniform(seed, stream, position) for seed in range(20) for stream in range(20) for position in range(20)]
    )
    assert len(set(numbers)) == len(numbers)
    histogram = np.histogram(numbers, bins=16, range=(0, 1))[0]
    assert ((histogram - 500) ** 2 / 500).sum() < 40  # chi-squared, 15 degrees of freedom: p < 0.001


def test_what_a_sequence_has_seen_follows_its_tokens() -> None:
    seq = SequenceState(1, [], b"root", 1)
    seq.append([3, 5, 3], generated=False)
    assert seq.seen() == {3, 5}
    seq.push(9)
    assert seq.seen() == {3, 5, 9}
    seq.truncate(1, 16)
    assert seq.seen() == {3}
    seq.append([4], generated=True)
    assert seq.seen() == {3, 4}
