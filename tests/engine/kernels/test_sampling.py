"""Sampling on the device: kernels against the torch reference, the reference against plain probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.sampling_types import mix64
from engine.kernels.sampling import (
    adjust_torch,
    adjust_triton,
    gumbel,
    kept_torch,
    pack,
    philox,
    sample_torch,
    sample_triton,
)

pytestmark = pytest.mark.slow

INF = float("inf")


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Yields what is allocated and not written is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def parameters(rows: int, **same: float) -> torch.Tensor:
    """The same for all rows but the key."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **same}
    columns = {name: [value] * rows for name, value in values.items()}
    return torch.from_numpy(pack(**columns, keys=[mix64(7, row) for row in range(rows)]))  # type: ignore[arg-type]


def check(logits: torch.Tensor, packed: torch.Tensor, device: str) -> None:
    """The kernel's tokens are the twin's, or lose by no more than rounding; whatever wins is kept by the filters, or
    stands within rounding of what is.
    """
    found = sample_triton(logits.to(device), packed.to(device)).tolist()
    wanted = sample_torch(logits, packed).tolist()
    for row, words, token, best in zip(logits.float(), packed, found, wanted, strict=True):
        assert 0 <= token < len(row)
        if token == best:
            continue
        scale, _, top_p, _ = words[:4].view(torch.float32).tolist()
        assert scale > 0, "a greedy row has no rounding"
        scores = row.double() * scale + gumbel(int(words[4:6].view(torch.int64)), len(row))
        more, less = words.clone(), words.clone()
        if top_p < 1:
            more.view(torch.float32)[2] *= 1 + 1e-4
            less.view(torch.float32)[2] *= 1 - 1e-4
        assert kept_torch(row, more)[token]
        surely = scores[kept_torch(row, less)].max()
        assert scores[token] >= surely - 1e-4 * max(1.0, float(surely.abs()) * 1e-2)


def test_philox_gives_the_published_numbers() -> None:
    # The known answer of Random123 for a counter and a key of zeros.
    assert [hex(int(word)) for word in philox(0, 1)[0]] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    assert not np.array_equal(philox(1 << 40, 5), philox(0, 5))


samplings = st.tuples(
    st.sampled_from([0.0, 1e-4, 0.3, 0.6, 1.0, 2.0, 100.0]),
    st.sampled_from([0, 0, 1, 2, 20, 64, 150, 10**6]),
    st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.95, 0.9999]),
    st.sampled_from([0.0, 0.0, 0.05, 0.999]),
)


@settings(max_examples=15)
@given(
    rows=st.lists(samplings, min_size=1, max_size=3),
    vocabulary=st.sampled_from([1, 32, 63, 65, 2047, 2048, 2049, 5003]),
    spread=st.sampled_from([0.1, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    masked=st.booleans(),
    seed=st.integers(0, 999),
)
def test_kernel_and_twin_draw_the_same(
    rows: list[tuple[float, int, float, float]],
    vocabulary: int,
    spread: float,
    dtype: torch.dtype,
    masked: bool,
    seed: int,
    device: str,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = (torch.randn(len(rows), vocabulary + 5, generator=generator) * spread).to(dtype)
    logits = wide[:, 3 : vocabulary + 3]  # strided
    if masked:
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -INF
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    keys = [mix64(seed, row) for row in range(len(rows))]
    packed = torch.from_numpy(pack(temperature, top_k, top_p, min_p, keys))
    check(logits, packed, device)


@pytest.mark.parametrize(
    "same",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"top_k": 300, "top_p": 0.5},
        {"top_p": 0.8, "min_p": 0.02},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.1},
        {"top_k": 300, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 30.0, "top_p": 0.5},
        {"temperature": 30.0, "top_k": 400, "top_p": 0.99},
    ],
    ids=str,
)
def test_the_kernel_keeps_what_the_twin_keeps(same: dict[str, float], device: str) -> None:
    """One row again and again with other keys: all that is kept is drawn sooner or later, and nothing else."""
    row = torch.randn(1, 9001, generator=torch.Generator().manual_seed(5)) * 3
    keys = 3 if device == "cpu" else 500
    check(row.expand(keys, -1), parameters(keys, **same), device)


