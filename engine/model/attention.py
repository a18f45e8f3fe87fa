"""Attention over the paged KV cache: `reference`, slow and obvious, and `paged`, which serves.

Both take the same arguments and one test holds them together. They know nothing of layers' weights or of requests. The
idea of `paged`: rows of like shape are attended to as one dense batch, the grouping is decided once a step
(`AttentionPlan`) and shared by all layers, so that a layer costs one gather and one fused call per group. Query heads
that share a K/V head go on the query axis, so K and V are never repeated.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kv_cache.quantized_cache import QuantizedCache, QuantizedLayer
from engine.model.batch import Batch, KVCache
from engine.model.layers import LatentProjections

BATCHED_QUERIES = 8  # rows of at most this many query tokens are batched with rows of as many; longer ones go alone
SMALL_BLOCKS = 4  # rows of so few blocks share a group at any ratio of lengths
EXPANDED_BYTES = 32 << 20  # of keys and values made of latents at once
GATHER_BYTES = 1 << 20  # on the CPU, bytes gathered at once: about a core's L2 cache
LONG_RUN = 16  # a decode row of so many neighbouring blocks goes alone: reading in place beats gathering

Position = TypeVar("Position", int, Tensor)


class Scratch:
    """Reused memory for gathered keys and values: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Returns an uninitialised flat tensor. Later calls return the same memory: use it up before the next."""
        if self._buffer is None or self._buffer.numel() < numel or self._buffer.dtype != like.dtype:
            self._buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        return self._buffer[:numel]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row as one window sees it: from its block `first` on, `count` blocks matter."""

    index: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows attended to together: `rows` rows with `queries` query tokens and up to `keys` keys each.

    `tokens` finds the queries in the batch: a slice where they lie together, else (rows * queries,) indices, None for
    all of them. `mask` is additive; without one, every key counts (or, if `causal`, those at or before the query).
    Either `gathered` blocks are copied to `buffer`, of which `k` and `v` are views, or, for a lone row of neighbouring
    blocks, `run` is the first of them and they are read where they are. Of branches, `own` are the tokens of the buffer
    that lie elsewhere, and their slots.
    """

    tokens: slice | Tensor | None
    rows: int
    queries: int
    keys: int
    mask: Tensor | None
    causal: bool
    run: int | None
    gathered: Tensor | None = None  # (2 * blocks,): of the keys, then of the values; (blocks,) of latents
    buffer: Tensor | None = None  # (as many, block_size * kv_heads * head_dim)
    k: Tensor | None = None  # (rows, kv_heads, keys, head_dim); (kv_heads, shared heads, keys, head_dim) for a long row
    v: Tensor | None = None
    own: tuple[Tensor, Tensor] | None = None


class AttentionPlan:
    """The grouping of one step's rows, for every window size that the model's layers use.

    `kv` is the cache of all layers; `group_heads` is query heads per K/V head. `heads` are K/V heads and their width
    where layers differ in those, and the plan is for layers of these alone. `maskless` is False where every group needs
    an explicit mask (softcapped scores). `chunked` is of the windows, and `windowed_images` of images, see `ModelSpec`.
    """

    def __init__(
        self,
        batch: Batch,
        kv: KVCache | QuantizedCache,
        windows: Iterable[int | None],
        *,
        group_heads: int,
        heads: tuple[int, ...] | None = None,
        scratch: Scratch | None = None,
        maskless: bool = True,
        chunked: bool = False,
        windowed_images: bool = False,
    ) -> None:
        self.batch, self._chunked = batch, chunked
        self._windowed_images = windowed_images and batch.last_keys is not None
        self._cache = kv.like if heads is None else kv.like.new_empty(()).expand(*kv.like.shape[:3], *heads)
        self._in_place = kv.in_place and kv.device.type == "cpu"
        self._block_size = kv.block_size
        self._scratch = scratch or Scratch()
        self._group_heads = group_heads
        self._maskless = maskless and not batch.first_key
        self._longest = max(batch.context_lens)
        self._on_cpu = kv.device.type == "cpu"
        # reading block tables from a device would wait for it, so runs of neighbours are found on the CPU only
        self._tables: list[list[int]] = batch.block_tables.tolist() if self._in_place else []
        self._groups: dict[int | None, list[_Group]] = {}
        for window in windows:
            window = self._effective(window)
            if window not in self._groups:
                self._groups[window] = self._plan(window)

    def _effective(self, window: int | None) -> int | None:
        if window is None or self._windowed_images:  # a window that hides nothing still lets an image's tokens attend
            return window
        return None if window >= self._longest else window

    def first_key(self, position: Position, window: int) -> Position:
        """Returns the first position that a query attends to, be it below 0; of each query of a tensor."""
        return position - position % window if self._chunked else position - window + 1

    def last_keys(self, window: int | None) -> Tensor | None:
        """Returns the last position that each token attends to in layers of this window; None: its own."""
        return None if window is None and self._windowed_images else self.batch.last_keys

    def groups(self, window: int | None) -> list[_Group]:
        """Returns the groups for layers of this window."""
        return self._groups[self._effective(window)]

    def _plan(self, window: int | None) -> list[_Group]:
        batch, size = self.batch, self._block_size
        starts = batch.query_starts
        alone, by_count = list[_Row](), dict[int, list[_Row]]()
        for index, context in enumerate(batch.context_lens):
            queries = starts[index + 1] - starts[index]
            if queries == 0:
                continue
            first = 0
            if window is not None:
                position = context - 1 if queries == 1 else int(batch.positions[starts[index]])
                first = max(0, self.first_key(position, window)) // size
            row = _Row(index, first, -(-context // size) - first)
            if queries > BATCHED_QUERIES or (queries == 1 and row.count >= LONG_RUN and self._run(row) is not None):
                alone.append(row)
            else:
                by_count.setdefault(queries, []).append(row)
        similar = [rows for counted in by_count.values() for rows in _similar(counted)]
        groups = [part for rows in similar for part in self._in_cache(rows)] + [[row] for row in alone]
        return [self._group(rows, window) for rows in groups]

    def _in_cache(self, rows: list[_Row]) -> list[list[_Row]]:
        """Splits rows so that a group's gathered keys and values are still in the processor's cache when they are
        attended to."""
        if not self._on_cpu:
            return [rows]
        row_bytes = self._cache[:, 0].numel() * self._cache.element_size() * max(row.count for row in rows)
        if row_bytes * len(rows) <= 4 * GATHER_BYTES:  # they fit the next cache, and fewer calls count for more
            return [rows]
        fit = max(1, GATHER_BYTES // row_bytes)
        return [rows[i : i + fit] for i in range(0, len(rows), fit)]

    def _group(self, rows: list[_Row], window: int | None) -> _Group:
        batch = self.batch
        queries = batch.query_starts[rows[0].index + 1] - batch.query_starts[rows[0].index]
        contexts = [batch.context_lens[row.index] for row in rows]
        keys = max(context - row.first * self._block_size for context, row in zip(contexts, rows, strict=True))
        long = queries > BATCHED_QUERIES
        sees_all = queries == 1 and window is None and len(set(contexts)) == 1  # at the end of its context
        causal = long and queries == contexts[0] and window is None and self._maskless and self.last_keys(None) is None
        mask = None if causal or (sees_all and self._maskless) else self._mask(rows, queries, keys, window)
        tokens = None if len(rows) == len(batch.context_lens) else self._tokens(rows, queries)
        run = self._run(rows[0]) if len(rows) == 1 else None
        if run is not None:
            return _Group(tokens, len(rows), queries, keys, mask, causal, run)
        gathered = self._gathered(rows, max(row.count for row in rows))
        parts, _, block_size, kv_heads, width = self._cache.shape
        buffer = self._scratch.take(len(gathered) * block_size * kv_heads * width, self._cache)
        near = buffer.view(parts, len(rows), -1, kv_heads, width)[:, :, :keys].transpose(2, 3)
        if long:
            near = near.transpose(1, 2).expand(parts, kv_heads, self._group_heads, keys, width)
        return _Group(
            tokens,
            len(rows),
            queries,
            keys,
            mask,
            causal,
            None,
            gathered,
            buffer.view(len(gathered), -1),
            near[0],
            near[-1],
            self._own(rows, keys),
        )

    def _own(self, rows: list[_Row], keys: int) -> tuple[Tensor, Tensor] | None:
        """Returns the tokens of a group's buffer that are of branches, and where their K/V is."""
        branches = self.batch.branches
        if branches is None or not any(self._branches(row) for row in rows):
            return None
        width, size = branches.slots.shape[1], self._block_size
        stride = size * max(row.count for row in rows)
        begins = [branches.starts[row.index] - row.first * size if self._branches(row) else keys for row in rows]
        at = torch.tensor(begins)[:, None] + torch.arange(width)
        kept = (at >= 0) & (at < keys)
        at += torch.arange(len(rows))[:, None] * stride
        device = branches.slots.device
        return at[kept].to(device), branches.slots[[row.index for row in rows]][kept.to(device)]

    def _branches(self, row: _Row) -> bool:
        branches = self.batch.branches
        return branches is not None and branches.starts[row.index] < self.batch.context_lens[row.index]

    def _tokens(self, rows: list[_Row], queries: int) -> slice | Tensor:
        starts = [self.batch.query_starts[row.index] for row in rows]
        if all(b == a + queries for a, b in itertools.pairwise(starts)):
            return slice(starts[0], starts[0] + len(rows) * queries)
        indices = [start + i for start in starts for i in range(queries)]
        return torch.tensor(indices, device=self.batch.positions.device)

    def _run(self, row: _Row) -> int | None:
        """Returns the first block, where the row's blocks are known to be neighbours in the cache."""
        if not self._in_place or not self.batch.in_place or self._branches(row):
            return None
        blocks = self._tables[row.index][row.first : row.first + row.count]
        return blocks[0] if blocks == list(range(blocks[0], blocks[0] + row.count)) else None

    def _gathered(self, rows: list[_Row], count: int) -> Tensor:
        tables, total = self.batch.block_tables, self._cache.shape[1]
        picked = tables if len(rows) == len(tables) else tables[[row.index for row in rows]]
        if any(row.first for row in rows):
            firsts = torch.tensor([row.first for row in rows], device=tables.device)
            columns = firsts[:, None] + torch.arange(count, device=tables.device)
            blocks = picked.gather(1, columns.clamp_(max=tables.shape[1] - 1)).flatten()
        else:
            blocks = picked[:, :count].flatten()
        return torch.cat([blocks + part * total for part in range(len(self._cache))])

    def _mask(self, rows: list[_Row], queries: int, keys: int, window: int | None) -> Tensor:
        """Returns the additive mask: (rows, 1, group heads * queries, keys), or (queries, keys) for a long row."""
        device = self.batch.positions.device
        tokens, last = self._tokens(rows, queries), self.last_keys(window)
        query = self.batch.positions[tokens].view(len(rows), queries, 1)
        key = torch.arange(keys, device=device)
        if any(row.first for row in rows):
            offsets = torch.tensor([row.first * self._block_size for row in rows], device=device)
            key = key + offsets[:, None, None]
        hidden = key > (query if last is None else last[tokens].view(query.shape))
        if self.batch.first_key:
            hidden |= key < self.batch.first_key
        if window is not None:
            hidden |= key < self.first_key(query, window)
        mask = torch.zeros(hidden.shape, dtype=self._cache.dtype, device=device).masked_fill_(hidden, float("-inf"))
        if queries > BATCHED_QUERIES:
            return mask[0]
        if queries == 1:
            return mask.unsqueeze(1)
        return mask.unsqueeze(1).expand(-1, self._group_heads, -1, -1).reshape(len(rows), 1, -1, keys)


