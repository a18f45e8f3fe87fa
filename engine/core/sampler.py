"""Samples tokens from logits, for all rows of a step at once. Knows nothing of sequences, text or scheduling.

Order, as vLLM has it: logit bias, repetition, presence and frequency penalties, mask, temperature, min-p, top-k, top-p.
Each row's sample depends on that row alone: the uniform number is a hash of (seed, stream, position), and rows that
need a sorted vocabulary are treated apart from rows that do not. On a GPU `engine.core.gpu_sampler` does all this, from
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
    """Returns whether the likeliest token is always taken."""
    return sampling.temperature < GREEDY_BELOW and not looks_back(sampling) and not sampling.logit_bias


def looks_back(sampling: Sampling) -> bool:
    """Returns whether a sample depends on the tokens before it by more than the model's logits."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def sample(
    logits: Tensor, requests: Sequence[RowSampling | None], apply_mask: Callable[[Tensor], object] | None = None
) -> SampledTokens:
    """Samples one token for each row of `logits` (rows, vocabulary), fp32: the likeliest where its request is None.

    The logits are changed in place. `apply_mask` sets the logits of tokens that a constraint does not allow to -inf, in
    place.
    """
    return begin_sampling(logits, requests, apply_mask).fetch()


def begin_sampling(
    logits: Tensor, requests: Sequence[RowSampling | None], apply_mask: Callable[[Tensor], object] | None = None
) -> PendingSamples:
    """Starts `sample`: a GPU computes asynchronously, and `fetch` waits for it."""
    if logits.is_cuda:
        from engine.core.gpu_sampler import begin_on_device  # it imports this module

        return begin_on_device(logits, requests, apply_mask)
    return _sample(logits, requests, apply_mask)


def _sample(
    logits: Tensor, requests: Sequence[RowSampling | None], apply_mask: Callable[[Tensor], object] | None
) -> PendingSamples:
    chosen = {i: request for i, request in enumerate(requests) if request is not None}
    raw = {i: row_logprobs(logits[i]) for i, request in chosen.items() if request.logprobs is not None}
    if chosen:
        _adjust(logits, chosen)
    if apply_mask is not None:
        apply_mask(logits)
    tokens = _likeliest(logits)
    if chosen:
        _sample_random(logits, chosen, tokens)
    ids: list[int] = tokens.tolist()
    sampled = SampledTokens(ids, {i: logprob_of(row, ids[i], chosen[i].logprobs or 0) for i, row in raw.items()})
    return PendingSamples(tokens, lambda: sampled)


def _sample_random(logits: Tensor, requests: Mapping[int, RowSampling], tokens: Tensor) -> None:
    """Samples the rows with a temperature into `tokens`; the others keep the likeliest."""
    sampled = [i for i, request in requests.items() if request.sampling.temperature >= GREEDY_BELOW]
    filtered = [i for i in sampled if _filters(requests[i].sampling)]
    plain = [i for i in sampled if not _filters(requests[i].sampling)]
    if filtered:
        tokens[filtered] = _sample_filtered(logits, requests, filtered)
    if plain:
        probabilities = torch.softmax(
            logits[plain] / _column(logits, [requests[i].sampling.temperature for i in plain]), -1
        )
        tokens[plain] = _invert(probabilities, [requests[i] for i in plain])


def _likeliest(logits: Tensor) -> Tensor:
    """Returns the first of the largest of each row. On a CPU numpy finds it several times as fast as torch."""
    if logits.is_cpu and logits.dtype == torch.float32:
        return torch.from_numpy(logits.detach().numpy().argmax(-1))
    return logits.argmax(-1)


def row_logprobs(logits: Tensor) -> Tensor:
    """Returns the log-probabilities of one row (vocabulary,), as the model has them: before bias, penalties and
    temperature."""
    return torch.log_softmax(logits, -1)


