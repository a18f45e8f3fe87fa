"""Proposes what a checkpoint's layer of multi-token prediction says (Gloeckle et al. 2024; DeepSeek-V3, section 2.2).

Of each token the layer reads its embedding and the model's final-normed state of the token before, and it predicts the
token after. A draft of several tokens runs it again on its own states. Its K/V are parts of the model's own blocks, at
the token's place, and are written in the step that runs the token: so prefixes, forks, cuts and offloaded blocks have
them. A draft's own K/V go to blocks behind the pool. A state that is not at hand, as that before the first new token
after a cached prefix, is taken as zero: that costs a little of a draft's quality, and never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.core.request import SequenceState
from engine.core.step import Step
from engine.families import family_of
from engine.kv_cache.block_pool import NULL_BLOCK
from engine.model import native_layers
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder
from engine.model.layers import Layer, LayerReader, RMSNorm
from engine.model.linear import Linear
from engine.model.quantization.checkpoint import open_weights, read_config
from engine.speculation.draft_model import MIN_SURVIVAL, request_of, sampled
from engine.speculation.proposer import NOTHING, DraftTokens, Proposer

ROOT = "mtp."
MAX_KEPT = 1024  # sequences whose newest states are kept; the one that ran longest ago is forgotten


def blocks_per_draft(config: EngineConfig) -> int:
    """Returns the blocks behind the pool that one draft may need: it begins anywhere in a block."""
    return (config.block_size + config.speculation_tokens - 2) // config.block_size + 1


@dataclass(frozen=True, slots=True)
class MTPLayer:
    """The layer, of `model`, whose embedding and output matrix it shares. `projection` (2 * hidden -> hidden) joins the
    normed embedding and the normed state, in this order; `norm` is after the layer."""

    model: Decoder
    embedding_norm: RMSNorm
    state_norm: RMSNorm
    projection: Linear
    layer: Layer
    norm: RMSNorm

    @classmethod
    def load(cls, path: Path, model: Decoder) -> MTPLayer:
        """Reads the layer of `model`, which was loaded from `path`; it has experts where its tensors say so.

        Raises:
            CheckpointError: a tensor is missing, of another shape, or not part of such a layer.
        """
        config, weights, spec = read_config(path), open_weights(path), model.spec
        names, known, hidden = family_of(config).names(config), set(weights.names()), spec.hidden_size
        experts = None
        if spec.experts is not None and f"{ROOT}layers.0.{names.router}.weight" in known:
            experts = replace(spec.experts, layers=(0,))
        rope = spec.ropes[spec.attending_layers[0]]
        alone = replace(spec, layers=1, windows=(None,), ropes=(rope,), recurrent_layers=(), experts=experts)
        read = LayerReader(alone, replace(names, root=ROOT), weights, model.dtype, model.device, model.packing)
        layer = read.layer(0)
        if model.experts_in_one_call:
            (layer,) = native_layers.with_experts(alone, [layer])
        made = cls(
            model=model,
            embedding_norm=read.norm(f"{ROOT}pre_fc_norm_embedding.weight", hidden),
            state_norm=read.norm(f"{ROOT}pre_fc_norm_hidden.weight", hidden),
            projection=read.linear(f"{ROOT}fc", hidden, 2 * hidden),
            layer=layer,
            norm=read.norm(f"{ROOT}norm.weight", hidden),
        )
        weights.check_all_used(tuple({f"{name.partition('.')[0]}." for name in known} - {ROOT}))
        return made

    def write(self, batch: Batch, states: Tensor, kv: KVCache) -> None:
        """Writes the layer's K/V of tokens with the states before them, (tokens, hidden)."""
        self.model.write_kv(self.layer, self._joined(batch, states), batch, kv.layers()[0])

    def run(self, batch: Batch, states: Tensor, kv: KVCache) -> Tensor:
        """Runs the layer on tokens with the states before them, (tokens, hidden), and writes its K/V.

        Returns:
            (tokens, hidden), final-normed: the states that logits, and a next token of a draft, are made of.
        """
        x = self._joined(batch, states)
        self.model.run_layers([self.layer], x, batch, kv)
        return self.norm(x)

    def _joined(self, batch: Batch, states: Tensor) -> Tensor:
        embedded = self.embedding_norm(self.model.embed(batch.token_ids, batch.features))
        return self.projection(torch.cat([embedded, self.state_norm(states)], -1))

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits (rows, vocab), float32, of what `run` returned."""
        return self.model.lm_head(states).float()


@dataclass(slots=True, eq=False)
class _Drafting:
    """A sequence that drafts: the state before its newest token, then before the draft's; its blocks, and the draft."""

    seq: SequenceState
    budget: int
    state: Tensor
    table: list[int]
    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    alive: float = 1.0


