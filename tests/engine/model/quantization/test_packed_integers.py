"""GPTQ, AWQ, compressed-tensors and bitsandbytes' int8: 20 random tensors of each variant are read as they were packed.

The packing here is written from the formats' published definitions (AutoGPTQ's and AutoAWQ's `pack`,
compressed-tensors' `pack_to_int32`), word by word; where a package itself is installed, its packing is read, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.quantization.checkpoint import open_weights
from engine.model.quantization.quantized_weight import AffineWeight

OUT, WIDTH = 48, 64
NAME = "model.layers.0.mlp.up_proj"
TENSORS = 20


def generators() -> Iterator[torch.Generator]:
    for seed in range(TENSORS):
        yield torch.Generator().manual_seed(seed)


def packed(values: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Put values along `dim` into int32 words, the first in the lowest bits, or those of `order`."""
    values = values.movedim(dim, -1).long()
    per_word = 32 // bits
    rest = -values.shape[-1] % per_word
    words = torch.nn.functional.pad(values, (0, rest)).unflatten(-1, (-1, per_word))
    total = sum(words[..., column] << bits * place for place, column in enumerate(order or range(per_word)))
    assert isinstance(total, Tensor)
    return total.to(torch.int32).movedim(-1, dim).contiguous()  # wraps to negative words


