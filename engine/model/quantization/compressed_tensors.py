"""Writes weights as compressed-tensors: the tensors of a linear layer, and the configuration that describes them.

Knows two of its layouts: "pack-quantized" (codes in words of 32 bits) and "int-quantized" (int8, for activations of 8
bits too). `packed_integers.py` reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.model.quantization.quantized_weight import AffineWeight


def pack(weight: AffineWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the parts of a symmetric weight in "pack-quantized", by the ends of their names."""
    out, width = weight.codes.shape
    per_word = 32 // weight.bits
    codes = torch.nn.functional.pad(weight.codes, (0, -width % per_word))
    fields = codes if weight.bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    return {
        "weight_packed": fields.contiguous().view(torch.int32),
        "weight_scale": weight.scales.to(scale_dtype),
        "weight_shape": torch.tensor([out, width]),
    }


def plain(weight: AffineWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the parts of a symmetric weight of 8 bits in "int-quantized"."""
    return {"weight": (weight.codes ^ 128).view(torch.int8), "weight_scale": weight.scales.to(scale_dtype)}


def configuration(
    bits: int, group: int | None, *, activations: bool, ignored: Sequence[str]
) -> dict[str, Any]:  # Any: JSON
    """Returns the quantization_config: symmetric codes of `bits`, a scale a row where there is no `group`.

    With `activations`, layers are described as having inputs of 8 bits, a scale a token. `ignored` are names or
    patterns ("re:…") of linears that stay as they are.
    """
    kept = {"type": "int", "symmetric": True, "dynamic": False, "actorder": None, "block_structure": None}
    inputs = {**kept, "num_bits": 8, "strategy": "token", "group_size": None, "dynamic": True}
    weights = {**kept, "num_bits": bits, "strategy": "channel" if group is None else "group", "group_size": group}
    form = "int-quantized" if activations else "pack-quantized"
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if activations else None,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
