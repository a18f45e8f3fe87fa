"""The parts of a decoder layer, packed for running, and how they are read from a checkpoint.

Knows the names and shapes of weights, nothing of batches or attention. The idea: what belongs together is joined at
load (queries, keys and values; gate and up), and every rearrangement that the forward pass would repeat is done here
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.checkpoint import Weights
from engine.errors import CheckpointError
from engine.linear import Linear, Packing
from engine.models.rope import interleave
from engine.models.spec import Activation, ModelSpec, Rope, WeightNames

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019).

    `weight` is (hidden,), or (heads, head_dim) to give every head of (tokens, heads, head_dim) its own. On the CPU this
    is made of four calls: in torch 2.13 the fused `F.rms_norm` takes three times as long there.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[-1]
        self.eps = eps
        self.weight = weight  # float32
        # x / sqrt(|x|^2 / n + eps) * w  ==  x / hypot(|x|, sqrt(n * eps)) * (w * sqrt(n))
        self._scaled = weight.float() * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor of x's shape and dtype."""
        if x.device.type != "cpu":
            if self.weight.dim() > 1:
                return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)
            return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)
        if x.dtype != torch.float32:
            return self(x.float()).to(x.dtype)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self._floor)).mul_(self._scaled)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, ready to run. A norm that the family does not have is None."""

    window: int | None
    rope: Rope | None
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim
    o: Linear
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear
    attention_pre_norm: RMSNorm | None
    attention_post_norm: RMSNorm | None
    mlp_pre_norm: RMSNorm | None
    mlp_post_norm: RMSNorm | None
    qk_norm: RMSNorm | None  # per head, over queries and keys at once
    q_norm: RMSNorm | None  # over the whole projection
    k_norm: RMSNorm | None


class LayerReader:
    """Reads layers of one model from its weights, cast to `dtype` on `device`."""

    def __init__(
        self,
        spec: ModelSpec,
        names: WeightNames,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing,
    ) -> None:
        self._spec, self._names, self._weights = spec, names, weights
        self._dtype, self._device, self._packing = dtype, device, packing

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor of the checkpoint. Raises CheckpointError: missing, or of another shape or kind."""
        return self._weights.take(name, shape).to(self._device, self._dtype)

    def norm(self, name: str, width: int) -> RMSNorm:
        """A norm over `width`; its weight stays in float32."""
        return RMSNorm(self._norm_weight(name, width), self._spec.norm_eps)

    def _norm_weight(self, name: str, width: int) -> Tensor:
        return self._weights.take(name, (width,)).to(self._device, torch.float32) + self._spec.norm_offset

    def layer(self, index: int) -> Layer:
        """Layer `index`, joined and packed. Raises CheckpointError."""
        spec, names = self._spec, self._names
        prefix = f"{names.root}layers.{index}."
        rope = spec.ropes[index]
        q_width, kv_width, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden_size

        def norm(wanted: bool, name: str) -> RMSNorm | None:
            return self.norm(f"{prefix}{name}.weight", hidden) if wanted else None

        qk_norm = q_norm = k_norm = None
        if spec.qk_norm == "head":
            q = self._order(self._norm_weight(f"{prefix}self_attn.q_norm.weight", spec.head_dim), rope)
            k = self._order(self._norm_weight(f"{prefix}self_attn.k_norm.weight", spec.head_dim), rope)
            both = torch.cat([q.expand(spec.heads, -1), k.expand(spec.kv_heads, -1)])
            qk_norm = RMSNorm(both, spec.norm_eps)
        elif spec.qk_norm == "projection":
            q = self._order(self._norm_weight(f"{prefix}self_attn.q_norm.weight", q_width), rope)
            k = self._order(self._norm_weight(f"{prefix}self_attn.k_norm.weight", kv_width), rope)
            q_norm, k_norm = RMSNorm(q, spec.norm_eps), RMSNorm(k, spec.norm_eps)
        return Layer(
            window=spec.windows[index],
            rope=rope,
            qkv=self._qkv(prefix, rope, (q_width, kv_width, kv_width)),
            o=self._linear(f"{prefix}self_attn.o_proj", hidden, q_width, spec.o_bias),
            gate_up=self._gate_up(prefix),
            down=self._linear(f"{prefix}mlp.down_proj", hidden, spec.intermediate_size, spec.mlp_bias),
            attention_pre_norm=norm(spec.pre_norm, names.attention_pre_norm),
            attention_post_norm=norm(spec.post_norm, names.attention_post_norm),
            mlp_pre_norm=norm(spec.pre_norm, names.mlp_pre_norm),
            mlp_post_norm=norm(spec.post_norm, names.mlp_post_norm),
            qk_norm=qk_norm,
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def _order(self, weight: Tensor, rope: Rope | None) -> Tensor:
        return weight if rope is None else interleave(weight, self._spec.head_dim, rope.dim)

    def _linear(self, name: str, rows: int, columns: int, bias: bool) -> Linear:
        weight = self.tensor(f"{name}.weight", rows, columns)
        return self._packing.plain(weight, self.tensor(f"{name}.bias", rows) if bias else None)

    def _qkv(self, prefix: str, rope: Rope | None, widths: tuple[int, int, int]) -> Linear:
        weight = self._joined(prefix, self._names.qkv, widths, "weight")
        bias = self._joined(prefix, self._names.qkv, widths, "bias") if self._spec.qkv_bias else None

        def ordered(joined: Tensor) -> Tensor:
            q, k, v = joined.split(widths)
            return torch.cat([self._order(q, rope), self._order(k, rope), v])

        return self._packing.plain(ordered(weight), None if bias is None else ordered(bias))

    def _gate_up(self, prefix: str) -> Linear:
        widths = (self._spec.intermediate_size,) * 2
        bias = self._joined(prefix, self._names.gate_up, widths, "bias") if self._spec.mlp_bias else None
        return self._packing.gated(self._joined(prefix, self._names.gate_up, widths, "weight"), bias)

    def _joined(self, prefix: str, names: tuple[str, ...], widths: tuple[int, ...], part: str) -> Tensor:
        """The rows of several projections one below the other, whether the checkpoint joins them or not."""
        tail = (self._spec.hidden_size,) if part == "weight" else ()
        if len(names) == 1:
            return self.tensor(f"{prefix}{names[0]}.{part}", sum(widths), *tail)
        if len(names) != len(widths):
            raise CheckpointError(f"{prefix}: {len(names)} names for {len(widths)} projections.")
        return torch.cat(
            [self.tensor(f"{prefix}{name}.{part}", width, *tail) for name, width in zip(names, widths, strict=True)]
        )
