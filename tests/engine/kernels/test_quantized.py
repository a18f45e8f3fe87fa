"""Quantised linear layers: the cost of rounding, and every kernel against the torch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import InvalidParameter
from engine.kernels import quantized
from engine.kernels.quantized import dequantize, linear_torch, linear_triton, quantize
from engine.model.quantization.quantized_weight import AffineWeight

pytestmark = pytest.mark.slow

FORMATS = [(8, 0), (8, 128), (4, 32), (4, 64), (4, 128)]  # bits, group
BOUND = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, of the largest value."""
    found, wanted = found.float(), wanted.float()
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("bits", "group", "bound"), [(8, 0, 0.009), (8, 64, 0.006), (4, 32, 0.083), (4, 64, 0.092), (4, 128, 0.099)]
)
def test_rounding_gaussian_weights_costs_less_than_a_scale_for_all(bits: int, group: int, bound: float) -> None:
    weight = random(256, 4096, seed=1)
    most = (1 << (bits - 1)) - 1
    naive = (weight / weight.abs().max() * most).round() * weight.abs().max() / most
    rounded = dequantize(quantize(weight, bits, group))
    error = float((rounded - weight).norm() / weight.norm())
    assert error < bound
    assert error < 0.8 * float((naive - weight).norm() / weight.norm())


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_weights_that_are_exact_stay_exact(bits: int, group: int) -> None:
    half = 1 << (bits - 1)
    weight = torch.randint(-half + 1, half, (40, 300), generator=torch.Generator().manual_seed(2)).float()
    weight[:, ::32] = half - 1 if bits == 8 else -half
    assert torch.equal(dequantize(quantize(weight / 4, bits, group)), weight / 4)
    assert torch.equal(dequantize(quantize(torch.zeros(3, 5), bits, group)), torch.zeros(3, 5))


@pytest.mark.parametrize(("bits", "bytes_of_weight"), [(8, 1.0), (4, 0.5)])
def test_packed_weights_are_as_small_as_they_say(bits: int, bytes_of_weight: float) -> None:
    made = quantize(random(64, 1024, seed=3), bits, 64)
    assert made.nbytes == 64 * 1024 * (bytes_of_weight + 2 / 64)


@pytest.mark.parametrize(("bits", "group"), [(3, 0), (4, 48), (8, -1)])
def test_other_formats_are_refused(bits: int, group: int) -> None:
    with pytest.raises(InvalidParameter, match="accepted: "):
        quantize(torch.zeros(4, 4), bits, group)


@pytest.mark.parametrize("way", ["few", "some", "invariant", "widened"])
@settings(max_examples=12)
@given(data=st.data())
def test_every_way_does_what_the_twin_does(way: str, device: str, data: st.DataObject) -> None:
    bits, group = data.draw(st.sampled_from(FORMATS), label="format")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]), label="dtype")
    tokens = data.draw(
        st.sampled_from({"few": [1, 2], "widened": [129, 130]}.get(way, [3, 16, 17, 33])), label="tokens"
    )
    out = data.draw(st.sampled_from([1, 31, 64, 80, 129]), label="out")
    width = data.draw(st.sampled_from([7, 64, 255, 256, 257, 600]), label="in")
    bias = random(out, seed=4, dtype=dtype) if data.draw(st.booleans(), label="bias") else None
    weight = quantize(random(out, width, seed=5).to(device), bits, group, None if bias is None else bias.to(device))
    x = random(tokens, width + 3, seed=6, dtype=dtype).to(device)[:, 3:]
    found = linear_triton(x, weight, invariant=way == "invariant")
    # there weights are rounded to the type first, and the interpreter cuts off what it should round
    cut_off = way == "widened" and dtype == torch.bfloat16 and device == "cpu"
    bound = BOUND[dtype] * (2 if cut_off else 1)
    assert found.dtype == dtype and apart(found, linear_torch(x, weight)) < bound


STORED = [(4, 128, False), (4, 32, True), (8, 32, False), (8, 0, False), (4, 64, True)]  # bits, group, with minimums


