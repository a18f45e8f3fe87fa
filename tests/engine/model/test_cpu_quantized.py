"""Weights of 8 and 4 bits on the CPU: the kernels multiply what was rounded, a row by itself, on every instruction set,
and torch does 8 bits where they do not run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine import EngineConfig, InvalidParameter
from engine.config import QuantizationName
from engine.kernels import cpu
from engine.kernels.cpu.binding import GroupedWeight, alternating
from engine.kernels.cpu.compiling import OPTIONS
from engine.model import native_layers
from engine.model.decoder import load_decoder
from engine.model.linear import Linear, Packing, default_dtype, multiplies_int8, pack_int8
from engine.model.memory import find_dtype, needs_of, spec_of
from engine.model.model_spec import ModelSpec
from engine.model.quantization.quantized_weight import AffineWeight, round_to_nearest
from tests.engine.model import tiny
from tests.engine.model.instruction_sets import kernels_for
from tests.engine.model.stepping import Stepper, apart

needs_kernels = pytest.mark.skipif(cpu.library() is None, reason=f"no kernels in C++ here: {cpu.unavailable()}")
SIZES = {
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 192,
    "vocab_size": 389,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FORMS = [  # bits, columns of a scale (0: the row), symmetric
    *((8, 0, True), (8, 32, True), (8, 16, False), (8, 64, False)),
    *((4, 0, True), (4, 32, True), (4, 16, False), (4, 32, False), (4, 64, True)),
]
BYTES = [name for name in OPTIONS if name != "AMX"]  # where int8 weights are no tiles


@pytest.fixture(scope="module", params=OPTIONS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_for(request.param) as name:
        yield name


@pytest.fixture(scope="module", params=["qwen3", "llama_biased"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, overrides = tiny.MODELS[request.param]
    made = tiny.build(config, model, {**overrides, **SIZES})
    return tiny.save(made.to(torch.bfloat16), tmp_path_factory.mktemp(request.param))


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, 380) for _ in range(length)] for length in (1, 7, 16, 33, 90)]


def rounded(out: int, width: int, bits: int, group: int, symmetric: bool) -> AffineWeight:
    torch.manual_seed(out + width)
    return round_to_nearest(torch.randn(out, width) + 0.2, bits, group or width, symmetric)


def packed(weight: AffineWeight, bias: Tensor | None = None, *, gated: bool = False) -> GroupedWeight:
    return native_layers.pack_affine(weight, bias, gated=gated)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rounding_is_within_half_a_step(form: tuple[int, int, bool]) -> None:
    bits, group, symmetric = form
    weight = torch.randn(40, 128) + 0.2
    made = round_to_nearest(weight, bits, group or 128, symmetric)
    steps = made.scales.abs().repeat_interleave(made.group, 1)
    # the end that has a step less is cut off, at 4 bits and symmetric: by half a step more at most
    assert ((made.dequantize() - weight).abs() <= steps * (1.001 if bits == 4 and symmetric else 0.501)).all()
    assert int(made.codes.max()) < 2**bits


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("out", "width"), [(31, 64), (200, 192), (96, 4096)])
@pytest.mark.usefixtures("kernels")
def test_a_layer_multiplies_what_it_was_rounded_to(form: tuple[int, int, bool], out: int, width: int) -> None:
    weight, bias = rounded(out, width, *form), torch.randn(out)
    layer = packed(weight, bias)
    for rows in (1, 2, 5, 16, 17, 33, 100):
        x = torch.randn(rows, width).bfloat16()
        # activations of 8 bits: a step of 1/127 of the largest of at most 128 values, about 3 deviations
        assert apart(layer(x).float(), x.float() @ weight.dequantize().T + bias) < 1.5e-2


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.usefixtures("kernels")
def test_a_rows_product_has_the_same_bits_among_any_number_of_rows(form: tuple[int, int, bool]) -> None:
    layer = packed(rounded(72, 320, *form))
    x = torch.randn(70, 320).bfloat16()
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in (*range(2, 19), 33, 70):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


@needs_kernels
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_have_the_same_bits_on_all_instruction_sets(form: tuple[int, int, bool]) -> None:
    weight, x, found = rounded(72, 320, *form), torch.randn(5, 320).bfloat16(), []
    for name in cpu.build.instruction_sets():
        with kernels_for(name):
            found.append(packed(weight)(x))
    assert all(torch.equal(each, found[0]) for each in found)


@needs_kernels
def test_extreme_numbers_do_not_overflow() -> None:
    weight = AffineWeight(torch.full((32, 4096), 255, dtype=torch.uint8), torch.ones(32, 1), None, 8, 4096, 128)
    x = torch.full((3, 4096), 2.0).bfloat16()
    for name in cpu.build.instruction_sets():
        with kernels_for(name):
            assert torch.allclose(packed(weight)(x).float(), torch.tensor(127.0 * 4096 * 2), rtol=4e-3)


@needs_kernels
def test_gate_and_up_alternate_with_their_scales() -> None:
    weight = rounded(64, 64, 4, 32, False)
    bias, x = torch.randn(64), torch.randn(3, 64).bfloat16()
    expected = alternating((x.float() @ weight.dequantize().T + bias).T).T
    assert apart(packed(weight, bias, gated=True)(x).float(), expected) < 1e-2


def test_rows_of_zeros_and_tokens_of_zeros_stay_so() -> None:
    made = round_to_nearest(torch.zeros(32, 64), 4, 32, symmetric=True)
    assert not made.dequantize().any()
    if cpu.library() is not None:
        assert not packed(made)(torch.randn(2, 64).bfloat16()).any()
        assert not packed(rounded(32, 64, 4, 32, True))(torch.zeros(2, 64).bfloat16()).any()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.usefixtures("kernels")
def test_a_decoder_is_the_model_of_its_rounded_weights(checkpoint: Path, quantization: QuantizationName) -> None:
    def exact(bits: int, weight: Tensor, bias: Tensor | None) -> Linear:
        made = round_to_nearest(weight, bits, 32 if bits == 4 else weight.shape[1], symmetric=True)
        return partial(F.linear, weight=made.dequantize(), bias=bias)

    inner = partial(exact, 4 if quantization == "int4" else 8)
    whole = load_decoder(checkpoint, dtype=torch.float32, packing=Packing(inner, inner, partial(exact, 8)))
    decoder = load_decoder(checkpoint, dtype=torch.bfloat16, quantization=quantization, deterministic=True)
    assert decoder.native
    wanted, found = (torch.cat(Stepper(each, prompts()).run(300)) for each in (whole, decoder))
    assert apart(found, wanted) < 0.06  # bfloat16 alone is 0.01 to 0.02 apart, activations of 8 bits the rest


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_tokens_bits_do_not_depend_on_its_batch(checkpoint: Path, quantization: QuantizationName) -> None:
    for name in BYTES:
        if name not in cpu.build.instruction_sets():
            continue
        with kernels_for(name):
            decoder = load_decoder(checkpoint, dtype=torch.bfloat16, quantization=quantization)
            alone = [Stepper(decoder, [prompt]).run(300)[0] for prompt in prompts()]
            together = Stepper(decoder, prompts(), seed=2).run(13)
            assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
            assert native_layers.invariant(quantization)


@needs_kernels
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_memory_is_told(checkpoint: Path, quantization: QuantizationName) -> None:
    name = next(each for each in cpu.build.instruction_sets() if each in BYTES)
    with kernels_for(name):
        decoder = load_decoder(checkpoint, dtype=torch.bfloat16, quantization=quantization)
        layers = [layer for each in decoder._layers for layer in (each.qkv, each.o, each.gate_up, each.down)]
        held = sum(layer.tiles.nbytes for layer in (*layers, decoder.lm_head) if isinstance(layer, GroupedWeight))
        config = EngineConfig(str(checkpoint), device="cpu", quantization=quantization)
        assert needs_of(config).weights == pytest.approx(held + decoder._embedding.nbytes, rel=0.08)


@needs_kernels
def test_a_model_is_run_in_bfloat16_wherever_the_kernels_run_it(checkpoint: Path) -> None:
    config, device, spec = EngineConfig(str(checkpoint)), torch.device("cpu"), spec_of(checkpoint)

    def found(spec: ModelSpec = spec, **options: Any) -> torch.dtype:
        return find_dtype(replace(config, **options), device, spec)

    hardware = default_dtype(device)
    with kernels_for("AVX2"):
        assert found() == found(quantization="int4") == found(kv_dtype="int4") == torch.bfloat16
        assert found(dtype="float32") == found(dtype="float32", quantization="int4") == torch.float32
        assert found(kernels="torch") == found(kv_dtype="int8") == hardware
        assert found(replace(spec, attention_softcap=50.0)) == hardware
        assert found(replace(spec, attention_softcap=50.0), quantization="int8") == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vnni", [False, True])
@pytest.mark.skipif(not multiplies_int8(), reason="torch has no product of 8 bits here")
def test_torch_multiplies_rows_of_8_bits(
    rows: int, dtype: torch.dtype, vnni: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vnni and not torch.cpu._is_vnni_supported():
        pytest.skip("the processor has no VNNI")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 256).to(dtype), torch.randn(40).to(dtype)
    x = (torch.randn(rows, 256) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    layer = pack_int8(weight, bias)
    expected = x.float() @ weight.float().T + bias
    for row, wanted in zip(layer(x).float(), expected, strict=True):
        assert apart(row[None], wanted[None]) < (0.03 if vnni else 0.06)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


@pytest.mark.parametrize("how", [{"dtype": torch.float32}, {"dtype": torch.bfloat16, "kernels": "torch"}])
@pytest.mark.skipif(not multiplies_int8(), reason="torch has no product of 8 bits here")
def test_torch_runs_int8_where_the_kernels_do_not(checkpoint: Path, how: dict[str, Any]) -> None:
    exact = torch.cat(Stepper(load_decoder(checkpoint, dtype=torch.float32), prompts()).run(300))
    decoder = load_decoder(checkpoint, quantization="int8", **how)
    assert not decoder.native
    assert apart(torch.cat(Stepper(decoder, prompts()).run(300)), exact) < 0.2


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"dtype": torch.float32}, "the model is float32 on cpu"),
        ({"dtype": torch.bfloat16, "kernels": "torch"}, "kernels is torch, or K/V is in 8 bits"),
    ],
)
def test_int4_is_refused_where_the_kernels_do_not_run(checkpoint: Path, how: dict[str, Any], why: str) -> None:
    if cpu.library() is None:
        why = cpu.unavailable()
    with pytest.raises(InvalidParameter, match=rf"{why.replace('(', '.').replace(')', '.')}; accepted: none"):
        load_decoder(checkpoint, quantization="int4", **how)


def test_int4_is_refused_without_a_processor_for_it(checkpoint: Path) -> None:
    with kernels_for(""), pytest.raises(InvalidParameter, match="the processor has no AVX2; accepted: none"):
        load_decoder(checkpoint, dtype=torch.bfloat16, quantization="int4")
