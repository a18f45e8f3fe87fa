"""Mixtures of experts: the choice and the products against their twins, and bits against bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.experts import (
    ExpertRouter,
    ExpertWeights,
    expert_weights,
    mix_torch,
    mix_triton,
    route_torch,
    route_triton,
)
from engine.kernels.quantized import QuantizedWeight, dequantize, pack, quantize
from engine.model.model_spec import Activation, ClampedSwiGLU, ExpertGroups, Experts
from engine.model.quantization.quantized_weight import round_to_nearest
from tests.engine.kernels.examples import examples

# Of the largest number. Interpreted, three numbers of bfloat16 are cut off one after the other
BOUND = {torch.bfloat16: 3.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def numbers(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def apart(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@examples(12)
@given(
    tokens=st.sampled_from([1, 3, 17]), count=st.sampled_from([4, 6, 12, 33]), width=st.sampled_from([16, 100, 700]),
    per_token=st.integers(1, 4), sigmoid=st.booleans(), normalised=st.booleans(), bias=st.booleans(),
    selection=st.booleans(), factors=st.booleans(),
    shared=st.sampled_from(["none", "plain", "gated"]), groups=st.sampled_from([0, 1, 2]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), exact=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_experts_are_chosen_as_the_twin_chooses(
    device: str, tokens: int, count: int, width: int, per_token: int, sigmoid: bool, normalised: bool, bias: bool,
    selection: bool, factors: bool, shared: str, groups: int, dtype: torch.dtype, exact: bool, seed: int,
) -> None:  # fmt: skip
    of = Experts(
        count, per_token, 8, (0,), scores="sigmoid" if sigmoid else "softmax", normalised=normalised, scaling=1.7,
        groups=ExpertGroups(count // 3, 2, groups) if groups and count % 3 == 0 and count > 6 else None,
    )  # fmt: skip
    rows = count + (shared == "gated")
    router = ExpertRouter(
        numbers(rows, width, device=device, seed=seed, dtype=torch.float32 if exact else dtype) * width**-0.5,
        numbers(count, device=device, seed=seed + 1) if bias else None,
        numbers(count, device=device, seed=seed + 2) if selection else None,
        numbers(count, device=device, seed=seed + 4) if factors else None,
        shared=shared != "none",
        gated=shared == "gated",
    )
    x = numbers(tokens, width + 8, device=device, dtype=dtype, seed=seed + 3)[:, :width]
    weights, chosen = route_triton(x, router, of)
    expected, numbered = route_torch(x, router, of)
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int32
    assert torch.equal(chosen, numbered)
    assert apart(weights, expected) < 1e-5


def test_scores_that_are_no_numbers_choose_experts_that_there_are(device: str) -> None:
    router = ExpertRouter(torch.full((6, 16), torch.nan, device=device))
    weights, chosen = route_triton(torch.ones(3, 16, device=device), router, Experts(6, 2, 8, (0,)))
    assert bool(((chosen >= 0) & (chosen < 6)).all()) and bool(weights.isnan().all())


def test_of_equal_scores_the_first_is_chosen(device: str) -> None:
    router = ExpertRouter(torch.zeros(6, 16, device=device))
    weights, chosen = route_triton(torch.ones(1, 16, device=device), router, Experts(6, 3, 8, (0,)))
    assert chosen.tolist() == [[0, 1, 2]]
    assert weights.tolist() == [[pytest.approx(1 / 3)] * 3]


def test_scores_that_are_one_number_leave_the_larger_logit_first(device: str) -> None:
    """Llama 4's experts are chosen by logits, whose sigmoids may all be 1."""
    logits = torch.tensor([90.0, 70.0, 95.0, 60.0], device=device)
    router = ExpertRouter(torch.diag(logits), shared=True)
    of = Experts(4, 1, 8, (0,), scores="sigmoid", normalised=False, scaled_inputs=True)
    for run in (route_triton, route_torch):
        weights, chosen = run(torch.ones(1, 4, device=device), router, of)
        assert chosen.tolist() == [[2]] and weights.tolist() == [[1.0, 1.0]]


FORMS = {
    "dense": lambda weight: weight,
    "int8": lambda weight: quantize(weight, 8),
    "int4": lambda weight: quantize(weight, 4, 64),
    "awq": lambda weight: stored(weight),
}


def stored(weight: Tensor) -> QuantizedWeight:
    """As checkpoints have it: four bits with minimums."""
    width = weight.shape[1]
    rounded = round_to_nearest(F.pad(weight.float().cpu(), (0, -width % 32)), 4, 32, symmetric=False)
    made = pack(replace(rounded, codes=rounded.codes[:, :width]), None, weight.device)
    assert made is not None and made.minimums is not None
    return made


def of_experts(
    count: int, rows: int, width: int, form: str, seed: int, device: str, dtype: torch.dtype, biased: bool = False
) -> Any:
    each = numbers(count, rows, width, device=device, dtype=dtype, seed=seed) * width**-0.5
    biases = list(numbers(count, rows, device=device, dtype=dtype, seed=seed + 50)) if biased else []
    return expert_weights([FORMS[form](weight.contiguous()) for weight in each], dtype, biases=biases)


CLAMPED = ClampedSwiGLU(1.702, 0.8)


