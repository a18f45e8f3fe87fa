"""Layers of a decoder, packed for running and read from a checkpoint, and their rotary positions.

The idea: pairs that rotate together are made adjacent when the weights are loaded (`interleave`), so a rotation is one
complex product in place, and a head that rotates only in part is the same product with angle zero in its last pairs.
Attention scores do not change when queries and keys are permuted alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import CheckpointError
from engine.model.linear import Linear, Packing
from engine.model.loader import Weights
from engine.model.model_spec import (
    Activation,
    ClampedSwiGLU,
    Experts,
    GatedDelta,
    ModelSpec,
    NormKind,
    Rope,
    WeightNames,
)
from engine.model.quantized_weight import AffineWeight
from engine.model.recurrent.gated_delta_net import GatedDeltaNet
from engine.model.recurrent.mamba2 import Mamba2
from engine.model.recurrent.states import LayerStates, RecurrentPlan


def inverse_frequencies(rope: Rope, *, long_context: bool = False) -> Tensor:
    """Returns radians per position of each rotating pair: (dim / 2,) float32. `long_context` picks longrope's set."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    base = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return base
        case "linear":
            return base / rope.factor
        case "llama3":
            return _llama3(rope, base)
        case "yarn":
            return _yarn(rope, base)
        case "longrope":
            divisors = rope.long_factors if long_context else rope.short_factors
            return base / torch.tensor(divisors, dtype=torch.float32)


