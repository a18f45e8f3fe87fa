"""Attention over the paged KV cache: `reference`, slow and obvious, and `paged`, the one that serves.

Both take the same arguments and one test holds them together. They know nothing of layers' weights or of requests. The
idea of `paged`: rows of like shape are attended to as one dense batch, the grouping is decided once a step
(`AttentionPlan`) and shared by all layers, so that a layer costs one gather and one fused call per group. Query heads
that share a K/V head go on the query axis, so K and V are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.batch import Batch

BATCHED_QUERIES = 8  # rows of at most this many query tokens are batched with rows of as many; longer ones go alone
SMALL_BLOCKS = 4  # rows of so few blocks share a group whatever the ratio of their lengths


class Scratch:
    """Reused memory for gathered keys and values: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, numel: int, like: Tensor) -> Tensor:
        """An uninitialised flat tensor, valid until the next `take`."""
        if self._buffer is None or self._buffer.numel() < numel or self._buffer.dtype != like.dtype:
            self._buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        return self._buffer[:numel]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows attended to together: `rows` rows with `queries` query tokens and up to `keys` keys each.

    `tokens` finds the queries in the batch: a slice where they lie together, else (rows * queries,) indices. `blocks` is
    (rows * blocks per row,), or the first block where a lone row's blocks are neighbours. `mask` is additive; without
    one, every key counts (or, if `causal`, those at or before the query).
    """

    tokens: slice | Tensor
    rows: int
    queries: int
    keys: int
    blocks: Tensor | int
    mask: Tensor | None
    causal: bool


class AttentionPlan:
    """How one step's rows are grouped, for every window size that the model's layers use.

    `batch` is the step; `group_heads` is query heads per K/V head; `dtype` that of queries and cache. `maskless` is
    False where every group needs an explicit mask (softcapped scores).
    """

    def __init__(
        self, batch: Batch, block_size: int, windows: Iterable[int | None], *, group_heads: int, dtype: torch.dtype,
        scratch: Scratch | None = None, maskless: bool = True,
    ) -> None:
        self.batch = batch
        self.scratch = scratch or Scratch()
        self._block_size = block_size
        self._group_heads = group_heads
        self._dtype = dtype
        self._maskless = maskless
        self._longest = max(batch.context_lens)
        self._groups: dict[int | None, list[_Group]] = {}
        for window in {self._effective(window) for window in windows}:
            self._groups[window] = self._plan(window)

    def _effective(self, window: int | None) -> int | None:
        return None if window is None or window >= self._longest else window

    def groups(self, window: int | None) -> list[_Group]:
        """The groups for layers of this window."""
        return self._groups[self._effective(window)]

    def _plan(self, window: int | None) -> list[_Group]:
        batch, size = self.batch, self._block_size
        starts, contexts = batch.query_starts, batch.context_lens
        alone, by_count = [], dict[int, list[tuple[int, int, int]]]()
        for row, context in enumerate(contexts):
            count = starts[row + 1] - starts[row]
            if count == 0:
                continue
            first = 0
            if window is not None:
                position = context - 1 if count == 1 else int(batch.positions[starts[row]])
                first = max(0, position - window + 1) // size
            entry = (row, first, -(-context // size) - first)
            if count > BATCHED_QUERIES:
                alone.append(self._group([entry], count, window))
            else:
                by_count.setdefault(count, []).append(entry)
        batched = [
            self._group(rows, count, window) for count, entries in by_count.items() for rows in _similar(entries)
        ]
        return batched + alone

    def _group(self, entries: list[tuple[int, int, int]], queries: int, window: int | None) -> _Group:
        """One group of (row, first block, number of blocks), each with `queries` query tokens."""
        batch, size = self.batch, self._block_size
        rows = [row for row, _, _ in entries]
        contexts = [batch.context_lens[row] for row in rows]
        most = max(count for _, _, count in entries)
        keys = max(context - first * size for context, (_, first, _) in zip(contexts, entries, strict=True))
        causal, mask = False, None
        if queries == 1 and window is None and len(set(contexts)) == 1 and self._maskless:
            pass  # one query at the end of its context sees all of it
        elif queries > BATCHED_QUERIES and queries == contexts[0] and window is None and self._maskless:
            causal = True
        else:
            mask = self._mask(entries, queries, keys, window)
        return _Group(self._tokens(rows, queries), len(rows), queries, keys, self._blocks(entries, most), mask, causal)

    def _tokens(self, rows: list[int], queries: int) -> slice | Tensor:
        starts = self.batch.query_starts
        if all(starts[b] == starts[a] + queries for a, b in zip(rows, rows[1:], strict=False)):
            return slice(starts[rows[0]], starts[rows[0]] + len(rows) * queries)
        indices = [starts[row] + i for row in rows for i in range(queries)]
        return torch.tensor(indices, device=self.batch.positions.device)

    def _blocks(self, entries: list[tuple[int, int, int]], count: int) -> Tensor | int:
        tables = self.batch.block_tables
        if len(entries) == 1:
            row, first, _ = entries[0]
            blocks = tables[row, first : first + count]
            if tables.device.type == "cpu":  # elsewhere, asking would wait for the device
                listed = blocks.tolist()
                if listed == list(range(listed[0], listed[0] + count)):
                    return int(listed[0])
            return blocks
        picked = tables[[row for row, _, _ in entries]] if len(entries) < len(tables) or not _ordered(entries) else tables
        if all(first == 0 for _, first, _ in entries):
            return picked[:, :count].reshape(-1)
        firsts = torch.tensor([first for _, first, _ in entries], device=tables.device)
        columns = firsts[:, None] + torch.arange(count, device=tables.device)
        return picked.gather(1, columns.clamp_(max=tables.shape[1] - 1)).reshape(-1)

    def _mask(self, entries: list[tuple[int, int, int]], queries: int, keys: int, window: int | None) -> Tensor:
        """Additive: (rows, 1, group heads * queries, keys), or (queries, keys) for a row that goes alone."""
        device = self.batch.positions.device
        tokens = self._tokens([row for row, _, _ in entries], queries)
        query = self.batch.positions[tokens].view(len(entries), queries, 1)
        key = torch.arange(keys, device=device)
        if any(first for _, first, _ in entries):
            key = key + torch.tensor([first * self._block_size for _, first, _ in entries], device=device)[:, None, None]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=device).masked_fill_(hidden, float("-inf"))
        if queries > BATCHED_QUERIES:
            return mask[0]
        if queries == 1:
            return mask.unsqueeze(1)
        return mask.unsqueeze(1).expand(-1, self._group_heads, -1, -1).reshape(len(entries), 1, -1, keys)


def _ordered(entries: list[tuple[int, int, int]]) -> bool:
    return all(entry[0] == i for i, entry in enumerate(entries))


def _similar(entries: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Split rows so that within a group no row has under half the blocks of the longest: padding at most doubles."""
    if max(count for _, _, count in entries) <= max(SMALL_BLOCKS, 2 * min(count for _, _, count in entries)):
        return [entries]
    groups: list[list[tuple[int, int, int]]] = []
    for entry in sorted(entries, key=lambda entry: -entry[2]):
        longest = groups[-1][0][2] if groups else 0
        if groups and longest <= max(SMALL_BLOCKS, 2 * entry[2]):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return [sorted(group) for group in groups]


