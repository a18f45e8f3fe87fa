"""A model's linear layers, laid out once for the CPU instead of at every call.

A query is some twenty tokens: multiplying them takes less time than PyTorch's GEMM needs to rearrange 42 MB of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """x → x @ weight.T + bias, and then GELU (the exact one) where it is asked for; for inference alone."""

    def __init__(self, linear: nn.Linear, *, gelu: bool = False) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._after: tuple[str, list[float], str] = ("gelu", [], "none") if gelu else ("none", [], "")

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, *self._after)
        return made


def pack(model: nn.Module) -> None:
    """Replace every `nn.Linear` in place, and in BERT's feed-forward layers the GELU behind it."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                gelu = name == "dense" and _exact_gelu(getattr(module, "intermediate_act_fn", None))
                if gelu:
                    module.intermediate_act_fn = nn.Identity()
                setattr(module, name, PackedLinear(child, gelu=gelu))


def _exact_gelu(module: object) -> bool:
    return getattr(module, "act", None) is nn.functional.gelu
