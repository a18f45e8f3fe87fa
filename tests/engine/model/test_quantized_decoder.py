"""Decoders on quantised weights as a GPU has them, computed by the torch reference: near the whole model, int8
nearer."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.nn import functional as F

from engine import EngineConfig
from engine.kernels.quantized import QuantizedWeight, dequantize, packing
from engine.model.decoder import load_decoder
from engine.model.linear import Linear, Pack, Packing
from engine.model.memory import needs_of
from tests.engine.model import tiny
from tests.engine.model.stepping import Stepper, apart

SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 389,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Name = Literal["int8", "int4"]


@pytest.fixture(scope="module", params=["qwen3", "llama_biased"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, overrides = tiny.MODELS[request.param]
    made = tiny.build(config, model, {**overrides, **SIZES})
    return tiny.save(made.to(torch.bfloat16), tmp_path_factory.mktemp(request.param))


def kept(layer: Linear) -> QuantizedWeight:
    assert isinstance(layer, partial)
    weight = layer.keywords["weight"]
    assert isinstance(weight, QuantizedWeight)
    return weight


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, 380) for _ in range(length)] for length in (1, 7, 40)]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_quantised_decoder_is_the_model_of_its_rounded_weights(checkpoint: Path, name: Name) -> None:
    made = packing(name)
    assert made.head is not None

    def rounded(pack: Pack) -> Pack:
        return lambda weight, bias: partial(F.linear, weight=dequantize(kept(pack(weight, bias))), bias=bias)

    whole = Packing(rounded(made.plain), rounded(made.gated), rounded(made.head))
    wanted, found = (
        torch.cat(Stepper(load_decoder(checkpoint, dtype=torch.float32, packing=each), prompts()).run(16))
        for each in (whole, made)
    )
    assert apart(found, wanted) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantised_decoder_stays_near_the_whole_one(checkpoint: Path, dtype: torch.dtype) -> None:
    exact = torch.cat(Stepper(load_decoder(checkpoint, dtype=torch.float32), prompts()).run(16))
    names: tuple[Name, ...] = ("int8", "int4")
    errors = [
        torch.cat(Stepper(load_decoder(checkpoint, dtype=dtype, packing=packing(name)), prompts()).run(16)) - exact
        for name in names
    ]
    found = [float(error.norm() / exact.norm()) for error in errors]
    assert found[0] < 0.06 and found[1] < 0.5
    assert found[0] < found[1] / 3


def test_only_the_logits_of_int4_are_in_eight_bits() -> None:
    made, weight = packing("int4", invariant=True), torch.ones(4, 64)
    assert made.head is not None
    assert [kept(pack(weight, None)).bits for pack in (made.plain, made.gated, made.head)] == [4, 4, 8]


def test_memory_is_told_for_int4(checkpoint: Path) -> None:
    weights = {
        name: needs_of(EngineConfig(str(checkpoint), device="cpu", dtype="bfloat16", quantization=name)).weights
        for name in ("none", "int8", "int4")
    }
    assert weights["int4"] < weights["int8"] < weights["none"] * 1.1
    decoder = load_decoder(checkpoint, dtype=torch.bfloat16, packing=packing("int4"))
    layers = [layer for each in decoder._layers for layer in (each.qkv, each.o, each.gate_up, each.down)]
    held = sum(kept(layer).nbytes for layer in (*layers, decoder.lm_head))
    assert weights["int4"] == pytest.approx(held + decoder._embedding.nbytes, rel=0.08)
