"""The one decoder: every dense family is a ModelSpec away.

Knows a batch, a KV cache and its own weights; nothing of requests, sampling or text. The idea: tokens of all rows lie
end to end as (tokens, hidden), nothing is padded outside attention, and the inputs that all layers share (rotations,
attention plan, cache views) are made once a step. Small models at batch 1 spend their time in calls: a layer has few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.config import KernelName, QuantizationName
from engine.errors import CheckpointError
from engine.families import family_of
from engine.kernels.cpu.binding import NativeLinear
from engine.kv_cache.quantized_cache import QuantizedCache, QuantizedLayer
from engine.model import attention, gpu_layers, native_layers
from engine.model.adapters.packed import PackedAdapters, packed_bytes
from engine.model.adapters.peft_checkpoint import Adapter, projections, read_adapter
from engine.model.adapters.resident import StackedAdapters, stacked_bytes
from engine.model.attention import AttentionPlan, Scratch
from engine.model.batch import Batch, Features, KVCache
from engine.model.gpu_batch import DeviceStep, PackedModel, step_of
from engine.model.layers import ACTIVATIONS, LatentProjections, Layer, LayerReader
from engine.model.linear import Packing
from engine.model.loader import Weights
from engine.model.mlp.experts import Expert, RoutedExperts, clamped_swiglu, run_experts
from engine.model.mlp.layer_inputs import LayerInputs
from engine.model.model_spec import ModelSpec, Rope, WeightNames
from engine.model.quantization.checkpoint import open_weights, read_config
from engine.model.recurrent.short_convolution import earlier_slots, short_convolution
from engine.model.recurrent.states import RecurrentPlan
from engine.model.rope import Rotation, rotate_, served_context

Attention = Callable[..., Tensor]  # the signature of attention.paged
# By K/V heads, their width, and the block table of their K/V group: the windows of layers with those.
Windows = dict[tuple[int, int, int], dict[int | None, None]]
Keep = Callable[[Tensor], None]
_Resident = StackedAdapters | PackedAdapters
Turns = tuple[Tensor, Tensor]  # the rotations of queries and of keys


class Decoder:
    """A dense decoder-only transformer, loaded.

    `spec.max_position_embeddings` is the limit of positions. For longrope (Phi-3's long variants) the frequencies
    depend on the length that is served: up to the pre-training context the short set is exact, and is the default; a
    longer `max_model_len` switches to the long set for all lengths, since cached keys cannot change later.
    """

    def __init__(
        self,
        spec: ModelSpec,
        names: WeightNames,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None = None,
        attend: Attention = attention.paged,
        kernels: KernelName = "auto",
        quantization: QuantizationName = "none",
        deterministic: bool = False,
        packing: Packing | None = None,
    ) -> None:
        spec, long_context = served_context(spec, max_model_len)
        self.spec, self.dtype, self.device = spec, dtype, device
        self._names = names
        self._adapters: _Resident | None = None
        self._attend, self._activation = attend, ACTIVATIONS[spec.activation]
        self._expert_gate = None if spec.experts is None else spec.experts.gate
        self._scratch, self._deterministic, self._stepwise = Scratch(), deterministic, deterministic
        self._windows: Windows = {}
        for index in spec.attending_layers:
            self._windows.setdefault((*spec.kv_shape(index), 0), {})[spec.windows[index]] = None
        self.rotations: dict[Rope, Rotation] = {
            rope: Rotation(rope, width, device, long_context=long_context)
            for rope, width in {rope: spec.rotated_width(at) for at, rope in enumerate(spec.ropes)}.items()
            if rope is not None
        }
        on_gpu = attend is attention.paged and gpu_layers.chosen(spec, dtype, device, kernels)
        tiled = kernels == "auto" and attend is attention.paged and native_layers.suits(spec, dtype, device)
        tiled = tiled and packing is None
        packing = packing or native_layers.packing_for(quantization, spec, dtype, device, tiled, on_gpu, deterministic)
        read = LayerReader(spec, names, weights, dtype, device, packing)
        self._embedding = read.tensor(f"{names.root}{names.embedding}.weight", spec.vocab_size, spec.hidden_size)
        # rounded like the embeddings it scales, as the checkpoints were trained
        self._embedding_multiplier = float(torch.tensor(spec.embedding_multiplier).to(dtype))
        self._inputs: LayerInputs | None = None
        if spec.per_layer_input is not None:
            self._inputs = LayerInputs.read(read, spec.per_layer_input, names.root, len(spec.windows), spec.hidden_size)
        self._layers: list[Layer] = [read.layer(index) for index in range(spec.layers)]
        self.experts_in_one_call = tiled and spec.experts is not None and spec.experts.gate is None and spec.gated_mlp
        if self.experts_in_one_call:
            self._layers = native_layers.with_experts(spec, self._layers)
        self._norm = read.norm(f"{names.root}{names.norm}.weight", spec.hidden_size)
        self.lm_head, self.pack, self.packing = read.head(self._embedding), packing.plain, packing
        self._cpu = native_layers.CpuLayers(spec, self._layers) if tiled and not spec.torch_layers else None
        self._gpu = gpu_layers.GpuLayers(spec, self._layers, dtype, device, deterministic) if on_gpu else None
        self.packed_for = PackedModel.of(spec, device, deterministic=deterministic)

    @property
    def native(self) -> bool:
        """Returns whether the C++ kernels run all of it: a token's bits then depend on its sequence alone, but see
        `native_layers.invariant`."""
        return self._cpu is not None

    @property
    def image_token(self) -> int:
        """Returns the token that stands for a row of an image in a batch; 0 of a model that reads none."""
        return 0 if self.spec.vision is None else self.spec.vision.image_token_id

    @property
    def on_gpu(self) -> bool:
        """Returns whether the Triton kernels run the model, and `forward_step` may be called."""
        return self._gpu is not None

    def read_adapter(self, adapter: str, base: str = "") -> Adapter:
        """Reads an adapter of this model. Raises CheckpointError."""
        return read_adapter(adapter, self.spec, self._names, base)

    def adapter_bytes(self, adapter: Adapter) -> int:
        """Returns the bytes that an adapter takes while it is resident."""
        nbytes = packed_bytes if self.native else stacked_bytes
        return nbytes(projections(self.spec, self._names), adapter, self.dtype)

    @torch.inference_mode()
    def with_adapters(self, adapters: Mapping[int, Adapter], before: _Resident | None = None) -> _Resident:
        """Returns adapters by slot for `use_adapters`, sharing those of `before`. May be called while steps run."""
        places = projections(self.spec, self._names)
        if self._cpu is not None:
            assert not isinstance(before, StackedAdapters), "the same decoder made it"
            return PackedAdapters(places, self.spec.layers, adapters, before)
        assert not isinstance(before, PackedAdapters), "the same decoder made it"
        return StackedAdapters(places, adapters, self.dtype, self.device, before)

    def use_adapters(self, adapters: _Resident) -> None:
        """Has steps find their rows' adapters in these from now on. No step may be running."""
        self._adapters = adapters

    def _adapted(self, adapters: Sequence[int], starts: Sequence[int]) -> Sequence[Layer]:
        """Returns the layers with the adapters of a step's rows."""
        if not adapters:
            return self._layers
        assert isinstance(self._adapters, StackedAdapters), "a row has an adapter, so one is resident"
        return self._adapters.applied(self._layers, adapters, starts)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: KVCache | QuantizedCache, keep: Keep | None = None, keep_all: Keep | None = None
    ) -> Tensor:
        """Runs one step, writing its K/V to the cache. `keep` takes the final-normed states behind the logits, and
        `keep_all` those of all tokens.

        Returns:
            Logits after the tokens at `batch.logits_at`: (len(logits_at), vocab) float32.
        """
        states = self._run(batch, kv)
        if keep_all is not None:
            keep_all(self._norm(states))
        states = states.index_select(0, batch.logits_at)
        if keep is not None:
            keep(self._norm(states))
        return self.logits(states)

    @torch.inference_mode()
    def forward_step(
        self, step: DeviceStep, kv: KVCache | QuantizedCache, out: Tensor | None = None,
        features: Features | None = None,
    ) -> Tensor:  # fmt: skip
        """Runs `forward` for a step that is on the device already; the logits are put in `out` if given."""
        states = self._run_on_gpu(step, kv, features)
        wanted = len(step.logits_at) < len(states)  # a decode needs them all, in order
        return self.logits(states.index_select(0, step.logits_at) if wanted else states, out)

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: KVCache | QuantizedCache) -> Tensor:
        """Runs one step; returns the final-normed hidden states of all its tokens: (tokens, hidden) in the model's
        dtype."""
        return self._norm(self._run(batch, kv))

    def logits(self, states: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns logits of last-layer states (n, hidden), before the final norm: (n, vocab) float32, in `out` if
        given."""
        spec = self.spec
        if self._gpu is not None:
            said = self._gpu.logits(states, self._norm, self.lm_head)
        elif isinstance(self.lm_head, NativeLinear):
            said = self.lm_head.logits(states, self._norm.weight, spec.norm_eps, centred=spec.norm == "layer")
        else:
            said = self.lm_head(self._norm(states))
        logits = said.float() if out is None else out.copy_(said)
        if spec.logits_scaling != 1.0:
            logits.div_(spec.logits_scaling)
        if spec.logit_softcap is not None:
            logits.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return logits

    def _run_on_gpu(self, step: DeviceStep, kv: KVCache | QuantizedCache, features: Features | None) -> Tensor:
        assert self._gpu is not None, "on_gpu was not asked"
        x = self.embed(step.token_ids, features)
        layers = self._adapted(*step.adapters) if step.adapters else None
        inputs = None if self._inputs is None else self._inputs(step.token_ids, x)
        self._gpu.run(x, step, kv.layers(), self.rotations, layers, inputs)
        return x

    def embed(self, token_ids: Tensor, features: Features | None = None) -> Tensor:
        """Returns the input of the first layer: (tokens, hidden) in the model's dtype."""
        x = self._embedding.index_select(0, token_ids)
        if self._embedding_multiplier != 1.0:
            x.mul_(self._embedding_multiplier)
        return x if features is None else x.index_copy_(0, features.at, features.rows)

    def _run(self, batch: Batch, kv: KVCache | QuantizedCache) -> Tensor:
        if self._gpu is not None:
            step = step_of(batch, kv.block_size, self.packed_for.grouped(kv.groups), self.device)
            return self._run_on_gpu(step, kv, batch.features)
        x = self.embed(batch.token_ids, batch.features)
        if self._cpu is not None:
            assert isinstance(kv, KVCache) or kv.coding == "int4", (
                "the CPU's own kernels read no K/V of 8 bits; such a decoder is loaded with kernels='torch'"
            )
            assert not isinstance(self._adapters, StackedAdapters)
            self._cpu.run(x, batch, kv, *self._rotations_at(batch), self._adapters)
            return x
        inputs = None if self._inputs is None else self._inputs(batch.token_ids, x)
        self.run_layers(self._adapted(batch.adapters, batch.query_starts), x, batch, kv, inputs)
        return x

    def _rotations_at(self, batch: Batch) -> tuple[dict[Rope, Tensor], dict[Rope, Tensor]]:
        """Returns the rotations of keys and of queries."""
        turns = {rope: rotation.at(batch.rotary_positions) for rope, rotation in self.rotations.items()}
        return turns, {rope: self.rotations[rope].of_queries(at, batch.positions) for rope, at in turns.items()}

    @torch.inference_mode()
    def run_layers(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        batch: Batch,
        kv: KVCache | QuantizedCache,
        inputs: Tensor | None = None,
    ) -> None:
        """Runs `layers` of this model on torch, on `x` (tokens, hidden) in place; `kv` is the cache of those alone, and
        `inputs` (layers, tokens, size) their `LayerInputs`."""
        spec = self.spec
        rotations, of_queries = self._rotations_at(batch)
        tables = (0,) * len(spec.windows) if kv.groups is None else kv.groups.tables
        seen: Windows = self._windows
        if kv.groups is not None:
            seen = {}
            for at, (table, window) in enumerate(zip(tables, spec.windows, strict=True)):
                seen.setdefault((*spec.kv_shape(at), table), {})[window] = None
        plans = {
            (*heads, table): AttentionPlan(
                batch.of_table(table),
                kv,
                windows,
                group_heads=spec.heads // heads[0],
                heads=tuple(heads),
                scratch=self._scratch,
                maskless=spec.attention_softcap is None and not (spec.sinks and self.device.type != "cpu"),
                chunked=spec.chunked,
                windowed_images=spec.windowed_images,
            )
            for (*heads, table), windows in seen.items()
        }
        caches: Iterator[Tensor | QuantizedLayer] = iter(kv.layers())
        states = iter(() if kv.states is None else kv.states.layers())
        recurrent = self._recurrent_plan(batch) if any(layer.recurrent is not None for layer in layers) else None
        earlier = earlier_slots(batch, kv.block_size, spec.conv_taps - 1) if spec.conv_layers else None
        for index, layer in enumerate(layers):
            normed = x if layer.attention_pre_norm is None else layer.attention_pre_norm(x)
            turns = None if layer.rope is None else (of_queries[layer.rope], rotations[layer.rope])
            if layer.recurrent is not None:
                assert recurrent is not None, "the model has recurrent layers"
                mixed = layer.recurrent(normed, next(states), recurrent)
                x.add_(mixed, alpha=spec.residual_multiplier * spec.recurrence_multiplier)
            if layer.taps is not None:
                cache = next(caches)
                assert isinstance(cache, Tensor) and earlier is not None, "see KVCache.of"
                convolved = short_convolution(layer.qkv(normed), layer.taps, cache, batch.slots, *earlier)
                x.add_(layer.o(convolved), alpha=spec.residual_multiplier)
            elif layer.latent is not None:
                cache = next(caches)
                assert isinstance(cache, Tensor), "see KVCache.of"
                self._latent_attention(layer, layer.latent, x, normed, cache, plans[*_heads(cache), 0], turns)
            elif layer.attends:
                cache = next(caches)
                self._attention(layer, x, normed, cache, plans[*_heads(cache), tables[index]], turns)
            if batch.save_kv_layer is not None:
                batch.save_kv_layer(index)
            if not spec.parallel:
                normed = x if layer.mlp_pre_norm is None else layer.mlp_pre_norm(x)
            if layer.has_mlp:
                self._mlp(layer, x, normed)
            if layer.input_gate is not None and inputs is not None:
                x.add_(layer.input_gate(x, inputs[index], self._activation))
            if layer.scale != 1.0:
                x.mul_(layer.scale)

    @torch.inference_mode()
    def write_kv(self, layer: Layer, x: Tensor, batch: Batch, cache: Tensor) -> None:
        """Writes the K/V of `x` (tokens, hidden) in an attending layer on torch, and computes nothing else of it."""
        assert layer.attention_pre_norm is not None, "of the layers that are read beside a model"
        rotations, of_queries = self._rotations_at(batch)
        turns = None if layer.rope is None else (of_queries[layer.rope], rotations[layer.rope])
        self._place(layer, layer.attention_pre_norm(x), cache, batch, turns)

    def _recurrent_plan(self, batch: Batch) -> RecurrentPlan:
        rows = (batch.query_starts, batch.context_lens, batch.states, batch.within)
        return RecurrentPlan(*rows, batch.positions.device, stepwise=self._stepwise)

    def _attention(
        self,
        layer: Layer,
        x: Tensor,
        normed: Tensor,
        cache: Tensor | QuantizedLayer,
        plan: AttentionPlan,
        turns: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Adds the layer's attention over `normed` to `x`, both (tokens, hidden), in place.

        `turns` are the rotations of queries and keys, the same tensor where they do not differ.
        """
        spec = self.spec
        queries, gates = self._place(layer, normed, cache, plan.batch, turns)
        window, scale, softcap = layer.window, spec.attention_scale, spec.attention_softcap
        attended = self._attend(queries, cache, plan, window=window, scale=scale, softcap=softcap, sinks=layer.sinks)
        attended = attended.flatten(1)
        out = layer.o(attended * gates.sigmoid() if spec.gated_attention else attended)
        if layer.attention_post_norm is not None:
            out = layer.attention_post_norm(out)
        x.add_(out, alpha=spec.residual_multiplier * spec.attention_multiplier)

    def _place(
        self, layer: Layer, normed: Tensor, cache: Tensor | QuantizedLayer, batch: Batch, turns: Turns | None
    ) -> tuple[Tensor, Tensor]:
        """Writes the layer's K/V of `normed`. Returns the queries (tokens, heads, head_dim), as the cache wants them,
        and their gates (tokens, heads * head_dim), where attention is gated."""
        heads, kv_heads, width = self.spec.heads, *_heads(cache)
        joined = layer.qkv(normed)
        qkv = joined[:, : (heads + 2 * kv_heads) * width].unflatten(1, (-1, width))
        qk = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            heads_normed = qkv[:, : len(layer.qk_norm.weight)]
            heads_normed.copy_(layer.qk_norm(heads_normed))
        elif layer.q_norm is not None and layer.k_norm is not None:
            q, k = joined[:, : heads * width], joined[:, heads * width : (heads + kv_heads) * width]
            q.copy_(layer.q_norm(q))
            k.copy_(layer.k_norm(k))
        if turns is not None and turns[0] is turns[1]:
            rotate_(qk, turns[0])
        elif turns is not None:
            rotate_(qk[:, :heads], turns[0])
            rotate_(qk[:, heads:], turns[1])
        queries = qkv[:, :heads]
        if layer.has_kv:
            # keys and values of the new tokens as (2, tokens, kv_heads, head_dim): one view instead of four
            row, side = joined.shape[1], kv_heads * width
            new = joined.as_strided((2, len(joined), kv_heads, width), (side, row, width, 1), heads * width)
            if isinstance(cache, QuantizedLayer):
                cache.store(batch.slots, new)
                queries = cache.of_queries(queries)
            else:
                cache.view(2, -1, kv_heads, width).index_copy_(1, batch.slots, new)
        return queries, joined[:, -heads * width :]

    def _latent_attention(
        self,
        layer: Layer,
        latent: LatentProjections,
        x: Tensor,
        normed: Tensor,
        cache: Tensor,
        plan: AttentionPlan,
        turns: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Adds the layer's latent attention (DeepSeek-V2, section 2.1) over `normed` to `x`, in place.

        `cache` is (1, blocks, block_size, 1, rank + rope_dim): the latents of keys and values, and the rotated keys.
        """
        joined = layer.qkv(normed)
        queries, new = joined.split((joined.shape[1] - cache.shape[-1], cache.shape[-1]), 1)
        if layer.q_up is not None and layer.q_norm is not None:
            queries = layer.q_up(layer.q_norm(queries))
        queries = queries.reshape(len(joined), self.spec.heads, -1)
        rank, nope = latent.keys.shape[2], latent.keys.shape[1]
        assert layer.k_norm is not None, "of every layer with latents"
        new = torch.cat([layer.k_norm(new[:, :rank]), new[:, rank:]], 1)[:, None]
        if turns is not None:
            rotate_(queries[..., nope:], turns[0])
            rotate_(new[..., rank:], turns[1])
        cache.view(-1, 1, cache.shape[-1]).index_copy_(0, plan.batch.slots, new)
        attended = self._attend(
            queries, cache, plan, window=layer.window, scale=self.spec.attention_scale, latent=latent
        )
        x.add_(layer.o(attended.flatten(1)), alpha=self.spec.residual_multiplier)

    def _mlp(self, layer: Layer, x: Tensor, normed: Tensor) -> None:
        """Adds the layer's MLP, gated (Shazeer 2020) or not, over `normed` to `x`, in place."""
        if layer.mixture is None:
            out = self._gated(normed, layer)
        elif layer.mixture.beside is None:
            out = self._mixture(layer.mixture, normed, normed)
        else:
            beside = layer.mixture.beside
            out = beside.mlp_post_norm(self._gated(normed, layer))
            out.add_(beside.post_norm(self._mixture(layer.mixture, beside.pre_norm(x), beside.router_norm(x.float()))))
        if layer.mlp_post_norm is not None:
            out = layer.mlp_post_norm(out)
        x.add_(out, alpha=self.spec.residual_multiplier * self.spec.mlp_multiplier)

    def _gated(self, x: Tensor, mlp: Layer | Expert) -> Tensor:
        if not self.spec.gated_mlp:
            return mlp.down(self._activation(mlp.gate_up(x)))
        gate, up = mlp.gate_up(x).chunk(2, dim=-1)
        if isinstance(mlp, Expert) and self._expert_gate is not None:
            return mlp.down(clamped_swiglu(gate, up, self._expert_gate))
        if self.spec.gate_multiplier != 1.0:
            gate = gate * self.spec.gate_multiplier
        return mlp.down(self._activation(gate).mul_(up))

    def _mixture(self, mixture: RoutedExperts, x: Tensor, seen: Tensor) -> Tensor:
        """Returns the output of a layer's experts for `x`, (tokens, hidden); `seen` is the router's input."""
        experts = self.spec.experts
        assert experts is not None, "the layer has experts"
        return run_experts(experts, mixture, x, seen, self._gated, by_row=self._deterministic)


def _heads(cache: Tensor | QuantizedLayer) -> tuple[int, int]:
    """Returns the K/V heads of a layer and their width."""
    return cache.shape[3], cache.shape[4]


def load_decoder(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    kernels: KernelName = "auto",
    quantization: QuantizationName = "none",
    deterministic: bool = False,
    packing: Packing | None = None,
) -> Decoder:
    """Loads the decoder of a checkpoint (see `loader.resolve`), with weights in `dtype` on `device`.

    `max_model_len` matters to models whose frequencies depend on the length served; see `Decoder`. `kernels` is "torch"
    or "auto", which takes our own where they run the model. `quantization` rounds weights at load to int8 or int4, on
    CUDA or our own CPU kernels, and to int8 on torch's; with `deterministic`, every step then computes alike. `packing`
    overrides the weight layout that these imply.

    Raises:
        UnsupportedArchitecture: no family here runs it.
        InvalidParameter: `quantization` int4 on a CPU where our kernels do not run the model, or in float32 on CUDA.
        CheckpointError: an option is not supported exactly, or the weights are incomplete or inconsistent.
    """
    config = read_config(path)
    family = family_of(config)
    # layers of multi-token prediction are read apart, see `engine.speculation.mtp`
    spec, names = replace(family.spec(config), mtp_layers=0), family.names(config)
    if max_model_len is not None and max_model_len > spec.max_position_embeddings:
        raise CheckpointError(
            f"max_model_len is {max_model_len}, but {path.name} supports at most "
            f"{spec.max_position_embeddings} positions (max_position_embeddings)."
        )
    weights = open_weights(path)
    decoder = Decoder(
        spec,
        names,
        weights,
        dtype=dtype,
        device=torch.device(device),
        max_model_len=max_model_len,
        kernels=kernels,
        quantization=quantization,
        deterministic=deterministic,
        packing=packing,
    )
    weights.check_all_used((*names.ignored, names.lm_head) if spec.tied_embeddings else names.ignored)
    return decoder
