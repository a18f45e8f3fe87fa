"""Layers of a decoder, packed for running and read from a checkpoint.

Knows norms, gates and the parts of a layer; `rope` rotates heads, and `Decoder` runs the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import CheckpointError
from engine.model.linear import Linear, Packing, native_bf16
from engine.model.loader import Weights
from engine.model.mlp.experts import RoutedExperts, read_mixture
from engine.model.mlp.layer_inputs import InputGate
from engine.model.model_spec import (
    Activation,
    GatedDelta,
    Latent,
    ModelSpec,
    NormKind,
    Rope,
    WeightNames,
)
from engine.model.quantization.quantized_weight import AffineWeight
from engine.model.recurrent.gated_delta_net import GatedDeltaNet
from engine.model.recurrent.mamba2 import Mamba2
from engine.model.recurrent.states import LayerStates, RecurrentPlan
from engine.model.rope import interleave, interleave_tails

LATENT_EPS = 1e-6  # of the norms over latents, whatever the model's own is
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
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


class LayerNorm(RMSNorm):
    """LayerNorm without a bias (Ba et al. 2016): RMSNorm of x less its mean."""

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor of x's shape and dtype."""
        exact = x.float()
        return super().__call__(exact - exact.mean(-1, keepdim=True)).to(x.dtype)


NORMS: dict[NormKind, type[RMSNorm]] = {"rms": RMSNorm, "layer": LayerNorm}


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """The matrices of latent attention that make keys and values of latents, where each head has its own.

    They are float32 on a CPU that does not multiply bfloat16, where torch's products of it take several times as long.
    """

    keys: Tensor  # (heads, nope_dim, rank)
    values: Tensor  # (heads, rank, value_dim)


Recurrent = Callable[[Tensor, LayerStates, RecurrentPlan], Tensor]  # see GatedDeltaNet


def _no_mlp(x: Tensor) -> Tensor:
    raise AssertionError("the layer has no MLP of its own")


def _no_attention(x: Tensor) -> Tensor:
    raise AssertionError("the layer does not attend")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, ready to run. A norm that the family lacks is None; a layer with experts has no MLP of its
    own, one that is `recurrent` may attend beside, and one of an MLP alone does neither.

    A short convolution has its two projections in the place of attention's: `qkv` gives the gate in, the gate out and
    the values, each of `hidden`, and `o` takes the result. Of latent attention `qkv` gives the queries, or their
    latent, then the latent of keys and values and the rotated key; `q_norm` and `k_norm` are over the latents.
    """

    window: int | None
    rope: Rope | None
    # hidden -> (heads + 2 * kv_heads) * head_dim, heads * head_dim more where attention is gated, or, without `has_kv`,
    # the queries alone
    qkv: Linear
    o: Linear
    gate_up: Linear  # hidden -> 2 * intermediate, or intermediate without a gate
    down: Linear
    attention_pre_norm: RMSNorm | None
    attention_post_norm: RMSNorm | None
    mlp_pre_norm: RMSNorm | None
    mlp_post_norm: RMSNorm | None
    qk_norm: RMSNorm | None  # per head, over queries and keys at once, and values where these are normalised
    q_norm: RMSNorm | None  # over the whole projection
    k_norm: RMSNorm | None
    q_up: Linear | None = None  # latent of the queries -> queries
    latent: LatentProjections | None = None
    taps: Tensor | None = None  # (taps, hidden) float32, the current token's last: of a short convolution
    sinks: Tensor | None = None  # (heads,) float32
    mixture: RoutedExperts | None = None  # in the place of the MLP, or beside it
    has_kv: bool = True  # else it attends to the keys and values of an earlier layer
    input_gate: InputGate | None = None
    scale: float = 1.0  # of the hidden states at its end
    recurrent: Recurrent | None = None
    attends: bool = True
    has_mlp: bool = True  # or experts


def in_rope_order(spec: ModelSpec, weight: Tensor, index: int) -> Tensor:
    """Rearranges the rows of heads of layer `index` from a checkpoint's pairs of rotated components to ours."""
    rope = spec.ropes[index]
    if rope is None or rope.neighbours:
        return weight
    return interleave(weight, spec.kv_shape(index)[1], rope.dim)


