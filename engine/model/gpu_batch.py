"""Packs a step as one array of int32 and back: a single copy to the device.

The idea: every part has its place in the array, decided by its maximum size (`StepCapacity`). With a step's own sizes
the array is closely packed; with those of a CUDA graph, the same views serve every step of that graph. The block tables
come last, so that a graph's step copies only their used part. The limits of a step are here too: the pieces of
attention for a device, and the sizes of step that CUDA graphs are kept for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.attention import Pieces
from engine.kernels.work import COLUMNS, AttentionWork, Rows, WorkLimits, cut, grown
from engine.kv_cache.kv_groups import KVGroups
from engine.model.batch import Batch, BatchLayout
from engine.model.model_spec import ModelSpec

Ints = NDArray[np.int32]
RESIDENT = 3  # programs of a decode that a multiprocessor holds at once (72 KiB of shared memory each, of 227)
RESIDENT_CODED = 2  # of quantized K/V, which takes more registers
FIXED_KEYS = 1024  # of a piece, where sums must be made alike in every batch
INTERPRETED_PROCESSORS = 4  # assumed multiprocessors where there is no device
MAX_DRAFT_TOKENS = 256  # of the steps with drafts that graphs are kept for; under such a load drafts seldom pay
_ALIGNED = 4  # int32s: every part begins at 16 bytes, as the kernels' loads like it


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The model's input of one step on a GPU. All int32: `token_ids`, `positions`, `slots` (tokens,) as in `Batch`,
    `logits_at` the tokens whose logits are needed, `pieces` the attention of each of the model's layers, and
    `layer_slots` its slots: of the K/V group that it is in.
    `adapters` has the rows' slots and where their tokens start, on the host, where a row has an adapter. No CUDA graph
    is recorded of a step with `save_kv_layer`, see `Step`."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logits_at: Tensor
    pieces: tuple[Pieces, ...]
    layer_slots: tuple[Tensor, ...]
    adapters: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    save_kv_layer: Callable[[int], None] | None = None
    last_keys: Tensor | None = None  # as `Batch`


@dataclass(frozen=True, slots=True)
class WorkCapacity:
    """Capacities of the work of one kind of layers: pieces of both sizes, listed queries, merged ones, and parts."""

    small: int
    large: int
    order: int
    merged: int
    parts: int

    def holds(self, work: AttentionWork) -> bool:
        has = (len(work.small), len(work.large), len(work.order), len(work.merged), work.slots)
        return all(
            a <= b for a, b in zip(has, (self.small, self.large, self.order, self.merged, self.parts), strict=True)
        )


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """Capacities of a step."""

    tokens: int
    logits: int
    work: tuple[WorkCapacity, ...]  # of each kind of layers
    blocks: int  # of all tables
    tables: int = 1  # block tables of a row: one of each K/V group


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers whose attention is cut alike: of one window, one number of K/V heads (of which the limits are), one width
    of heads and one K/V group, `table`."""

    window: int | None
    head_dim: int
    limits: WorkLimits
    table: int = 0


@dataclass(frozen=True, slots=True)
class PackedModel:
    """The facts of a model that packing needs: the kinds of its layers, each layer's, and the query heads."""

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]  # numbers of kinds
    heads: int

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device, *, deterministic: bool) -> PackedModel:
        """Returns those of a model on a device."""
        made = list[LayerKind]()
        for index, window in enumerate(spec.windows):
            limits = limits_for(spec, device, deterministic=deterministic, layer=index)
            made.append(LayerKind(window, spec.kv_shape(index)[1], limits))
        return cls._of_layers(made, spec.heads)

    @classmethod
    def _of_layers(cls, layers: Sequence[LayerKind], heads: int) -> PackedModel:
        kinds = tuple(dict.fromkeys(layers))
        return cls(kinds, tuple(kinds.index(each) for each in layers), heads)

    def grouped(self, groups: KVGroups | None) -> PackedModel:
        """Returns the same with the block tables of K/V groups."""
        if groups is None:
            return self
        both = zip(self.of_layers, groups.tables, strict=True)
        return self._of_layers([replace(kind, table=table) for kind, table in both], self.heads)

    def limited(self, change: Callable[[WorkLimits], WorkLimits]) -> PackedModel:
        """Returns the same with other limits."""
        return replace(self, kinds=tuple(replace(kind, limits=change(kind.limits)) for kind in self.kinds))

    @property
    def of_layers(self) -> tuple[LayerKind, ...]:
        """Returns each layer's kind."""
        return tuple(self.kinds[kind] for kind in self.layers)

    @property
    def fixed_keys(self) -> int | None:
        """Returns the keys of a piece, where sums are made alike in every batch."""
        return self.kinds[0].limits.fixed_keys


