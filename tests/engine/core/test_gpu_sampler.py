"""The device's side of the sampler, by torch references and by interpreted kernels, against the sampler of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core import gpu_sampler
from engine.core.gpu_sampler import adjustments, keys, sample_on_device, warm_up
from engine.core.sampler import sample
from engine.core.sampling_types import RowSampling, SampledTokens, mix64
from engine.kernels import logprobs, sampling
from engine.params import Sampling
from tests.engine.core.test_sampler import allowed, draw, logits

pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["twin", "kernel"])
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SampledTokens]:
    """`sample_on_device` of logits on the CPU, with torch references or with kernels."""
    for module, name in ((sampling, "sample"), (sampling, "adjust"), (logprobs, "logprobs")):
        monkeypatch.setattr(module, name, getattr(module, f"{name}_{'torch' if request.param == 'twin' else 'triton'}"))
    device = DEVICE if request.param == "kernel" else "cpu"
    return lambda rows, *rest: sample_on_device(rows.to(device), *rest)


adjusting = st.builds(
    Sampling,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.7, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, 79), st.floats(-9, 9, width=32), max_size=4),
)
draws = st.builds(
    RowSampling,
    sampling=adjusting,
    seed=st.integers(-(2**63), 2**63 - 1),
    stream=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10**6),
    counts=st.dictionaries(st.integers(0, 79), st.integers(1, 9), max_size=6),
    seen=st.sets(st.integers(0, 79), min_size=1, max_size=20),
    banned=st.frozensets(st.integers(0, 79), max_size=9),
    logprobs=st.sampled_from([None, None, 0, 3, 64]),
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(st.none() | draws, min_size=1, max_size=5), seed=st.integers(0, 99), masked=st.booleans())
def test_likeliest_tokens_and_logprobs_are_those_of_the_cpu(
    on_device: Callable[..., SampledTokens], asked: list[RowSampling | None], seed: int, masked: bool
) -> None:
    rows = logits(len(asked), 80, seed)
    forbidden = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.5

    def apply_mask(given: torch.Tensor) -> None:
        given.masked_fill_(forbidden.to(given.device), -torch.inf)

    wanted = sample(rows.clone(), asked, apply_mask if masked else None)
    found = on_device(rows.clone(), asked, apply_mask if masked else None)
    assert found.token_ids == wanted.token_ids
    assert list(found.logprobs) == list(wanted.logprobs)
    for row, record in wanted.logprobs.items():
        mine = found.logprobs[row]
        assert mine.token_id == record.token_id
        assert mine.logprob == pytest.approx(record.logprob, abs=1e-5)
        assert [token for token, _ in mine.top] == [token for token, _ in record.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in record.top], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        Sampling(),
        Sampling(top_k=4),
        Sampling(top_p=0.6, temperature=1.5),
        Sampling(min_p=0.2),
        Sampling(top_p=0.8, min_p=0.05),
        Sampling(temperature=2.0, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_every_token_that_the_filters_leave_is_drawn_and_no_other(
    on_device: Callable[..., SampledTokens], asked: Sampling, request: pytest.FixtureRequest
) -> None:
    count = 10 if "kernel" in request.node.name and DEVICE == "cpu" else 3000
    row = logits(1, 30, seed=4)
    drawn = on_device(row.repeat(count, 1), [draw(asked, position=at) for at in range(count)])
    keep = allowed(row[0].numpy(), asked)
    counts = np.bincount(drawn.token_ids, minlength=30)
    assert not counts[~keep].any()
    weights = np.where(keep, np.exp(row[0].double().numpy() / asked.temperature), 0.0)
    if count == 3000:
        assert counts[weights / weights.sum() > 0.01].all()


def test_draws_are_keyed_by_seed_stream_and_position(on_device: Callable[..., SampledTokens]) -> None:
    rows = torch.zeros(4, 5000)
    seeds = [draw(Sampling(), seed=1, position=5), draw(Sampling(), seed=1, position=6), draw(Sampling(), seed=2), None]
    together = on_device(rows.clone(), seeds).token_ids
    assert len(set(together)) == 4
    assert together[3] == 0
    assert on_device(rows[:1].clone(), seeds[1:2]).token_ids == together[1:2]


@given(values=st.lists(st.tuples(*[st.integers(-(2**63), 2**64 - 1)] * 3), min_size=1, max_size=5))
def test_keys_are_those_of_mix64(values: list[tuple[int, int, int]]) -> None:
    assert keys(*zip(*values, strict=True)).tolist() == [mix64(*each) for each in values]


def test_a_token_outside_of_the_vocabulary_reaches_no_device() -> None:
    with pytest.raises(IndexError, match="0 to 9"):
        adjustments([None, draw(Sampling(logit_bias={10: 1.0}))], 10)


def test_warming_up_draws_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel runs for one row and for two; but a greedy row changes no logits."""
    ran: dict[str, set[int]] = {}
    for module, name in (
        (sampling, "adjust"), (sampling, "sample"), (logprobs, "logprobs"), (gpu_sampler, "apply_token_bitmask"),
        (gpu_sampler, "fill_sampled"),
    ):  # fmt: skip
        kernel = getattr(module, name)

        def counted(logits: torch.Tensor, *rest: Any, name: str = name, kernel: Any = kernel) -> Any:
            ran.setdefault(name, set()).add(len(logits))
            return kernel(logits, *rest)

        monkeypatch.setattr(module, name, counted)
    warm_up(40, torch.device("cpu"))
    assert ran == {name: {1, 2} for name in ("adjust", "sample", "logprobs", "apply_token_bitmask", "fill_sampled")}