def logprob_of(logprobs: Tensor, token: int, k: int) -> TokenLogprob:
    """Builds the record of one token and the `k` likeliest, from a row of log-probabilities."""
    top: tuple[tuple[int, float], ...] = ()
    if k:
        values, ids = torch.topk(logprobs, min(k, logprobs.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


def uniform(seed: int, stream: int, position: int) -> float:
    """Returns a number in [0, 1), a hash of the three arguments."""
    return (mix64(seed, stream, position) >> 11) * 2.0**-53


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _column(like: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _adjust(logits: Tensor, requests: Mapping[int, RowSampling]) -> None:
    """Applies bias, penalties and bans as sparse updates: only tokens that a row names are touched."""
    _add(logits, ((i, d.sampling.logit_bias.items()) for i, d in requests.items()))
    for i, request in requests.items():
        if request.sampling.repetition_penalty != 1.0:
            _repetition(logits[i], request)
    _add(logits, ((i, _occurrence_penalties(d)) for i, d in requests.items()))
    _add(logits, ((i, ((t, -torch.inf) for t in d.banned)) for i, d in requests.items()))


def _add(logits: Tensor, deltas: Iterable[tuple[int, Iterable[tuple[int, float]]]]) -> None:
    """Adds to logits, given for each row as (token id, delta) pairs."""
    entries = [(row, token, delta) for row, pairs in deltas for token, delta in pairs]
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        where = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
        logits.index_put_(where, torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True)


def _occurrence_penalties(request: RowSampling) -> Iterable[tuple[int, float]]:
    presence, frequency = request.sampling.presence_penalty, request.sampling.frequency_penalty
    if not presence and not frequency:
        return ()
    return ((token, -presence - frequency * count) for token, count in request.counts.items())


def _repetition(row: Tensor, request: RowSampling) -> None:
    """Divides positive and multiplies negative logits of seen tokens (Keskar et al. 2019, CTRL), in place."""
    ids = torch.tensor(sorted(request.seen), device=row.device)
    penalty = request.sampling.repetition_penalty
    values = row[ids]
    row[ids] = torch.where(values > 0, values / penalty, values * penalty)


def _sample_filtered(logits: Tensor, requests: Mapping[int, RowSampling], rows: list[int]) -> Tensor:
    """Samples rows with min-p, top-k or top-p: cuts the sorted distribution, then samples from the rest. Returns token
    ids.

    Rows are sorted only as far as each itself needs, so that no row's sample depends on the rest of the batch.
    """
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    by_width: dict[int, list[int]] = {}
    for at, i in enumerate(rows):
        by_width.setdefault(min(logits.shape[1], max(_LIKELIEST, requests[i].sampling.top_k)), []).append(at)
    for width, members in by_width.items():
        chosen = [requests[rows[at]] for at in members]
        picked = logits[[rows[at] for at in members]]
        scaled = picked / _column(logits, [request.sampling.temperature for request in chosen])
        values, ids = torch.topk(scaled, width, dim=-1)
        undecided = _undecided(scaled, values, [request.sampling for request in chosen])
        decided = [at for at in range(len(members)) if at not in undecided]
        for part, whole in ((decided, False), (sorted(undecided), True)):
            if part:
                order = torch.sort(scaled[part], dim=-1, descending=True) if whole else (values[part], ids[part])
                sampled = _filter_and_sample(scaled[part], *order, [chosen[at] for at in part])
                tokens[[members[at] for at in part]] = sampled
    return tokens


def _filter_and_sample(scaled: Tensor, values: Tensor, ids: Tensor, requests: list[RowSampling]) -> Tensor:
    """Samples token ids from the largest `values` of `scaled` (rows, vocabulary), which have `ids`, both descending."""
    samplings = [request.sampling for request in requests]
    order = torch.arange(values.shape[1], device=values.device)
    top_k = torch.tensor([s.top_k or scaled.shape[1] for s in samplings], device=values.device)
    if any(s.min_p > 0.0 for s in samplings):
        floor = values[:, :1] + _column(scaled, [s.min_p for s in samplings]).log()
        scaled, values = (each.masked_fill(each < floor, -torch.inf) for each in (scaled, values))
    values = values.masked_fill(order >= top_k.unsqueeze(1), -torch.inf)
    # Tokens that min-p and top-k drop are gone before top-p: probabilities are among the rest.
    whole = torch.where(top_k.unsqueeze(1) < scaled.shape[1], _log_total(values), _log_total(scaled))
    probabilities = torch.exp(values - whole)
    before = probabilities.cumsum(-1) - probabilities  # mass of the likelier tokens; the first is always kept
    top_p = _column(scaled, [s.top_p for s in samplings])
    probabilities = probabilities.masked_fill((before >= top_p) & (top_p < 1.0), 0.0)
    return ids.gather(1, _invert(probabilities, requests).unsqueeze(1)).squeeze(1)


def _log_total(rows: Tensor) -> Tensor:
    """Computes log of the sum of exponentials of each row, (rows, 1). `torch.logsumexp` splits a lone row for its
    threads, and several rows not: its bits would depend on the batch."""
    largest = rows.max(-1, keepdim=True)
    return largest.values - torch.log_softmax(rows, -1).gather(1, largest.indices)


def _undecided(scaled: Tensor, values: Tensor, samplings: list[Sampling]) -> set[int]:
    """Returns the rows whose cut may lie beyond the likeliest tokens in `values`."""
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


def _invert(probabilities: Tensor, requests: Sequence[RowSampling]) -> Tensor:
    """Samples each row of unnormalised probabilities by inverse CDF, in double precision."""
    cumulative = probabilities.double().cumsum(-1)
    u = [uniform(d.seed, d.stream, d.position) for d in requests]
    targets = torch.tensor(u, dtype=torch.float64, device=cumulative.device).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=probabilities.shape[1] - 1)
