"""The experts of a layer (Shazeer et al. 2017): their weights, read in any layout, and the routing of tokens to them.

Knows nothing of attention, or of the activation within an expert, which `Decoder` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.linear import Linear, ProjectionReader
from engine.model.model_spec import ClampedSwiGLU, Experts, ModelSpec, WeightNames


def clamped_swiglu(gate: Tensor, up: Tensor, by: ClampedSwiGLU) -> Tensor:
    """Returns the gated values, (tokens, intermediate), of halves of that shape."""
    gate, up = gate.clamp(max=by.limit), up.clamp(-by.limit, by.limit)
    return torch.sigmoid(gate * by.alpha).mul_(gate).mul_(up + 1)


def routed(experts: Experts, logits: Tensor, selection_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns weights and numbers of each token's experts, (tokens, per_token), of the router's `logits` (tokens,
    experts) float32."""
    scores = logits.sigmoid() if experts.scores == "sigmoid" else logits.softmax(-1)
    ranked = scores if selection_bias is None else scores + selection_bias
    if experts.scaled_inputs:  # large logits, whose sigmoids are the same number, are still told apart
        ranked = logits
    if experts.groups is not None:
        grouped = ranked.unflatten(1, (experts.groups.count, -1))
        best = grouped.topk(experts.groups.summed).values.sum(-1).topk(experts.groups.per_token).indices
        hidden = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, False)
        ranked = grouped.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = ranked.topk(experts.per_token).indices
    weights = scores.gather(1, chosen)
    if experts.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + experts.min_weight)
    return weights * experts.scaling if experts.scaling != 1.0 else weights, chosen


@dataclass(frozen=True, slots=True)
class Expert:
    """An MLP of a mixture."""

    gate_up: Linear  # hidden -> 2 * intermediate, or intermediate without a gate
    down: Linear


@dataclass(frozen=True, slots=True)
class BesideMLP:
    """The norms of experts that run beside their layer's MLP (Gemma 4): experts and router read the hidden states
    without the MLP's norm, and both outputs are normalised before they are added."""

    router_norm: Linear
    pre_norm: Linear
    post_norm: Linear
    mlp_post_norm: Linear

    @classmethod
    def read(cls, read: ProjectionReader, names: WeightNames, prefix: str, hidden: int) -> BesideMLP:
        """Reads the norms of a layer whose weights' names begin with `prefix`. Raises CheckpointError."""
        after = (names.beside_pre_norm, names.beside_post_norm, names.beside_mlp_post_norm)
        return cls(
            read.plain_norm(f"{prefix}{names.router_norm}", hidden),
            *(read.plain_norm(f"{prefix}{name}.weight", hidden) for name in after),
        )


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The router and the experts of one layer."""

    router: Tensor  # (experts, hidden) float32
    experts: tuple[Expert, ...]
    router_bias: Tensor | None = None  # (experts,) float32
    selection_bias: Tensor | None = None  # (experts,) float32
    weight_scales: Tensor | None = None  # (experts,) float32
    beside: BesideMLP | None = None
    shared: Expert | None = None  # runs beside the experts
    shared_gate: Tensor | None = None  # (1, hidden) float32
    run: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None  # all in one call, see `CpuExperts`
    mix: Callable[[Tensor], Tensor] | None = None  # routing, too
    latents: tuple[Linear, Linear] | None = None  # from the hidden states to what experts read and return, and back


def run_experts(
    of: Experts,
    layer: RoutedExperts,
    x: Tensor,
    seen: Tensor,
    run: Callable[[Tensor, Expert], Tensor],
    *,
    by_row: bool,
) -> Tensor:
    """Returns the weighted sum of each token's experts, and the shared one's output, for `x` (tokens, hidden).

    Each expert that a token chose is run once, for all its tokens, or `by_row`; sums are in float32 and in the experts'
    order, so they do not depend on the batch. `seen` is the router's input, and `run` computes one expert.
    """
    if layer.mix is not None:
        return layer.mix(x).to(x.dtype)
    weights, chosen = chosen_experts(of, layer, seen)
    order = chosen.flatten().argsort(stable=True)
    tokens, weights = order // of.per_token, weights.flatten()[order]
    counts, every = chosen.flatten().bincount(minlength=of.count), layer.experts
    if layer.latents is not None:
        into, back = layer.latents
        rows = into(x)
        sums = torch.zeros(rows.shape, device=x.device)
        add_experts(sums, every, counts.tolist(), rows, tokens, weights, tokens, run, by_row=by_row)
        made = back(sums.to(x.dtype))
        return made if layer.shared is None else made.add_(_by_rows(run, x, layer.shared, by_row=by_row))
    if layer.shared is not None:
        every, counts = (*every, layer.shared), F.pad(counts, (0, 1), value=len(x))
        tokens = torch.cat([tokens, torch.arange(len(x), device=x.device)])
        weights = torch.cat([weights, shared_weights(layer, x)])
    out, rows, sums = torch.zeros(x.shape, device=x.device), x, tokens
    if of.scaled_inputs:  # each is a row of its own
        rows = x[tokens] * weights.to(x.dtype)[:, None]
        tokens, weights = torch.arange(len(rows), device=x.device), torch.ones_like(weights)
    if layer.run is not None:
        made = layer.run(rows, counts, tokens, weights)
        return (out.index_add_(0, sums, made) if of.scaled_inputs else made).to(x.dtype)
    add_experts(out, every, counts.tolist(), rows, tokens, weights, sums, run, by_row=by_row)
    return out.to(x.dtype)


def _by_rows(run: Callable[[Tensor, Expert], Tensor], x: Tensor, expert: Expert, *, by_row: bool) -> Tensor:
    """Returns an expert's output for all of `x`, row `by_row` where sums must not depend on their number."""
    return torch.cat([run(row, expert) for row in x.split(1)]) if by_row else run(x, expert)


