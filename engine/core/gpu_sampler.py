"""`engine.core.sampler.sample` on a GPU: one copy to the device for all parameters of a step, one copy back for its
tokens and log-probabilities.

Between the two nothing waits. Rows, masks and log-probabilities mean the same as there; the random numbers are others
(see `engine.kernels.sampling.sample`). Runs on a CPU too, with the kernels' torch references, as its tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.sampling_types import PendingSamples, RowSampling, SampledTokens
from engine.kernels import logprobs as of_rows
from engine.kernels import sampling as kernels
from engine.kernels.buffers import from_device, to_device
from engine.kernels.sampled_tokens import fill_sampled
from engine.kernels.token_bitmask import apply_token_bitmask
from engine.outputs import TokenLogprob
from engine.params import GREEDY, Sampling

Ints = NDArray[np.int32]
_MASK64 = (1 << 64) - 1
_ALIGNED = 4  # words: Triton compiles a kernel anew for memory that begins at no multiple of 16 bytes


def sample_on_device(
    logits: Tensor, requests: Sequence[RowSampling | None], apply_mask: Callable[[Tensor], object] | None = None
) -> SampledTokens:
    """See `engine.core.sampler.sample`."""
    return begin_on_device(logits, requests, apply_mask).fetch()


def begin_on_device(
    logits: Tensor, requests: Sequence[RowSampling | None], apply_mask: Callable[[Tensor], object] | None = None
) -> PendingSamples:
    """See `engine.core.sampler.begin_sampling`."""
    rows, vocabulary = logits.shape
    asked = [i for i, request in enumerate(requests) if request is not None and request.logprobs is not None]
    entries, starts = adjustments(requests, vocabulary)
    parameters, changes, bounds, where = _sent(
        [_parameters(requests), entries, starts, np.array(asked, dtype=np.int32)], logits.device
    )
    raw, raw_rows = logits, where
    if asked and (len(entries) or apply_mask is not None):  # log-probabilities are of the unmodified logits
        raw, raw_rows = logits.index_select(0, where), torch.arange(len(asked), dtype=torch.int32, device=logits.device)
    if len(entries):
        kernels.adjust(logits, changes.view(-1, 2), bounds)
    if apply_mask is not None:
        apply_mask(logits)
    tokens = kernels.sample(logits, parameters.view(rows, kernels.WORDS))
    if not asked:
        arrive = from_device(tokens)
        return PendingSamples(tokens, lambda: SampledTokens(arrive().tolist(), {}))
    wanted = [request.logprobs or 0 for request in requests if request is not None and request.logprobs is not None]
    found = of_rows.logprobs(raw, raw_rows, tokens.index_select(0, where), max(wanted))
    return PendingSamples(tokens, _leaving(tokens, found, dict(zip(asked, wanted, strict=True))))


def warm_up(vocabulary: int, device: torch.device) -> None:
    """Samples with every option that a row may have, and fills in sampled tokens, so that no request waits for a kernel
    to be compiled."""
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={0: 1.0})
    for requests in (
        [None],
        [RowSampling(sampling, 1, 0, 1, {}, {0}, logprobs=3)],
        [RowSampling(sampling, 1, 0, 1, {}, {0}, logprobs=3)] * 2,
    ):
        pending = begin_on_device(torch.randn(len(requests), vocabulary, device=device), requests, _mask_nothing)
        fill_sampled(torch.full((len(requests),), -1, dtype=torch.int32, device=device), pending.token_ids)
        pending.fetch()


def _mask_nothing(logits: Tensor) -> None:
    words = -(-logits.shape[1] // 32)
    bits = torch.full((len(logits), words), -1, dtype=torch.int32, device=logits.device)
    apply_token_bitmask(logits, bits, torch.arange(len(logits), device=logits.device))


def adjustments(requests: Sequence[RowSampling | None], vocabulary: int) -> tuple[Ints, Ints]:
    """Returns the arguments of `kernels.adjust`: entries (n, 2) and starts.

    Raises:
        IndexError: a row names a token that the vocabulary does not have.
    """
    parts: list[Part] = []
    for request in requests:
        parts += _NO_CHANGES if request is None or not _changed(request) else _changes(request)
    sizes = [len(tokens) for tokens, _ in parts]
    starts = np.cumsum([0, *sizes], dtype=np.int32)
    entries = np.empty((starts[-1], 2), dtype=np.int32)
    if not len(entries):
        return entries, starts
    values = entries.view(np.float32)[:, 1]
    for at, size, (tokens, numbers) in zip(starts.tolist(), sizes, parts, strict=False):
        if size:
            entries[at : at + size, 0] = np.fromiter(tokens, np.int32, size)
            values[at : at + size] = numbers
    if not 0 <= entries[:, 0].min() <= entries[:, 0].max() < vocabulary:
        raise IndexError(f"A row's bias, penalties or bans name a token outside of 0 to {vocabulary - 1}.")
    return entries, starts


Part = tuple[Collection[int], float | NDArray[np.float64]]
_NO_CHANGES: list[Part] = [((), 0.0)] * 4


def _changed(request: RowSampling) -> bool:
    s = request.sampling
    penalties = s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty
    return bool(penalties or s.logit_bias or request.banned)


def _changes(request: RowSampling) -> list[Part]:
    """Returns tokens and numbers of the four stages: bias, repetition, presence and frequency, bans."""
    s = request.sampling
    biases = np.fromiter(s.logit_bias.values(), np.float64, len(s.logit_bias))
    counts = request.counts if s.presence_penalty or s.frequency_penalty else {}
    times = np.fromiter(counts.values(), np.float64, len(counts))
    return [
        (s.logit_bias, biases),
        (request.seen if s.repetition_penalty != 1.0 else (), s.repetition_penalty),
        (counts, -s.presence_penalty - s.frequency_penalty * times),
        (request.banned, 0.0),
    ]


def keys(seeds: Sequence[int], streams: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """Computes `mix64(seed, stream, position)` of all rows at once."""
    state = np.zeros(len(seeds), dtype=np.uint64)
    for values in (seeds, streams, positions):
        state += np.array([value & _MASK64 for value in values], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def _parameters(requests: Sequence[RowSampling | None]) -> Ints:
    samplings: list[Sampling] = [GREEDY if request is None else request.sampling for request in requests]
    return kernels.pack(
        temperature=[s.temperature for s in samplings],
        top_k=[s.top_k for s in samplings],
        top_p=[s.top_p for s in samplings],
        min_p=[s.min_p for s in samplings],
        keys=keys(*zip(*[(0, 0, 0) if d is None else (d.seed, d.stream, d.position) for d in requests], strict=True)),
    )


def _sent(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Sends arrays to the device, flat, in one copy."""
    padded = [array.size + -array.size % _ALIGNED for array in arrays]
    whole = np.zeros(sum(padded), dtype=np.int32)
    at = 0
    for array, size in zip(arrays, padded, strict=True):
        whole[at : at + array.size] = array.reshape(-1)
        at += size
    parts = to_device(torch.from_numpy(whole), device).split(padded)
    return [part[: array.size] for part, array in zip(parts, arrays, strict=True)]


def _leaving(tokens: Tensor, found: of_rows.Logprobs, wanted: dict[int, int]) -> Callable[[], SampledTokens]:
    """Starts one copy of all results from the device. `wanted` maps rows to their number of top tokens."""
    floats = torch.cat([found.chosen, found.values.reshape(-1)]).view(torch.int32)
    arrive = from_device(torch.cat([tokens.int(), found.tokens.reshape(-1).int(), floats]))
    rows, shape = len(tokens), found.values.shape
    return lambda: _arrived(arrive().numpy(), rows, shape, wanted)


def _arrived(whole: Ints, rows: int, shape: torch.Size, wanted: dict[int, int]) -> SampledTokens:
    count, max_k = shape
    sampled, top_ids, rest = np.split(whole, [rows, rows + count * max_k])
    chosen, values = np.split(rest.view(np.float32), [count])
    ids: list[int] = sampled.tolist()
    table = list(zip(top_ids.reshape(count, max_k).tolist(), values.reshape(count, max_k).tolist(), strict=True))
    return SampledTokens(
        ids,
        {
            row: TokenLogprob(ids[row], float(chosen[at]), tuple(zip(*(part[:k] for part in table[at]), strict=True)))
            for at, (row, k) in enumerate(wanted.items())
        },
    )
