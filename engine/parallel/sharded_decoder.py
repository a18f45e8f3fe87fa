"""A rank's part of a decoder: the same layers, of fewer heads and columns, with sums over the shards.

Rank 0 runs steps as any decoder does, and tells the others, which follow. Column-parallel projections are those of a
smaller model. Row-parallel ones are summed over the shards (Megatron-LM, Shoeybi et al. 2019), as are rows of the
embedding; logits are gathered by rank 0. Contexts run the same layers, each on its tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Work

from engine.errors import CheckpointError, InvalidParameter, RankDied
from engine.families import family_of
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.model import attention
from engine.model.adapters.peft_checkpoint import Adapter
from engine.model.batch import Batch, Features, KVCache
from engine.model.decoder import Decoder, Keep
from engine.model.layers import Layer, RMSNorm
from engine.model.linear import Linear, Packing, pack
from engine.model.loader import SafetensorsWeights
from engine.model.mlp.experts import RoutedExperts
from engine.model.model_spec import ModelSpec, WeightNames
from engine.model.quantization.checkpoint import open_weights, read_config
from engine.parallel.collectives import RankGroup, Store
from engine.parallel.commands import Allocate, Command, Copies, receive_command, send_command
from engine.parallel.context_shards import RingKind
from engine.parallel.expert_parallel import ExpertParallel, ScatteredRowParallel
from engine.parallel.micro_batches import micro_batches
from engine.parallel.placement import Placement, shard_of
from engine.parallel.ring_attention import RingAttention
from engine.parallel.sharded_weights import ShardedWeights


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups that a rank is in: all `ranks`, the `shards` of its stage and context, and the `ring` of contexts with
    its stage and shard, if there are several."""

    ranks: RankGroup
    shards: RankGroup
    ring: RingAttention | None

    @classmethod
    def connect(cls, store: Store, place: Placement, kind: RingKind = "auto") -> RankGroups:
        """Connects the rank at `place` to the others, of which each does so at the same time. Raises RankDied."""
        ranks = RankGroup(store, "ranks", place.rank, place.width * place.stages)
        shards = RankGroup(store, f"stage {place.stage}, context {place.context}", place.shard, place.shards)
        ring = None
        if place.contexts > 1:
            name = f"stage {place.stage}, shard {place.shard}"
            ring = RingAttention(RankGroup(store, name, place.context, place.contexts), kind)
        return cls(ranks, shards, ring)


@dataclass(frozen=True, slots=True)
class RowParallel:
    """A projection of which each shard has some inputs: their products are summed."""

    linear: Linear
    shards: RankGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.shards.all_reduce(self.linear(x))


class ShardedNorm(RMSNorm):
    """An RMSNorm over a projection of which each shard has some outputs, the same ones `repeated` times."""

    def __init__(self, norm: RMSNorm, width: int, shards: RankGroup, repeated: int = 1) -> None:
        """`width` is that of the whole projection."""
        super().__init__(norm.weight, norm.eps)
        self._width, self._shards, self._repeated = width, shards, repeated

    def __call__(self, x: Tensor) -> Tensor:
        exact = x.float()
        squares = self._shards.all_reduce(exact.square().sum(-1, keepdim=True)) / self._repeated
        return (exact * torch.rsqrt(squares / self._width + self.eps) * self.weight).to(x.dtype)


class ShardedCache(KVCache):
    """Rank 0's part of the paged K/V. Its copies are told to the other ranks, whose parts have the same blocks; with
    several contexts each has some tokens of every block, and `block_size` counts them all."""

    tell: Callable[[Command], None]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self.tell(Copies(pairs, slots=False))
        super().copy_blocks(pairs)

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self.tell(Copies(list(pairs), slots=True))
        super().copy_slots(pairs)


