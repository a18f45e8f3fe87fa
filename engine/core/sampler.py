"""Draws tokens from logits, for all rows of a step at once. Knows nothing of sequences, text or scheduling.

Order, as vLLM has it: logit bias, repetition, presence and frequency penalties, mask, temperature, min-p, top-k, top-p.
Each row's draw depends on that row alone: the uniform number is a hash of (seed, stream, position), and rows that need
a sorted vocabulary are treated apart from rows that do not. On a GPU `engine.core.gpu_sampler` does all this, from
other random numbers: a seed gives the same tokens again on the same kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engine.core.sampling_types import PendingSamples, RowSampling, SampledTokens, mix64
from engine.kernels.sampling import GREEDY_BELOW
from engine.outputs import TokenLogprob
from engine.params import Sampling

# Filters look at this many of the likeliest tokens first, and at the whole vocabulary only where that is not enough.
_LIKELIEST = 256


def is_greedy(sampling: Sampling) -> bool:
    """Returns whether it is the likeliest token that is wanted, whatever came before."""
    return sampling.temperature < GREEDY_BELOW and not looks_back(sampling) and not sampling.logit_bias


def looks_back(sampling: Sampling) -> bool:
    """Returns whether a draw depends on the tokens before it by more than the model's logits."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def sample(
    logits: Tensor, draws: Sequence[RowSampling | None], apply_mask: Callable[[Tensor], object] | None = None
) -> SampledTokens:
    """Draw one token for each row of `logits` (rows, vocabulary), fp32: the likeliest where its draw is None.

    The logits are changed in place. `apply_mask` sets the logits of tokens that a constraint does not allow to -inf, in
    place.
    """
    return begin_sampling(logits, draws, apply_mask).fetch()


def begin_sampling(
    logits: Tensor, draws: Sequence[RowSampling | None], apply_mask: Callable[[Tensor], object] | None = None
) -> PendingSamples:
    """`sample` in two: a GPU is told now, and `fetch` waits for it."""
    if logits.is_cuda:
        from engine.core.gpu_sampler import begin_on_device  # which needs what is above

        return begin_on_device(logits, draws, apply_mask)
    return _sample(logits, draws, apply_mask)


def _sample(
    logits: Tensor, draws: Sequence[RowSampling | None], apply_mask: Callable[[Tensor], object] | None
) -> PendingSamples:
    chosen = {i: draw for i, draw in enumerate(draws) if draw is not None}
    raw = {i: row_logprobs(logits[i]) for i, draw in chosen.items() if draw.logprobs is not None}
    if chosen:
        _adjust(logits, chosen)
    if apply_mask is not None:
        apply_mask(logits)
    tokens = _likeliest(logits)
    if chosen:
        _draw(logits, chosen, tokens)
    ids: list[int] = tokens.tolist()
    drawn = SampledTokens(ids, {i: logprob_of(row, ids[i], chosen[i].logprobs or 0) for i, row in raw.items()})
    return PendingSamples(tokens, lambda: drawn)


def _draw(logits: Tensor, draws: Mapping[int, RowSampling], tokens: Tensor) -> None:
    """Put what is drawn into `tokens`, where it is not the likeliest."""
    drawn = [i for i, draw in draws.items() if draw.sampling.temperature >= GREEDY_BELOW]
    filtered = [i for i in drawn if _filters(draws[i].sampling)]
    plain = [i for i in drawn if not _filters(draws[i].sampling)]
    if filtered:
        tokens[filtered] = _draw_filtered(logits, draws, filtered)
    if plain:
        probabilities = torch.softmax(
            logits[plain] / _column(logits, [draws[i].sampling.temperature for i in plain]), -1
        )
        tokens[plain] = _invert(probabilities, [draws[i] for i in plain])


def _likeliest(logits: Tensor) -> Tensor:
    """The first of the largest of each row. On a CPU numpy finds it several times as fast as torch."""
    if logits.is_cpu and logits.dtype == torch.float32:
        return torch.from_numpy(logits.detach().numpy().argmax(-1))
    return logits.argmax(-1)


