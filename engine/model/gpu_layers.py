"""Layers of a decoder on the Triton kernels; matrices are multiplied by their packing's kernels.

Knows the order of operations in a layer and the kernel of each; `Decoder` runs the same layers on torch otherwise, and
one test holds the two together. Between two matrix products there is one kernel, or two; experts are another file's.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.config import KernelName
from engine.errors import InvalidParameter
from engine.kernels.attention import attend, attend_triton
from engine.kernels.gated import gated, gated_triton
from engine.kernels.gemv import gemv, gemv_triton
from engine.kernels.norm import Norm, add_and_norm, add_and_norm_triton
from engine.kernels.qkv import place, place_triton
from engine.kv_cache.quantized_cache import QuantizedLayer
from engine.model.gpu_batch import DeviceStep
from engine.model.layers import ACTIVATIONS, Layer, LayerNorm, RMSNorm
from engine.model.linear import Dense, Linear
from engine.model.mlp.gpu_experts import GpuExperts, unsupported
from engine.model.model_spec import ModelSpec, Rope
from engine.model.rope import Rotation

log = logging.getLogger(__name__)

MAX_GROUPED = 64  # rows of attention's tile where heads are wide
MAX_HEAD_DIM = 512


def chosen(spec: ModelSpec, dtype: torch.dtype, device: torch.device, kernels: KernelName) -> bool:
    """Returns whether these layers run the model: by default on CUDA, where they can, or on request.

    Raises:
        InvalidParameter: they are requested and cannot.
    """
    if kernels == "torch" or (kernels == "auto" and device.type != "cuda"):
        return False
    wanting = _wanting(spec, dtype, device)
    if wanting and kernels == "triton":
        raise InvalidParameter("kernels", f"kernels is triton, but {wanting}; accepted: auto, torch.")
    if wanting:
        log.warning("On torch, without CUDA graphs, as the Triton kernels cannot run this model: %s.", wanting)
    return not wanting


def _wanting(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Returns why the kernels cannot run a model, if they cannot."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and not _interpreted():
        return f"the device is {device}, and they run on CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the model is in {str(dtype).removeprefix('torch.')}, and they compute in bfloat16 and float16"
    if spec.latent is not None:
        return "its attention is latent"
    for kv_heads, head_dim in dict.fromkeys(spec.kv_shape(index) for index in spec.attending_layers):
        if not 16 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
            return f"its heads have {head_dim} components, and they take even numbers from 16 to {MAX_HEAD_DIM}"
        if spec.heads // kv_heads > MAX_GROUPED:
            return f"{spec.heads // kv_heads} query heads share a K/V head, and they take {MAX_GROUPED}"
    if spec.conv_layers:
        return "it has short convolutions"
    if spec.recurrent_layers:
        return "it has recurrent layers"
    if differs := unsupported(spec):
        return differs
    return "" if _interpreted() else _unlaunchable()


def _unlaunchable() -> str:
    """Returns why Triton launches nothing here, if it does not: its launchers are built with a C compiler."""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:  # of any kind that its driver, the compiler or the linker raise
        return f"Triton cannot launch a kernel, for which it wants a C compiler and Python's headers ({error})"
    return ""


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


class GpuLayers:
    """The layers. On a CPU the kernels run in Triton's interpreter. If `deterministic`, a token's experts have the same
    bits in any batch; other matrices have what their packing does."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer],
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        interpreted = device.type == "cpu"
        self._spec = spec
        self._layers = layers
        self._pre = [_norm(layer.attention_pre_norm) for layer in layers]
        self._attend = attend_triton if interpreted else attend
        self._place = place_triton if interpreted else place
        self._gated = gated_triton if interpreted else gated
        self._add_and_norm = add_and_norm_triton if interpreted else add_and_norm
        self._linear_one = gemv_triton if interpreted else gemv
        mixed = partial(GpuExperts, spec, dtype=dtype, invariant=deterministic, interpreted=interpreted)
        self._experts = [None if layer.mixture is None else mixed(layer.mixture) for layer in layers]
        plain = [_Plain.of(layer) for layer in layers]
        self._plain = [each for each in plain if each is not None] if None not in plain else None

    def run(
        self,
        x: Tensor,
        step: DeviceStep,
        caches: Sequence[Tensor | QuantizedLayer],
        rotations: Mapping[Rope, Rotation],
        adapted: Sequence[Layer] | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """Runs all layers on `x` (tokens, hidden) in place, writing K/V to the caches. `adapted` are the layers where
        rows have adapters, `inputs` (layers, tokens, size) those that each layer has of its own."""
        spec, turns = self._spec, {rope: _Turns.at(each, rope, step.positions) for rope, each in rotations.items()}
        if len(x) == 1 and self._plain is not None and adapted is None:
            self._run_one(x, step, caches, turns, self._plain)
            return
        normed = self._add_and_norm(x, None, self._pre[0])
        for index, (layer, cache) in enumerate(zip(adapted or self._layers, caches, strict=True)):
            seen = x if normed is None else normed
            joined = layer.qkv(seen)
            if layer.q_norm is not None and layer.k_norm is not None:
                self._norm_projections(joined, layer.q_norm, layer.k_norm)
            normed = self._add_and_norm(
                x,
                layer.o(self._attended(joined, index, layer, step, cache, turns)),
                _norm(layer.mlp_pre_norm),
                delta_norm=_norm(layer.attention_post_norm),
                multiplier=spec.residual_multiplier,
            )
            if step.save_kv_layer is not None:
                step.save_kv_layer(index)
            if not spec.parallel:
                seen = x if normed is None else normed
            following = self._pre[index + 1] if index + 1 < len(self._layers) else None
            last = layer.input_gate is None and layer.scale == 1.0
            normed = self._add_and_norm(
                x,
                self._mlp(x, seen, layer, self._experts[index]),
                following if last else None,
                delta_norm=_norm(layer.mlp_post_norm),
                multiplier=spec.residual_multiplier,
            )
            if last:
                continue
            if layer.input_gate is not None and inputs is not None:
                x.add_(layer.input_gate(x, inputs[index], ACTIVATIONS[spec.activation]))
            if layer.scale != 1.0:
                x.mul_(layer.scale)
            normed = self._add_and_norm(x, None, following)

    def _mlp(self, x: Tensor, seen: Tensor, layer: Layer, experts: GpuExperts | None) -> Tensor:
        """Returns the output of a layer's MLP, of its experts, or of both, (tokens, hidden); `seen` is `x` normalised,
        which experts beside an MLP normalise by themselves."""
        beside = None if layer.mixture is None else layer.mixture.beside
        if experts is not None and beside is None:
            return experts(seen)
        out = layer.down(self._gated(layer.gate_up(seen), self._spec.activation))
        if experts is None or beside is None:
            return out
        routed = self._add_and_norm(x.float(), None, _norm(beside.router_norm))
        read = self._add_and_norm(x, None, _norm(beside.pre_norm))
        made = self._add_and_norm(out, None, _norm(beside.mlp_post_norm))
        assert routed is not None and read is not None and made is not None
        self._add_and_norm(made, experts(read, routed), None, delta_norm=_norm(beside.post_norm))
        return made

    def logits(self, states: Tensor, norm: RMSNorm, head: Linear) -> Tensor:
        """Returns logits of states (n, hidden) before the final norm: (n, vocab) of their type, or in float32."""
        if len(states) == 1 and isinstance(head, Dense):
            seen, left = self._read(states, norm)
            return self._linear_one(seen, head.weight, head.bias, norm=left, dtype=torch.float32)
        normed = self._add_and_norm(states, None, _norm(norm))
        assert normed is not None
        return head(normed)

    def _attended(
        self,
        joined: Tensor,
        index: int,
        layer: Layer,
        step: DeviceStep,
        cache: Tensor | QuantizedLayer,
        turns: Mapping[Rope, _Turns],
    ) -> Tensor:
        """Returns a layer's attention over its queries, keys and values: (tokens, heads * head_dim)."""
        spec, turned = self._spec, _STILL if layer.rope is None else turns[layer.rope]
        queries = self._place(
            joined,
            spec.heads,
            cache,
            step.layer_slots[index],
            rotation=turned.rotation,
            norm=_norm(layer.qk_norm),
            query_scale=turned.query_scale,
            has_kv=layer.has_kv,
        )
        return self._attend(
            queries,
            cache,
            step.pieces[index],
            step.positions,
            scale=spec.attention_scale,
            window=layer.window,
            chunked=spec.chunked,
            softcap=spec.attention_softcap,
            sinks=layer.sinks,
            last_keys=None if spec.windowed_images and layer.window is None else step.last_keys,
            out=torch.empty(queries.shape, dtype=joined.dtype, device=joined.device),
        ).flatten(1)

    def _run_one(
        self,
        x: Tensor,
        step: DeviceStep,
        caches: Sequence[Tensor | QuantizedLayer],
        turns: Mapping[Rope, _Turns],
        plain: Sequence[_Plain],
    ) -> None:
        """The layers of one token: norms, gates and sums are fused into the products."""
        spec, times = self._spec, self._spec.residual_multiplier
        for index, (layer, each, cache) in enumerate(zip(self._layers, plain, caches, strict=True)):
            seen, left = self._read(x, layer.attention_pre_norm)
            joined = self._linear_one(seen, each.qkv.weight, each.qkv.bias, norm=left)
            attended = self._attended(joined, index, layer, step, cache, turns)
            self._linear_one(attended, each.o.weight, each.o.bias, add_to=x, multiplier=times)
            if not spec.parallel:
                seen, left = self._read(x, layer.mlp_pre_norm)
            weight, bias = each.gate_up.weight, each.gate_up.bias
            opened = self._linear_one(seen, weight, bias, norm=left, activation=spec.activation)
            self._linear_one(opened, each.down.weight, each.down.bias, add_to=x, multiplier=times)

    def _read(self, x: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Norm | None]:
        """Returns the input of one token's product, and the norm that is left to the product: none that subtracts the
        mean, or that two products read."""
        left = _norm(norm)
        if left is None or not (left.centred or self._spec.parallel):
            return x, left
        normed = self._add_and_norm(x, None, left)
        assert normed is not None
        return normed, None

    def _norm_projections(self, joined: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        """Normalises all queries of a token at once, and all keys, in place."""
        spec = self._spec
        q_end = spec.heads * spec.head_dim
        k_end = q_end + spec.kv_heads * spec.head_dim
        for part, norm in ((joined[:, :q_end], q_norm), (joined[:, q_end:k_end], k_norm)):
            normed = self._add_and_norm(part, None, _norm(norm))
            assert normed is not None
            part.copy_(normed)


@dataclass(frozen=True, slots=True)
class _Turns:
    """A step's rotations by one rope, (tokens, head_dim / 2, 2) float32, cosine and sine, and factors of its queries,
    (tokens,) float32."""

    rotation: Tensor | None
    query_scale: Tensor | None

    @classmethod
    def at(cls, rotation: Rotation, rope: Rope, positions: Tensor) -> _Turns:
        turned = torch.view_as_real(rotation.at(positions)).squeeze(1) if rope.dim else None
        return cls(turned, rotation.growth(positions))


_STILL = _Turns(None, None)  # of a layer without positions


@dataclass(frozen=True, slots=True)
class _Plain:
    """A layer with unpacked weights, with no norm but those before attention and MLP."""

    qkv: Dense
    o: Dense
    gate_up: Dense
    down: Dense

    @classmethod
    def of(cls, layer: Layer) -> _Plain | None:
        parts = [each for each in (layer.qkv, layer.o, layer.gate_up, layer.down) if isinstance(each, Dense)]
        others = (layer.attention_post_norm, layer.mlp_post_norm, layer.q_norm, layer.k_norm, layer.input_gate)
        plain = layer.scale == 1.0 and all(each is None for each in others)
        return cls(*parts) if len(parts) == 4 and plain else None


def _norm(norm: Linear | None) -> Norm | None:
    assert norm is None or isinstance(norm, RMSNorm)
    return None if norm is None else Norm(norm.weight, norm.eps, isinstance(norm, LayerNorm))