class ShardedDecoder(Decoder):
    """The part of a model that the rank at `place` runs, and its `groups`."""

    def __init__(
        self,
        spec: ModelSpec,
        names: WeightNames,
        weights: ShardedWeights,
        place: Placement,
        groups: RankGroups,
        *,
        dtype: torch.dtype,
        max_model_len: int | None = None,
        deterministic: bool = False,
    ) -> None:
        """`spec` is the whole model's."""
        super().__init__(
            shard_of(spec, place),
            names,
            weights,
            dtype=dtype,
            device=torch.device("cpu"),
            max_model_len=max_model_len,
            attend=attention.paged if groups.ring is None else groups.ring.attend,
            kernels="torch",
            deterministic=deterministic,
            packing=Packing(pack, pack, None if place.last else _no_logits),
        )
        self.placement, self.ranks, self.shards, self.ring = place, groups.ranks, groups.shards, groups.ring
        self._experts = None
        if spec.experts is not None and place.expert_parallel:
            self._experts = ExpertParallel(spec.experts, self.shards)
        self.weights_read = weights.parameters()  # elements
        self._first_token = place.tokens(spec.vocab_size).start
        self._layers = [self._sharded(spec, layer) for layer in self._layers]
        if place.stage:
            self._embedding = self._embedding.new_empty(0, spec.hidden_size)  # looked up by the first stage
        self.spec = replace(self.spec, vocab_size=spec.vocab_size)
        self.on_death: Callable[[RankDied], RankDied] = lambda error: error  # of another rank: says more of it

    def _sharded(self, spec: ModelSpec, layer: Layer) -> Layer:
        o: Linear = RowParallel(layer.o, self.shards)
        down = RowParallel(layer.down, self.shards)
        if layer.mixture is not None and self._experts is not None:
            o = ScatteredRowParallel(layer.o, self._experts)
        if layer.q_norm is None or layer.k_norm is None:
            return replace(layer, o=o, down=down)
        repeated = max(1, self.placement.shards // spec.kv_heads)
        q_norm = ShardedNorm(layer.q_norm, spec.heads * spec.head_dim, self.shards)
        k_norm = ShardedNorm(layer.k_norm, spec.kv_heads * spec.head_dim, self.shards, repeated)
        return replace(layer, o=o, down=down, q_norm=q_norm, k_norm=k_norm)

    def allocate(self, blocks: int, block_size: int, groups: KVGroups | None) -> ShardedCache:
        """Makes the cache of every rank, and returns rank 0's."""
        self._tell(Allocate(blocks))
        part = block_size // self.placement.contexts
        cache = ShardedCache.of(self.spec, blocks, part, self.dtype, self.device, groups=groups)
        assert isinstance(cache, ShardedCache)
        cache.block_size, cache.tell = block_size, self._tell
        return cache

    def _tell(self, command: Command) -> None:
        try:
            send_command(self.ranks, command)
        except RankDied as error:
            raise self.on_death(error) from error

    def stop(self) -> None:
        """Ends the other ranks' `serve`; no step may follow."""
        send_command(self.ranks, None)

    @torch.inference_mode()
    def serve(self, make_cache: Callable[[int], KVCache]) -> None:
        """Follows the commands of rank 0, until it stops. Raises RankDied when it is gone."""
        cache: KVCache | None = None
        while (command := receive_command(self.ranks)) is not None:
            if isinstance(command, Allocate):
                cache = make_cache(command.blocks)
                continue
            assert cache is not None, "rank 0 allocates first"
            if isinstance(command, Batch):
                self._step(command, cache)
            elif command.slots:
                cache.copy_slots(command.pairs)
            else:
                cache.copy_blocks(command.pairs)

    def read_adapter(self, adapter: str, base: str = "") -> Adapter:
        raise CheckpointError("adapters are not divided among ranks; accepted: one rank, or a model without adapters.")

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: KVCache | QuantizedCache, keep: Keep | None = None, keep_all: Keep | None = None
    ) -> Tensor:
        """Runs one step on all ranks, as `Decoder.forward`; of rank 0."""
        assert isinstance(kv, ShardedCache) and keep is None and keep_all is None, "see `check_parallel`"
        self._tell(batch)
        try:
            return self._step(batch, kv)
        except RankDied as error:
            raise self.on_death(error) from error

    def _step(self, batch: Batch, kv: KVCache) -> Tensor:
        """Runs this rank's part of a step; returns the logits at rank 0, elsewhere none."""
        place = self.placement
        if place.width * place.stages == place.shards:
            return super().forward(batch, kv)
        before, after = place.rank - place.width, place.rank + place.width
        sent, logits = list[Work](), list[Tensor]()
        for part in [batch] if place.stages == 1 else micro_batches(batch, place.stages):
            division = None if self.ring is None else self.ring.divide(part, kv.like.shape[2])
            own = part if division is None else division.shard()
            if place.stage == 0:
                x = self.embed(own.token_ids)
            else:
                x = torch.empty(len(own.token_ids), self.spec.hidden_size, dtype=self.dtype)
                self.ranks.receive(x, before)
            self.run_layers(self._layers, x, own, kv)
            if not place.last:
                sent.append(self.ranks.send(x, after))
                continue
            states = x.index_select(0, own.logits_at)
            if self.ring is not None and division is not None:
                states = self.ring.gather(states, division)
            if place.context == 0:
                logits.append(self.logits(states))
        if place.stages == 1:
            return logits[0] if logits else torch.empty(0, self.spec.vocab_size)
        if place.last and place.shard == place.context == 0 and len(batch.logits_at):
            sent.append(self.ranks.send(torch.cat(logits), 0))
        whole = torch.empty(len(batch.logits_at) if place.rank == 0 else 0, self.spec.vocab_size)
        if place.rank == 0 and len(whole):
            self.ranks.receive(whole, place.width * (place.stages - 1))
        self.ranks.finish(sent)
        return whole

    def embed(self, token_ids: Tensor, features: Features | None = None) -> Tensor:
        here = token_ids - self._first_token
        elsewhere = (here < 0) | (here >= len(self._embedding))
        x = super().embed(here.masked_fill_(elsewhere, 0), features)
        return self.shards.all_reduce(x.masked_fill_(elsewhere[:, None], 0.0))

    def _mlp(self, layer: Layer, x: Tensor, normed: Tensor) -> None:
        super()._mlp(layer, x, normed)
        if layer.mixture is not None and self._experts is not None:
            self._experts.gather(x)

    def _mixture(self, mixture: RoutedExperts, x: Tensor, seen: Tensor) -> Tensor:
        if self._experts is None:
            return self.shards.all_reduce(super()._mixture(mixture, x, seen))
        own, out = self._experts.own(len(x)), torch.zeros_like(x)
        out[own] = self._experts.run(mixture, x[own], self._gated, by_row=self._deterministic)
        return out

    def logits(self, states: Tensor, out: Tensor | None = None) -> Tensor:
        parts = self.shards.gather(super().logits(states))
        if not parts:
            return states.new_empty(len(states), 0, dtype=torch.float32)
        whole = torch.cat(parts, 1)[:, : self.spec.vocab_size]
        return whole if out is None else out.copy_(whole)