def works_of(laid: BatchLayout, block_size: int, model: PackedModel) -> list[AttentionWork]:
    """Cuts the attention of a step, for each kind of layers."""
    shape = np.asarray(laid.starts), np.asarray(laid.contexts), laid.tables, block_size
    rows = Rows(*shape, laid.branches, laid.last_keys)
    return [cut(_seen(rows, kind, laid), kind.limits, kind.window) for kind in model.kinds]


def _seen(rows: Rows, kind: LayerKind, laid: BatchLayout) -> Rows:
    """Returns a step's rows as layers of a kind see them."""
    if not kind.table:
        return rows
    assert laid.windowed is not None, "the cache has K/V groups"
    return replace(rows, tables=laid.windowed[0][kind.table - 1], table=kind.table)


def blocks_of(works: Sequence[AttentionWork]) -> NDArray[np.int32]:
    """Returns the blocks of all tables, those of each K/V group once."""
    of_tables = {work.table: work.blocks for work in works}
    if len(of_tables) == 1:
        return works[0].blocks
    return np.concatenate([of_tables[table] for table in sorted(of_tables)])


class Cutter:
    """Cuts the attention of successive steps. While the same sequences decode, pieces are kept for some steps and only
    grow: cutting is most of the host's work for a small step."""

    _KEPT = 16  # steps: no piece is then longer by more than a quarter of a tile

    def __init__(self, model: PackedModel, block_size: int) -> None:
        self._model, self._size = model, block_size
        self._works: list[AttentionWork] = []
        self._contexts: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._age = 0

    def works(self, laid: BatchLayout) -> list[AttentionWork]:
        """See `works_of`."""
        contexts = np.asarray(laid.contexts)
        decodes = len(laid.tokens) == len(contexts) and self._model.fixed_keys is None
        kept = decodes and laid.follows and self._age < self._KEPT and np.array_equal(contexts, self._contexts + 1)
        if kept:
            rows = Rows(np.asarray(laid.starts), contexts, laid.tables, self._size)
            kinds = zip(self._works, self._model.kinds, strict=True)
            self._works = [grown(work, _seen(rows, kind, laid)) for work, kind in kinds]
            self._age += 1
        else:
            self._works = works_of(laid, self._size, self._model)
            self._age = 0 if decodes else self._KEPT
        self._contexts = contexts
        return self._works


def capacity_of(laid: BatchLayout, works: Sequence[AttentionWork]) -> StepCapacity:
    """Returns the sizes of this step, no larger."""
    sizes = [
        WorkCapacity(len(work.small), len(work.large), len(work.order), len(work.merged), work.slots) for work in works
    ]
    tables = 1 + max(work.table for work in works)
    return StepCapacity(len(laid.tokens), len(laid.wanted), tuple(sizes), len(blocks_of(works)), tables)


@dataclass(frozen=True, slots=True)
class Parts:
    """Buffers for attention that is yet to be merged. One layer is done with them before the next begins, so all layers
    share them, and all graphs."""

    values: Tensor
    weights: Tensor

    @classmethod
    def like(cls, capacities: Sequence[StepCapacity], model: PackedModel, device: torch.device) -> Parts:
        """Returns buffers that are large enough for each of several capacities."""
        max_parts = max(work.parts for each in capacities for work in each.work)
        widest = max(kind.head_dim for kind in model.kinds)
        values = torch.empty(max_parts, model.heads, widest, device=device)
        return cls(values, torch.empty(max_parts, model.heads, device=device))

    def of(self, kind: LayerKind) -> Tensor:
        """Returns the values as those of layers of a kind lie: (parts, heads, head_dim)."""
        parts, heads, _ = self.values.shape
        return self.values.flatten()[: parts * heads * kind.head_dim].view(parts, heads, kind.head_dim)


