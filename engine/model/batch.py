"""The model's input of one step: its tensors, and the persistent buffers in which each step's batch is made.

Rows are ragged: every sequence's query tokens are laid end to end, `query_starts` says where each begins. A decode row
has one query token, a prefill row has a chunk of them; nothing else distinguishes the two. Of a block table, only the
changes since the last step are written. Knows rows and their sequences' tables; nothing of jobs or of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.request import NO_ADAPTER
from engine.core.step import Row, Step
from engine.core.token_tree import path_to, runs
from engine.kernels.buffers import zeros
from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.block_tensors import BlockTensors, copy_slots
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.layer_parts import LayerParts
from engine.model.model_spec import GlobalHeads, ModelSpec
from engine.model.recurrent.states import RecurrentStates
from engine.multimodal.image_input import FIRST_IMAGE_ID, has_images

if TYPE_CHECKING:
    from engine.multimodal.encoder_cache import EncoderCache


@dataclass(frozen=True, slots=True)
class Batch:
    """One ragged step.

    `token_ids`, `positions` and `slots` have shape (tokens,), int64. A slot is `block * block_size + offset`, the place
    of that token's K/V. `block_tables` is (rows, max_blocks) int64, padded with NULL_BLOCK. A query token at position p
    attends to positions 0..p of its own row's block table. `query_starts` has rows + 1 entries; `context_lens[r]` is
    the position of row r's last query token, plus one. `logits_at` indexes `token_ids`: the tokens whose logits are
    needed.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    logits_at: Tensor
    in_place: bool = True  # whether adjacent keys may be read in place, which is faster
    states: tuple[int, ...] = ()  # each row's slot of `RecurrentStates`, which its tokens advance
    within: slice | None = None  # the tokens that advance states, where others pad a lone row
    features: Features | None = None
    windowed: tuple[tuple[Tensor, Tensor], ...] = ()  # the block tables and slots of each windowed K/V group
    first_key: int = 0  # no token attends to positions before it; on torch's layers alone
    branches: Branches | None = None
    adapters: tuple[int, ...] = ()  # each row's slot, or NO_ADAPTER; none where no row has one
    save_kv_layer: Callable[[int], None] | None = None  # see `Step`
    last_keys: Tensor | None = None  # (tokens,) int64, where tokens of an image attend to later ones of it
    mutual: tuple[tuple[int, int, int], ...] = ()  # those images: row, first position and end
    # (3, tokens) int64, by frame, row and column where a sequence has images (M-RoPE); (tokens,) in `engine.diffusion`
    rotary: Tensor | None = None

    @property
    def rotary_positions(self) -> Tensor:
        """Returns the positions that ropes rotate by."""
        return self.positions if self.rotary is None else self.rotary

    def of_table(self, table: int) -> Batch:
        """Returns the batch as layers of that K/V group see it, 0 being those that see the whole context."""
        if not table:
            return self
        block_tables, slots = self.windowed[table - 1]
        return replace(self, block_tables=block_tables, slots=slots)


