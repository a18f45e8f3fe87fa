"""Layers of a decoder on the kernels in C++ (`engine.kernels.cpu`): all of them in one call, or one a call where each
layer's K/V is sent as it is written.

Knows which models the kernels run exactly, and hands them pointers; `Decoder` runs the same layers on torch otherwise,
and one test holds the two together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from engine.config import QuantizationName
from engine.errors import InvalidParameter
from engine.kernels import cpu as kernels
from engine.kernels import matmul, quantized
from engine.kernels.cpu.binding import (
    ExpertStruct,
    GroupedWeight,
    LayerStruct,
    MixtureStruct,
    ModelStruct,
    NativeLinear,
    RouterStruct,
    StepStruct,
    TiledWeight,
    WeightStruct,
    pointer,
)
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.model.adapters.packed import PackedAdapters
from engine.model.adapters.resident import adapters_of_tokens
from engine.model.batch import Batch, KVCache
from engine.model.layers import Layer, RMSNorm
from engine.model.linear import Dense, Packing, multiplies_int8, pack, pack_int8
from engine.model.mlp.experts import RoutedExperts
from engine.model.model_spec import Experts, GatedDelta, ModelSpec, Rope
from engine.model.quantization.quantized_weight import AffineWeight, round_to_nearest

INT4_GROUP = 32  # columns of a scale
EIGHT_BITS_FROM = 65  # tokens, on AMX: below it a step waits for the weights, and 16 bits cost nothing
_NEVER = 1 << 62
_GATED = {"silu": 3, "gelu": 4, "gelu_tanh": 5}  # Output in linear.h


def suits(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether the kernels run this model, here."""
    return (
        _whole(spec)
        and dtype == torch.bfloat16
        and device.type == "cpu"
        and spec.attention_softcap is None
        and kernels.library() is not None
    )