def _no_logits(weight: Tensor, bias: Tensor | None) -> Linear:
    """Drops the weights of the logits, which another stage makes."""

    def absent(x: Tensor) -> Tensor:
        raise AssertionError("another stage makes the logits")

    return absent


def load_sharded(
    path: Path,
    place: Placement,
    groups: RankGroups,
    *,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    deterministic: bool = False,
) -> ShardedDecoder:
    """Loads a rank's part of the decoder of a checkpoint, as `load_decoder` does the whole.

    Raises:
        UnsupportedArchitecture, CheckpointError: see there.
        InvalidParameter: the checkpoint is quantised.
    """
    config = read_config(path)
    family = family_of(config)
    spec, names = replace(family.spec(config), mtp_layers=0), family.names(config)
    source = open_weights(path)
    if type(source) is not SafetensorsWeights:
        message = f"{path.name} is quantised, and only plain safetensors are divided among ranks; accepted: 1."
        raise InvalidParameter(place.setting, message)
    weights = ShardedWeights(source, spec, names, place)
    decoder = ShardedDecoder(
        spec,
        names,
        weights,
        place,
        groups,
        dtype=dtype,
        max_model_len=max_model_len,
        deterministic=deterministic,
    )
    weights.check_all_used((*names.ignored, names.lm_head) if spec.tied_embeddings else names.ignored)
    return decoder
