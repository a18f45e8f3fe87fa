"""Norms, gates and what finishes queries, keys and values: each kernel against its twin, the twins against the model's
own torch code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import gated, norm, qkv
from engine.kernels.norm import Norm
from engine.kv_cache.quantized_cache import Coding, QuantizedCache, plain
from engine.model.layers import ACTIVATIONS, LayerNorm, RMSNorm
from engine.model.model_spec import Activation, Rope
from engine.model.rope import Rotation, rotate_
from tests.engine.kernels.examples import examples

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # of the largest number
few = examples(20)
dtypes = st.sampled_from(list(BOUND))


def same(found: Tensor, wanted: Tensor, of: Tensor | None = None) -> None:
    """Beside the largest that is wanted, or the largest of `of`."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    largest = (wanted if of is None else of).double().abs().max().clamp(min=1e-9)
    error = (found.double() - wanted.double()).abs().max() / largest
    assert error < BOUND[found.dtype], f"relative error {error}"


def numbers(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@few
@given(
    tokens=st.integers(1, 5), hidden=st.sampled_from([1, 7, 64, 576, 1100]), dtype=dtypes, delta=st.booleans(),
    before=st.booleans(), after=st.booleans(), centred=st.booleans(), multiplier=st.sampled_from([1.0, 0.22]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_the_sum_and_its_norm(
    device: str, tokens: int, hidden: int, dtype: torch.dtype, delta: bool, before: bool, after: bool, centred: bool,
    multiplier: float, seed: int,
) -> None:  # fmt: skip
    """Centred ones of numbers whose mean is no zero, but for the eps large."""
    x = numbers(tokens, hidden, device=device, dtype=dtype, seed=seed) * 3 + centred
    add = numbers(tokens, hidden + 5, device=device, dtype=dtype, seed=seed + 1)[:, :hidden] if delta else None
    eps = 1e-2 if centred else 1e-5
    first = Norm(numbers(hidden, device=device, seed=seed + 2), eps, centred) if before else None
    last = Norm(numbers(hidden, device=device, seed=seed + 3), eps, centred) if after else None
    sums, results = [], []
    for run in (norm.add_and_norm_triton, norm.add_and_norm_torch):
        sums.append(x.clone())
        results.append(run(sums[-1], add, last, delta_norm=first, multiplier=multiplier))
    same(*sums)
    kernel, twin = results
    assert (kernel is None) == (last is None)
    if kernel is not None:
        assert twin is not None
        same(kernel, twin)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_the_twin_is_the_models_norm(kind: type[RMSNorm]) -> None:
    x, weight = numbers(3, 64, device="cpu") * 5 + 1, numbers(64, device="cpu", seed=1)
    twin = Norm(weight, 1e-3, kind is LayerNorm)
    torch.testing.assert_close(norm.add_and_norm_torch(x, None, twin), kind(weight, 1e-3)(x))


@pytest.mark.parametrize("hidden", [48, 64, 100])
def test_a_norm_less_its_mean_is_the_same_bits_beside_any_others(hidden: int, device: str) -> None:
    x, delta = (numbers(9, hidden, device=device, dtype=torch.float16, seed=seed) + 2 for seed in (0, 1))
    of = Norm(numbers(hidden, device=device, seed=2), 1e-5, True)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        sums = x[rows].clone()
        made = norm.add_and_norm_triton(sums, delta[rows], of)
        assert made is not None
        return sums, made

    together = run(slice(0, 9))
    for rows in (slice(0, 1), slice(3, 8)):
        assert all(torch.equal(one, every[rows]) for one, every in zip(run(rows), together, strict=True))


@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind != "relu2"])  # of MLPs without a gate
@few
@given(tokens=st.integers(1, 4), width=st.sampled_from([1, 33, 1024, 1500]), dtype=dtypes, seed=st.integers(0, 99))
def test_gates(kind: Activation, device: str, tokens: int, width: int, dtype: torch.dtype, seed: int) -> None:
    both = numbers(tokens, 2 * width + 3, device=device, dtype=dtype, seed=seed)[:, : 2 * width] * 4
    found, wanted = gated.gated_triton(both, kind), gated.gated_torch(both, kind)
    gate, up = both.float().chunk(2, -1)
    same(found, wanted, gate * up)  # 1 + tanh(-3) is small against its terms
    same(wanted, (ACTIVATIONS[kind](gate) * up).to(dtype), gate * up)


@few
@given(
    tokens=st.sampled_from([1, 3, 70]), heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    width=st.sampled_from([16, 32, 80, 128]), dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    coding=st.sampled_from([None, None, "int8", "fp8"]), turns=st.booleans(),
    norms=st.sampled_from(["", "rms", "layer"]), grows=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_queries_keys_and_values_are_finished_and_put_in_their_place(
    device: str, tokens: int, heads: tuple[int, int], width: int, dtype: torch.dtype, coding: Coding | None,
    turns: bool, norms: str, grows: bool, seed: int,
) -> None:  # fmt: skip
    query_heads, kv_heads = heads
    joined = numbers(tokens, (query_heads + 2 * kv_heads) * width, device=device, dtype=dtype, seed=seed) * 2
    size, blocks = 16, -(-tokens // 16) + 2
    slots = (torch.randperm(size * (blocks - 1), generator=torch.Generator().manual_seed(seed))[:tokens] + size).to(
        device, torch.int32
    )
    rotation = None
    if turns:
        rope = Rope(dim=width // 4 * 2, theta=10_000.0, attention_factor=1.2)  # only the first half of a head turns
        positions = torch.arange(tokens, device=device) * 37
        complex_ = Rotation(rope, width, torch.device(device), long_context=False).at(positions)
        rotation = torch.view_as_real(complex_.squeeze(1)).contiguous()
    of_norm = numbers(query_heads + kv_heads, width, device=device, seed=seed + 1)
    each = Norm(of_norm, 1e-6, norms == "layer") if norms else None
    scale = 1 + numbers(tokens, device=device, seed=seed + 2).abs() if grows else None
    found: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for run in (qkv.place_triton, qkv.place_torch):
        mine = joined.clone()
        if coding is None:
            cache = torch.full((2, blocks, size, kv_heads, width), 7.0, dtype=dtype, device=device)
            queries = run(mine, query_heads, cache, slots, rotation=rotation, norm=each, query_scale=scale)
            found.append((queries, cache, None))
        else:
            coded = QuantizedCache(1, blocks, size, kv_heads, width, dtype, device, coding).layers()[0]
            coded.codes.fill_(7)
            queries = run(mine, query_heads, coded, slots, rotation=rotation, norm=each, query_scale=scale)
            found.append((queries, coded.codes, coded.scales))
    same(found[0][0], found[1][0])
    if coding is None:
        same(found[0][1], found[1][1])
        return
    (_, codes, scales), (_, wanted_codes, wanted_scales) = found
    assert scales is not None and wanted_scales is not None
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-5, atol=0)
    close = (plain(codes).float() - plain(wanted_codes).float()).abs()
    step = plain(wanted_codes).float().abs() / 8 + 2**-9 if coding == "fp8" else torch.ones_like(close)
    assert (close <= step * 1.001).all(), "at most the next code"
    assert (close > 0).float().mean() < 0.01, "and that seldom: a rounding before tips few"


@pytest.mark.parametrize(("rows", "has_kv"), [(4, False), (6, True), (8, True)])
def test_as_many_heads_are_normalised_as_the_norm_has(device: str, rows: int, has_kv: bool) -> None:
    """Queries alone, keys, or values too, which do not turn; a layer without keys and values of its own writes none."""
    heads, kv_heads, width, tokens = 4, 2, 32, 5
    joined = numbers(tokens, (heads + 2 * kv_heads * has_kv) * width, device=device, dtype=torch.float16) * 2
    of = Norm(numbers(rows, width, device=device, seed=1), 1e-6)
    turn = numbers(tokens, width // 2, 2, device=device, seed=2)
    slots = torch.arange(17, 17 + tokens, dtype=torch.int32, device=device)
    found = []
    for run in (qkv.place_triton, qkv.place_torch):
        cache = torch.full((2, 3, 16, kv_heads, width), 7.0, dtype=torch.float16, device=device)
        queries = run(joined.clone(), heads, cache, slots, rotation=turn, norm=of, has_kv=has_kv)
        found.append((queries, cache))
    same(found[0][0], found[1][0])
    same(found[0][1], found[1][1])
    cache = found[1][1].view(2, -1, kv_heads, width)[:, 17 : 17 + tokens]
    if not has_kv:
        assert (found[1][1] == 7).all()
        return
    plain = joined.view(tokens, -1, width)[:, heads + kv_heads :]
    if rows == 8:
        plain = norm.normed(plain, Norm(of.weight[6:], 1e-6)).half()
    assert torch.equal(cache[1], plain)


def test_the_twin_turns_as_the_model_does() -> None:
    joined = numbers(5, 4 * 32, device="cpu", seed=3)
    rotations = Rotation(Rope(dim=32, theta=1e4), 32, torch.device("cpu"), long_context=False).at(torch.arange(5) * 9)
    expected = joined.view(5, 4, 32)[:, :3].clone()
    rotate_(expected, rotations)
    cache = torch.zeros(2, 3, 4, 1, 32)
    slots = torch.arange(4, 9, dtype=torch.int32)
    values = joined.view(5, 4, 32)[:, 3].clone()
    rotation = torch.view_as_real(rotations.squeeze(1)).contiguous()
    queries = qkv.place_torch(joined, 2, cache, slots, rotation=rotation)
    torch.testing.assert_close(queries, expected[:, :2])
    torch.testing.assert_close(cache[0].view(-1, 32)[4:9], expected[:, 2])
    torch.testing.assert_close(cache[1].view(-1, 32)[4:9], values)


def test_the_twin_lets_queries_grow_as_the_model_does() -> None:
    """And their keys stay."""
    rope = Rope(dim=32, theta=1e4, query_beta=0.4, query_context=10, query_offset=1)
    rotation, positions = Rotation(rope, 32, torch.device("cpu"), long_context=False), torch.arange(5) * 9
    keys = rotation.at(positions)
    queries = rotation.of_queries(keys, positions)
    assert not torch.equal(queries, keys)
    joined = numbers(5, 4 * 32, device="cpu", seed=3)
    expected = joined.view(5, 4, 32)[:, :3].clone()
    rotate_(expected[:, :2], queries)
    rotate_(expected[:, 2:], keys)
    cache, slots = torch.zeros(2, 3, 4, 1, 32), torch.arange(4, 9, dtype=torch.int32)
    turned = torch.view_as_real(keys.squeeze(1)).contiguous()
    found = qkv.place_torch(joined, 2, cache, slots, rotation=turned, query_scale=rotation.growth(positions))
    torch.testing.assert_close(found, expected[:, :2])
    torch.testing.assert_close(cache[0].view(-1, 32)[4:9], expected[:, 2])


@pytest.mark.parametrize("coding", ["int8", "fp8"])
def test_codes_of_every_magnitude(coding: Coding, device: str) -> None:
    """Across the whole range of e4m3, and at halves between its numbers."""
    width = 256
    grid = torch.arange(0, 128, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()
    values = torch.cat([grid[:127], (grid[1:127] + grid[:126]) / 2, torch.tensor([448.0, -448.0, 0.0])])
    joined = torch.zeros(1, 3 * width, device=device)
    joined[0, width : 2 * width] = values
    joined[0, 2 * width :] = -values.flip(0)
    caches = []
    for run in (qkv.place_triton, qkv.place_torch):
        cache = QuantizedCache(1, 2, 16, 1, width, torch.float32, device, coding).layers()[0]
        run(joined.clone(), 1, cache, torch.tensor([17], dtype=torch.int32, device=device))
        caches.append(cache)
    assert torch.equal(plain(caches[0].codes), plain(caches[1].codes)), "0 and -0 are the same"