@dataclass(frozen=True, slots=True)
class Branches:
    """The rows of a step that verify branches of token trees, whose K/V lies behind their sequences' in preorder. Row r
    has the K/V of position p from `starts[r]` on at `slots[r, p - starts[r]]`; where that is the row's context, all is
    in its block table. `slots` is (rows, tokens) int64, padded with zeros."""

    starts: tuple[int, ...]
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Rows of an encoder that stand in the place of tokens' embeddings: `at` (n,) int64 indexes the step's tokens,
    `rows` (n, hidden)."""

    at: Tensor
    rows: Tensor


class KVCache(BlockTensors):
    """Paged keys and values of all layers in one tensor: (layers, 2, blocks, block_size, kv_heads, head_dim).

    With `latent` a token has one row in place of both, (layers, 1, blocks, block_size, 1, head_dim).

    Of a short convolution's layer, a token's place holds what later tokens mix in, in two halves of `conv_width` / 2:
    (layers, 2, blocks, block_size, 1, conv_width / 2), a tensor of its own. So a prefix is shared, copied, truncated
    and offloaded at any token, as K/V is; it takes more memory than the state of the last tokens alone would. Layers
    with `global_heads` have a tensor of their own, too. A layer that does none of this, or reads the keys and values of
    another one (`shared_kv`), has no part of a block: the `states` of recurrent layers have slots of their own. With
    `groups` a block has `groups.layers` layers, and each group's blocks are other ones. `mtp` is the cache of layers of
    multi-token prediction: its first blocks are parts of these blocks.
    """

    in_place = True  # attention may read blocks in place

    def __init__(
        self,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        conv_layers: tuple[int, ...] = (),
        conv_width: int = 0,
        latent: bool = False,
        global_heads: GlobalHeads | None = None,
        shared_kv: Mapping[int, int] | None = None,
        without_blocks: tuple[int, ...] = (),
        states: RecurrentStates | None = None,
        groups: KVGroups | None = None,
        mtp: KVCache | None = None,
    ) -> None:
        self.block_size = block_size
        self.states = states
        self.groups = groups
        self.mtp = mtp
        shared_kv = shared_kv or {}
        kinds = [(2 - latent, kv_heads, head_dim)]
        kind_of = {index: 0 for index in range(layers) if index not in without_blocks}
        others = [(conv_layers, (2, 1, conv_width // 2))]
        if global_heads is not None:
            others.append((global_heads.layers, (2, global_heads.kv_heads, global_heads.head_dim)))
        for these, kind in others:
            if these:
                kind_of |= dict.fromkeys(these, len(kinds))
                kinds.append(kind)
        own: list[list[int]] = [[] for _ in kinds]
        for index in sorted(kind_of.keys() - shared_kv.keys()):
            own[kind_of[index]].append(index)
        # of each layer, in order: its tensor, and its place in that
        self._places = [(at, own[at].index(shared_kv.get(index, index))) for index, at in sorted(kind_of.items())]
        if groups is not None:
            own, self._places = [list(range(groups.layers))], [(0, place) for place in groups.places]
        self._own, self._layers = own, layers
        super().__init__(
            [
                zeros(len(these), parts, blocks, block_size, heads, width, dtype=dtype, device=device)
                for these, (parts, heads, width) in zip(own, kinds, strict=True)
            ]
            + ([] if mtp is None else mtp.tensors)
        )
        self.data = self._tensors[0]

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        slots: int = 1,
        draft_blocks: int = 0,
        groups: KVGroups | None = None,
    ) -> KVCache:
        """Returns the cache of a model; its first block is the null block, and the first of its `slots` of recurrent
        states the state of no tokens. Layers of multi-token prediction have `draft_blocks` behind the others. With
        `groups` a block is of one K/V group."""
        shape = (spec.layers, blocks, block_size, spec.kv_heads, spec.head_dim)
        with_blocks = {*spec.attending_layers, *spec.conv_layers}
        mtp = None
        if spec.mtp_layers:
            of_mtp = (spec.mtp_layers, blocks + draft_blocks, block_size, spec.kv_heads, spec.head_dim)
            mtp = cls(*of_mtp, dtype, device)
        return cls(
            *shape,
            dtype,
            device,
            conv_layers=spec.conv_layers,
            conv_width=spec.hidden_size,
            latent=spec.latent is not None,
            global_heads=spec.global_heads,
            shared_kv=spec.shared_kv,
            without_blocks=tuple(index for index in range(spec.layers) if index not in with_blocks),
            states=RecurrentStates(spec, slots, dtype, device) if spec.recurrent_layers else None,
            groups=groups,
            mtp=mtp,
        )

    @property
    def like(self) -> Tensor:
        """Returns a tensor of the shape of an attending layer without global heads and the dtype of the computation, of
        any values."""
        return self.data[0] if len(self.data) else self.data.new_empty(self.data.shape[1:])

    def layers(self) -> list[Tensor]:
        """Returns each layer's (2, blocks, block_size, kv_heads, head_dim): keys, then values; (1, ...) of latents. A
        convolution's has one head of half of its width. A layer that reads another one's has the same tensor. Layers
        that do neither are left out: see `states`."""
        parts = [part.unbind(0) for part in self._tensors]  # of `mtp`, too, which no place names
        return [parts[at][place] for at, place in self._places]

    def layer_parts(self) -> LayerParts:
        """Returns the parts of a block by layer, without `groups`: there a block has layers of one group."""
        assert self.groups is None, "a block of a K/V group is no block of all layers"
        found: list[list[Tensor]] = [[] for _ in range(self._layers)]
        for part, these in zip(self._tensors, self._own, strict=False):  # those of `mtp` come last
            for place, index in enumerate(these):
                found[index].append(part[place])
        of_mtp = [] if self.mtp is None else [[layer] for part in self.mtp.tensors for layer in part]
        return LayerParts([*found, *of_mtp], self._layers)

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies single tokens' K/V in every layer, see `kv_cache.block_tensors.copy_slots`."""
        copy_slots(self.tensors, pairs)

    @cached_property
    def addresses(self) -> list[int]:
        """Returns where each layer's keys begin."""
        return [layer.data_ptr() for layer in self.layers()]


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A step as `Batch` describes it, on the host. `tables` is valid until the next step's is made.

    A token that row i of the step before samples, still unknown here, is -1 - i.
    """

    tokens: list[int]
    positions: Ints
    slots: Ints
    starts: list[int]
    contexts: list[int]
    tables: Ints
    wanted: list[int]
    windowed: tuple[Ints, Ints] | None = None  # tables (groups, rows, blocks) and slots of the windowed K/V groups
    images: tuple[list[int], list[int]] = ([], [])  # placeholders: where they are in `tokens`, and their ids
    branches: tuple[tuple[int, ...], Ints] | None = None  # `Branches`
    adapters: tuple[int, ...] = ()  # as `Batch`
    mutual: tuple[tuple[int, int, int], ...] = ()
    last_keys: Ints | None = None
    rotary: Ints | None = None
    follows: bool = False  # the rows are the sequences of the last step, in order, and their tables have only grown


class Batching:
    """Makes one batch at a time: it is valid until the next one is made."""

    def __init__(
        self,
        block_size: int,
        device: torch.device | str = "cpu",
        images: EncoderCache | None = None,
        image_token: int = 0,
        groups: KVGroups | None = None,
    ) -> None:
        """`images` has the rows of placeholders; `image_token` stands for those in a batch."""
        self._size = block_size
        self._groups = 1 if groups is None else groups.width
        self._images, self._image_token = images, image_token
        self._device = device
        self._tables: Ints = np.full((self._groups, 0, 0), NULL_BLOCK, dtype=np.int64)
        self._written: list[tuple[int, int, int]] = []  # of each row: its sequence's id and moves, blocks written
        self._rows = 0  # of the last step
        self._follows = False

    def make(self, step: Step) -> Batch:
        """Returns the step's tensors."""
        laid = self.lay(step)
        return Batch(
            token_ids=self._tensor(laid.tokens),
            positions=self._tensor(laid.positions),
            slots=self._tensor(laid.slots),
            query_starts=tuple(laid.starts),
            context_lens=tuple(laid.contexts),
            block_tables=self._tensor(laid.tables),
            logits_at=self._tensor(laid.wanted),
            states=tuple(row.state for row in step.rows),
            features=self.features(laid),
            windowed=() if laid.windowed is None else tuple(zip(*map(self._tensor, laid.windowed), strict=True)),
            branches=None if laid.branches is None else Branches(laid.branches[0], self._tensor(laid.branches[1])),
            adapters=laid.adapters,
            save_kv_layer=step.save_kv_layer,
            last_keys=None if laid.last_keys is None else self._tensor(laid.last_keys),
            mutual=laid.mutual,
            rotary=None if laid.rotary is None else self._tensor(laid.rotary),
        )

    def features(self, laid: BatchLayout) -> Features | None:
        """Returns the rows for a step's placeholders, on the device; None where it has none."""
        at, ids = laid.images
        if not ids or self._images is None:
            return None
        return Features(self._tensor(at), self._images.rows(ids))

    def lay(self, step: Step) -> BatchLayout:
        """Returns the same on the host. Tokens whose K/V exists already write to the null block."""
        rows, size = step.rows, self._size
        ends = [row.start + row.width for row in rows]
        tables = self._filled(rows, ends)
        firsts = np.array([row.start for row in rows])
        cached = np.array([row.seq.kv_len for row in rows])
        if step.tokens == len(rows):  # every row is one token
            tokens = [row.seq.tokens[row.start] if row.sampled_at is None else -1 - row.sampled_at for row in rows]
            starts = list(range(len(rows) + 1))
            wanted = [at for at, row in enumerate(rows) if row.logits_from <= row.start]
            row_of, positions = np.arange(len(rows)), firsts
        else:
            tokens, wanted, starts = [], [], [0]
            for row in rows:
                first = starts[-1] - row.start  # position p of this row is token first + p of the batch
                end = row.start + row.width
                wanted.extend(range(first + max(row.start, row.logits_from), first + end))
                tokens.extend(row.seq.tokens[row.start : row.end])
                tokens.extend(row.draft)
                starts.append(starts[-1] + row.width)
            row_of = np.repeat(np.arange(len(rows)), np.diff(starts))
            positions = np.arange(len(tokens)) + (firsts - np.array(starts[:-1]))[row_of]
            cached = cached[row_of]
        offsets = positions % size
        written = tables[:, row_of, positions // size]  # each token's block, of each group
        slots = np.ascontiguousarray(np.where(positions < cached, NULL_BLOCK, written) * size + offsets)
        seen = self._images
        images: tuple[list[int], list[int]] = ([], [])
        mutual: tuple[tuple[int, int, int], ...] = ()
        if seen is not None and has_images(tokens):
            images = self._parted(tokens)
            found = ((at, seen.mutual(row.seq, row.start, row.end)) for at, row in enumerate(rows))
            mutual = tuple((at, start, end) for at, spans in found for start, end in spans)
        adapters = [row.seq.adapter_slot for row in rows]
        laid = BatchLayout(
            tokens,
            positions,
            slots[0],
            starts,
            ends,
            tables[0],
            wanted,
            (tables[1:], slots[1:]),
            images,
            adapters=tuple(adapters) if any(each != NO_ADAPTER for each in adapters) else (),
            mutual=mutual,
            last_keys=last_keys_of(positions, starts, mutual),
            rotary=None if seen is None else seen.rotary(rows, positions, starts),
            follows=self._follows,
        )
        return _branched(laid, rows) if any(row.parents for row in rows) else laid

    def _parted(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Replaces the placeholders among `tokens`; returns where they were, and their ids."""
        at = [at for at, token in enumerate(tokens) if token >= FIRST_IMAGE_ID]
        ids = [tokens[each] for each in at]
        for each in at:
            tokens[each] = self._image_token
        return at, ids

    def _filled(self, rows: list[Row], ends: list[int]) -> Ints:
        """Returns the rows' tables of each K/V group up to their last query token, (groups, rows, blocks), padded with
        NULL_BLOCK. Blocks whose window has passed may still be there: nothing reads them."""
        size, written = self._size, self._written
        blocks = [-(-end // size) for end in ends]
        width = max(blocks)
        self._reserve(len(rows), width)
        tables = self._tables
        self._follows, self._rows = len(rows) == self._rows, len(rows)
        for at, (row, count) in enumerate(zip(rows, blocks, strict=True)):
            seq = row.seq
            id, moves, had = written[at]
            first = had
            if id != seq.id or moves != seq.moves:
                self._follows, first = False, 0
            elif count == had:
                continue
            if count > first:
                tables[0, at, first:count] = seq.table[first:count]
                if self._groups > 1:
                    begin = max(first, seq.window_from)
                    tables[1:, at, first:begin] = NULL_BLOCK
                    tables[1:, at, begin:count] = np.array(seq.windowed[begin:count], dtype=np.int64).T
            if count < had:
                tables[:, at, count:had] = NULL_BLOCK
            written[at] = seq.id, seq.moves, count
        return tables[:, : len(rows), :width]

    def _reserve(self, rows: int, width: int) -> None:
        groups, had_rows, had_width = self._tables.shape
        if rows > had_rows or width > had_width:
            shape = (groups, max(rows, had_rows), max(2 * width, had_width))
            grown = np.full(shape, NULL_BLOCK, dtype=np.int64)
            grown[:, :had_rows, :had_width] = self._tables
            self._tables = grown
            self._written += [(0, 0, 0)] * (rows - len(self._written))

    def _tensor(self, values: Ints | list[int]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)


def last_keys_of(positions: Ints, starts: Sequence[int], mutual: Sequence[tuple[int, int, int]]) -> Ints | None:
    """Returns the last position that each token attends to; None where that is its own, without `mutual` images."""
    if not mutual:
        return None
    last = positions.copy()
    for row, start, end in mutual:
        of_row = last[starts[row] : starts[row + 1]]
        of_row[(of_row >= start) & (of_row < end)] = end - 1
    return last


def _branched(laid: BatchLayout, rows: Sequence[Row]) -> BatchLayout:
    """Splits rows with token trees: each run of a tree is a row of its own, at its own depth."""
    positions, starts, contexts = laid.positions.copy(), [0], list[int]()
    of, begins, places = list[int](), list[int](), list[Ints]()
    for at, row in enumerate(rows):
        first = laid.starts[at] + row.count  # the draft's first token in the batch
        for nodes in runs(len(row.draft), row.parents):
            path = path_to(row.parents, nodes.stop - 1)
            context = row.end + len(path)
            positions[first + nodes.start : first + nodes.stop] = np.arange(context - len(nodes), context)
            of.append(at)
            starts.append(first + nodes.stop)
            contexts.append(context)
            begins.append(row.end if nodes.start else context)
            places.append(laid.slots[first:][path if nodes.start else []])
    slots = np.zeros((len(of), max(map(len, places))), dtype=np.int64)
    for at, each in enumerate(places):
        slots[at, : len(each)] = each
    mutual = tuple((of.index(row), start, end) for row, start, end in laid.mutual)  # in a row's first run
    return replace(
        laid, positions=positions, starts=starts, contexts=contexts, tables=laid.tables[of],
        branches=(tuple(begins), slots), adapters=tuple(laid.adapters[at] for at in of if laid.adapters),
        mutual=mutual, last_keys=last_keys_of(positions, starts, mutual),
        rotary=None if laid.rotary is None else laid.rotary + (positions - laid.positions),
    )  # fmt: skip
