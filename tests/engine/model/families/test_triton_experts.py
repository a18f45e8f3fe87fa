"""Experts on the Triton kernels, interpreted in float32, against the same layers of `transformers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.decoder import Decoder, load_decoder
from engine.model.linear import Dense, Packing
from engine.model.mlp.experts import RoutedExperts
from engine.model.mlp.gpu_experts import GpuExperts
from engine.model.model_spec import ModelSpec
from tests.engine.model import tiny

pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "ernie4_5_moe", "glm4_moe")
TOKENS = 40  # of all experts


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> tuple[str, torch.nn.Module]:
    return request.param, tiny.build(*tiny.MODELS[request.param])


@pytest.fixture(scope="module")
def loaded(model: tuple[str, torch.nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = tiny.save(model[1], tmp_path_factory.mktemp(model[0]))
    return load_decoder(path, dtype=torch.float32, kernels="torch", packing=Packing(Dense, Dense))


def inputs(hidden: int) -> Tensor:
    return torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(3))


def on_triton(spec: ModelSpec, mixture: RoutedExperts, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return GpuExperts(spec, mixture, torch.float32, interpreted=True)(x)


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_experts_are_those_of_transformers(model: tuple[str, torch.nn.Module], loaded: Decoder) -> None:
    x, spec, mixed = inputs(loaded.spec.hidden_size), loaded.spec, 0
    for index, layer in enumerate(loaded._layers):
        if layer.mixture is None:
            continue
        block = model[1].get_submodule(f"model.layers.{index}.mlp")
        with torch.inference_mode():
            expected = block(x[None])
        expected = (expected[0] if isinstance(expected, tuple) else expected).view(x.shape)
        assert apart(on_triton(spec, layer.mixture, x), expected) < 1e-4
        mixed += 1
    assert spec.experts is not None and mixed == len(spec.experts.layers) > 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_model_has_products_of_one_tile(tmp_path: Path, deterministic: bool) -> None:
    """The interpreter's bits would be the same with others."""
    config, model, overrides = tiny.MODELS["qwen2_moe"]
    made = tiny.build(config, model, {**overrides, "hidden_size": 96})
    path = tiny.save(made.to(torch.float16), tmp_path)
    decoder = load_decoder(path, dtype=torch.float16, kernels="triton", deterministic=deterministic)
    assert decoder._gpu is not None
    mixed = [each for each in decoder._gpu._experts if each is not None]
    assert mixed and all(each._mix.keywords["invariant"] is deterministic for each in mixed)


@pytest.mark.slow
def test_each_part_of_the_routing_counts(model: tuple[str, torch.nn.Module], loaded: Decoder) -> None:
    """Drops each part of a family's routing in turn."""
    spec, x = loaded.spec, inputs(loaded.spec.hidden_size)
    of, mixture = spec.experts, next(layer.mixture for layer in loaded._layers if layer.mixture is not None)
    assert of is not None
    whole = on_triton(spec, mixture, x)
    without = {"normalised": replace(of, normalised=not of.normalised)}
    if of.scores == "sigmoid":
        without["scores"] = replace(of, scores="softmax")
    if of.groups is not None:
        without["groups"] = replace(of, groups=None)
    if of.scaling != 1.0:
        without["scaling"] = replace(of, scaling=1.0)
    for name, changed in without.items():
        assert apart(on_triton(replace(spec, experts=changed), mixture, x), whole) > 1e-2, name
    missing = {
        "selection_bias": replace(mixture, selection_bias=None),
        "shared": replace(mixture, shared=None, shared_gate=None),
        "shared_gate": replace(mixture, shared_gate=None),
    }
    for name, less in missing.items():
        if getattr(mixture, name) is not None:
            assert apart(on_triton(spec, less, x), whole) > 1e-2, name
