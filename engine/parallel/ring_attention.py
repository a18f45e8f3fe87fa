"""Attention over K/V that lies on several ranks, in two ways that give the same.

*pass-K/V*: each rank keeps its queries, and keys and values go round a ring (ring attention, Liu et al. 2023).
*pass-Q*: keys and values stay, and all ranks' queries come to each, whose partial results go back (Yang et al. 2024,
"Context Parallelism for Scalable Million-Token Inference"). Either way a query's parts are put together by the logs of
their softmax sums. Knows tensors and a step's division, and nothing of layers' weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache.quantized_cache import QuantizedLayer
from engine.model.attention import AttentionPlan
from engine.model.batch import Batch
from engine.parallel.collectives import RankGroup
from engine.parallel.context_shards import ContextDivision, ContextShard, HeadShape, RingKind, RowKeys

Parts = list[tuple[Tensor, Tensor]]  # partial attention, and the logs of its softmax sums


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Computes attention over some of the keys.

    Args:
        q: (batch, heads, queries, head_dim); `k` and `v` (batch, heads, keys, head_dim), or one head for all.
        mask: additive and finite, of a shape that broadcasts to (batch, heads, queries, keys), two or four dimensions.

    Returns:
        (batch, heads, queries, head_dim), and the logs of the softmax sums, (batch, heads, queries); both float32.
    """
    if softcap is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, sums = flash(q, k, v, attn_mask=mask, scale=scale)
        return out.float(), sums.float()
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)
    sums = scores.logsumexp(-1)
    return torch.matmul((scores - sums[..., None]).exp_(), v.float()), sums


def merged(parts: Parts) -> Tensor:
    """Returns attention over all keys, of partial results over some of them: as many numbers, float32."""
    weights = torch.stack([sums for _, sums in parts]).softmax(0)
    return torch.stack([out for out, _ in parts]).mul_(weights[..., None]).sum(0)


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attention among the ranks of `ring`, which all have the same heads. `kind` other than auto is every row's."""

    ring: RankGroup
    kind: RingKind = "auto"

    def divide(self, batch: Batch, part: int) -> ContextDivision:
        """Divides a step; each rank has `part` tokens of a block."""
        return ContextDivision(batch, part, self.ring.rank, self.ring.size, self.kind)

    def gather(self, states: Tensor, division: ContextDivision) -> Tensor:
        """Returns the states (logits_at, hidden) behind a step's logits at the ring's first rank, of those that each
        rank has; none elsewhere."""
        ring, counts = self.ring, [len(each) for each in division.wanted]
        first = ring.rank == 0
        if not any(counts):
            return states[:0]
        came = ring.exchange(states, [len(states)] + [0] * (ring.size - 1), counts if first else [0] * ring.size)
        return division.in_order(came) if first else came

    def attend(
        self,
        query: Tensor,
        cache: Tensor | QuantizedLayer,
        plan: AttentionPlan,
        *,
        window: int | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Computes attention of one layer, as `attention.paged` does: of this rank's tokens, over the K/V of all."""
        batch = plan.batch
        assert isinstance(batch, ContextShard) and batch.division is not None, "see `ContextDivision.shard`"
        assert isinstance(cache, Tensor) and sinks is None, "see `check_parallel`"
        step = _Step(batch.division, batch.block_tables, plan, window, scale, softcap)
        shape = HeadShape(query.shape[1], cache.shape[3], cache.shape[4], query.element_size())
        rows = batch.division.rows(plan, window, shape)
        out = torch.zeros_like(query)
        if any(rows.counts):
            out[rows.own] = self._pass_queries(query[rows.own], cache, rows.queried, rows.counts, step)
        for row, found in zip(rows.passed, self._pass_kv(query, cache, rows.passed, step), strict=True):
            out[row.tokens] = found
        return out

    def _pass_kv(self, query: Tensor, cache: Tensor, rows: tuple[RowKeys, ...], step: _Step) -> list[Tensor]:
        """Returns the attention of this rank's queries of each row: (tokens, heads, head_dim)."""
        if not rows:
            return []
        ring, blocks = self.ring, [each.blocks(step.table).flatten() for each in rows]
        held = cache[:, torch.cat(blocks)]
        parts: list[Parts] = [[] for _ in rows]
        for hop in range(ring.size):
            last = hop == ring.size - 1
            arriving = held if last else torch.empty_like(held)
            moving = () if last else ring.shift(held, arriving)
            kvs = held.split([len(each) for each in blocks], 1)
            for row, kv, part in zip(rows, kvs, parts, strict=True):
                if len(row.tokens):
                    part.append(step.attended(query[row.tokens], kv, row, (ring.rank - hop) % ring.size))
            ring.finish(moving)
            held = arriving
        return [merged(part).to(query.dtype) if part else query[:0] for part in parts]

    def _pass_queries(
        self, query: Tensor, cache: Tensor, rows: tuple[RowKeys, ...], counts: tuple[int, ...], step: _Step
    ) -> Tensor:
        """Returns the attention of this rank's queries of all rows, (tokens, heads, head_dim)."""
        ring, (own, heads, width) = self.ring, query.shape
        back = [own] * ring.size
        queries = ring.exchange(query.flatten(1).repeat(ring.size, 1), back, counts).unflatten(1, (heads, width))
        partial = torch.empty(len(queries), heads, width + 1)
        for row in rows:
            kv = cache[:, row.blocks(step.table).flatten()]
            attended, sums = step.attended(queries[row.tokens], kv, row, ring.rank)
            partial[row.tokens] = torch.cat([attended, sums[..., None]], -1)
        came = ring.exchange(partial, counts, back).view(ring.size, own, heads, width + 1)
        return merged([(part[..., :width], part[..., width]) for part in came]).to(query.dtype)


@dataclass(frozen=True, slots=True)
class _Step:
    """The parts of one layer's attention that all of its rows share. `table` is its K/V group's."""

    division: ContextDivision
    table: Tensor
    plan: AttentionPlan
    window: int | None
    scale: float
    softcap: float | None

    def attended(self, q: Tensor, kv: Tensor, row: RowKeys, source: int) -> tuple[Tensor, Tensor]:
        """Computes partial attention of a row's queries (tokens, heads, head_dim) over the keys of rank `source`, (2,
        blocks, tokens of a block, kv_heads, head_dim). Returns it, and the logs of its sums, (tokens, heads)."""
        count, heads, width = q.shape
        kv_heads, shared = kv.shape[3], heads // kv.shape[3]
        mask = self.division.mask(row, source, self.plan, self.window, q.dtype)
        if mask.shape[1] > 1 or len(mask) == 1:  # a lone row: K/V heads are the batch, heads that share one the heads
            k, v = kv.flatten(1, 2).transpose(1, 2)[:, :, None].expand(-1, -1, shared, -1, -1)
            q = q.view(count, kv_heads, shared, width).permute(1, 2, 0, 3)
            out, sums = partial_attention(q, k, v, mask[0], scale=self.scale, softcap=self.softcap)
            return out.permute(2, 0, 1, 3).reshape(count, heads, width), sums.permute(2, 0, 1).reshape(count, heads)
        k, v = kv.view(2, count, -1, kv_heads, width).transpose(2, 3)
        q = q.view(count, kv_heads, shared, width)
        out, sums = partial_attention(q, k, v, mask[:, None], scale=self.scale, softcap=self.softcap)
        return out.reshape(count, heads, width), sums.reshape(count, heads)
