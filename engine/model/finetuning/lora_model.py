"""A decoder with a LoRA (Hu et al. 2021) that gradients pass through.

Reads the layers that `Decoder` reads, frozen and not packed, and computes whole sequences without a cache: tokens of
all rows lie end to end, and only attention and convolutions see a padded grid. Knows nothing of chats, optimisers or
files of adapters. Tests hold its logits to the decoder's and its gradients to those of PEFT and transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from engine.errors import CheckpointError, InvalidParameter
from engine.families import family_of
from engine.model.adapters.peft_checkpoint import LinearName, TargetRows, projections
from engine.model.layers import ACTIVATIONS, Layer, LayerReader
from engine.model.linear import Dense, Packing
from engine.model.model_spec import ModelSpec, Rope, WeightNames
from engine.model.quantization.checkpoint import open_weights, read_config
from engine.model.rope import Rotation, rotated, served_context

LOSS_ROWS = 512  # positions whose logits are made at once


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Sequences laid end to end. `places` (tokens,) finds each token in the grid (rows, longest)."""

    token_ids: Tensor  # (tokens,) int64
    positions: Tensor
    places: Tensor
    rows: int
    longest: int

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], device: torch.device) -> TokenRows:
        """Lays out texts, none of them empty."""
        longest = max(map(len, texts))
        positions = torch.cat([torch.arange(len(text)) for text in texts])
        places = torch.cat([torch.arange(len(text)) + row * longest for row, text in enumerate(texts)])
        ids = torch.tensor([token for text in texts for token in text])
        return cls(ids.to(device), positions.to(device), places.to(device), len(texts), longest)

    def grid(self, x: Tensor) -> Tensor:
        """Returns `x` (tokens, ...) as (rows, longest, ...), zero behind each row's end."""
        made = x.new_zeros(self.rows * self.longest, *x.shape[1:]).index_copy(0, self.places, x)
        return made.view(self.rows, self.longest, *x.shape[1:])

    def flat(self, x: Tensor) -> Tensor:
        """Returns the grid `x` (rows, longest, ...) as (tokens, ...)."""
        return x.flatten(0, 1).index_select(0, self.places)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The trained matrices of a projection: `a` (rank, in) and `b` (out, rank) float32, as PEFT has them."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class _AdaptedLinear:
    """A frozen linear with the scaled updates of its projections."""

    linear: Dense
    parts: tuple[tuple[TargetRows, LoraPair], ...]
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        a = torch.cat([pair.a for _, pair in self.parts])
        b, first = y.new_zeros(y.shape[1], len(a), dtype=a.dtype), 0
        for target, pair in self.parts:  # all of a linear's updates as one product
            columns = torch.arange(first, first + len(pair.a), device=a.device)
            b = b.index_put((target.rows.to(a.device)[:, None], columns[None]), pair.b)
            first += len(pair.a)
        return y + F.linear(F.linear(x, a.to(x.dtype)), (b * self.scale).to(x.dtype))


def trainable_projections(spec: ModelSpec, names: WeightNames, wanted: Sequence[str] = ()) -> dict[str, TargetRows]:
    """Returns the projections to train by their names from "layers." on: those whose names end with one of `wanted`,
    such as "q_proj" or "self_attn.q_proj", or all that adapters may change.

    Raises:
        CheckpointError: the model has layers that gradients do not pass through here.
        InvalidParameter: one of `wanted` is no projection of the model.
    """
    found = {
        "experts": spec.experts is not None,
        "recurrent layers": bool(spec.recurrent_layers),
        "latent attention": spec.latent is not None,
        "layers that differ in their keys and values": spec.uneven_kv or spec.value_norm,
        "inputs of each layer": spec.per_layer_input is not None or spec.layer_scales,
        "attention sinks": spec.sinks,
        "chunked attention": spec.chunked,
        "a vision encoder": spec.vision is not None and not spec.vision.optional,
    }
    if refused := [name for name, there in found.items() if there]:
        raise CheckpointError(f"The model has {refused[0]}, which are not trained yet; accepted: dense models without.")
    every = projections(spec, names)
    for each in wanted:
        if not any(name.endswith(f".{each}") for name in every):
            accepted = ", ".join(sorted({name.rpartition(".")[2] for name in every}))
            raise InvalidParameter("target_modules", f"target_modules has {each!r:.80}; accepted: {accepted}.")
    chosen = tuple(f".{each}" for each in wanted)
    return {name: rows for name, rows in every.items() if not wanted or name.endswith(chosen)}