def _llama3(rope: Rope, base: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between are blended."""
    turns = rope.original_context * base / (2 * math.pi)  # full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * base / rope.factor + blend * base


def _yarn(rope: Rope, base: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolate pairs of few turns, keep pairs of many, a ramp between."""

    def pair_of(turns: float) -> float:  # the (fractional) component that makes this many turns
        return rope.dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return base / rope.factor * ramp + base * (1.0 - ramp)


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """YaRN's correction of the softmax temperature, applied to sine and cosine (section 3.4; DeepSeek's mscales)."""

    def grow(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    return grow(mscale) / grow(mscale_all_dim) if mscale and mscale_all_dim else grow(1.0)


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """LongRoPE (Ding et al. 2024), as Phi-3 uses it."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original_context))


class Rotation:
    """The rotation of one Rope for heads of `head_dim` components; the frequencies live on `device`."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, *, long_context: bool) -> None:
        frequencies = torch.zeros(head_dim // 2)  # the pairs that do not rotate keep angle 0 ...
        frequencies[: rope.dim // 2] = inverse_frequencies(rope, long_context=long_context)
        lengths = torch.ones(head_dim // 2)  # ... and length 1
        lengths[: rope.dim // 2] = rope.attention_factor
        self._frequencies = frequencies.to(device)
        self._lengths = lengths.to(device)
        self._beta, self._context = rope.query_beta, rope.query_context

    def at(self, positions: Tensor) -> Tensor:
        """Unit rotations at `positions` (tokens,): (tokens, 1, head_dim / 2) complex64."""
        angles = torch.outer(positions.float(), self._frequencies)
        return torch.polar(self._lengths.expand_as(angles), angles).unsqueeze(1)

    def of_queries(self, at: Tensor, positions: Tensor) -> Tensor:
        """Returns the rotations of queries, given those of keys: the same tensor unless queries grow with position."""
        if not self._beta:
            return at
        return at * (1 + self._beta * torch.log1p(torch.floor(positions / self._context)))[:, None, None]


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Rotates `heads` (tokens, heads, head_dim) in place by `rotations` (tokens, 1, head_dim / 2) complex64."""
    if heads.dtype == torch.float32:
        heads.view(torch.complex64).mul_(rotations)
    else:  # the product is made in float32: bfloat16 has no complex type, and positions need the precision
        heads.copy_((heads.float().view(torch.complex64) * rotations).view(torch.float32))


def interleave(weight: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorders the rows of a query or key projection so that component i and i + rotary_dim/2 become neighbours.

    `weight` is (heads * head_dim, ...): a matrix, a bias, or a norm's weight (head_dim,). Components past `rotary_dim`
    stay where they are.
    """
    half = rotary_dim // 2
    order = torch.arange(head_dim)
    order[0:rotary_dim:2] = torch.arange(half)
    order[1:rotary_dim:2] = torch.arange(half, rotary_dim)
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def clamped_swiglu(gate: Tensor, up: Tensor, by: ClampedSwiGLU) -> Tensor:
    """Returns the gated values, (tokens, intermediate), of halves of that shape."""
    gate, up = gate.clamp(max=by.limit), up.clamp(-by.limit, by.limit)
    return torch.sigmoid(gate * by.alpha).mul_(gate).mul_(up + 1)


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
class Expert:
    """A gated MLP of a mixture."""

    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear


Recurrent = Callable[[Tensor, LayerStates, RecurrentPlan], Tensor]  # see GatedDeltaNet


def _no_mlp(x: Tensor) -> Tensor:
    raise AssertionError("a layer of experts has no MLP of its own")


def _no_attention(x: Tensor) -> Tensor:
    raise AssertionError("a recurrent layer does not attend")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, ready to run. A norm that the family lacks is None; a layer with experts has no MLP, and one
    that is `recurrent` no attention.

    A short convolution has its two projections in the place of attention's: `qkv` gives the gate in, the gate out and
    the values, each of `hidden`, and `o` takes the result.
    """

    window: int | None
    rope: Rope | None
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim, and heads * head_dim more where attention is gated
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
    taps: Tensor | None = None  # (taps, hidden) float32, the current token's last: of a short convolution
    sinks: Tensor | None = None  # (heads,) float32
    router: Tensor | None = None  # (experts, hidden) float32, of a mixture
    router_bias: Tensor | None = None  # (experts,) float32
    experts: tuple[Expert, ...] = ()
    shared: Expert | None = None  # of a mixture: for every token
    shared_gate: Tensor | None = None  # (1, hidden) float32
    recurrent: Recurrent | None = None


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
        return self._packing.plain(weight, None)

    def layer(self, index: int) -> Layer:
        """Reads layer `index`, joined and packed. Raises CheckpointError."""
        spec, names = self._spec, self._names
        prefix = f"{names.root}layers.{index}."
        rope = spec.ropes[index]
        q_width, kv_width, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden_size

        def norm(wanted: bool, name: str) -> RMSNorm | None:
            return self.norm(f"{prefix}{name}.weight", hidden) if wanted else None

        qk_norm = q_norm = k_norm = taps = None
        recurrent = self._recurrent(prefix + names.recurrence) if index in spec.recurrent_layers else None
        if recurrent is not None:
            pass
        elif index in spec.conv_layers:
            taps = self.exact(f"{prefix}conv.conv.weight", hidden, 1, spec.conv_taps)[:, 0].T.contiguous()
        elif spec.qk_norm == "head":
            q = self._order(self._norm_weight(f"{prefix}{names.q_norm}.weight", spec.head_dim), rope)
            k = self._order(self._norm_weight(f"{prefix}{names.k_norm}.weight", spec.head_dim), rope)
            qk_norm = self._norm(torch.cat([q.expand(spec.heads, -1), k.expand(spec.kv_heads, -1)]))
        elif spec.qk_norm == "heads":
            q = self._norm_weight(f"{prefix}{names.q_norm}.weight", spec.heads, spec.head_dim)
            k = self._norm_weight(f"{prefix}{names.k_norm}.weight", spec.kv_heads, spec.head_dim)
            qk_norm = self._norm(self._order(torch.cat([q, k]).flatten(), rope).unflatten(0, (-1, spec.head_dim)))
        elif spec.qk_norm == "projection":
            q = self._order(self._norm_weight(f"{prefix}{names.q_norm}.weight", q_width), rope)
            k = self._order(self._norm_weight(f"{prefix}{names.k_norm}.weight", kv_width), rope)
            q_norm, k_norm = self._norm(q), self._norm(k)
        experts = self._experts(prefix) if spec.experts is not None and index in spec.experts.layers else ()
        router = router_bias = None
        if experts:
            router = self.exact(f"{prefix}{names.router}.weight", len(experts), hidden)
        if experts and spec.experts is not None and spec.experts.router_bias:
            router_bias = self.exact(f"{prefix}{names.router}.bias", len(experts))
        qkv: Linear = _no_attention
        o: Linear = _no_attention
        if taps is not None:
            qkv = self.linear(f"{prefix}conv.in_proj", 3 * hidden, hidden)
            o = self.linear(f"{prefix}conv.out_proj", hidden, hidden)
        elif recurrent is None:
            qkv = self._qkv(prefix, rope, (q_width, kv_width, kv_width))
            o = self.linear(f"{prefix}{names.o}", hidden, q_width, spec.o_bias)
        shared, shared_gate = self._shared(prefix) if experts else (None, None)
        return Layer(
            window=spec.windows[index],
            rope=rope,
            qkv=qkv,
            o=o,
            gate_up=_no_mlp if experts else self._gate_up(prefix, names.gate_up, spec.intermediate_size),
            down=(
                _no_mlp
                if experts
                else self.linear(f"{prefix}{names.down}", hidden, spec.intermediate_size, spec.mlp_bias)
            ),
            attention_pre_norm=norm(spec.pre_norm, names.attention_pre_norm),
            attention_post_norm=norm(spec.post_norm, names.attention_post_norm),
            mlp_pre_norm=norm(spec.pre_norm and not spec.parallel, names.mlp_pre_norm),
            mlp_post_norm=norm(spec.post_norm, names.mlp_post_norm),
            qk_norm=qk_norm,
            q_norm=q_norm,
            k_norm=k_norm,
            taps=taps,
            sinks=self.exact(f"{prefix}{names.sinks}", spec.heads) if spec.sinks else None,
            router=router,
            router_bias=router_bias,
            experts=experts,
            shared=shared,
            shared_gate=shared_gate,
            recurrent=recurrent,
        )

    def _recurrent(self, prefix: str) -> Recurrent:
        of, hidden = self._spec.recurrence, self._spec.hidden_size
        assert of is not None, "a recurrent layer has a recurrence"
        if isinstance(of, GatedDelta):
            return GatedDeltaNet.read(self, of, prefix, hidden)
        return Mamba2.read(self, of, prefix, hidden, self._spec.norm_eps)

    def _shared(self, prefix: str) -> tuple[Expert | None, Tensor | None]:
        """Reads the expert that every token takes, and its gate."""
        spec, names, experts = self._spec, self._names, self._spec.experts
        if experts is None or not experts.shared_size:
            return None, None
        own = prefix + names.shared_expert
        down = self.linear(f"{own}{names.expert_down}", spec.hidden_size, experts.shared_size)
        gate = self.exact(f"{prefix}{names.shared_gate}.weight", 1, spec.hidden_size) if experts.shared_gate else None
        return Expert(self._gate_up(own, names.expert_gate_up, experts.shared_size), down), gate

    def _experts(self, prefix: str) -> tuple[Expert, ...]:
        spec, names, experts = self._spec, self._names, self._spec.experts
        assert experts is not None, "the layer has experts"
        if names.stacked_experts:
            return self._stacked_experts(f"{prefix}{names.stacked_experts}", experts)
        if names.joined_experts is not None:
            return self._joined_experts(prefix, names.joined_experts, experts)
        width, made = experts.intermediate_size, list[Expert]()
        for index in range(experts.count):
            own = f"{prefix}{names.expert.format(index=index)}"
            down = self.linear(f"{own}{names.expert_down}", spec.hidden_size, width, spec.mlp_bias)
            made.append(Expert(self._gate_up(own, names.expert_gate_up, width), down))
        return tuple(made)

    def _joined_experts(self, prefix: str, names: tuple[str, str], experts: Experts) -> tuple[Expert, ...]:
        count, width, hidden = experts.count, experts.intermediate_size, self._spec.hidden_size
        opened = self.tensor(f"{prefix}{names[0]}.weight", count, 2 * width, hidden)
        closed = self.tensor(f"{prefix}{names[1]}.weight", count, hidden, width)
        pairs = zip(opened, closed, strict=True)
        return tuple(Expert(self.packed(each.contiguous()), self.packed(down.contiguous())) for each, down in pairs)

    def _stacked_experts(self, stem: str, experts: Experts) -> tuple[Expert, ...]:
        count, width, hidden = experts.count, experts.intermediate_size, self._spec.hidden_size
        opened = self.tensor(f"{stem}gate_up_proj", count, hidden, 2 * width)
        closed = self.tensor(f"{stem}down_proj", count, width, hidden)
        biases: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * count
        if self._spec.mlp_bias:
            of_opened = self.tensor(f"{stem}gate_up_proj_bias", count, 2 * width)
            biases = list(zip(of_opened, self.tensor(f"{stem}down_proj_bias", count, hidden), strict=True))
        apart = torch.arange(2 * width).view(width, 2).T.flatten()  # gate above up
        pack = self._packing.plain
        return tuple(
            Expert(
                pack(opened[index].T[apart], None if bias[0] is None else bias[0][apart]),
                pack(closed[index].T.contiguous(), bias[1]),
            )
            for index, bias in enumerate(biases)
        )

    def _order(self, weight: Tensor, rope: Rope | None) -> Tensor:
        if rope is None or rope.neighbours:
            return weight
        return interleave(weight, self._spec.head_dim, rope.dim)

    def linear(self, name: str, rows: int, columns: int, bias: bool = False) -> Linear:
        """Reads and packs a projection, as codes with scales where the checkpoint has those. Raises CheckpointError."""
        added = self.tensor(f"{name}.bias", rows) if bias else None
        stored = self._stored([(f"{name}.weight", rows)], columns)
        if stored is not None and (packed := self._packed(stored, added)) is not None:
            return packed
        return self._packing.plain(self.tensor(f"{name}.weight", rows, columns), added)

    def head(self, embedding: Tensor) -> Linear:
        """Reads the weights of the logits, which may be the embedding's, and packs them. Raises CheckpointError."""
        names, tied = self._names, self._spec.tied_embeddings
        name = f"{names.root}embed_tokens.weight" if tied else names.lm_head
        stored = self._stored([(name, len(embedding))], embedding.shape[1])
        if stored is not None and (packed := self._packed(stored, None)) is not None:
            return packed
        weight = embedding if tied else self.tensor(name, *embedding.shape)
        return (self._packing.head or self._packing.plain)(weight, None)

    def _qkv(self, prefix: str, rope: Rope | None, widths: tuple[int, int, int]) -> Linear:
        gated = self._spec.gated_attention
        if gated:  # each head's query and its gate lie together
            widths = (2 * widths[0], *widths[1:])
        bias = self._joined(prefix, self._names.qkv, widths, "bias") if self._spec.qkv_bias else None

        def ordered(joined: Tensor) -> Tensor:
            q, k, v = joined.split(widths)
            if not gated:
                return torch.cat([self._order(q, rope), self._order(k, rope), v])
            q, gate = (part.flatten(0, 1) for part in q.unflatten(0, (-1, 2, self._spec.head_dim)).unbind(1))
            return torch.cat([self._order(q, rope), self._order(k, rope), v, gate])

        added = None if bias is None else ordered(bias)
        stored = self._stored_parts(prefix, self._names.qkv, widths)
        if stored is not None:
            packed = self._packed(stored.rows(ordered(torch.arange(sum(widths)))), added)
            if packed is not None:
                return packed
        return self._packing.plain(ordered(self._joined(prefix, self._names.qkv, widths, "weight")), added)

    def _gate_up(self, prefix: str, names: tuple[str, ...], width: int) -> Linear:
        widths, whole = (width, width), not self._spec.torch_layers  # layers that torch runs want gate above up
        bias = self._joined(prefix, names, widths, "bias") if self._spec.mlp_bias else None
        stored = self._stored_parts(prefix, names, widths)
        if stored is not None and (packed := self._packed(stored, bias, gated=whole)) is not None:
            return packed
        pack = self._packing.gated if whole else self._packing.plain
        return pack(self._joined(prefix, names, widths, "weight"), bias)

    def _stored_parts(self, prefix: str, names: tuple[str, ...], widths: tuple[int, ...]) -> AffineWeight | None:
        rows = widths if len(names) == len(widths) else (sum(widths),)
        return self._stored(
            [(f"{prefix}{name}.weight", each) for name, each in zip(names, rows, strict=True)], self._spec.hidden_size
        )

    def _stored(self, parts: Sequence[tuple[str, int]], columns: int) -> AffineWeight | None:
        """Reads tensors (rows, columns), one below the other, as codes with scales; None where the checkpoint has them
        otherwise, or nothing packs them so."""
        if self._packing.affine is None:
            return None
        read = list[AffineWeight]()
        for name, rows in parts:
            weight = self._weights.take_quantized(name, (rows, columns))
            if weight is None:
                return None
            read.append(weight)
        return AffineWeight.joined(read)

    def _packed(self, weight: AffineWeight, bias: Tensor | None, *, gated: bool = False) -> Linear | None:
        assert self._packing.affine is not None
        return self._packing.affine(weight, bias, gated)

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