@pytest.mark.slow
@examples(14)
@given(
    tokens=st.sampled_from([1, 2, 40]), count=st.sampled_from([3, 8, 20]), hidden=st.sampled_from([16, 72, 200]),
    wide=st.sampled_from([16, 40, 136]), per_token=st.integers(1, 3), form=st.sampled_from(list(FORMS)),
    activation=st.sampled_from(["silu", "gelu_tanh", CLAMPED]), shared=st.booleans(), invariant=st.booleans(),
    extra=st.sampled_from(["", "biases", "scaled inputs"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), seed=st.integers(0, 99),
)  # fmt: skip
def test_outputs_are_those_of_the_twin(
    device: str, tokens: int, count: int, hidden: int, wide: int, per_token: int, form: str,
    activation: Activation | ClampedSwiGLU, shared: bool, invariant: bool, extra: str, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    if dtype == torch.float32 and form != "dense":
        dtype = torch.float16  # weights of few bits are for activations of 16
    gate_up = of_experts(count, 2 * wide, hidden, form, seed, device, dtype, extra == "biases")
    down = of_experts(count, hidden, wide, form, seed + 1, device, dtype, extra == "biases")
    x = numbers(tokens, hidden + 8, device=device, dtype=dtype, seed=seed + 2)[:, :hidden]
    chosen = numbers(tokens, count, device=device, seed=seed + 3).topk(per_token).indices.int()
    weights = numbers(tokens, per_token + shared, device=device, seed=seed + 4).abs()
    beside = numbers(tokens, hidden, device=device, dtype=dtype, seed=seed + 5) if shared else None
    found, wanted = (
        run(
            x, gate_up, down, weights, chosen, activation, shared=beside, scaled_inputs=extra == "scaled inputs",
            invariant=invariant,
        )
        for run in (mix_triton, mix_torch)
    )  # fmt: skip
    assert apart(found, wanted) < BOUND[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("scaled_inputs", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_token_is_the_same_bits_beside_any_others(form: str, scaled_inputs: bool, device: str) -> None:
    """Of gpt-oss's experts, with biases and clamped gates, and of those that read scaled inputs."""
    count, hidden, wide, dtype = 6, 96, 40, torch.float16
    gate_up = of_experts(count, 2 * wide, hidden, form, 0, device, dtype, not scaled_inputs)
    down = of_experts(count, hidden, wide, form, 1, device, dtype, not scaled_inputs)
    gate: Activation | ClampedSwiGLU = "silu" if scaled_inputs else CLAMPED
    x = numbers(70, hidden, device=device, dtype=dtype, seed=2)
    router = ExpertRouter(numbers(count, hidden, device=device, dtype=dtype, seed=3))
    of = Experts(count, 2, wide, (0,))

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = route_triton(rows, router, of)
        made = mix_triton(
            rows, gate_up, down, weights, chosen, gate, scaled_inputs=scaled_inputs, invariant=True
        )  # fmt: skip
        return weights, made

    together = run(x)
    for first, end in ((0, 1), (3, 40), (69, 70)):
        for alone, beside in zip(run(x[first:end]), together, strict=True):
            assert torch.equal(alone, beside[first:end])


def test_one_size_of_tile_serves_any_number_of_tokens_where_bits_count(device: str) -> None:
    """A tile's size is the order of a sum on a tensor core, which the interpreter does not have."""
    from engine.kernels.gpu.experts import tile_for

    for quantized in (False, True):
        for invariant in (False, True):
            tiles = {
                tile_for(pairs, 8, 512, invariant=invariant, quantized=quantized) for pairs in (1, 64, 65, 400, 65_536)
            }
            assert (len(tiles) == 1) == invariant


@pytest.mark.parametrize("block", [16, 64])
def test_pairs_are_sorted_by_expert_as_they_come(block: int, device: str) -> None:
    from engine.kernels.gpu.experts import sort_kernel

    for pairs in (1, 15, 16, 100):
        chosen = torch.randint(0, 5, (pairs,), generator=torch.Generator().manual_seed(pairs), dtype=torch.int32)
        order = torch.full((pairs,), -1, dtype=torch.int32, device=device)
        starts = torch.full((6,), -1, dtype=torch.int32, device=device)
        sort_kernel[(5,)](chosen.to(device), order, starts, pairs, block=block)
        assert order.tolist() == chosen.argsort(stable=True).tolist()
        assert starts.tolist() == [int((chosen < expert).sum()) for expert in range(6)]


def test_an_expert_of_all_tokens_and_experts_of_none(device: str) -> None:
    """Only one expert of many is read."""
    gate_up = of_experts(9, 32, 24, "dense", 0, device, torch.float32)
    down = of_experts(9, 24, 16, "dense", 1, device, torch.float32)
    x, chosen = numbers(40, 24, device=device, seed=2), torch.full((40, 1), 5, dtype=torch.int32, device=device)
    for number in set(range(9)) - {5}:
        gate_up.weights[number].fill_(torch.nan)
    weights = torch.ones(40, 1, device=device)
    found = mix_triton(x, gate_up, down, weights, chosen, "silu")
    assert apart(found, mix_torch(x, gate_up, down, weights, chosen, "silu")) < 1e-5
    assert mix_triton(x[:0], gate_up, down, weights[:0], chosen[:0], "silu").shape == (0, 24)


def test_weights_of_several_forms_are_brought_to_one(device: str) -> None:
    plain = numbers(3, 20, 128, device=device, dtype=torch.float16)
    mixed = expert_weights([plain[0], quantize(plain[1], 8), quantize(plain[2], 4, 64)], torch.float16)
    assert isinstance(mixed, ExpertWeights) and len(mixed.tables) == 1
    for found, wanted in zip(mixed.weights, (plain[0], dequantize(quantize(plain[1], 8)).half()), strict=False):
        assert isinstance(found, Tensor) and torch.equal(found, wanted)
    given = [stored(plain[0]), quantize(plain[1], 4, 32)]
    scaled = expert_weights(given, torch.float16)
    assert len(scaled.tables) == 3
    for weight, exact in zip(scaled.weights, given, strict=True):
        assert isinstance(weight, QuantizedWeight) and weight.scales.dtype == torch.float32
        assert weight.minimums is not None and torch.equal(dequantize(weight), dequantize(exact))