@dataclass(slots=True)
class MTP(Proposer):
    """Drafts by `layer`. `kv` is its cache; the blocks from `first_block` on are `rows` drafts', `per_draft` each."""

    name = "mtp"
    model = True

    layer: MTPLayer
    kv: KVCache
    first_block: int
    per_draft: int
    rows: int
    # by sequence, the one that ran last at the end: a position, and the states from there on
    _kept: OrderedDict[int, tuple[int, Tensor]] = field(default_factory=OrderedDict)
    _shifts: dict[int, int] = field(default_factory=dict)  # of those with images: of the positions that ropes rotate by

    @classmethod
    def of(cls, layer: MTPLayer, kv: KVCache, config: EngineConfig, blocks: int) -> MTP:
        """Returns the proposer of a model whose cache has `blocks` blocks, the null block included."""
        assert kv.mtp is not None, "the cache was made without the layer"
        return cls(layer, kv.mtp, blocks, blocks_per_draft(config), config.max_running)

    def ran(self, step: Step, batch: Batch, states: Tensor) -> None:
        """Writes the layer's K/V of a step that ran, `states` (tokens, hidden) being the model's final-normed ones."""
        before = states.roll(1, 0)
        for row, (first, end) in zip(step.rows, pairwise(batch.query_starts), strict=True):
            known = self._state(row.seq, row.start - 1)
            before[first] = 0 if known is None else known
            newest = 1 + len(row.draft)  # those of a draft may all be right
            self._kept[row.seq.id] = row.end - 1, states[end - newest : end].clone()
            self._kept.move_to_end(row.seq.id)
            if batch.rotary is not None:
                self._shifts[row.seq.id] = int(batch.rotary[0, end - 1]) - (row.end - 1 + len(row.draft))
        while len(self._kept) > MAX_KEPT:
            self._shifts.pop(self._kept.popitem(last=False)[0], None)
        self.layer.write(batch, before, self.kv)

    @torch.inference_mode()
    def propose_all(self, asked: Sequence[tuple[SequenceState, int]], min_confidence: float) -> list[DraftTokens]:
        drafting = self._begun(asked)
        found = {each.seq.id: each for each in drafting}
        while drafting:
            states = self.layer.run(self._batch(drafting), torch.stack([each.state for each in drafting]), self.kv)
            requests = [request_of(each.seq, each.tokens) for each in drafting]
            samples = sampled(self.layer.logits(states), requests)
            for each, state, (token, probability) in zip(drafting, states, samples, strict=True):
                each.state = state
                each.tokens += (token,)
                each.confidence += (probability,)
                each.alive *= probability
            least = max(MIN_SURVIVAL, min_confidence)
            drafting = [each for each in drafting if len(each.tokens) < each.budget and each.alive >= least]
        drafts = {id: DraftTokens(each.tokens, each.confidence) for id, each in found.items()}
        return [drafts.get(seq.id, NOTHING) for seq, _ in asked]

    def forget(self, seq: SequenceState) -> None:
        self._kept.pop(seq.id, None)
        self._shifts.pop(seq.id, None)

    def _state(self, seq: SequenceState, position: int) -> Tensor | None:
        """Returns the model's state at a position of a sequence, (hidden,), if it is at hand."""
        first, states = self._kept.get(seq.id, (0, None))
        return states[position - first] if states is not None and 0 <= position - first < len(states) else None

    def _begun(self, asked: Sequence[tuple[SequenceState, int]]) -> list[_Drafting]:
        """Returns the sequences that can draft: of those the newest token alone has not run. The last block of their
        K/V is copied where it is not full: the draft goes on in the copy."""
        drafting: list[_Drafting] = []
        copies: list[tuple[int, int]] = []
        size, most = self.kv.block_size, self.per_draft
        for seq, budget in asked:
            newest = len(seq) - 1
            state = self._state(seq, newest - 1)
            if seq.remaining != 1 or state is None or len(drafting) == self.rows:
                continue
            full, first = newest // size, self.first_block + len(drafting) * most
            if newest % size:
                copies.append((seq.table[full], first))
            room = most * size - newest % size
            table = seq.table[:full] + list(range(first, first + most))
            drafting.append(_Drafting(seq, min(budget, room), state, table))
        self.kv.copy_blocks(copies)
        return drafting

    def _batch(self, drafting: Sequence[_Drafting]) -> Batch:
        """Returns the newest token of each sequence or of its draft."""
        size, device = self.kv.block_size, self.kv.device
        positions = [len(each.seq) - 1 + len(each.tokens) for each in drafting]
        slots = [each.table[at // size] * size + at % size for each, at in zip(drafting, positions, strict=True)]
        width, rotary = max(len(each.table) for each in drafting), None
        if self._shifts:
            turned = [at + self._shifts.get(each.seq.id, 0) for each, at in zip(drafting, positions, strict=True)]
            rotary = torch.tensor([turned] * 3, device=device)
        tables = [each.table + [NULL_BLOCK] * (width - len(each.table)) for each in drafting]
        return Batch(
            torch.tensor([each.tokens[-1] if each.tokens else each.seq.tokens[-1] for each in drafting], device=device),
            torch.tensor(positions, device=device),
            torch.tensor(slots, device=device),
            tuple(range(len(drafting) + 1)),
            tuple(at + 1 for at in positions),
            torch.tensor(tables, device=device),
            torch.arange(0, device=device),
            first_key=1,  # no state comes before a sequence's first token
            rotary=rotary,
        )