class LoraModel:
    """A checkpoint's decoder, frozen in `dtype`, and the matrices of an adapter.

    A is drawn as PEFT draws it, from `seed`, and B is zero: the model is unchanged at first. With `recompute`,
    activations are made again in the backward pass instead of kept (Chen et al. 2016).

    Raises:
        UnsupportedArchitecture, CheckpointError: the model cannot be read or trained.
        InvalidParameter: a target is no projection of it.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str] = (),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        recompute: bool = False,
    ) -> None:
        config = read_config(path)
        family = family_of(config)
        spec, names = family.spec(config), family.names(config)
        self.spec, long_context = served_context(replace(spec, mtp_layers=0), None)
        self.names, self.device, self.scale = names, torch.device(device), alpha / rank
        self.targets = trainable_projections(self.spec, names, targets)
        self._recompute, weights = recompute, open_weights(path)
        read = LayerReader(self.spec, names, weights, dtype, self.device, Packing(Dense, Dense))
        self._embedding = read.tensor(f"{names.root}{names.embedding}.weight", spec.vocab_size, spec.hidden_size)
        self._multiplier = float(torch.tensor(spec.embedding_multiplier).to(dtype))
        layers = [read.layer(index) for index in range(spec.layers)]
        self._norm = read.norm(f"{names.root}{names.norm}.weight", spec.hidden_size)
        self._head = read.head(self._embedding)
        weights.check_all_used((*names.ignored, names.lm_head) if spec.tied_embeddings else names.ignored)
        self._rotations = {
            rope: Rotation(rope, self.spec.rotated_width(at), self.device, long_context=long_context)
            for at, rope in enumerate(self.spec.ropes)
            if rope is not None
        }
        self.pairs = _drawn(self.targets, rank, seed, self.device)
        self._layers = [self._adapted(index, layer) for index, layer in enumerate(layers)]

    def parameters(self) -> list[Tensor]:
        """Returns the trained matrices, in a fixed order."""
        return [matrix for pair in self.pairs.values() for matrix in (pair.a, pair.b)]

    def _adapted(self, index: int, layer: Layer) -> Layer:
        return replace(
            layer,
            qkv=self._linear(index, "qkv", layer),
            o=self._linear(index, "o", layer),
            gate_up=self._linear(index, "gate_up", layer),
            down=self._linear(index, "down", layer),
        )

    def _linear(self, index: int, name: LinearName, layer: Layer) -> Dense | _AdaptedLinear:
        linear = getattr(layer, name)
        parts = tuple(
            (target, self.pairs[each])
            for each, target in self.targets.items()
            if target.layer == index and target.linear == name
        )
        return _AdaptedLinear(linear, parts, self.scale) if parts else linear

    def losses(self, rows: TokenRows, learned: Tensor) -> Iterator[Tensor]:
        """Yields sums of the negative log-likelihood of the tokens at `learned` (n,), some positions at a time.

        `learned` has places among `rows.token_ids`, none of them a row's first.
        """
        states, targets = self.states(rows), rows.token_ids[learned]

        def loss(some: Tensor, wanted: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(some), wanted, reduction="sum")

        for some, wanted in zip(states[learned - 1].split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True):
            yield checkpoint(loss, some, wanted, use_reentrant=False) if self._recompute else loss(some, wanted)

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits (n, vocab) float32 of the last layer's states (n, hidden), before the final norm."""
        logits = self._head(self._norm(states)).float() / self.spec.logits_scaling
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def states(self, rows: TokenRows) -> Tensor:
        """Returns the last layer's states (tokens, hidden), before the final norm."""
        x = self._embedding.index_select(0, rows.token_ids) * self._multiplier
        rotations = {rope: rotation.at(rows.positions) for rope, rotation in self._rotations.items()}
        masks = {window: self._mask(rows.longest, window) for window in dict.fromkeys(self.spec.windows)}

        def run(x: Tensor, layer: Layer) -> Tensor:
            return self._layer(x, layer, rows, rotations, masks)

        for layer in self._layers:
            x = checkpoint(run, x, layer, use_reentrant=False) if self._recompute else run(x, layer)
        return x

    def _mask(self, longest: int, window: int | None) -> Tensor | None:
        """Returns the additive mask (longest, longest); None where it is the causal one alone."""
        if self.spec.attention_softcap is None and (window is None or window >= longest):
            return None
        query, key = torch.arange(longest, device=self.device)[:, None], torch.arange(longest, device=self.device)
        hidden = key > query
        if window is not None:
            hidden |= key < query - window + 1
        dtype = self._embedding.dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))

    def _layer(
        self,
        x: Tensor,
        layer: Layer,
        rows: TokenRows,
        rotations: Mapping[Rope, Tensor],
        masks: Mapping[int | None, Tensor | None],
    ) -> Tensor:
        spec = self.spec
        normed = x if layer.attention_pre_norm is None else layer.attention_pre_norm(x)
        if layer.taps is not None:
            mixed = layer.o(_convolved(layer.qkv(normed), layer.taps, rows))
        else:
            mixed = layer.o(self._attended(normed, layer, rows, rotations, masks[layer.window]))
            if layer.attention_post_norm is not None:
                mixed = layer.attention_post_norm(mixed)
        x = x + mixed * spec.residual_multiplier
        if not spec.parallel:
            normed = x if layer.mlp_pre_norm is None else layer.mlp_pre_norm(x)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        out = layer.down(ACTIVATIONS[spec.activation](gate) * up)
        if layer.mlp_post_norm is not None:
            out = layer.mlp_post_norm(out)
        return x + out * spec.residual_multiplier

    def _attended(
        self, normed: Tensor, layer: Layer, rows: TokenRows, rotations: Mapping[Rope, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Returns the attention of one layer, (tokens, heads * head_dim)."""
        spec = self.spec
        heads, kv_heads, width = spec.heads, spec.kv_heads, spec.head_dim
        qk, v = layer.qkv(normed).unflatten(1, (-1, width)).split((heads + kv_heads, kv_heads), 1)
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        elif layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split((heads, kv_heads), 1)
            qk = torch.cat([layer.q_norm(q.flatten(1)), layer.k_norm(k.flatten(1))], 1).unflatten(1, (-1, width))
        q, k = qk.split((heads, kv_heads), 1)
        if layer.rope is not None:
            turns = rotations[layer.rope]
            q = rotated(q, self._rotations[layer.rope].of_queries(turns, rows.positions))
            k = rotated(k, turns)
        q, k, v = (rows.grid(each).transpose(1, 2) for each in (q, k, v))  # (rows, heads, longest, width)
        k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
        if spec.attention_softcap is None:
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.attention_scale
            )
        else:
            assert mask is not None, "see `_mask`"
            scores = (q @ k.transpose(-1, -2)).float() * (spec.attention_scale / spec.attention_softcap)
            attended = (torch.tanh(scores) * spec.attention_softcap + mask).softmax(-1).to(v.dtype) @ v
        return rows.flat(attended.transpose(1, 2)).flatten(1)


def _convolved(projected: Tensor, taps: Tensor, rows: TokenRows) -> Tensor:
    """Returns the gated outputs (tokens, hidden) of a short convolution, see `recurrent.short_convolution`."""
    gate_in, gate_out, values = projected.chunk(3, dim=-1)
    product = F.pad(rows.grid((gate_in * values).float()), (0, 0, len(taps) - 1, 0))
    mixed = sum(product[:, at : at + rows.longest] * tap for at, tap in enumerate(taps))
    assert isinstance(mixed, Tensor)
    return gate_out * rows.flat(mixed).to(projected.dtype)


def _drawn(targets: Mapping[str, TargetRows], rank: int, seed: int, device: torch.device) -> dict[str, LoraPair]:
    draw = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, target in targets.items():
        bound = 1 / math.sqrt(target.columns)
        a = (torch.rand(rank, target.columns, generator=draw) * 2 - 1) * bound
        b = torch.zeros(len(target.rows), rank)
        pairs[name] = LoraPair(a.to(device).requires_grad_(), b.to(device).requires_grad_())
    return pairs