@pytest.mark.parametrize("draw", [sample_torch, sample_triton])
@pytest.mark.parametrize("same", [{}, {"top_k": 3}, {"min_p": 0.17}, {"top_k": 4, "min_p": 0.17}], ids=str)
def test_top_p_cuts_where_the_likelier_reach_it(draw: object, same: dict[str, float], device: str) -> None:
    row = torch.full((100,), -INF)
    row[[60, 70, 80]] = torch.tensor([0.5, 0.3, 0.2]).log()
    if same:
        row[90] = -2.5  # gone before top-p looks
    logits, unfiltered = row.expand(60, -1), sample_torch(row.expand(60, -1), parameters(60, **same))
    last = (unfiltered == 80).nonzero()[:3, 0]  # keys by which the least likely wins, if it may
    assert len(last) == 3
    for top_p, wins in ((0.804, True), (0.796, False)):
        packed = parameters(60, **same, top_p=top_p)[last]
        drawn = draw(logits[last].to(device), packed.to(device)).tolist()  # type: ignore[operator]
        assert [token == 80 for token in drawn] == [wins] * 3


def test_the_largest_vocabulary(device: str) -> None:
    logits = torch.randn(1, 262_144, generator=torch.Generator().manual_seed(6)) * 2
    check(logits, parameters(1, top_k=20, top_p=0.8), device)


def test_draws_follow_the_filtered_softmax(device: str) -> None:
    row = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2
    for same in ({}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.8}, {"temperature": 2.5, "min_p": 0.2}):
        few = [40] if device == "cpu" and same == {"top_k": 6} else []  # interpreted
        kernel = [(sample_triton, count) for count in (few if device == "cpu" else [20_000])]
        for draw, count in ((sample_torch, 600), *kernel):
            packed = parameters(count, **same)
            where = device if draw is sample_triton else "cpu"
            drawn = draw(row.expand(count, -1).to(where), packed.to(where)).cpu()
            kept = kept_torch(row[0], packed[0])
            weights = torch.exp(row[0].double() / same.get("temperature", 1.0)) * kept
            expected = weights / weights.sum() * count
            counts = torch.bincount(drawn, minlength=40)
            assert not counts[~kept].any()
            often = expected > 5
            chi = ((counts - expected)[often] ** 2 / expected[often]).sum() + 0.0
            freedom = max(1, int(often.sum()))
            assert chi < freedom + 4.5 * (2 * freedom) ** 0.5 + 5


def test_a_rows_draw_has_the_same_bits_in_any_batch(device: str) -> None:
    logits = (torch.randn(4, 3001, generator=torch.Generator().manual_seed(2)) * 2).to(device)
    packed = parameters(4, top_p=0.9).to(device)
    packed[::2] = parameters(2, temperature=1.5).to(device)
    together = sample_triton(logits, packed)
    for row in range(4):
        assert sample_triton(logits[row : row + 1], packed[row : row + 1]).equal(together[row : row + 1])
    assert sample_triton(logits.flip(0), packed.flip(0)).equal(together.flip(0))


