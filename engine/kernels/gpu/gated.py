"""The gate of an MLP, element by element."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.variants import Variant

BLOCK = 1024  # numbers that one program makes


@triton.jit
def opened(gate, kind: tl.constexpr):
    """The activation of float32 numbers."""
    if kind == "silu":
        return gate * tl.sigmoid(gate)
    elif kind == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # the tanh form: x * (1 + tanh(z)) / 2 is x * sigmoid(2 z)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def combined(gate, up, kind: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr):
    """The gated values of float32 numbers: `kind` is an activation, or "clamped" (see `ClampedSwiGLU`)."""
    if kind == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    else:
        return opened(gate, kind) * up


@triton.jit
def gated_kernel(gate_up, out, width, stride, kind: tl.constexpr, block: tl.constexpr):
    """One program makes `block` numbers of one token. See `gated.gated`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    real = at < width
    gate = tl.load(gate_up + token * stride + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + width + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, (opened(gate, kind) * up).to(out.dtype.element_ty), mask=real)


def variants() -> list[Variant]:
    """Every activation."""
    types = {"gate_up": "*bf16", "out": "*bf16", "width": "i32", "stride": "i32"}
    divisible = frozenset({"width", "stride"})
    return [
        Variant(f"gated {kind}", gated_kernel, types, {"kind": kind, "block": BLOCK}, 4, 1, divisible)
        for kind in ("silu", "gelu", "gelu_tanh")
    ]