def paged(
    query: Tensor, cache: Tensor, plan: AttentionPlan, *, window: int | None, scale: float, softcap: float | None = None,
) -> Tensor:
    """Attention of one layer, fast.

    Args:
        query: (tokens, heads, head_dim).
        cache: keys and values of the layer, (2, blocks, block_size, kv_heads, head_dim), of the query's dtype.
        plan: the step's plan; it must have been made for `window`, and not `maskless` if there is a `softcap`.

    Returns:
        (tokens, heads, head_dim); how a row comes out does not depend on the other rows, up to rounding.
    """
    groups = plan.groups(window)
    heads, kv_heads, width = query.shape[1], cache.shape[3], cache.shape[4]
    shared = heads // kv_heads
    out = None
    for group in groups:
        rows, queries, keys = group.rows, group.queries, group.keys
        k, v = _gather(cache, group, plan.scratch)  # (rows, kv_heads, keys, head_dim)
        q = query[group.tokens]
        if queries > BATCHED_QUERIES:  # a lone row: K/V heads are the batch, the heads that share one are the heads
            q = q.view(queries, kv_heads, shared, width).permute(1, 2, 0, 3)
            k = k[0].unsqueeze(1).expand(kv_heads, shared, keys, width)
            v = v[0].unsqueeze(1).expand(kv_heads, shared, keys, width)
            attended = _attend(q, k, v, group, scale, softcap).permute(2, 0, 1, 3)
        elif queries == 1:
            attended = _attend(q.view(rows, kv_heads, shared, width), k, v, group, scale, softcap)
        else:
            q = q.view(rows, queries, kv_heads, shared, width).permute(0, 2, 3, 1, 4)
            q = q.reshape(rows, kv_heads, shared * queries, width)
            attended = _attend(q, k, v, group, scale, softcap)
            attended = attended.view(rows, kv_heads, shared, queries, width).permute(0, 3, 1, 2, 4)
        attended = attended.reshape(rows * queries, heads, width)
        if len(groups) == 1:
            return attended
        if out is None:
            out = torch.empty_like(query)
        out[group.tokens] = attended
    return torch.empty_like(query) if out is None else out


def _gather(cache: Tensor, group: _Group, scratch: Scratch) -> tuple[Tensor, Tensor]:
    block_size, kv_heads, width = cache.shape[2:]
    if isinstance(group.blocks, int):
        count = -(-group.keys // block_size)
        near = cache[:, group.blocks : group.blocks + count].view(2, 1, count * block_size, kv_heads, width)
    else:
        flat = cache.flatten(2)
        count = group.blocks.shape[0]
        buffer = scratch.take(2 * count * flat.shape[2], cache).view(2, count, flat.shape[2])
        torch.index_select(flat[0], 0, group.blocks, out=buffer[0])
        torch.index_select(flat[1], 0, group.blocks, out=buffer[1])
        near = buffer.view(2, group.rows, -1, kv_heads, width)
    both = near[:, :, : group.keys].transpose(2, 3)
    return both[0], both[1]


def _attend(q: Tensor, k: Tensor, v: Tensor, group: _Group, scale: float, softcap: float | None) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=group.causal, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    if group.mask is not None:
        scores = scores.add_(group.mask)
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)


def reference(
    query: Tensor, cache: Tensor, plan: AttentionPlan, *, window: int | None, scale: float, softcap: float | None = None,
) -> Tensor:
    """What `paged` computes, one token and one head at a time, in float32; the same arguments and result."""
    batch, (block_size, kv_heads, width) = plan.batch, cache.shape[2:]
    out = torch.zeros_like(query)
    shared = query.shape[1] // kv_heads
    for row in range(len(batch.context_lens)):
        keys, values = cache[:, batch.block_tables[row]].float().view(2, -1, kv_heads, width)
        for token in range(batch.query_starts[row], batch.query_starts[row + 1]):
            position = int(batch.positions[token])
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(query.shape[1]):
                k, v = keys[first : position + 1, head // shared], values[first : position + 1, head // shared]
                scores = k @ query[token, head].float() * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                out[token, head] = (scores.softmax(0) @ v).to(query.dtype)
    return out