@pytest.mark.parametrize("draw", [sample_torch, sample_triton])
class TestEdges:
    def drawn(self, draw: object, row: torch.Tensor, device: str, rows: int = 4, **same: float) -> set[int]:
        """Returns what comes of as many keys. Interpreted kernels draw the first few, and the twin says that they are
        right."""
        logits, packed = row.expand(rows, -1).contiguous(), parameters(rows, **same)
        tokens = sample_torch(logits, packed).tolist()
        if draw is sample_triton:
            few = min(rows, 5) if device == "cpu" else rows
            found = sample_triton(logits[:few].to(device), packed[:few].to(device))
            assert found.tolist() == tokens[:few]
        return set(tokens)

    def test_greedy_takes_the_first_of_the_largest(self, draw: object, device: str) -> None:
        row = torch.zeros(5000)
        row[[70, 2500, 4999]] = 3.0
        assert self.drawn(draw, row, device, temperature=0.0, top_k=3, min_p=0.5) == {70}
        assert self.drawn(draw, -torch.ones(130), device, temperature=1e-6) == {0}

    def test_tokens_of_one_logit_are_kept_all_or_none(self, draw: object, device: str) -> None:
        row = torch.full((300,), -1.0)
        row[[10, 100, 200, 250]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
        assert self.drawn(draw, row, device, rows=60, top_k=2, temperature=3.0) == {10, 100, 200, 250}
        assert self.drawn(draw, row, device, rows=60, top_k=2, top_p=0.5, temperature=9.0) == {10, 100, 200, 250}
        zeros = torch.tensor([0.0, -0.0, 0.0, -5.0])
        assert self.drawn(draw, zeros, device, rows=40, top_k=1) == {0, 1, 2}

    def test_what_is_masked_is_never_drawn(self, draw: object, device: str) -> None:
        row = torch.full((2100,), -INF)
        row[2077] = -40.0
        for same in ({}, {"top_p": 0.5}, {"min_p": 0.9}, {"top_k": 99, "top_p": 0.1}, {"temperature": 0.0}):
            assert self.drawn(draw, row, device, rows=1, **same) == {2077}
        row[5] = -40.0
        assert self.drawn(draw, row, device, rows=30, top_k=9, top_p=0.999) == {5, 2077}

    def test_a_row_with_nothing_allowed_gives_its_first_token(self, draw: object, device: str) -> None:
        for same in ({}, {"top_k": 5, "top_p": 0.5}, {"temperature": 0.0}):
            assert self.drawn(draw, torch.full((70,), -INF), device, rows=1, **same) == {0}

    def test_an_infinite_logit_wins(self, draw: object, device: str) -> None:
        row = torch.zeros(2100)
        row[[2060, 2070]] = INF
        for same in ({}, {"top_k": 5, "top_p": 0.5}, {"temperature": 0.0}):
            assert self.drawn(draw, row, device, rows=1, **same) == {2060}

    def test_extremes_of_the_filters_leave_the_likeliest_or_all(self, draw: object, device: str) -> None:
        row = torch.randn(2200, generator=torch.Generator().manual_seed(3))
        best = {int(row.argmax())}
        for same in ({"top_p": 1e-12}, {"min_p": 0.99999}, {"top_k": 1}, {"temperature": 1e-4}):
            assert self.drawn(draw, row, device, rows=1, **same) == best
        packed = [parameters(2, **same).to(device) for same in ({}, {"top_k": 2200}, {"top_p": 0.9999999})]
        logits = row.expand(2, -1).to(device)
        tokens = [draw(logits, each).tolist() for each in packed]  # type: ignore[operator]
        assert tokens[0] == tokens[1] == tokens[2]

    def test_hardly_any_rounding_at_large_numbers(self, draw: object, device: str) -> None:
        row = torch.full((100,), -3e38)
        row[[3, 4]] = 3e4
        assert self.drawn(draw, row, device, rows=30, temperature=1e-4, top_p=0.9) == {3, 4}


@settings(max_examples=15)
@given(
    rows=st.integers(0, 4),
    vocabulary=st.sampled_from([5, 3000]),
    most=st.sampled_from([0, 3, 1500]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_adjustments_are_made_in_order(
    rows: int, vocabulary: int, most: int, dtype: torch.dtype, seed: int, device: str
) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(rows, vocabulary)).astype(np.float32)).to(dtype)
    parts = [random.permutation(vocabulary)[: random.integers(0, most + 1)] for _ in range(4 * rows)]
    entries = np.zeros((sum(map(len, parts)), 2), dtype=np.int32)
    entries[:, 0] = np.concatenate([np.zeros(0, dtype=int), *parts])
    entries.view(np.float32)[:, 1] = random.uniform(0.5, 2, len(entries))
    starts = torch.from_numpy(np.cumsum([0, *map(len, parts)]).astype(np.int32))
    wanted = logits.clone().float()
    for at, tokens in enumerate(parts):
        row, stage = divmod(at, 4)
        for token, bits in zip(tokens, entries[starts[at] : starts[at + 1], 1], strict=True):
            value, x = bits.view(np.float32), wanted[row, token]
            changed = [x + value, x / value if x > 0 else x * value, x + value, -INF][stage]
            wanted[row, token] = torch.as_tensor(changed).to(dtype).float()
    for adjust, where in ((adjust_torch, "cpu"), (adjust_triton, device)):
        mine = logits.clone().to(where)
        adjust(mine, torch.from_numpy(entries).to(where), starts.to(where))
        rtol, atol = (1e-6, 1e-6) if dtype == torch.float32 else (8e-3, 0.06)
        torch.testing.assert_close(mine.cpu().float(), wanted, rtol=rtol, atol=atol)