def stored(out: int, width: int, bits: int, group: int, minimums: bool) -> AffineWeight:
    """A weight as a checkpoint has it, with scales of float16."""
    size = group or width
    scales = (random(out, width // size, seed=15).abs() / 100 + 0.01).half().float()
    codes = torch.randint(0, 1 << bits, (out, width), generator=torch.Generator().manual_seed(16), dtype=torch.uint8)
    lows = random(out, width // size, seed=17) / 10 if minimums else None
    return AffineWeight(codes, scales, lows, bits, size, 0 if minimums else 1 << (bits - 1))


@pytest.mark.parametrize("form", STORED, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 20, 130])
def test_a_checkpoints_codes_are_multiplied_as_they_are(form: tuple[int, int, bool], tokens: int, device: str) -> None:
    weight = stored(80, 640, *form)
    bias = random(80, seed=18, dtype=torch.float16)
    made = quantized.pack(weight, bias.to(device), torch.device(device))
    assert made is not None
    assert torch.allclose(dequantize(made).cpu(), weight.dequantize(), rtol=0, atol=1e-6)
    x = random(tokens, 640, seed=19, dtype=torch.float16).to(device)
    expected = x.float().cpu() @ weight.dequantize().T + bias.float()
    assert apart(linear_triton(x, made).cpu(), expected) < BOUND[torch.float16]
    assert apart(linear_torch(x, made).cpu(), expected) < BOUND[torch.float16]


def test_zero_points_become_minimums_and_other_groups_are_left_alone() -> None:
    weight = AffineWeight(torch.full((4, 64), 3, dtype=torch.uint8), torch.ones(4, 2), None, 4, 32, 5)
    made = quantized.pack(weight, None, torch.device("cpu"))
    assert made is not None and made.minimums is not None
    assert torch.equal(dequantize(made), torch.full((4, 64), -2.0))
    narrow = AffineWeight(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 4), None, 4, 16, 8)
    assert quantized.pack(narrow, None, torch.device("cpu")) is None


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written is not a number."""
    empty = torch.Tensor.new_empty

    def poison(like: torch.Tensor, *shape: int, **kind: Any) -> torch.Tensor:  # Any: as torch has it
        made = empty(like, *shape, **kind)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


@pytest.mark.parametrize(("tokens", "out", "width"), [(1, 64, 1024), (2, 128, 2048), (20, 65, 1030), (64, 64, 512)])
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 64)])
@pytest.mark.usefixtures("poisoned")
def test_every_output_is_written(tokens: int, out: int, width: int, bits: int, group: int, device: str) -> None:
    weight = quantize(random(out, width, seed=7).to(device), bits, group)
    x = random(tokens, width, seed=8, dtype=torch.bfloat16).to(device)
    assert apart(linear_triton(x, weight), linear_torch(x, weight)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 32)])
def test_an_invariant_result_does_not_look_at_the_batch(bits: int, group: int, device: str) -> None:
    weight = quantize(random(100, 700, seed=9).to(device), bits, group)
    x = random(70, 700, seed=10, dtype=torch.bfloat16).to(device)
    together = linear_triton(x, weight, invariant=True)
    for rows in (slice(0, 1), slice(5, 8), slice(40, 70)):
        assert torch.equal(linear_triton(x[rows], weight, invariant=True), together[rows])


def test_x_may_be_transposed_in_float32_or_empty(device: str) -> None:
    weight = quantize(random(48, 96, seed=11).to(device), 4, 32)
    x = random(96, 3, seed=12, dtype=torch.float16).to(device).t()
    assert apart(linear_triton(x, weight), linear_torch(x, weight)) < BOUND[torch.float16]
    assert apart(linear_triton(x.float(), weight), linear_torch(x.float(), weight)) < BOUND[torch.float32]
    assert linear_triton(x[:0], weight).shape == (0, 48)


def test_many_rows_are_widened_some_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_WIDENED_AT_ONCE", 64 * 96)
    whole = random(150, 96, seed=13)
    weight = quantize(whole.to(device), 8)
    x = random(130, 96, seed=14, dtype=torch.bfloat16).to(device)
    assert apart(linear_triton(x, weight), linear_torch(x, weight)) < BOUND[torch.bfloat16]
    assert apart(dequantize(weight).cpu(), whole) < 5e-3