def _similar(rows: list[_Row]) -> list[list[_Row]]:
    """Splits rows so that within a group no row has under half the blocks of the longest: padding at most doubles."""
    if max(row.count for row in rows) <= max(SMALL_BLOCKS, 2 * min(row.count for row in rows)):
        return [rows]
    groups: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: -row.count):
        if groups and groups[-1][0].count <= max(SMALL_BLOCKS, 2 * row.count):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group, key=lambda row: row.index) for group in groups]


def paged(
    query: Tensor,
    cache: Tensor | QuantizedLayer,
    plan: AttentionPlan,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    latent: LatentProjections | None = None,
) -> Tensor:
    """Computes attention of one layer, fast.

    Args:
        query: (tokens, heads, head_dim).
        cache: keys and values of the layer, (2, blocks, block_size, kv_heads, head_dim), of the query's dtype; or, with
            `latent`, the latents and rotated keys that these are made of, (1, blocks, block_size, 1, rank + rope_dim).
        plan: the step's plan; it must have been made for `window`, and not `maskless` if there is a `softcap`, or
            `sinks` on another device than the CPU.
        sinks: (heads,) float32, logits that join the denominators of the softmax and have no values.

    Returns:
        (tokens, heads, head_dim), or value_dim with `latent`; a row's result does not depend on the other rows, up to
        rounding.
    """
    groups = plan.groups(window)
    heads, kv_heads, width = query.shape[1], cache.shape[3], cache.shape[4]
    shared = heads // kv_heads

    def of_group(q: Tensor, group: _Group) -> Tensor:
        if latent is None:
            return _attend_group(q, cache, group, kv_heads, shared, width, scale, softcap, sinks)
        if group.queries > BATCHED_QUERIES:
            return _attend_alone(q, cache, group, latent, scale).to(q.dtype)
        attended = _attend_group(_absorbed(q, latent), cache, group, 1, heads, width, scale, softcap, sinks)
        return _of_heads(attended[..., : latent.values.shape[1]], latent.values)

    if len(groups) == 1 and groups[0].tokens is None:
        return of_group(query, groups[0])
    out = torch.empty_like(query) if latent is None else query.new_empty(*query.shape[:2], latent.values.shape[2])
    for group in groups:
        out[group.tokens] = of_group(query[group.tokens], group)
    return out