def chosen_experts(of: Experts, layer: RoutedExperts, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights and numbers of each token's experts, (tokens, per_token); `seen` is the router's input."""
    weights, chosen = routed(of, F.linear(seen.float(), layer.router, layer.router_bias), layer.selection_bias)
    return weights if layer.weight_scales is None else weights * layer.weight_scales[chosen], chosen


def shared_weights(layer: RoutedExperts, x: Tensor) -> Tensor:
    """Returns the weight of each token's shared expert, (tokens,) float32."""
    if layer.shared_gate is None:
        return torch.ones(len(x), device=x.device)
    return F.linear(x.float(), layer.shared_gate).sigmoid()[:, 0]


def add_experts(
    out: Tensor,
    experts: Sequence[Expert],
    counts: Sequence[int],
    rows: Tensor,
    at: Tensor,
    weights: Tensor,
    sums: Tensor,
    run: Callable[[Tensor, Expert], Tensor],
    *,
    by_row: bool,
) -> None:
    """Runs each expert on its `counts` next rows, `rows[at]`, and adds them, times `weights`, to `out[sums]`, which is
    float32."""
    first = 0
    for expert, count in zip(experts, counts, strict=True):
        step = 1 if by_row else max(1, count)  # torch's sums depend on the number of rows
        for begin in range(first, first + count, step):
            some = slice(begin, min(begin + step, first + count))
            out.index_add_(0, sums[some], run(rows[at[some]], expert).float().mul_(weights[some, None]))
        first += count


def read_mixture(read: ProjectionReader, spec: ModelSpec, names: WeightNames, prefix: str) -> RoutedExperts:
    """Reads the experts of a layer whose weights' names begin with `prefix`. Raises CheckpointError."""
    experts, hidden = spec.experts, spec.hidden_size
    assert experts is not None, "the layer has experts"
    count, router = experts.count, f"{prefix}{names.router}"
    selection_bias = None
    if experts.selection_bias:
        shape = (1, count) if names.selection_bias_rows else (count,)
        selection_bias = read.exact(f"{prefix}{names.selection_bias}", *shape).flatten()
    shared, weights = f"{prefix}{names.shared_expert}", read.exact(f"{router}.weight", count, hidden)
    return RoutedExperts(
        router=weights * hidden**-0.5 if experts.beside_mlp else weights,
        experts=_experts(read, spec, names, prefix, experts),
        router_bias=read.exact(f"{router}.bias", count) if experts.router_bias else None,
        selection_bias=selection_bias,
        weight_scales=read.exact(f"{prefix}{names.weight_scales}", count) if experts.weight_scales else None,
        beside=BesideMLP.read(read, names, prefix, hidden) if experts.beside_mlp else None,
        shared=_expert(read, spec, names, shared, experts.shared_size) if experts.shared_size else None,
        shared_gate=read.exact(f"{prefix}{names.shared_gate}.weight", 1, hidden) if experts.shared_gate else None,
        latents=_latents(read, names, prefix, hidden, experts.latent_size) if experts.latent_size else None,
    )


def _latents(read: ProjectionReader, names: WeightNames, prefix: str, hidden: int, size: int) -> tuple[Linear, Linear]:
    into, back = (f"{prefix}{name}" for name in names.expert_latents)
    return read.linear(into, size, hidden), read.linear(back, hidden, size)


def _experts(
    read: ProjectionReader, spec: ModelSpec, names: WeightNames, prefix: str, experts: Experts
) -> tuple[Expert, ...]:
    stems = (f"{prefix}{names.expert.format(index=index)}" for index in range(experts.count))
    every: Iterable[Expert]
    if names.stacked_experts:
        every = _stacked(read, spec, f"{prefix}{names.stacked_experts}", experts, in_turn=names.stacked_in_turn)
    elif names.joined_experts is not None:
        every = _joined(read, spec, prefix, names.joined_experts, experts)
    elif (size := experts.latent_size) and not spec.gated_mlp:
        (opened,), width = names.expert_gate_up, experts.intermediate_size
        both = ((read.linear(f"{stem}{opened}", width, size), f"{stem}{names.expert_down}") for stem in stems)
        every = (Expert(up, read.linear(down, size, width)) for up, down in both)
    else:
        every = (_expert(read, spec, names, stem, experts.intermediate_size) for stem in stems)
    if (place := read.packing.expert) is None:
        return tuple(every)
    return tuple(Expert(place(at, each.gate_up), place(at, each.down)) for at, each in enumerate(every))


def _expert(read: ProjectionReader, spec: ModelSpec, names: WeightNames, stem: str, width: int) -> Expert:
    down = read.linear(f"{stem}{names.expert_down}", spec.hidden_size, width, spec.mlp_bias)
    gated = spec.experts is not None and spec.experts.gate is None
    return Expert(read.gate_up(stem, names.expert_gate_up, width, gated=gated), down)


def _joined(
    read: ProjectionReader, spec: ModelSpec, prefix: str, names: tuple[str, str], experts: Experts
) -> Iterator[Expert]:
    count, width, hidden = experts.count, experts.intermediate_size, spec.hidden_size
    opened = read.tensor(f"{prefix}{names[0]}", count, 2 * width, hidden)
    closed = read.tensor(f"{prefix}{names[1]}", count, hidden, width)
    gated = read.packing.gated if experts.gate is None else read.packing.plain
    pairs = zip(opened, closed, strict=True)
    return (Expert(gated(each.contiguous(), None), read.packed(down.contiguous())) for each, down in pairs)


def _stacked(
    read: ProjectionReader, spec: ModelSpec, stem: str, experts: Experts, *, in_turn: bool
) -> Iterator[Expert]:
    count, width, hidden = experts.count, experts.intermediate_size, spec.hidden_size
    opened = read.tensor(f"{stem}gate_up_proj", count, hidden, 2 * width)
    closed = read.tensor(f"{stem}down_proj", count, width, hidden)
    biases: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * count
    if spec.mlp_bias:
        of_opened = read.tensor(f"{stem}gate_up_proj_bias", count, 2 * width)
        biases = list(zip(of_opened, read.tensor(f"{stem}down_proj_bias", count, hidden), strict=True))
    order = torch.arange(2 * width)  # gate above up
    if in_turn:
        order = order.view(width, 2).T.flatten()
    pack = read.packing.plain
    gated = read.packing.gated if experts.gate is None else pack
    return (
        Expert(
            gated(opened[index].T[order].contiguous(), None if bias[0] is None else bias[0][order]),
            pack(closed[index].T.contiguous(), bias[1]),
        )
        for index, bias in enumerate(biases)
    )
