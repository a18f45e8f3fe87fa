"""Experts divided among the ranks of a stage: tokens go to their experts and come back (GShard, Lepikhin et al. 2020).

In a layer with experts each rank has a slice of the step's tokens (sequence parallel, Korthikanti et al. 2022): sums of
attention's parts are scattered to the slices, and the hidden states are gathered behind the experts. A token goes to a
rank once, however many of its experts are there, and comes back as their weighted sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.linear import Linear
from engine.model.mlp.experts import Expert, RoutedExperts, add_experts, chosen_experts, shared_weights
from engine.model.model_spec import Experts
from engine.parallel.collectives import RankGroup


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The experts of a model, as many of them on each of the ranks `shards`."""

    experts: Experts
    shards: RankGroup

    def lengths(self, tokens: int) -> list[int]:
        """Returns each rank's number of a step's tokens."""
        each = -(-tokens // self.shards.size)
        return [max(0, min(each, tokens - at * each)) for at in range(self.shards.size)]

    def own(self, tokens: int) -> slice:
        """Returns this rank's slice of a step's tokens."""
        lengths, at = self.lengths(tokens), self.shards.rank
        return slice(sum(lengths[:at]), sum(lengths[: at + 1]))

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' `x` (tokens, width) in the rows of its own slice, and zeros in the others."""
        lengths, own = self.lengths(len(x)), self.own(len(x))
        count = lengths[self.shards.rank]
        parts = self.shards.exchange(x, lengths, [count] * self.shards.size)
        out = torch.zeros_like(x)
        out[own] = parts.view(self.shards.size, count, *x.shape[1:]).sum(0)
        return out

    def gather(self, x: Tensor) -> None:
        """Fills the rows of `x` (tokens, width) that other ranks have with theirs."""
        lengths = self.lengths(len(x))
        own = x[self.own(len(x))]
        x.copy_(self.shards.exchange(own.repeat(self.shards.size, 1), [len(own)] * self.shards.size, lengths))

    def run(self, layer: RoutedExperts, x: Tensor, run: Callable[[Tensor, Expert], Tensor], *, by_row: bool) -> Tensor:
        """Returns what `run_experts` does, for this rank's slice `x` (tokens, hidden). `layer` has the whole router,
        and this rank's experts."""
        shards, each = self.shards, self.experts.count // self.shards.size
        weights, chosen = chosen_experts(self.experts, layer, x)
        wanted = torch.zeros(len(x), shards.size, dtype=torch.bool).scatter_(1, chosen // each, True)
        tokens = wanted.T.nonzero()[:, 1]  # rank by rank
        sent = wanted.sum(0)
        received = shards.exchange(sent, [1] * shards.size, [1] * shards.size).tolist()
        counts = sent.tolist()
        rows = shards.exchange(x[tokens], counts, received)
        routing = shards.exchange(torch.cat([chosen.float(), weights], 1)[tokens], counts, received)
        made = self._local(layer, rows, routing, run, by_row=by_row)
        out = torch.zeros(x.shape)
        out.index_add_(0, tokens, shards.exchange(made.to(x.dtype), received, counts).float())
        if layer.shared is not None:
            everyone = torch.arange(len(x))
            shared = (layer.shared,), [len(x)]
            add_experts(out, *shared, x, everyone, shared_weights(layer, x), everyone, run, by_row=by_row)
        return out.to(x.dtype)

    def _local(
        self,
        layer: RoutedExperts,
        rows: Tensor,
        routing: Tensor,
        run: Callable[[Tensor, Expert], Tensor],
        *,
        by_row: bool,
    ) -> Tensor:
        """Returns the weighted sums of this rank's experts for `rows`, float32. `routing` (rows, 2 * per_token) has the
        numbers of each row's experts, then their weights."""
        numbers, weights = routing.chunk(2, 1)
        local = numbers.long() - self.shards.rank * len(layer.experts)
        at, nth = ((local >= 0) & (local < len(layer.experts))).nonzero().unbind(1)
        order = local[at, nth].argsort(stable=True)
        at, nth = at[order], nth[order]
        counts = local[at, nth].bincount(minlength=len(layer.experts)).tolist()
        out = torch.zeros(rows.shape)
        add_experts(out, layer.experts, counts, rows, at, weights[at, nth], at, run, by_row=by_row)
        return out


@dataclass(frozen=True, slots=True)
class ScatteredRowParallel:
    """A row-parallel projection before experts: the sum over the ranks, for each one's slice of the tokens."""

    linear: Linear
    experts: ExpertParallel

    def __call__(self, x: Tensor) -> Tensor:
        return self.experts.scatter_sum(self.linear(x))