class Packed:
    """Offsets of each part, for one capacity."""

    def __init__(self, capacity: StepCapacity) -> None:
        self.capacity = capacity
        self._places: list[tuple[int, int]] = []
        at = 0
        for size in self._sizes():
            self._places.append((at, size))
            at += -(-size // _ALIGNED) * _ALIGNED
        self.size = at
        self._blocks_at = self._places[-1][0]

    def _sizes(self) -> list[int]:
        capacity = self.capacity
        sizes = [capacity.tokens, capacity.tokens, capacity.logits, *[capacity.tokens] * capacity.tables]
        for each in capacity.work:
            sizes += [each.small * COLUMNS, each.large * COLUMNS, each.order, each.merged, each.merged + 1, each.parts]
        return [*sizes, capacity.blocks]

    def fill(self, laid: BatchLayout, works: Sequence[AttentionWork], into: Ints) -> int:
        """Writes a step to `into`, which has `size` entries or more. Returns the number of entries that the device
        needs.

        Tokens beyond the step's are token 0 at position 0, written to the null block; pieces beyond have no queries.
        """
        parts: list[NDArray[np.int32] | NDArray[np.int64] | list[int]]
        parts = [laid.tokens, laid.positions, laid.wanted, laid.slots]
        if self.capacity.tables > 1:
            assert laid.windowed is not None, "the cache has K/V groups"
            parts += list(laid.windowed[1])
        begin, blocks = len(parts), blocks_of(works)
        for work in works:
            parts += [work.small.ravel(), work.large.ravel(), work.order, work.merged, work.starts, work.parts]
        for at, ((first, size), part) in enumerate(zip(self._places, [*parts, blocks], strict=True)):
            used = len(part)
            into[first : first + used] = part
            if used < size and first != self._blocks_at:
                is_starts = at >= begin and (at - begin) % 6 == 4  # merged entries beyond the step have no parts
                into[first + used : first + size] = part[-1] if is_starts else 0
        return self._blocks_at + len(blocks)

    def views(
        self, packed: Tensor, model: PackedModel, parts: Parts | None = None, *, branched: bool = False
    ) -> DeviceStep:
        """Returns the step in `packed`, int32 on the device. `parts` are made if not given; `branched`: it has branches
        of token trees."""
        parts = parts or Parts.like([self.capacity], model, packed.device)
        views = [packed[first : first + size] for first, size in self._places]
        slots = views[3 : 3 + self.capacity.tables]
        begin = 3 + len(slots)
        pieces = list[Pieces]()
        for nth, (kind, capacity) in enumerate(zip(model.kinds, self.capacity.work, strict=True)):
            small, large, order, merged, starts, of_token = views[begin + 6 * nth : begin + 6 + 6 * nth]
            made = Pieces(
                views[-1],
                small.view(-1, COLUMNS) if capacity.small else None,
                large.view(-1, COLUMNS) if capacity.large else None,
                order,
                merged,
                starts,
                of_token,
                parts.of(kind),
                parts.weights,
                kind.limits.large_tile,
                branched,
            )
            pieces.append(made)
        of_layers = tuple(pieces[kind] for kind in model.layers), tuple(slots[kind.table] for kind in model.of_layers)
        return DeviceStep(views[0], views[1], slots[0], views[2], *of_layers)


def with_last_keys(step: DeviceStep, laid: BatchLayout) -> DeviceStep:
    """Returns the step with the last keys of its tokens, where these are not their own positions. Such a step is no
    decode, and no graph's: they are sent apart."""
    if laid.last_keys is None:
        return step
    return replace(step, last_keys=torch.from_numpy(laid.last_keys.astype(np.int32)).to(step.positions.device))


def step_of(batch: Batch, block_size: int, model: PackedModel, device: torch.device) -> DeviceStep:
    """Packs a batch that was not made for the kernels, from the device and back; seldom used."""
    laid = BatchLayout(
        batch.token_ids.tolist(), batch.positions.cpu().numpy(), batch.slots.cpu().numpy(),
        list(batch.query_starts), list(batch.context_lens), batch.block_tables.cpu().numpy(),
        batch.logits_at.tolist(),
        windowed=_windowed(batch),
        branches=None if batch.branches is None else (batch.branches.starts, batch.branches.slots.cpu().numpy()),
        last_keys=None if batch.last_keys is None else batch.last_keys.cpu().numpy(),
    )  # fmt: skip
    works = works_of(laid, block_size, model)
    packed = Packed(capacity_of(laid, works))
    host = np.zeros(packed.size, dtype=np.int32)
    packed.fill(laid, works, host)
    step = packed.views(torch.from_numpy(host).to(device), model, branched=batch.branches is not None)
    step = with_last_keys(step, laid)
    return replace(step, adapters=(batch.adapters, batch.query_starts)) if batch.adapters else step


def _windowed(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Returns the block tables and slots of a batch's windowed K/V groups."""
    if not batch.windowed:
        return None
    tables, slots = zip(*batch.windowed, strict=True)
    return torch.stack(tables).cpu().numpy(), torch.stack(slots).cpu().numpy()


def limits_for(spec: ModelSpec, device: torch.device, *, deterministic: bool, layer: int = 0) -> WorkLimits:
    """Returns the pieces of a layer that fill the device."""
    kv_heads, head_dim = spec.kv_shape(layer)
    processors = INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return WorkLimits(
        group_heads=spec.heads // kv_heads,
        pieces=max(1, RESIDENT * processors // kv_heads),
        large_tile=128 if head_dim <= 128 and not deterministic else 64,
        fixed_keys=FIXED_KEYS if deterministic else None,
        cascade=not deterministic,
        chunked=spec.chunked,
    )


def limits_for_quantized(limits: WorkLimits) -> WorkLimits:
    """Returns the same for quantized K/V."""
    return replace(limits, pieces=max(1, limits.pieces * RESIDENT_CODED // RESIDENT))


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows that graphs are kept for, up to `max_rows`: padding wastes less than a third above 4
    rows, and few steps cost as much as recording a graph."""
    steps = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, max(321, max_rows + 64), 64)]
    return (*(step for step in steps if step < max_rows), max_rows)


def draft_sizes(max_rows: int, width: int) -> tuple[int, ...]:
    """Returns the numbers of tokens that graphs of steps with drafts are kept for: powers of two up to `max_rows` rows
    of `width` tokens, 256 in all at most."""
    most = min(max_rows * width, MAX_DRAFT_TOKENS)
    return (*(1 << n for n in range(1, most.bit_length()) if 1 << n < most), most)


def draft_shape(
    tokens: int, width: int, kinds: Sequence[LayerKind], max_blocks: int, *, branched: bool
) -> StepCapacity:
    """Returns the capacity for a step of so many tokens whose rows have at most `width` each, in any mix: decodes and
    rows with drafts, which may share prefixes. `branched`: the branches of token trees are rows of their own."""
    blocks = tokens * max_blocks + (tokens * (2 + width) if branched else 0)  # of a branch see `work.Rows.listed`
    works, tables = (_draft_work(tokens, width, kind.limits) for kind in kinds), _tables(kinds)
    return StepCapacity(tokens, tokens, tuple(works), tables * blocks, tables)


def _draft_work(tokens: int, width: int, limits: WorkLimits) -> WorkCapacity:
    pieces, most, few = limits.pieces, limits.large_queries, limits.small_queries
    if limits.fixed_keys is not None:
        return WorkCapacity(0, 4 * tokens + pieces, tokens, tokens, 4 * tokens + pieces * min(most, width))
    tiles = (-(-tokens * -(-row // most) // row) for row in range(few + 1, width + 1))  # large ones, of rows so wide
    large, order, queries, parts = max(tiles, default=0) + pieces, tokens, min(most, width), 0
    if limits.cascade:
        large, order, queries, parts = large + tokens // 2, 4 * tokens, min(most, tokens), 8 * tokens + 2 * pieces
    return WorkCapacity(tokens + pieces, large, order, tokens, max(parts, 2 * tokens + pieces * (1 + queries)))


def decode_shapes(rows: int, kinds: Sequence[LayerKind], max_blocks: int) -> list[StepCapacity]:
    """Returns capacities for `rows` decodes, smallest first: the decodes' own needs; then, since surplus pieces cost a
    launch too, with as many for shared prefixes as are worth a graph. Larger steps run without a graph."""
    works, tables = zip(*(_decode_works(rows, kind.limits) for kind in kinds), strict=True), _tables(kinds)
    return [StepCapacity(rows, rows, work, tables * rows * max_blocks, tables) for work in works]


def _tables(kinds: Sequence[LayerKind]) -> int:
    return 1 + max(kind.table for kind in kinds)


def _decode_works(rows: int, limits: WorkLimits) -> list[WorkCapacity]:
    if limits.fixed_keys is not None:
        return [WorkCapacity(0, 4 * rows + limits.pieces, rows, rows, 4 * rows + limits.pieces)]
    works = [WorkCapacity(rows + limits.pieces, 0, rows, rows, rows + limits.pieces)]
    if limits.cascade and rows > 1:
        large = limits.pieces + rows // 2
        of_one_prefix = rows + limits.pieces * (1 + min(rows, limits.large_queries))
        parts = max(8 * rows + 2 * limits.pieces, of_one_prefix)
        works.append(WorkCapacity(rows + limits.pieces, large, 4 * rows, rows, parts))
    return works