def row_logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities of one row (vocabulary,), as the model has them: before bias, penalties and temperature."""
    return torch.log_softmax(logits, -1)


def logprob_of(logprobs: Tensor, token: int, k: int) -> TokenLogprob:
    """The record of one token and the `k` likeliest, from a row of log-probabilities."""
    top: tuple[tuple[int, float], ...] = ()
    if k:
        values, ids = torch.topk(logprobs, min(k, logprobs.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


def uniform(seed: int, stream: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but these three."""
    return (mix64(seed, stream, position) >> 11) * 2.0**-53


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _column(like: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _adjust(logits: Tensor, draws: Mapping[int, RowSampling]) -> None:
    """Bias, penalties and bans, as sparse updates: only tokens that a row names are touched."""
    _add(logits, ((i, d.sampling.logit_bias.items()) for i, d in draws.items()))
    for i, draw in draws.items():
        if draw.sampling.repetition_penalty != 1.0:
            _repetition(logits[i], draw)
    _add(logits, ((i, _occurrence_penalties(d)) for i, d in draws.items()))
    _add(logits, ((i, ((t, -torch.inf) for t in d.banned)) for i, d in draws.items()))


def _add(logits: Tensor, deltas: Iterable[tuple[int, Iterable[tuple[int, float]]]]) -> None:
    """Add to logits, given for each row as (token id, delta) pairs."""
    entries = [(row, token, delta) for row, pairs in deltas for token, delta in pairs]
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        where = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
        logits.index_put_(where, torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True)


def _occurrence_penalties(draw: RowSampling) -> Iterable[tuple[int, float]]:
    presence, frequency = draw.sampling.presence_penalty, draw.sampling.frequency_penalty
    if not presence and not frequency:
        return ()
    return ((token, -presence - frequency * count) for token, count in draw.counts.items())


def _repetition(row: Tensor, draw: RowSampling) -> None:
    """Divide positive and multiply negative logits of seen tokens (Keskar et al. 2019, CTRL), in place."""
    ids = torch.tensor(sorted(draw.seen), device=row.device)
    penalty = draw.sampling.repetition_penalty
    values = row[ids]
    row[ids] = torch.where(values > 0, values / penalty, values * penalty)


def _draw_filtered(logits: Tensor, draws: Mapping[int, RowSampling], rows: list[int]) -> Tensor:
    """Token ids for rows with min-p, top-k or top-p: cut the sorted distribution, then draw from what is left.

    Rows are sorted as far as they themselves need it, so that none is drawn differently for what stands beside it.
    """
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    by_width: dict[int, list[int]] = {}
    for at, i in enumerate(rows):
        by_width.setdefault(min(logits.shape[1], max(_LIKELIEST, draws[i].sampling.top_k)), []).append(at)
    for width, members in by_width.items():
        chosen = [draws[rows[at]] for at in members]
        picked = logits[[rows[at] for at in members]]
        scaled = picked / _column(logits, [draw.sampling.temperature for draw in chosen])
        values, ids = torch.topk(scaled, width, dim=-1)
        undecided = _undecided(scaled, values, [draw.sampling for draw in chosen])
        decided = [at for at in range(len(members)) if at not in undecided]
        for part, whole in ((decided, False), (sorted(undecided), True)):
            if part:
                order = torch.sort(scaled[part], dim=-1, descending=True) if whole else (values[part], ids[part])
                drawn = _cut_and_draw(scaled[part], *order, [chosen[at] for at in part])
                tokens[[members[at] for at in part]] = drawn
    return tokens


def _cut_and_draw(scaled: Tensor, values: Tensor, ids: Tensor, draws: list[RowSampling]) -> Tensor:
    """Token ids drawn from the largest `values` of `scaled` (rows, vocabulary), which have `ids`, both descending."""
    samplings = [draw.sampling for draw in draws]
    order = torch.arange(values.shape[1], device=values.device)
    top_k = torch.tensor([s.top_k or scaled.shape[1] for s in samplings], device=values.device)
    if any(s.min_p > 0.0 for s in samplings):
        least = values[:, :1] + _column(scaled, [s.min_p for s in samplings]).log()
        scaled, values = (each.masked_fill(each < least, -torch.inf) for each in (scaled, values))
    values = values.masked_fill(order >= top_k.unsqueeze(1), -torch.inf)
    # What min-p and top-k drop is gone before top-p looks: probabilities are among those left.
    whole = torch.where(top_k.unsqueeze(1) < scaled.shape[1], _log_total(values), _log_total(scaled))
    probabilities = torch.exp(values - whole)
    before = probabilities.cumsum(-1) - probabilities  # mass of the likelier tokens; the first is always kept
    top_p = _column(scaled, [s.top_p for s in samplings])
    probabilities = probabilities.masked_fill((before >= top_p) & (top_p < 1.0), 0.0)
    return ids.gather(1, _invert(probabilities, draws).unsqueeze(1)).squeeze(1)


def _log_total(rows: Tensor) -> Tensor:
    """log of the sum of exponentials of each row, (rows, 1). `torch.logsumexp` cuts a lone row into parts for its
    threads, and several rows not: its bits would depend on the batch."""
    largest = rows.max(-1, keepdim=True)
    return largest.values - torch.log_softmax(rows, -1).gather(1, largest.indices)


def _undecided(scaled: Tensor, values: Tensor, samplings: list[Sampling]) -> set[int]:
    """The rows whose cut may lie beyond the likeliest tokens in `values`."""
    if values.shape[1] == scaled.shape[1]:
        return set()
    mass = torch.exp(_log_total(values) - _log_total(scaled)).squeeze(1).tolist()
    ratio = torch.exp(values[:, -1] - values[:, 0]).tolist()
    found = set()
    for at, (s, covered, last) in enumerate(zip(samplings, mass, ratio, strict=True)):
        by_k = s.top_k > 0
        by_p = s.top_p < 1.0 and covered >= s.top_p
        by_min = s.min_p > 0.0 and last < s.min_p
        if not (by_k or by_p or by_min):
            found.add(at)
    return found


def _invert(probabilities: Tensor, draws: Sequence[RowSampling]) -> Tensor:
    """Inverse-CDF draw for each row of unnormalised probabilities, in double precision."""
    cumulative = probabilities.double().cumsum(-1)
    u = [uniform(d.seed, d.stream, d.position) for d in draws]
    targets = torch.tensor(u, dtype=torch.float64, device=cumulative.device).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=probabilities.shape[1] - 1)
