"""Families with parts of their own on the Triton kernels, interpreted in float32, against `transformers`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.families import family_of
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder
from engine.model.gpu_layers import GpuLayers
from engine.model.linear import Dense, Packing
from engine.model.loader import SafetensorsWeights, read_json
from engine.model.model_spec import ModelSpec
from tests.engine.model import tiny
from tests.engine.model.families.features import TOLERANCE, VISIBLE
from tests.engine.model.stepping import Stepper, apart
from tests.engine.multimodal import seeing_gemma4

pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")

FAMILIES: dict[str, dict[str, Any]] = {  # Any: arguments of untyped configuration classes
    "gpt_oss": {},
    "ministral3": {"head_dim": 16},
    "cohere": {"head_dim": 16, "hidden_size": 96},
    "cohere2": {"head_dim": 16, "hidden_size": 96},
    "llama4": {"head_dim": 16},
    "gemma4": {"head_dim": 16, "global_head_dim": 32},
    "gemma4_moe": {"head_dim": 16, "global_head_dim": 32},
}
LENGTHS = (1, 47, 150)


def on_triton(path: Path, change: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}) -> Decoder:
    """Runs a checkpoint on the kernels in float32, which serve 16 bits alone; `change` gives other fields of its spec.
    Any: fields of ModelSpec."""
    config = read_json(path / "config.json")
    family = family_of(config)
    spec = family.spec(config)
    changed, weights, cpu = replace(spec, **change(spec)), SafetensorsWeights(path), torch.device("cpu")
    options: dict[str, Any] = {"dtype": torch.float32, "device": cpu, "packing": Packing(Dense, Dense)}
    decoder = Decoder(changed, family.names(config), weights, kernels="torch", **options)
    decoder._gpu = GpuLayers(changed, decoder._layers, torch.float32, cpu)
    return decoder


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A family, its checkpoint, and the logits of transformers. Any: of pytest's parameters."""
    config, model, overrides = tiny.MODELS[request.param]
    built = tiny.build(config, model, {**overrides, **FAMILIES[request.param]})
    with torch.no_grad():
        expected = [built(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    return request.param, tiny.save(built, tmp_path_factory.mktemp(request.param)), expected


def prompts() -> list[list[int]]:
    draw = random.Random(11)
    return [[draw.randrange(3, 380) for _ in range(length)] for length in LENGTHS]


@pytest.mark.slow
def test_logits_are_those_of_transformers(made: tuple[str, Path, Any]) -> None:
    """In chunks, then one token at a time beside another row and alone, as decodes are; the longest one's keys are read
    in parts then."""
    stepper, found = Stepper(on_triton(made[1]), prompts(), seed=1), [list[torch.Tensor]() for _ in LENGTHS]
    for chunks in ([1, 40, 60], [0, 4, 50], [0, 1, 29], [0, 1, 1], [0, 1, 1], [0, 0, 8], [0, 0, 1]):
        for parts, logits in zip(found, stepper.step(chunks), strict=True):
            parts.append(logits)
    for parts, expected in zip(found, made[2], strict=True):
        assert apart(torch.cat(parts), expected) < TOLERANCE


def of_experts(**changed: object) -> Callable[[ModelSpec], dict[str, Any]]:
    """Any: fields of Experts."""
    return lambda spec: {"experts": replace(spec.experts, **changed)}  # type: ignore[type-var]  # of a mixture


def without_growth(spec: ModelSpec) -> dict[str, Any]:
    return {"ropes": tuple(None if rope is None else replace(rope, query_beta=0.0) for rope in spec.ropes)}


PARTS: list[tuple[str, str, Callable[[ModelSpec], dict[str, Any]]]] = [
    ("gpt_oss", "sinks", lambda spec: {"sinks": False}),
    ("gpt_oss", "clamped gates", of_experts(gate=None)),
    ("gpt_oss", "the experts' biases", lambda spec: {"mlp_bias": False}),
    ("ministral3", "growing queries", without_growth),
    ("cohere", "the mean", lambda spec: {"norm": "rms"}),
    ("cohere", "norms of heads", lambda spec: {"qk_norm": "none"}),
    ("cohere2", "the mean", lambda spec: {"norm": "rms"}),
    ("llama4", "chunks", lambda spec: {"chunked": False}),
    ("llama4", "growing queries", without_growth),
    ("llama4", "scaled inputs", of_experts(scaled_inputs=False)),
    ("llama4", "norms of rotated heads", lambda spec: {"qk_norm": "none"}),
    ("gemma4", "norms of values", lambda spec: {"value_norm": False}),
    ("gemma4", "keys of another layer", lambda spec: {"kv_sources": (None, None, None, None, 0, 1)}),
    ("gemma4", "inputs of layers", lambda spec: {"per_layer_input": None}),
    ("gemma4", "scales of layers", lambda spec: {"layer_scales": False}),
    ("gemma4_moe", "factors of experts", of_experts(weight_scales=False)),
]
FAR = {"chunks", "growing queries"}  # which nothing shows of in the first tokens


@pytest.mark.slow
def test_each_part_counts(made: tuple[str, Path, Any]) -> None:
    """Drops each part that sets a family apart from those that ran before."""
    parts = [(part, change) for family, part, change in PARTS if family == made[0]]
    assert parts
    for part, change in parts:
        which = 2 if part in FAR else 1
        found = Stepper(on_triton(made[1], change), [prompts()[which]], seed=1).run(150)[0]
        assert apart(found, made[2][which]) > VISIBLE, part


@pytest.mark.slow
def test_an_images_tokens_attend_ahead_in_layers_that_slide_alone(tmp_path: Path) -> None:
    """As on torch, which is held to transformers with images; in layers that see all they attend to earlier ones."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 32}
    path = seeing_gemma4.write(tmp_path, seeing_gemma4.build(large=True, text=sizes))
    decoder, order = on_triton(path), torch.arange(70)
    assert decoder.spec.windowed_images
    last = order.clone()
    last[20:60] = 59
    table = torch.arange(1, 6)[None]
    plain = Batch(order * 5 % 380, order, order + 16, (0, 70), (70,), table, order)
    batch = replace(plain, last_keys=last, mutual=((0, 20, 60),))

    def logits(given: Batch) -> torch.Tensor:
        return decoder.forward(given, KVCache.of(decoder.spec, 6, 16, torch.float32, "cpu"))

    found, causal = logits(batch), logits(plain)
    decoder._gpu = None
    assert apart(found, logits(batch)) < TOLERANCE
    assert apart(causal, found) > VISIBLE