def refusal(quantization: QuantizationName, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Returns why weights of 4 bits, or of 8 where torch has no product of them, are refused on a CPU."""
    if kernels.unavailable():
        why = kernels.unavailable()
    elif dtype != torch.bfloat16 or device.type != "cpu":
        why = f"the model is {str(dtype).removeprefix('torch.')} on {device.type}"
    elif spec.attention_softcap is not None or not _whole(spec):
        why = "the CPU kernels do not run this model: its scores are capped, or a width is no multiple of 32"
    else:
        why = "kernels is torch, or K/V is in 8 bits"
    others = "none or int8" if multiplies_int8() else "none"
    return (
        f"quantization is {quantization}, which our own CPU kernels run here, but {why}; accepted: {others}, or a "
        "model in bfloat16 that they run."
    )


def invariant(quantization: QuantizationName) -> bool:
    """Returns whether a token's bits on the kernels depend on its sequence alone, even if that is not asked for."""
    return quantization != "int8" or not kernels.has_tiles()


def _whole(spec: ModelSpec) -> bool:
    widths = [spec.hidden_size, spec.head_dim, spec.intermediate_size, *spec.mlp_widths]
    if spec.latent is not None:
        widths += [spec.latent.query_rank or spec.hidden_size, spec.heads * spec.latent.value_dim]
    if spec.global_heads is not None:
        widths.append(spec.global_heads.head_dim)
    if spec.per_layer_input is not None:
        widths.append(spec.per_layer_input.size)
    if spec.experts is not None:
        widths += [spec.experts.intermediate_size, spec.experts.shared_size, spec.experts.latent_size]
    if spec.recurrence is not None:
        heads, rows, columns = spec.recurrence.state_shape
        widths.append(heads * (columns if isinstance(spec.recurrence, GatedDelta) else rows))
    return all(width % 32 == 0 for width in widths)


def packing(quantization: QuantizationName, *, deterministic: bool = False) -> Packing:
    """Packs weights for the kernels.

    int8 has a scale a row, int4 one for 32 columns, and 8 bits for the logits. On AMX int8 weights are tiles, and a
    deterministic model rounds activations alike in every step; all others do so anyway.
    """
    if quantization == "int4":
        return Packing(partial(_rounded, 4, False), partial(_rounded, 4, True), partial(_rounded, 8, False))
    if quantization == "int8" and not kernels.has_tiles():
        return Packing(partial(_rounded, 8, False), partial(_rounded, 8, True))
    library = kernels.library()
    assert library is not None, "suits() was not asked"
    from_tokens = None if quantization == "none" else _NEVER if deterministic else EIGHT_BITS_FROM

    def plain(weight: Tensor, bias: Tensor | None) -> TiledWeight:
        return TiledWeight(library, weight, bias, eight_bits_from=from_tokens)

    def gated(weight: Tensor, bias: Tensor | None) -> TiledWeight:
        return TiledWeight(library, weight, bias, gated=True, eight_bits_from=from_tokens)

    return Packing(plain, gated, affine=_as_stored if quantization == "none" else None)


def packing_for(
    quantization: QuantizationName,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    tiled: bool,
    on_gpu: bool,
    deterministic: bool,
) -> Packing:
    """Returns the weight packing for the device and its kernels. Raises InvalidParameter."""
    if device.type == "cuda" and quantization != "none":
        if dtype == torch.float32:
            message = f"quantization is {quantization}, but dtype is float32; accepted: bfloat16 or float16 on CUDA."
            raise InvalidParameter("quantization", message)
        return quantized.packing(quantization, invariant=deterministic)
    if quantization == "int8" and device.type == "cpu" and not (tiled or on_gpu) and multiplies_int8():
        return Packing(pack_int8, pack_int8)
    if quantization != "none" and not tiled:
        raise InvalidParameter("quantization", refusal(quantization, spec, dtype, device))
    if on_gpu:
        dense = matmul.Invariant if deterministic else Dense
        return Packing(dense, dense, affine=quantized.as_stored(device, invariant=deterministic))
    return packing(quantization, deterministic=deterministic) if tiled else Packing(pack, pack)


def _as_stored(weight: AffineWeight, bias: Tensor | None, gated: bool) -> GroupedWeight | None:
    """Packs a weight that is quantised already, where the kernels have its group."""
    out, width = weight.codes.shape
    grouped = weight.group in (16, 32, 64, 128) or weight.group % 32 == 0
    if not grouped or width % 32 or (gated and out % 32):
        return None
    return pack_affine(weight, bias, gated=gated)


def _rounded(bits: int, gated: bool, weight: Tensor, bias: Tensor | None) -> GroupedWeight:
    group = INT4_GROUP if bits == 4 else weight.shape[1]
    return pack_affine(round_to_nearest(weight, bits, group, symmetric=True), bias, gated=gated)


def pack_affine(weight: AffineWeight, bias: Tensor | None, *, gated: bool = False) -> GroupedWeight:
    """Packs a quantised weight for the kernels; a `gated` one is gate above up, each of a multiple of 16 rows."""
    library = kernels.library()
    assert library is not None, "suits() was not asked"
    return GroupedWeight(library, weight, bias, gated=gated)


class CpuExperts:
    """The experts of a layer, and its shared one, in one call, and their routing."""

    def __init__(self, spec: ModelSpec, mixture: RoutedExperts) -> None:
        library = kernels.library()
        assert library is not None, "suits() was not asked"
        self._library = library
        shared = () if mixture.shared is None else (mixture.shared,)
        self._experts = (*mixture.experts, *shared)  # they own the memory
        self._scores = mixture
        linears = ((cast(NativeLinear, each.gate_up), cast(NativeLinear, each.down)) for each in self._experts)
        structs = (ExpertStruct(gate_up.struct, down.struct) for gate_up, down in linears)
        every = (ExpertStruct * len(self._experts))(*structs)
        router = _router(cast(Experts, spec.experts), mixture)
        self.struct = MixtureStruct(len(every), spec.hidden_size, _GATED[spec.activation], every, router)

    def __call__(self, x: Tensor, counts: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of each token's experts, (tokens, hidden) float32.

        Args:
            x: (tokens, hidden) bfloat16.
            counts: tokens of each expert, (experts,) int64.
            tokens: those tokens, expert by expert, with their `weights`, float32.
        """
        x, out = x.contiguous(), torch.empty(x.shape)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        of = (ctypes.c_void_p(each.data_ptr()) for each in (starts, tokens, weights, out))
        return self._called(self._library.ponder_experts, x, out, *of)

    def mix(self, x: Tensor) -> Tensor:
        """Routes each token of `x` (tokens, hidden) bfloat16, and returns the sums as above."""
        x, out = x.contiguous(), torch.empty(x.shape)
        return self._called(self._library.ponder_mixture, x, out, ctypes.c_void_p(out.data_ptr()))

    def _called(self, call: Callable[..., int], x: Tensor, out: Tensor, *pointers: ctypes.c_void_p) -> Tensor:
        rows = ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x))
        if call(ctypes.byref(self.struct), *rows, *pointers, ctypes.c_int(torch.get_num_threads())):
            raise MemoryError("No memory for the activations of a step.")
        return out


def _router(of: Experts, mixture: RoutedExperts) -> RouterStruct:
    weights = mixture.router, mixture.router_bias, mixture.selection_bias, mixture.shared_gate
    groups = (0, 0, 0) if of.groups is None else (of.groups.count, of.groups.per_token, of.groups.summed)
    numbers = (of.count, of.per_token, of.scores == "sigmoid", of.normalised)
    return RouterStruct(*map(pointer, weights), *numbers, *groups, of.scaling, of.min_weight)


def _routes(of: Experts, count: int) -> bool:
    """Returns whether the kernels choose these `count` experts: not those of one rank, nor where weights are made of
    more than the router's scores."""
    groups = of.groups
    if count != of.count:
        return False
    enough = groups is None or groups.per_token * (of.count // groups.count) >= of.per_token
    return enough and not (of.scaled_inputs or of.weight_scales or of.beside_mlp or of.latent_size)


def with_experts(spec: ModelSpec, layers: Sequence[Layer]) -> list[Layer]:
    """Returns the layers with each one's experts in one call."""

    def native(mixture: RoutedExperts) -> RoutedExperts:
        experts = CpuExperts(spec, mixture)
        routes = _routes(cast(Experts, spec.experts), len(mixture.experts))
        return replace(mixture, run=experts, mix=experts.mix if routes else None)

    return [layer if layer.mixture is None else replace(layer, mixture=native(layer.mixture)) for layer in layers]


class CpuLayers:
    """The layers, which were packed with `packing`, and those of experts passed through `with_experts`."""

    def __init__(self, spec: ModelSpec, layers: Sequence[Layer]) -> None:
        library = kernels.library()
        assert library is not None, "suits() was not asked"
        self._library = library
        self._layers = layers  # they own the memory that the structures point to
        self._ropes = [rope for rope in dict.fromkeys(spec.ropes) if rope is not None]
        self._structs = (LayerStruct * len(layers))(*(self._struct(layer) for layer in layers))
        self._model = ModelStruct(
            len(layers),
            spec.hidden_size,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.intermediate_size,
            _GATED[spec.activation],
            spec.norm_eps,
            spec.attention_scale,
            spec.residual_multiplier,
            self._structs,
            spec.norm == "layer",
            spec.parallel,
        )

    def _struct(self, layer: Layer) -> LayerStruct:
        linears = (layer.qkv, layer.o) if layer.mixture else (layer.qkv, layer.o, layer.gate_up, layer.down)
        weights = [cast(NativeLinear, weight).struct for weight in linears]
        weights += [WeightStruct()] * (4 - len(weights))
        mixture = None
        if layer.mixture is not None:
            experts = layer.mixture.run
            assert isinstance(experts, CpuExperts) and layer.mixture.mix is not None, "others are run by torch"
            assert layer.mlp_post_norm is None, "no family normalises what its experts return"
            mixture = ctypes.addressof(experts.struct)
        norms: tuple[RMSNorm | None, ...] = (
            *(layer.attention_pre_norm, layer.attention_post_norm, layer.mlp_pre_norm, layer.mlp_post_norm),
            *(layer.qk_norm, layer.q_norm, layer.k_norm),
        )
        pointers = (None if norm is None else pointer(norm.weight) for norm in norms)
        rotation = -1 if layer.rope is None else self._ropes.index(layer.rope)
        taps = 0 if layer.taps is None else len(layer.taps)
        return LayerStruct(*weights, mixture, *pointers, pointer(layer.taps), layer.window or 0, rotation, taps)

    def run(
        self,
        states: Tensor,
        batch: Batch,
        kv: KVCache | QuantizedCache,
        rotations: Mapping[Rope, Tensor],
        of_queries: Mapping[Rope, Tensor],
        adapters: PackedAdapters | None = None,
    ) -> None:
        """Runs all layers on `states` (tokens, hidden) in place, writing K/V to the cache. Rotations, of keys and of
        queries, are (tokens, 1, head_dim / 2) complex64. `adapters` has those of the batch's rows."""
        starts, contexts = torch.tensor(batch.query_starts), torch.tensor(batch.context_lens)
        branches = batch.branches
        begins = None if branches is None else torch.tensor(branches.starts)
        turned = [each[rope].data_ptr() for rope in self._ropes for each in (rotations, of_queries)]
        turns = (ctypes.c_void_p * len(turned))(*turned)
        caches = (ctypes.c_void_p * len(self._layers))(*kv.addresses)
        scales = (ctypes.c_void_p * len(self._layers))(*kv.scale_addresses) if isinstance(kv, QuantizedCache) else None
        groups = None if kv.groups is None else self._of_groups(batch, kv.groups)
        of_tokens = adapters_of_tokens(batch.adapters, batch.query_starts).long() if batch.adapters else None
        assert of_tokens is None or adapters is not None, "a row has an adapter, so one is resident"
        first, last = (
            kv.tensors[each].stride(1) for each in (0, -1)
        )  # of codes and scales, or of K/V and convolutions
        step = StepStruct(
            len(states),
            len(batch.context_lens),
            batch.block_tables.stride(0),
            kv.block_size,
            torch.get_num_threads(),
            batch.slots.data_ptr(),
            starts.data_ptr(),
            contexts.data_ptr(),
            batch.block_tables.data_ptr(),
            ctypes.addressof(turns),
            states.data_ptr(),
            ctypes.addressof(caches),
            None if scales is None else ctypes.addressof(scales),
            first,
            0 if scales is None else last,
            last if scales is None else 0,
            None if groups is None else ctypes.addressof(groups[0]),
            None if groups is None else ctypes.addressof(groups[1]),
            pointer(begins),
            None if branches is None else branches.slots.data_ptr(),
            0 if branches is None else branches.slots.stride(0),
            pointer(of_tokens),
            None if adapters is None else ctypes.addressof(adapters.table),
            pointer(batch.last_keys),
        )
        save, every = batch.save_kv_layer, len(self._layers)
        for first, last in [(0, every)] if save is None else zip(range(every), range(1, every + 1), strict=True):
            bounds = ctypes.c_int64(first), ctypes.c_int64(last)
            if self._library.ponder_layers(ctypes.byref(self._model), ctypes.byref(step), *bounds):
                raise MemoryError("No memory for the activations of a step.")
            if save is not None:
                save(first)

    def _of_groups(self, batch: Batch, groups: KVGroups) -> tuple[ctypes.Array[ctypes.c_void_p], ...]:
        """Returns each layer's block tables and slots, of its K/V group."""
        seen = [batch.of_table(table) for table in range(groups.width)]
        assert len({each.block_tables.stride(0) for each in seen}) == 1, "tables of one step have one width"
        assert all(each.slots.is_contiguous() for each in seen), "the kernels read slots one after another"
        both = zip(
            *((seen[at].block_tables.data_ptr(), seen[at].slots.data_ptr()) for at in groups.tables), strict=True
        )
        return tuple((ctypes.c_void_p * len(self._layers))(*each) for each in both)