def _of_heads(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiplies each head of `x` (tokens, heads, in) by its matrix, of (heads, in, out): (tokens, heads, out)."""
    return torch.bmm(x.to(matrices.dtype).transpose(0, 1), matrices).transpose(0, 1).to(x.dtype)


def _absorbed(query: Tensor, latent: LatentProjections) -> Tensor:
    """Returns queries of latents instead of keys, (tokens, heads, rank + rope_dim): scores of both are the same, as a
    key without positions is a matrix times its latent (DeepSeek-V2, section 2.1.2)."""
    nope = latent.keys.shape[1]
    return torch.cat([_of_heads(query[..., :nope], latent.keys), query[..., nope:]], -1)


def expanded_from(latent: LatentProjections, width: int) -> int:
    """Returns the queries of a row from which it takes fewer products to make every head's keys and values of the
    latents, once for all of them, than to attend to latents, whose rows of `width` numbers are longer."""
    _, nope, rank = latent.keys.shape
    value = latent.values.shape[2]
    head = max(nope + width - rank, value)  # of queries, keys and values alike, as the fused call wants them
    return rank * (nope + value) // (2 * (width - head)) if width > head else sys.maxsize


def _attend_alone(
    q: Tensor, cache: Tensor | QuantizedLayer, group: _Group, latent: LatentProjections, scale: float
) -> Tensor:
    """Computes a lone row's queries (tokens, heads, head_dim) on latents, or on keys and values of each head, some
    heads at a time; all in the matrices' number format."""
    assert group.queries > BATCHED_QUERIES, "rows of few queries are grouped"
    heads, nope, rank = latent.keys.shape
    value, width, dtype = latent.values.shape[2], q.shape[2], latent.keys.dtype
    rows, q = _keys_and_values(cache, group, 1)[0][0, 0].to(dtype), q.to(dtype)  # (keys, rank + rope_dim)
    group = replace(group, mask=None if group.mask is None else group.mask.to(dtype))
    if group.queries < expanded_from(latent, rows.shape[1]):
        every = rows.expand(1, heads, *rows.shape)
        attended = _attend(_absorbed(q, latent).transpose(0, 1)[None], every, every, group, scale, None, None)
        return _of_heads(attended[0].transpose(0, 1)[..., :rank], latent.values)
    head = max(width, value)
    out, q = q.new_empty(len(q), heads, value), F.pad(q, (0, head - width))
    step = max(1, EXPANDED_BYTES // (2 * len(rows) * head * q.element_size()))
    for first in range(0, heads, step):
        some = slice(first, min(first + step, heads))
        k, v = q.new_zeros(2, some.stop - first, len(rows), head)
        torch.matmul(rows[:, :rank], latent.keys[some].transpose(1, 2), out=k[..., :nope])
        k[..., nope:width] = rows[:, rank:]
        torch.matmul(rows[:, :rank], latent.values[some], out=v[..., :value])
        attended = _attend(q[None, :, some].transpose(1, 2), k[None], v[None], group, scale, None, None)
        out[:, some] = attended[0].transpose(0, 1)[..., :value]
    return out


def _attend_group(
    q: Tensor,
    cache: Tensor | QuantizedLayer,
    group: _Group,
    kv_heads: int,
    shared: int,
    width: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes one group's queries (rows * queries, heads, head_dim) -> the same shape."""
    rows, queries = group.rows, group.queries
    k, v = _keys_and_values(cache, group, shared)
    if sinks is not None:  # as the rows of scores lie
        sinks = sinks.view(kv_heads, shared)
        sinks = sinks[..., None] if queries > BATCHED_QUERIES else sinks.repeat_interleave(queries, 1)
    if queries > BATCHED_QUERIES:  # a lone row: K/V heads are the batch, the heads that share one are the heads
        q = q.view(queries, kv_heads, shared, width).permute(1, 2, 0, 3)
        attended = _attend(q, k, v, group, scale, softcap, sinks).permute(2, 0, 1, 3)
    elif queries == 1:
        attended = _attend(q.view(rows, kv_heads, shared, width), k, v, group, scale, softcap, sinks)
    else:
        q = q.view(rows, queries, kv_heads, shared, width).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, kv_heads, shared * queries, width)
        attended = _attend(q, k, v, group, scale, softcap, sinks)
        attended = attended.view(rows, kv_heads, shared, queries, width).permute(0, 3, 1, 2, 4)
    return attended.reshape(rows * queries, kv_heads * shared, width)


def _keys_and_values(cache: Tensor | QuantizedLayer, group: _Group, shared: int) -> tuple[Tensor, Tensor]:
    parts, blocks, block_size, kv_heads, width = cache.shape
    if group.k is not None and group.v is not None and group.buffer is not None and group.gathered is not None:
        if isinstance(cache, QuantizedLayer):
            cache.gather(group.gathered, group.buffer)
        else:
            torch.index_select(cache.view(parts * blocks, -1), 0, group.gathered, out=group.buffer)
        if group.own is not None:
            at, slots = group.own
            tokens = group.buffer.view(parts, -1, kv_heads * width)
            if isinstance(cache, QuantizedLayer):
                tokens[:, at] = cache.tokens(slots, tokens.dtype).flatten(2)
            else:
                tokens[:, at] = cache.view(parts, -1, kv_heads * width)[:, slots]
        return group.k, group.v
    assert group.run is not None and not isinstance(cache, QuantizedLayer)
    token = kv_heads * width
    if group.queries > BATCHED_QUERIES:
        shape, strides = (kv_heads, shared, group.keys, width), (width, 0, token, 1)
    else:
        shape, strides = (1, kv_heads, group.keys, width), (0, width, token, 1)
    start = cache.storage_offset() + group.run * block_size * token
    k = cache.as_strided(shape, strides, start)
    return k, cache.as_strided(shape, strides, start + (parts - 1) * blocks * block_size * token)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, group: _Group, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=group.causal, scale=scale)
    if softcap is None and sinks is not None and q.device.type == "cpu":
        # SDPA's own kernel, which returns the log of the sums too.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, sums = flash(q, k, v, is_causal=group.causal, attn_mask=group.mask, scale=scale)
        return out * torch.sigmoid(sums - sinks)[..., None].to(out.dtype)
    scores = torch.matmul(q, k.transpose(-1, -2)).float()
    scores = scores.mul_(scale) if softcap is None else scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if group.mask is not None:
        scores = scores.add_(group.mask)
    if sinks is not None:
        scores = torch.cat([scores, sinks[..., None].expand(*scores.shape[:-1], 1)], -1)
    return torch.matmul(scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype), v)


