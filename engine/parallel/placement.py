"""A rank's place in the grid of stages, contexts and shards, and the part of a model that is its own.

Megatron-LM's division (Shoeybi et al. 2019): a shard has some heads and columns of every MLP, and rows of the
vocabulary; a stage has some layers (GPipe, Huang et al. 2019). Contexts have the same weights, and each some tokens.
Knows architectures, and no tensors or processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.model.model_spec import Experts, ModelSpec, WeightNames

MAX_RANKS = 64  # that a refusal looks for one which fits


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank `rank` of `shards` times `contexts` times `stages`: the ranks of one stage are neighbours, and those of one
    context in it."""

    rank: int
    shards: int = 1
    stages: int = 1
    expert_parallel: bool = False  # shards have whole experts, not a part of each
    contexts: int = 1

    @classmethod
    def of(cls, config: EngineConfig, rank: int) -> Placement:
        """Returns the place of a rank of those that are configured."""
        return cls(
            rank,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            config.enable_expert_parallel,
            config.prefill_context_parallel_size,
        )

    @property
    def setting(self) -> str:
        """Returns the name of the first setting that makes several ranks of it."""
        if self.shards > 1:
            return "tensor_parallel_size"
        return "pipeline_parallel_size" if self.stages > 1 else "prefill_context_parallel_size"

    @property
    def shard(self) -> int:
        return self.rank % self.shards

    @property
    def context(self) -> int:
        return self.rank // self.shards % self.contexts

    @property
    def width(self) -> int:
        """Returns the number of ranks of a stage."""
        return self.shards * self.contexts

    @property
    def stage(self) -> int:
        return self.rank // self.width

    @property
    def last(self) -> bool:
        """Returns whether its stage has the last layers, and so the logits."""
        return self.stage == self.stages - 1

    @property
    def has_vocabulary(self) -> bool:
        """Returns whether its stage looks tokens up, or makes logits."""
        return self.stage == 0 or self.last

    def layers(self, count: int) -> range:
        """Returns the layers of its stage; earlier stages have one more where `count` does not divide."""
        each, more = divmod(count, self.stages)
        first = self.stage * each + min(self.stage, more)
        return range(first, first + each + (self.stage < more))

    def share(self, count: int) -> range:
        """Returns its part of `count` that all shards divide evenly."""
        each = count // self.shards
        return range(self.shard * each, (self.shard + 1) * each)

    def kv_heads(self, count: int) -> range:
        """Returns its K/V heads; where there are fewer than shards, several have the same one."""
        if count >= self.shards:
            return self.share(count)
        head = self.shard // (self.shards // count)
        return range(head, head + 1)

    def tokens(self, vocabulary: int) -> range:
        """Returns its rows of the vocabulary, padded to as many in each shard: some may lie beyond."""
        each = -(-vocabulary // self.shards)
        return range(self.shard * each, (self.shard + 1) * each)


def shard_of(spec: ModelSpec, place: Placement) -> ModelSpec:
    """Returns the architecture of a rank's part: as if the model had no more heads, columns, tokens and layers."""
    layers = place.layers(spec.layers)
    some = slice(layers.start, layers.stop)
    return replace(
        spec,
        vocab_size=len(place.tokens(spec.vocab_size)) if place.has_vocabulary else 0,
        heads=len(place.share(spec.heads)),
        kv_heads=len(place.kv_heads(spec.kv_heads)),
        intermediate_size=spec.intermediate_size // place.shards,
        mlp_widths=tuple(width // place.shards for width in spec.mlp_widths[some]),
        layers=len(layers),
        windows=spec.windows[some],
        ropes=spec.ropes[some],
        experts=None if spec.experts is None else _experts_of(spec.experts, place, layers),
    )


def _experts_of(experts: Experts, place: Placement, layers: range) -> Experts:
    mixed = tuple(index - layers.start for index in experts.layers if index in layers)
    if place.expert_parallel:
        return replace(experts, layers=mixed, count=experts.count // place.shards)
    return replace(
        experts,
        layers=mixed,
        intermediate_size=experts.intermediate_size // place.shards,
        shared_size=experts.shared_size // place.shards,
    )


@dataclass(frozen=True, slots=True)
class Slices:
    """The `ranges` that a rank has of dimension `dim` of a tensor; the whole has `length` there."""

    dim: int
    length: int
    ranges: tuple[range, ...]


def slices_of(spec: ModelSpec, names: WeightNames, place: Placement) -> Mapping[str, Slices]:
    """Returns the tensors of which a rank has a part, by their names in the checkpoint, with that part."""
    found: dict[str, Slices] = {}

    def joined(prefix: str, stems: tuple[str, ...], lengths: tuple[int, ...], parts: tuple[range, ...]) -> None:
        """Adds projections' outputs, which the checkpoint may have in one tensor."""
        if len(stems) == 1 < len(lengths):
            starts = [sum(lengths[:at]) for at in range(len(lengths))]
            moved = tuple(
                range(part.start + start, part.stop + start) for part, start in zip(parts, starts, strict=True)
            )
            each = {stems[0]: Slices(0, sum(lengths), moved)}
        else:
            each = {stem: Slices(0, length, (part,)) for stem, length, part in zip(stems, lengths, parts, strict=True)}
        for stem, some in each.items():
            found[f"{prefix}{stem}.weight"] = found[f"{prefix}{stem}.bias"] = some

    tokens = place.tokens(spec.vocab_size)
    own = range(min(tokens.start, spec.vocab_size), min(tokens.stop, spec.vocab_size))
    rows = Slices(0, spec.vocab_size, (own,))
    found[f"{names.root}{names.embedding}.weight"] = found[names.lm_head] = rows
    for index in place.layers(spec.layers):
        prefix, (kv_heads, width) = f"{names.root}layers.{index}.", spec.kv_shape(index)
        q, kv = place.share(spec.heads), place.kv_heads(kv_heads)
        heads = (_times(q, width), _times(kv, width), _times(kv, width))
        joined(prefix, names.qkv, (spec.heads * width, kv_heads * width, kv_heads * width), heads)
        found[f"{prefix}{names.o}.weight"] = Slices(1, spec.heads * width, heads[:1])
        each = width if spec.qk_norm == "projection" else 1  # "heads": rows, one a head
        if spec.qk_norm in ("heads", "projection"):
            found[f"{prefix}{names.q_norm}.weight"] = Slices(0, spec.heads * each, (_times(q, each),))
            found[f"{prefix}{names.k_norm}.weight"] = Slices(0, kv_heads * each, (_times(kv, each),))
        wide = spec.mlp_widths[index] if spec.mlp_widths else spec.intermediate_size
        columns = place.share(wide)
        joined(prefix, names.gate_up, (wide, wide), (columns, columns))
        found[f"{prefix}{names.down}.weight"] = Slices(1, wide, (columns,))
        if spec.experts is None or index not in spec.experts.layers or place.expert_parallel:
            continue
        stems = {f"{prefix}{names.shared_expert}": spec.experts.shared_size}
        for expert in range(spec.experts.count):
            stems[f"{prefix}{names.expert.format(index=expert)}"] = spec.experts.intermediate_size
        for stem, wide in stems.items():
            columns = place.share(wide)
            joined(stem, names.expert_gate_up, (wide, wide), (columns, columns))
            found[f"{stem}{names.expert_down}.weight"] = Slices(1, wide, (columns,))
    return found


def row_parallel_biases(spec: ModelSpec, names: WeightNames, place: Placement) -> frozenset[str]:
    """Returns the biases that are added once, after the sum over the shards: by the first shard."""
    stems = [names.o, names.down]
    if spec.experts is not None and not place.expert_parallel:
        experts = [names.expert.format(index=expert) for expert in range(spec.experts.count)]
        stems += [f"{each}{names.expert_down}" for each in (*experts, names.shared_expert)]
    return frozenset(f"{names.root}layers.{at}.{stem}.bias" for at in place.layers(spec.layers) for stem in stems)


def _times(some: range, width: int) -> range:
    return range(some.start * width, some.stop * width)


def check_parallel(config: EngineConfig, spec: ModelSpec, names: WeightNames, model: str) -> None:
    """Refuses a model or a setting that several ranks do not run.

    Raises:
        InvalidParameter: says what was wrong and what is accepted.
    """
    shards, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if config.device == "auto" and torch.cuda.is_available():
        message = f"device is auto, here a GPU, and the model is divided among {config.ranks} ranks; accepted: cpu."
        raise InvalidParameter("device", message)
    if why := _unsupported(spec, names):
        name = Placement.of(config, 0).setting
        message = f"{name} is {getattr(config, name)}, but {model} has {why}; accepted: 1 for this model."
        raise InvalidParameter(name, message)
    whole = config.enable_expert_parallel
    if whole and spec.experts is None:
        message = f"enable_expert_parallel is set, but {model} has no experts; accepted: false for this model."
        raise InvalidParameter("enable_expert_parallel", message)
    if not _divides(spec, shards, whole):
        fitting = ", ".join(str(each) for each in range(1, MAX_RANKS + 1) if _divides(spec, each, whole))
        sizes = f"{spec.heads} heads, {spec.kv_heads} K/V heads and an MLP of {spec.intermediate_size}"
        if (experts := spec.experts) is not None:
            sizes += f", {experts.count} experts" if whole else f", experts of {experts.intermediate_size}"
        message = f"tensor_parallel_size is {shards}, but {model} has {sizes}; accepted: {fitting}."
        raise InvalidParameter("tensor_parallel_size", message)
    if stages > spec.layers:
        message = f"pipeline_parallel_size is {stages}; accepted: 1 to {spec.layers}, the layers of {model}."
        raise InvalidParameter("pipeline_parallel_size", message)


def _divides(spec: ModelSpec, shards: int, whole_experts: bool) -> bool:
    widths = [spec.heads, *(spec.mlp_widths or (spec.intermediate_size,))]
    if (experts := spec.experts) is not None:
        widths += [experts.count] if whole_experts else [experts.intermediate_size, experts.shared_size]
    whole = spec.kv_heads % shards == 0 or shards % spec.kv_heads == 0
    return whole and not any(width % shards for width in widths)


def _unsupported(spec: ModelSpec, names: WeightNames) -> str:
    """Returns the part of a model that is not divided among ranks; nothing where all are."""
    parts = {
        "experts that lie in one tensor": bool(names.stacked_experts) or names.joined_experts is not None,
        "attention sinks": spec.sinks,
        "latent attention": spec.latent is not None,
        "recurrent layers": spec.recurrence is not None,
        "short convolutions": bool(spec.conv_layers),
        "layers that differ in their keys and values": spec.uneven_kv,
        "inputs for each layer": spec.per_layer_input is not None,
        "a vision encoder": spec.vision is not None and not spec.vision.optional,
    }
    return next((part for part, there in parts.items() if there), "")
