"""Scales of channels: folding them leaves a float model as it is, in every family, and the search never does harm."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.loader import SafetensorsWeights, Weights
from engine.model.quantization.equalization import Preceding, awq_scales, fold, preceding, smoothquant_scales
from engine.model.quantization.gptq import nearest
from engine.model.quantization.input_statistics import InputStatistics
from engine.model.quantization.layerwise import LayerwiseModel, LinearName, Projection, projections
from tests.engine.model import tiny

pytestmark = pytest.mark.slow

WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TEXTS = [[(7 * at + 11 * text) % 380 + 3 for at in range(40)] for text in range(3)]


class ReplacedWeights(Weights):
    """A checkpoint with some tensors in the place of its own."""

    def __init__(self, weights: Weights, replaced: dict[str, Tensor]) -> None:
        super().__init__(weights.place)
        self._weights, self._replaced = weights, replaced

    def names(self) -> Iterable[str]:
        return self._weights.names()

    def parameters(self) -> int:
        return self._weights.parameters()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._replaced[name] if name in self._replaced else self._weights.take(name, shape)


def checkpoint(name: str, folder: Path) -> Path:
    config, model, overrides = tiny.MODELS[name]
    return tiny.save(tiny.build(config, model, {**overrides, **WIDTHS, "num_hidden_layers": 2}), folder / name)


def rounded(weight: Tensor) -> Tensor:
    return nearest(weight, 4, 32, torch.float32).dequantize()


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.parametrize(
    "name",
    ["llama_biased", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "granite", "olmo2", "cohere2", "lfm2_four_taps"],
)
def test_folding_leaves_the_model_as_it_is(name: str, method: str, tmp_path: Path) -> None:
    model = LayerwiseModel(checkpoint(name, tmp_path))
    assert isinstance(model.weights, SafetensorsWeights)
    plain, folded, scaled = model.embed(TEXTS), model.embed(TEXTS), 0
    for index in range(model.spec.layers):
        inputs: dict[LinearName, InputStatistics] = {}
        layer = model.layer(index)

        def observe(linear: LinearName, x: Tensor, inputs: dict[LinearName, InputStatistics] = inputs) -> None:
            inputs.setdefault(linear, InputStatistics(120, moments=False)).add(x)

        plain = list(model.outputs(index, layer, plain, observe))
        prefix = f"{model.names.root}layers.{index}."
        tensors = {each: model.weights.stored(each) for each in model.weights.names() if each.startswith(prefix)}
        parts = projections(model.spec, model.names, index)
        for linear, before in preceding(model.spec, model.names, index, parts).items():
            weights = [tensors[f"{part.name}.weight"].float() for part in parts[linear]]
            sample = inputs[linear].sample
            if method == "awq":
                scales, _ = awq_scales(weights, sample, rounded, before)
            elif before.rows is None:
                scales, _ = smoothquant_scales(weights, sample, rounded)
            else:
                continue
            scaled += int((scales / scales[0] - 1).abs().max() > 0.05)
            fold(tensors, before, parts[linear], scales, model.spec.norm_offset)
        folded = list(model.outputs(index, model.layer(index, ReplacedWeights(model.weights, tensors)), folded))
    wanted, found = (model.log_probs(torch.cat(states)) for states in (plain, folded))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert scaled > 1 or (name in ("olmo2", "cohere2") and method == "smoothquant")  # no linear has a norm of its own


def test_a_norm_of_16_bits_is_divided_exactly() -> None:
    random = torch.Generator().manual_seed(0)
    norm = torch.randn(256, generator=random).bfloat16()
    norm[7] = 0.0
    weight = torch.randn(32, 256, generator=random).bfloat16()
    scales = torch.rand(256, generator=random) * 4 + 0.25
    for offset in (0.0, 1.0):
        tensors = {"norm.weight": norm, "linear.weight": weight}
        fold(tensors, Preceding("norm"), [Projection("linear", 32, 256)], scales, offset)
        assert tensors["norm.weight"].dtype == torch.bfloat16
        before = (norm.double() + offset) * weight.double()
        after = (tensors["norm.weight"].double() + offset) * tensors["linear.weight"].double()
        assert torch.allclose(after, before, rtol=3e-7, atol=0)


def test_a_search_is_never_worse_than_no_scales_and_helps_where_channels_stand_out() -> None:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 128, generator=random)
    sample = torch.randn(200, 128, generator=random)
    sample[:, ::16] *= 30

    def error(scales: Tensor) -> float:
        return float((sample @ (rounded(weight * scales) / scales - weight).t()).square().sum())

    scales, power = awq_scales([weight], sample, rounded, Preceding("norm"))
    assert power > 0 and error(scales) < 0.7 * error(torch.ones(128))
    flat = torch.ones(200, 128)
    scales, power = awq_scales([weight], flat, rounded, Preceding("norm"))
    assert torch.equal(scales, torch.ones(128)) and power == -1


def test_heads_that_attend_to_the_same_values_have_the_same_scales() -> None:
    random = torch.Generator().manual_seed(2)
    sample = torch.randn(100, 64, generator=random) * torch.linspace(0.1, 5, 64)
    scales, _ = awq_scales(
        [torch.randn(32, 64, generator=random)], sample, rounded, Preceding("v", slice(0, 32), 2, 16)
    )
    heads = scales.view(2, 2, 16)
    assert torch.equal(heads[:, 0], heads[:, 1]) and not torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("sizes", [(1, 2, 3), (400, 700, 1300, 5)])
def test_a_sample_is_spread_evenly_over_all_inputs(sizes: tuple[int, ...]) -> None:
    tokens = sum(sizes)
    rows = torch.arange(tokens, dtype=torch.float32)[:, None]
    statistics = InputStatistics(tokens, moments=True)
    for part in rows.split(list(sizes)):
        statistics.add(part)
    every = -(-tokens // 1024)
    assert statistics.sample[:, 0].tolist() == list(range(0, tokens, every))
    assert float(statistics.hessian) == pytest.approx(float(rows.double().square().sum()))
