"""Weights as floats of 8 and 4 bits in safetensors, dequantised as they are read: FP8, MXFP4, bitsandbytes' NF4, FP4.

Knows the layouts that these publish. Their values are not evenly spaced, so none is handed on as codes.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from engine.model.quantization.stored_parts import StoredParts

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, 5.3.3; the highest bit is the sign


def float8(parts: StoredParts, block: tuple[int, int] | None) -> Tensor | None:
    """Reads E4M3 values (out, in) with `weight_scale`, one or (out,) or (out, groups), or with a scale for each block
    of `block` rows and columns: `weight_scale_inv` as DeepSeek-V3 has it, or `weight_scale`."""
    if parts.kind_of("weight") != "F8_E4M3":
        return None
    out, width = parts.shape
    values = parts.take("weight", parts.shape, "F8_E4M3").float()
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    if block is None:
        scales = parts.per_row(name).float()
        group = parts.group_of(scales.shape[1])
        return values.mul_(scales.repeat_interleave(group, dim=1))
    rows, columns = block
    scales = parts.take(name, (-(-out // rows), -(-width // columns))).float()
    return values.mul_(scales.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :width])


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantises gpt-oss's layout: `blocks` (..., in / 32, 16) uint8, two values a byte, the lower nibble first, and
    exponents `scales` (..., in / 32) uint8 about 127. Returns (..., in) float32."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = (scales.int() - 127)[..., None]
    return torch.ldexp(table[codes.long()], exponents.expand(codes.shape)).flatten(-2)


def bitsandbytes_4bit(parts: StoredParts) -> Tensor | None:
    """Reads bitsandbytes' NF4 or FP4 (Dettmers et al. 2023, QLoRA): two codes a byte, the higher nibble first, that
    index `quant_map`, times the `absmax` of blocks of the flattened weight; that may be quantised in turn."""
    state = next((name for name in _STATES if name in parts), None)
    if state is None:
        return None
    described = _described(parts, state)
    count, size = parts.shape[0] * parts.shape[1], described["blocksize"]
    if tuple(described["shape"]) != parts.shape or count % 2:
        raise parts.refuse(state, f"of {described['shape']} in blocks of {size}", f"{parts.shape}, an even number")
    packed = parts.take("weight", (count // 2, 1), "U8").flatten()
    blocks = -(-count // size)
    if "weight.nested_absmax" in parts:
        nested = described["nested_blocksize"]
        codes = parts.take("weight.absmax", (blocks,), "U8").long()
        table = parts.take("weight.nested_quant_map", (256,), "F32")
        scales = parts.take("weight.nested_absmax", (-(-blocks // nested),), "F32")
        absmax = table[codes] * scales.repeat_interleave(nested)[:blocks] + described["nested_offset"]
    else:
        absmax = parts.take("weight.absmax", (blocks,), "F32")
    table = parts.take("weight.quant_map", (16,), "F32")
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten().long()
    values = table[codes] * absmax.repeat_interleave(size)[:count]
    return values.view(parts.shape)


_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


def _described(parts: StoredParts, state: str) -> dict[str, Any]:  # Any: JSON of bitsandbytes
    text = bytes(parts.take(state, parts.shape_of(state), "U8").tolist())
    try:
        described = json.loads(text)
        needed = {"shape": list, "blocksize": int}
        if "weight.nested_absmax" in parts:
            needed |= {"nested_blocksize": int, "nested_offset": float}
        fits = all(isinstance(described[name], kind) for name, kind in needed.items())
        if fits and min(described["blocksize"], described.get("nested_blocksize", 1)) >= 1:
            return dict(described)
    except (ValueError, KeyError, TypeError):
        pass
    raise parts.refuse(state, f"{text[:80]!r}", "the JSON that bitsandbytes writes")
