"""FP8, MXFP4 and bitsandbytes' 4-bit types: 20 random tensors of each variant are read as they were packed.

MXFP4 is held to `transformers`' own dequantisation. FP8 and bitsandbytes are packed here from the published definitions
(DeepSeek-V3's weights file, QLoRA's appendix); where bitsandbytes is installed, its own packing is read, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.decoder import load_decoder
from engine.model.quantization.checkpoint import open_weights
from engine.model.quantization.small_floats import mxfp4
from tests.engine.model import tiny
from tests.engine.model.quantization.test_packed_integers import (
    OUT,
    WIDTH,
    checkpoint,
    compressed,
    generators,
    read,
)
from tests.engine.model.stepping import Stepper, apart

IN_BLOCKS = {"hidden_size": 64, "intermediate_size": 32}  # of 32 values


def eight_bits(random: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return (torch.randn(shape, generator=random) * 100).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(), (1,), (OUT,), (OUT, 1)])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8_with_a_scale_for_the_tensor_or_each_row(tmp_path: Path, method: str, shape: tuple[int, ...]) -> None:
    settings = {"quant_method": "fp8"} if method == "fp8" else compressed("float-quantized", 8, "float")
    for random in generators():
        weight, scales = eight_bits(random, (OUT, WIDTH)), torch.rand(shape, generator=random)
        parts = {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(())}
        dense, affine = read(checkpoint(tmp_path, settings, parts))
        assert torch.equal(dense, weight.float() * (scales[:, None] if shape == (OUT,) else scales))
        assert affine is None


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8_with_a_scale_for_each_block(tmp_path: Path, method: str) -> None:
    settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [20, 24]}  # the last blocks are cut off
    if method != "fp8":
        settings = compressed("float-quantized", 8, "float", strategy="block", block_structure=[20, 24])
    name = "weight_scale_inv" if method == "fp8" else "weight_scale"
    for random in generators():
        weight, scales = eight_bits(random, (OUT, WIDTH)), torch.rand(3, 3, generator=random)
        dense, _ = read(checkpoint(tmp_path, settings, {"weight": weight, name: scales}))
        expected = weight.float()
        for row in range(OUT):
            for column in range(WIDTH):
                expected[row, column] *= scales[row // 20, column // 24]
        assert torch.equal(dense, expected)


def test_mxfp4_is_transformers_own(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for random in generators():
        blocks = torch.randint(0, 256, (2, OUT, WIDTH // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(100, 150, (2, OUT, WIDTH // 32), generator=random, dtype=torch.uint8)
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        assert torch.equal(mxfp4(blocks, scales), expected)


def test_mxfp4_experts_are_taken_under_the_name_of_the_weight(tmp_path: Path) -> None:
    random, name = next(generators()), "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.randint(0, 256, (2, OUT, WIDTH // 32, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, OUT, WIDTH // 32), generator=random, dtype=torch.uint8)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert torch.equal(weights.take(name, (2, WIDTH, OUT)).float(), mxfp4(blocks, scales).transpose(1, 2))
    weights.check_all_used(())
    assert weights.parameters() == 2 * OUT * WIDTH


def test_gpt_oss_with_experts_in_mxfp4_is_the_model_of_their_values(tmp_path: Path) -> None:
    random = next(generators())
    model = tiny.build("GptOssConfig", "GptOssForCausalLM", {**tiny.MODELS["gpt_oss"][2], **IN_BLOCKS})
    tiny.save(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        count, width, out = stored.pop(name).shape
        blocks = torch.randint(0, 256, (count, out, width // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(120, 126, (count, out, width // 32), generator=random, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data.copy_(mxfp4(blocks, scales).transpose(1, 2))
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    prompt = list(range(3, 63))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    assert apart(Stepper(load_decoder(tmp_path, dtype=torch.float32), [prompt]).run(23)[0], expected) < 1e-4


def nf4_table() -> Tensor:
    """QLoRA's quantiles of a normal distribution; any table of 16 values in [-1, 1] is read alike."""
    return torch.linspace(-1, 1, 16) ** 3


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bits(tmp_path: Path, kind: str, nested: bool) -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    blocks, table = OUT * WIDTH // 16, nf4_table()
    for random in generators():
        codes = torch.randint(0, 16, (OUT * WIDTH,), generator=random, dtype=torch.uint8)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 16, "dtype": "bfloat16", "shape": [OUT, WIDTH]}
        parts = {"weight": (codes[0::2] << 4 | codes[1::2])[:, None], "weight.quant_map": table}
        absmax = torch.rand(blocks, generator=random)
        if nested:
            state |= {"nested_blocksize": 64, "nested_dtype": "float32", "nested_offset": 0.25}
            levels, scales = torch.linspace(-1, 1, 256), torch.rand(blocks // 64, generator=random)
            chosen = torch.randint(0, 256, (blocks,), generator=random, dtype=torch.uint8)
            absmax = torch.stack([levels[int(chosen[i])] * scales[i // 64] + 0.25 for i in range(blocks)])
            parts |= {"weight.absmax": chosen, "weight.nested_absmax": scales, "weight.nested_quant_map": levels}
        else:
            parts["weight.absmax"] = absmax
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
        dense, affine = read(checkpoint(tmp_path, settings, parts))
        expected = table[codes.long()] * absmax.repeat_interleave(16)
        assert torch.equal(dense, expected.view(OUT, WIDTH))
        assert affine is None


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_own_packing(tmp_path: Path, kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; it is optional").functional
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    for random in generators():
        weight = torch.randn(OUT, WIDTH, generator=random)
        stored, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        dense, _ = read(checkpoint(tmp_path, settings, {"weight": stored, **parts}))
        assert (dense - functional.dequantize_4bit(stored, state)).abs().max() <= 1e-6


def test_parameters_are_counted_as_if_dequantised(tmp_path: Path) -> None:
    blocks = OUT * WIDTH // 64
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [OUT, WIDTH]}
    parts = {
        "weight": torch.zeros(OUT * WIDTH // 2, 1, dtype=torch.uint8),
        "weight.quant_map": nf4_table(),
        "weight.absmax": torch.zeros(blocks),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).byte(),
    }
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert open_weights(checkpoint(tmp_path, settings, parts)).parameters() == OUT * WIDTH