def _expanded(rows: Tensor, latent: LatentProjections) -> tuple[Tensor, Tensor]:
    """Returns keys and values of every head, (tokens, heads, their width), of latents and rotated keys (tokens, rank +
    rope_dim) float32."""
    heads, _, rank = latent.keys.shape
    plain, values = (
        torch.einsum(of, rows[:, :rank], each.float())
        for of, each in (("tr,hnr->thn", latent.keys), ("tr,hrv->thv", latent.values))
    )
    return torch.cat([plain, rows[:, None, rank:].expand(-1, heads, -1)], -1), values


def reference(
    query: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    latent: LatentProjections | None = None,
) -> Tensor:
    """Computes `paged` one token and one head at a time, in float32; the same arguments and result."""
    batch, (kv_heads, width) = plan.batch, cache.shape[3:]
    out = query.new_zeros(*query.shape[:2], query.shape[2] if latent is None else latent.values.shape[2])
    shared = 1 if latent is not None else query.shape[1] // kv_heads
    for row in range(len(batch.context_lens)):
        rows = cache[:, batch.block_tables[row]].float().view(len(cache), -1, kv_heads, width)
        if batch.branches is not None and batch.branches.starts[row] < batch.context_lens[row]:
            begin, context = batch.branches.starts[row], batch.context_lens[row]
            own = cache.view(len(cache), -1, kv_heads, width)[:, batch.branches.slots[row, : context - begin]]
            rows[:, begin:context] = own.float()
        keys, values = rows if latent is None else _expanded(rows[0, :, 0], latent)
        last = plan.last_keys(window)
        for token in range(batch.query_starts[row], batch.query_starts[row + 1]):
            position = int(batch.positions[token])
            first = batch.first_key if window is None else max(batch.first_key, plan.first_key(position, window))
            end = 1 + (position if last is None else int(last[token]))
            for head in range(query.shape[1]):
                k, v = keys[first:end, head // shared], values[first:end, head // shared]
                scores = k @ query[token, head].float() * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                out[token, head] = (scores.softmax(0)[: len(v)] @ v).to(query.dtype)
    return out
