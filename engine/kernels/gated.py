"""The gate of an MLP (Shazeer 2020): SwiGLU and GeGLU, of a projection that gives gate and up side by side."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.model_spec import Activation


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, for (tokens, 2 * width), gate first: (tokens, width), computed in float32."""
    return (gated_triton if gate_up.is_cuda else gated_torch)(gate_up, activation)


def gated_torch(gate_up: Tensor, activation: Activation) -> Tensor:
    """The torch reference. See `gated`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    match activation:
        case "silu":
            opened = F.silu(gate)
        case "gelu":
            opened = F.gelu(gate)
        case "gelu_tanh":
            opened = F.gelu(gate, approximate="tanh")
    return (opened * up).to(gate_up.dtype)


def gated_triton(gate_up: Tensor, activation: Activation) -> Tensor:
    """The kernel. See `gated`."""
    from engine.kernels.gpu.gated import BLOCK, gated_kernel

    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, -(-width // BLOCK))
        gated_kernel[grid](gate_up, out, width, gate_up.stride(0), kind=activation, block=BLOCK)
    return out