def qkv_rows(spec: ModelSpec, names: WeightNames, index: int) -> tuple[tuple[str, ...], tuple[int, ...], Tensor]:
    """Returns the projections that `Layer.qkv` of an attending layer joins: their names in a checkpoint, the rows of
    queries, keys and values there, and the order (rows,) into which the joined rows are rearranged."""
    (kv_heads, head_dim), found = spec.kv_shape(index), names.qkv
    # of a gated head, query and gate lie together
    widths: tuple[int, ...] = ((1 + spec.gated_attention) * spec.heads * head_dim, *2 * (kv_heads * head_dim,))
    if index in spec.shared_kv:
        found, widths = found[:1], widths[:1]
    elif spec.global_heads is not None and index in spec.global_heads.layers and spec.global_heads.keys_are_values:
        found, widths = found[:2], widths[:2]
    q, *kv = torch.arange(sum(widths)).split(widths)
    gate = q[:0]
    if spec.gated_attention:
        q, gate = (part.flatten(0, 1) for part in q.unflatten(0, (-1, 2, head_dim)).unbind(1))
    if kv:  # the last of these are the values, be they the keys
        kv = [in_rope_order(spec, kv[0], index), kv[-1]]
    return found, widths, torch.cat([in_rope_order(spec, q, index), *kv, gate])


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
        self.packing = packing
        self._spec, self._names, self._weights = spec, names, weights
        self._dtype, self._device = dtype, device

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Reads one tensor of the checkpoint. Raises CheckpointError: missing, or of another shape or kind."""
        return self._weights.take(name, shape).to(self._device, self._dtype)

    def norm(self, name: str, width: int) -> RMSNorm:
        """Reads a norm over `width`; its weight stays in float32."""
        return self._norm(self._norm_weight(name, width))

    def _norm(self, weight: Tensor) -> RMSNorm:
        return NORMS[self._spec.norm](weight, self._spec.norm_eps)

    def _norm_weight(self, name: str, *shape: int) -> Tensor:
        return self.exact(name, *shape) + self._spec.norm_offset

    def plain_norm(self, name: str, width: int) -> RMSNorm:
        """Reads a norm within a recurrent layer: an RMSNorm, whose weight has no offset in any family."""
        return RMSNorm(self.exact(name, width), self._spec.norm_eps)

    def exact(self, name: str, *shape: int) -> Tensor:
        """Reads one tensor in float32. Raises CheckpointError as `tensor` does."""
        return self._weights.take(name, shape).to(self._device, torch.float32)

    def packed(self, weight: Tensor) -> Linear:
        """Packs a weight (out, in) without a bias."""
        return self.packing.plain(weight, None)

    def layer(self, index: int) -> Layer:
        """Reads layer `index`, joined and packed. Raises CheckpointError."""
        spec, names = self._spec, self._names
        prefix = f"{names.root}layers.{index}."
        rope, hidden, (kv_heads, head_dim) = spec.ropes[index], spec.hidden_size, spec.kv_shape(index)
        q_width, kv_width = spec.heads * head_dim, kv_heads * head_dim

        def norm(wanted: bool, name: str) -> RMSNorm | None:
            return self.norm(f"{prefix}{name}.weight", hidden) if wanted else None

        qk_norm = q_norm = k_norm = taps = None
        recurrent = self._recurrent(prefix + names.recurrence) if index in spec.recurrent_layers else None
        attends = index in spec.attending_layers
        if index in spec.conv_layers:
            taps = self.exact(f"{prefix}conv.conv.weight", hidden, 1, spec.conv_taps)[:, 0].T.contiguous()
        elif not attends or spec.latent is not None:
            pass
        elif spec.qk_norm == "head":
            qk_norm = self._norm(self._head_norms(prefix, index))
        elif spec.qk_norm == "rotated" and rope is not None and rope.dim:
            qk_norm = self._norm(torch.ones(spec.heads + kv_heads, head_dim, device=self._device))
        elif spec.qk_norm == "heads":
            q = self._norm_weight(f"{prefix}{names.q_norm}.weight", spec.heads, spec.head_dim)
            k = self._norm_weight(f"{prefix}{names.k_norm}.weight", spec.kv_heads, spec.head_dim)
            qk_norm = self._norm(
                in_rope_order(spec, torch.cat([q, k]).flatten(), index).unflatten(0, (-1, spec.head_dim))
            )
        elif spec.qk_norm == "projection":
            q = in_rope_order(spec, self._norm_weight(f"{prefix}{names.q_norm}.weight", q_width), index)
            k = in_rope_order(spec, self._norm_weight(f"{prefix}{names.k_norm}.weight", kv_width), index)
            q_norm, k_norm = self._norm(q), self._norm(k)
        mixed = spec.experts is not None and index in spec.experts.layers
        has_mlp = spec.mlp_layers is None or index in spec.mlp_layers
        dense = has_mlp and (not mixed or (spec.experts is not None and spec.experts.beside_mlp))
        wide = spec.mlp_widths[index] if spec.mlp_widths else spec.intermediate_size
        first = attends or recurrent is not None or taps is not None  # before the MLP
        qkv: Linear = _no_attention
        o: Linear = _no_attention
        if taps is not None:
            qkv = self.linear(f"{prefix}conv.in_proj", 3 * hidden, hidden)
            o = self.linear(f"{prefix}conv.out_proj", hidden, hidden)
        elif attends:
            latent = spec.latent
            qkv = self._qkv(prefix, index) if latent is None else self._latent_qkv(prefix, rope, latent)
            o = self.linear(f"{prefix}{names.o}", hidden, spec.attended_width(index), spec.o_bias)
        inputs = spec.per_layer_input
        layer = Layer(
            window=spec.windows[index],
            rope=rope,
            qkv=qkv,
            o=o,
            gate_up=self.gate_up(prefix, names.gate_up, wide) if dense else _no_mlp,
            down=self.linear(f"{prefix}{names.down}", hidden, wide, spec.mlp_bias) if dense else _no_mlp,
            attention_pre_norm=norm(spec.pre_norm and first, names.attention_pre_norm),
            attention_post_norm=norm(spec.post_norm and first, names.attention_post_norm),
            mlp_pre_norm=norm(spec.pre_norm and has_mlp and not spec.parallel, names.mlp_pre_norm),
            mlp_post_norm=norm(spec.post_norm and has_mlp, names.mlp_post_norm),
            qk_norm=qk_norm,
            q_norm=q_norm,
            k_norm=k_norm,
            taps=taps,
            sinks=self.exact(f"{prefix}{names.sinks}", spec.heads) if spec.sinks else None,
            recurrent=recurrent,
            attends=attends,
            has_mlp=has_mlp,
            mixture=read_mixture(self, spec, names, prefix) if mixed else None,
            has_kv=index not in spec.shared_kv,
            input_gate=None if inputs is None else InputGate.read(self, inputs, prefix, hidden),
            scale=self.exact(f"{prefix}layer_scalar", 1).item() if spec.layer_scales else 1.0,
        )
        return layer if spec.latent is None else self._with_latent(layer, prefix, spec.latent)

    def _recurrent(self, prefix: str) -> Recurrent:
        of, hidden = self._spec.recurrence, self._spec.hidden_size
        assert of is not None, "a recurrent layer has a recurrence"
        if isinstance(of, GatedDelta):
            return GatedDeltaNet.read(self, of, prefix, hidden)
        return Mamba2.read(self, of, prefix, hidden, self._spec.norm_eps)

    def _latent_qkv(self, prefix: str, rope: Rope | None, latent: Latent) -> Linear:
        spec, head = self._spec, latent.nope_dim + latent.rope_dim
        widths = (latent.query_rank or spec.heads * head, latent.rank + latent.rope_dim)
        names = f"self_attn.{'q_proj' if latent.query_rank is None else 'q_a_proj'}", "self_attn.kv_a_proj_with_mqa"
        queries, keys = torch.arange(sum(widths)).split(widths)
        if latent.query_rank is None:
            queries = interleave_tails(queries, head, rope)
        order = torch.cat([queries, interleave_tails(keys, len(keys), rope)])
        bias = None
        if spec.qkv_bias and latent.query_rank is None:
            bias = F.pad(self.tensor(f"{prefix}{names[1]}.bias", widths[1]), (widths[0], 0))
        elif spec.qkv_bias:
            bias = self._joined(prefix, names, widths, "bias")
        return self._ordered(prefix, names, widths, bias, order)

    def _with_latent(self, layer: Layer, prefix: str, latent: Latent) -> Layer:
        heads, width = self._spec.heads, latent.nope_dim + latent.rope_dim
        take = self.exact if self._device.type == "cpu" and not native_bf16() else self.tensor
        rows = heads * (latent.nope_dim + latent.value_dim)
        up = take(f"{prefix}self_attn.kv_b_proj.weight", rows, latent.rank)
        keys, values = up.unflatten(0, (heads, -1)).split((latent.nope_dim, latent.value_dim), 1)
        layer = replace(
            layer,
            k_norm=RMSNorm(self.exact(f"{prefix}self_attn.kv_a_layernorm.weight", latent.rank), LATENT_EPS),
            latent=LatentProjections(keys.contiguous(), values.transpose(1, 2).contiguous()),
        )
        if latent.query_rank is None:
            return layer
        order = interleave_tails(torch.arange(heads * width), width, layer.rope)
        return replace(
            layer,
            q_norm=RMSNorm(self.exact(f"{prefix}self_attn.q_a_layernorm.weight", latent.query_rank), LATENT_EPS),
            q_up=self.linear(f"{prefix}self_attn.q_b_proj", heads * width, latent.query_rank, bias=False, order=order),
        )

    def _head_norms(self, prefix: str, index: int) -> Tensor:
        """Reads the weights of norms over the heads of queries, keys and values, as far as the layer has them."""
        spec, names, (kv_heads, head_dim) = self._spec, self._names, self._spec.kv_shape(index)
        q = in_rope_order(spec, self._norm_weight(f"{prefix}{names.q_norm}.weight", head_dim), index)
        parts = [q.expand(spec.heads, -1)]
        if index not in spec.shared_kv:
            k = in_rope_order(spec, self._norm_weight(f"{prefix}{names.k_norm}.weight", head_dim), index)
            parts += [k.expand(kv_heads, -1), *([torch.ones_like(k).expand(kv_heads, -1)] if spec.value_norm else [])]
        return torch.cat(parts)

    def linear(self, name: str, rows: int, columns: int, bias: bool = False, order: Tensor | None = None) -> Linear:
        """Reads and packs a projection, as codes with scales where the checkpoint has those; `order` rearranges its
        outputs, which then have no bias. Raises CheckpointError."""
        added = self.tensor(f"{name}.bias", rows) if bias else None
        stored = self._stored([(f"{name}.weight", rows)], columns)
        if stored is not None and order is not None:
            stored = stored.rows(order)
        if stored is not None and (packed := self._packed(stored, added)) is not None:
            return packed
        weight = self.tensor(f"{name}.weight", rows, columns)
        return self.packing.plain(weight if order is None else weight[order], added)

    def head(self, embedding: Tensor) -> Linear:
        """Reads the weights of the logits, which may be the embedding's, and packs them. Raises CheckpointError."""
        names, tied = self._names, self._spec.tied_embeddings
        name = f"{names.root}{names.embedding}.weight" if tied else names.lm_head
        stored = self._stored([(name, len(embedding))], embedding.shape[1])
        if stored is not None and (packed := self._packed(stored, None)) is not None:
            return packed
        weight = embedding if tied else self.tensor(name, *embedding.shape)
        return (self.packing.head or self.packing.plain)(weight, None)

    def _qkv(self, prefix: str, index: int) -> Linear:
        names, widths, order = qkv_rows(self._spec, self._names, index)
        bias = self._joined(prefix, names, widths, "bias") if self._spec.qkv_bias else None
        return self._ordered(prefix, names, widths, bias, order)

    def _ordered(
        self, prefix: str, names: tuple[str, ...], widths: tuple[int, ...], bias: Tensor | None, order: Tensor
    ) -> Linear:
        """Reads projections of the hidden state as one whose outputs are rearranged by `order`."""
        added = None if bias is None else bias[order]
        stored = self._stored_parts(prefix, names, widths)
        if stored is not None and (packed := self._packed(stored.rows(order), added)) is not None:
            return packed
        return self.packing.plain(self._joined(prefix, names, widths, "weight")[order], added)

    def gate_up(self, prefix: str, names: tuple[str, ...], width: int, *, gated: bool = False) -> Linear:
        """Reads and packs gate above up, or the one projection of an MLP without a gate. Raises CheckpointError."""
        whole = gated or not self._spec.torch_layers  # torch's own gates want gate above up
        widths: tuple[int, ...] = (width, width)
        if not self._spec.gated_mlp:
            widths, whole = (width,), False
        bias = self._joined(prefix, names, widths, "bias") if self._spec.mlp_bias else None
        stored = self._stored_parts(prefix, names, widths)
        if stored is not None and (packed := self._packed(stored, bias, gated=whole)) is not None:
            return packed
        pack = self.packing.gated if whole else self.packing.plain
        return pack(self._joined(prefix, names, widths, "weight"), bias)

    def _stored_parts(self, prefix: str, names: tuple[str, ...], widths: tuple[int, ...]) -> AffineWeight | None:
        rows = widths if len(names) == len(widths) else (sum(widths),)
        return self._stored(
            [(f"{prefix}{name}.weight", each) for name, each in zip(names, rows, strict=True)], self._spec.hidden_size
        )

    def _stored(self, parts: Sequence[tuple[str, int]], columns: int) -> AffineWeight | None:
        """Reads tensors (rows, columns), one below the other, as codes with scales; None where the checkpoint has them
        otherwise, or nothing packs them so."""
        if self.packing.affine is None:
            return None
        read = list[AffineWeight]()
        for name, rows in parts:
            weight = self._weights.take_quantized(name, (rows, columns))
            if weight is None:
                return None
            read.append(weight)
        return AffineWeight.joined(read)

    def _packed(self, weight: AffineWeight, bias: Tensor | None, *, gated: bool = False) -> Linear | None:
        assert self.packing.affine is not None
        return self.packing.affine(weight, bias, gated)

    def _joined(self, prefix: str, names: tuple[str, ...], widths: tuple[int, ...], part: str) -> Tensor:
        """Reads the rows of several projections one below the other, whether the checkpoint joins them or not."""
        tail = (self._spec.hidden_size,) if part == "weight" else ()
        if len(names) == 1:
            return self.tensor(f"{prefix}{names[0]}.{part}", sum(widths), *tail)
        if len(names) != len(widths):
            raise CheckpointError(f"{prefix}: {len(names)} names for {len(widths)} projections.")
        return torch.cat(
            [self.tensor(f"{prefix}{name}.{part}", width, *tail) for name, width in zip(names, widths, strict=True)]
        )