def checkpoint(path: Path, settings: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Path:
    """A directory with one layer."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    save_file({f"{NAME}.{part}": tensor.contiguous() for part, tensor in parts.items()}, path / "model.safetensors")
    return path


def read(path: Path) -> tuple[Tensor, AffineWeight | None]:
    """The layer's weight, dequantised and as codes; nothing else may be left over."""
    weights = open_weights(path)
    dense = weights.take(f"{NAME}.weight", (OUT, WIDTH))
    codes = weights.take_quantized(f"{NAME}.weight", (OUT, WIDTH))
    weights.check_all_used(())
    return dense, codes


def draw(random: torch.Generator, bits: int, groups: int, zeros: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (out, in), scales (out, groups) in float16, and zeros (out, groups)."""
    codes = torch.randint(0, 2**bits, (OUT, WIDTH), generator=random)
    scales = (torch.rand(OUT, groups, generator=random) / 64 + 1e-3).half()
    middle = torch.full((OUT, groups), 2 ** (bits - 1))
    return codes, scales, middle if zeros == "middle" else torch.randint(0, 2**bits, (OUT, groups), generator=random)


def value(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    """The definition: scale * (code - zero), in float32."""
    return scales.float()[:, group_of] * (codes - zeros[:, group_of]).float()


@pytest.mark.parametrize("zeros", ["middle", "any"])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(tmp_path: Path, bits: int, groups: int, form: str, zeros: str) -> None:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": WIDTH // groups, "checkpoint_format": form}
    group_of = torch.arange(WIDTH) // (WIDTH // groups)
    for random in generators():
        codes, scales, points = draw(random, bits, groups, zeros)
        stored = points if form == "gptq_v2" else (points - 1) % 2**bits  # the first version's zeros are one less
        parts = {"qweight": packed(codes.t(), bits, 0), "qzeros": packed(stored.t(), bits, 1), "scales": scales.t()}
        dense, affine = read(checkpoint(tmp_path, settings, {**parts, "g_idx": group_of.int()}))
        assert torch.equal(dense, value(codes, scales, points, group_of))
        assert affine is not None and torch.equal(affine.dequantize(), dense)
        assert (affine.group, affine.minimums is None) == (WIDTH // groups, zeros == "middle")


def test_gptq_with_act_order(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}
    for random in generators():
        codes, scales, points = draw(random, 4, 4, "any")
        group_of = (torch.arange(WIDTH) // 16)[torch.randperm(WIDTH, generator=random)]
        stored = (points - 1) % 16
        parts = {"qweight": packed(codes.t(), 4, 0), "qzeros": packed(stored.t(), 4, 1), "scales": scales.t()}
        dense, affine = read(checkpoint(tmp_path, settings, {**parts, "g_idx": group_of.int()}))
        assert torch.equal(dense, value(codes, scales, points, group_of))
        assert affine is None  # columns of a group do not lie together


@pytest.mark.parametrize("groups", [1, 2])
def test_awq(tmp_path: Path, groups: int) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": WIDTH // groups, "version": "gemm", "zero_point": True}
    group_of = torch.arange(WIDTH) // (WIDTH // groups)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for random in generators():
        codes, scales, points = draw(random, 4, groups, "any")
        parts = {"qweight": packed(codes.t(), 4, 1, order), "qzeros": packed(points.t(), 4, 1, order)}
        dense, affine = read(checkpoint(tmp_path, settings, {**parts, "scales": scales.t()}))
        assert torch.equal(dense, value(codes, scales, points, group_of))
        assert affine is not None and torch.equal(affine.dequantize(), dense)


def compressed(form: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


@pytest.mark.parametrize("order", ["none", "group"])
@pytest.mark.parametrize("zeros", ["middle", "any"])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_packed(tmp_path: Path, bits: int, zeros: str, order: str) -> None:
    settings = compressed("pack-quantized", bits, group_size=16, strategy="group", symmetric=zeros == "middle")
    for random in generators():
        codes, scales, points = draw(random, bits, 4, zeros)
        group_of = torch.arange(WIDTH) // 16
        parts = {"weight_packed": packed(codes, bits, 1), "weight_scale": scales}
        parts["weight_shape"] = torch.tensor([OUT, WIDTH])
        if zeros == "any":
            parts["weight_zero_point"] = packed(points, bits, 0)
        if order == "group":
            group_of = group_of[torch.randperm(WIDTH, generator=random)]
            parts["weight_g_idx"] = group_of.int()
        dense, affine = read(checkpoint(tmp_path, settings, parts))
        assert torch.equal(dense, value(codes, scales, points, group_of))
        assert (affine is None) == (order == "group")


@pytest.mark.parametrize("shape", [(), (1,), (OUT, 1), (OUT, 4)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_int8(tmp_path: Path, symmetric: bool, shape: tuple[int, ...]) -> None:
    for random in generators():
        weight = torch.randint(-128, 128, (OUT, WIDTH), generator=random, dtype=torch.int8)
        scales = (torch.rand(shape, generator=random) / 64).bfloat16()
        parts = {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(1)}
        points = torch.zeros(shape, dtype=torch.int8)
        if not symmetric:
            points = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
            parts["weight_zero_point"] = points
        dense, affine = read(checkpoint(tmp_path, compressed("int-quantized", 8), parts))

        def over(tensor: Tensor) -> Tensor:
            return tensor.float().expand(OUT, 4).repeat_interleave(WIDTH // 4, 1) if len(shape) == 2 else tensor.float()

        assert torch.equal(dense, over(scales) * (weight.float() - over(points)))
        assert affine is not None


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    for random in generators():
        weight = torch.randint(-127, 128, (OUT, WIDTH), generator=random, dtype=torch.int8)
        extremes = torch.rand(OUT, generator=random)
        parts = {"weight": weight, "SCB": extremes, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        dense, affine = read(checkpoint(tmp_path, settings, parts))
        expected = weight.double() * extremes.double()[:, None] / 127
        assert (dense.double() - expected).abs().max() <= 1e-7  # two roundings to float32
        assert affine is not None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_own_packing(tmp_path: Path, bits: int, symmetric: bool) -> None:
    package = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed; it is optional")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor as Compressor

    settings = compressed("pack-quantized", bits, symmetric=symmetric, group_size=16, strategy="group")
    scheme = package.quantization.QuantizationScheme(**settings["config_groups"]["group_0"])
    for random in generators():
        half = 2 ** (bits - 1)
        points = torch.randint(-half, half, (OUT, 4), generator=random, dtype=torch.int8)
        state = {"weight": torch.randn(OUT, WIDTH, generator=random)}
        state["weight_scale"] = torch.rand(OUT, 4, generator=random).half() / 8 + 0.01
        if not symmetric:
            state["weight_zero_point"] = points
        parts = Compressor.compress(state, scheme)
        dense, _ = read(checkpoint(tmp_path, settings, parts))
        expected = Compressor.decompress({**parts, "weight_scale": parts["weight_scale"].float()}, scheme)["weight"]
        assert torch.equal(dense, expected.float())
