"""Whole checkpoints with a quantization_config: what runs gives the logits of the same weights as floats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.decoder import load_decoder
from engine.model.memory import weight_bytes
from engine.model.quantization.checkpoint import open_weights
from tests.engine.model import tiny
from tests.engine.model.quantization.test_packed_integers import checkpoint, compressed, packed
from tests.engine.model.stepping import Stepper

PROMPT = [(5 * i * i + 11 * i) % 380 + 3 for i in range(40)]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unquantised checkpoint."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    return tiny.save(tiny.build("LlamaConfig", "LlamaForCausalLM", sizes), tmp_path_factory.mktemp("plain"))


def quantized(plain: Path, to: Path, method: str) -> tuple[Path, Path]:
    """Round every projection, and save it in `method`'s layout and as floats: two directories."""
    config = json.loads((plain / "config.json").read_text())
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = floats[name] = weight
            continue
        stem = name.removesuffix(".weight")
        if method == "gptq":
            groups = weight.unflatten(1, (-1, 16))
            scales = (groups.abs().amax(-1) / 7).half()
            codes = ((groups / scales[..., None].float()).round() + 8).clamp(0, 15)
            floats[name] = ((codes - 8) * scales[..., None].float()).flatten(1)
            stored[f"{stem}.qweight"] = packed(codes.flatten(1).t(), 4, 0)
            stored[f"{stem}.qzeros"] = packed(torch.full(scales.t().shape, 7), 4, 1)
            stored[f"{stem}.scales"] = scales.t().contiguous()
            stored[f"{stem}.g_idx"] = (torch.arange(weight.shape[1]) // 16).int()
            stored[f"{stem}.bias"] = torch.zeros(weight.shape[0])  # as AutoGPTQ has it for layers without one
        else:
            scales = (weight.abs().amax(1, keepdim=True) / 400).float()
            stored[name] = (weight / scales).to(torch.float8_e4m3fn)
            stored[f"{stem}.weight_scale"] = scales
            floats[name] = stored[name].float() * scales
    settings = GPTQ if method == "gptq" else compressed("float-quantized", 8, "float", strategy="channel")
    for path, tensors, changes in ((to / "q", stored, {"quantization_config": settings}), (to / "f", floats, {})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(tensors, path / "model.safetensors")
    return to / "q", to / "f"


@pytest.mark.parametrize("method", ["gptq", "float-quantized"])
def test_logits_are_those_of_the_same_weights_as_floats(tmp_path: Path, plain: Path, method: str) -> None:
    paths = quantized(plain, tmp_path, method)
    logits = [Stepper(load_decoder(path, dtype=torch.float32), [PROMPT]).step([len(PROMPT)])[0] for path in paths]
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("method", ["gptq", "float-quantized"])
def test_memory_is_estimated_for_dequantised_weights(tmp_path: Path, plain: Path, method: str) -> None:
    path, _ = quantized(plain, tmp_path, method)
    exact = open_weights(plain).parameters() * 2
    assert exact <= weight_bytes(path, torch.bfloat16) <= 1.01 * exact


def test_a_bias_that_is_not_read_is_refused_unless_it_is_zero(tmp_path: Path, plain: Path) -> None:
    path, _ = quantized(plain, tmp_path, "gptq")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 0.5
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are not part of this architecture.*0\.mlp\.up_proj\.bias"):
        load_decoder(path, dtype=torch.float32)


def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    parts = {"qweight": torch.zeros(8, 48).int(), "qzeros": torch.zeros(1, 6).int(), "scales": torch.ones(1, 40)}
    weights = open_weights(checkpoint(tmp_path, GPTQ, parts))
    with pytest.raises(CheckpointError, match=r"up_proj.scales' is of shape \(1, 40\); accepted: shape \(1, 48\)"):
        weights.take("model.layers.0.mlp.up_proj.weight", (48, 64))


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    weights = open_weights(checkpoint(tmp_path, GPTQ, {"qweight": torch.zeros(8, 48).int()}))
    with pytest.raises(CheckpointError, match=r"up_proj.scales' is missing"):
        weights.take("model.layers.0.mlp.up_proj.weight", (48, 64))


REFUSED: Mapping[str, tuple[Any, str]] = {
    "a method": ({"quant_method": "aqlm"}, "quant_method is 'aqlm'; supported: gptq, awq, compressed-tensors, fp8"),
    "no method": ({"bits": 4}, "quant_method is None"),
    "no object": ("int4", "quantization_config is 'int4'; an object is needed"),
    "3 bits": ({"quant_method": "gptq", "bits": 3}, "bits is 3; supported: 4, 8"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
    "mixed bits": ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic\['\+:\.\*down\.\*'\]\.bits is 8"),
    "gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'; supported: gemm"),
    "8 bits of AWQ": ({"quant_method": "awq", "bits": 8}, "bits is 8; supported: 4"),
    "NVFP4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "format is 'nvfp4-pack-quantized'; supported: pack-quantized",
    ),
    "6 bits": (compressed("pack-quantized", 6), "weights is 'int of 6 bits'; supported: int of 4 or 8, float of 8"),
    "rotations": (
        {**compressed("pack-quantized", 4), "transform_config": {"config_groups": {"R1": {}}}},
        "transform_config is 'given'",
    ),
    "sparsity": (
        {**compressed("int-quantized", 8), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config is .*sparse-24-bitmask.*supported: format dense",
    ),
    "groups that are none": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": [1]},
        r"config_groups is \[1\]; supported: an object",
    ),
    "E5M2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; supported: e4m3"),
    "a block of one side": ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
    "neither 4 nor 8 bits": ({"quant_method": "bitsandbytes"}, "load_in_4bit is None"),
    "another 4-bit type": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"},
        "bnb_4bit_quant_type is 'af4'; supported: nf4, fp4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_variant_that_is_not_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        open_weights(checkpoint(tmp_path, settings, {"weight": torch.zeros(2, 2)}))
