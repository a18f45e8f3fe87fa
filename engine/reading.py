"""Log-probabilities of given tokens in rows of logits: what is asked for about a prompt, and about candidates.

On a GPU many rows are read at once, and all that was read comes back in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.logprobs import logprobs
from engine.kernels.pinned import from_device, to_device
from engine.outputs import TokenLogprob
from engine.sampler import logprob_of, row_logprobs

ROWS = 256  # that a GPU reads at once: to find the likeliest of a row it is copied


def token_logprobs(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    """Of `tokens[i]` and the `k` likeliest in row i of `logits` (len(tokens), vocabulary), fp32."""
    if logits.is_cuda and tokens:
        return _on_device(logits, tokens, k)
    return [logprob_of(row_logprobs(row), token, k) for row, token in zip(logits, tokens, strict=True)]


def chosen_logprobs(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Of `tokens[i]` in row `rows[i]` of `logits` (any, vocabulary), fp32. Rows may have repeats, in a row."""
    if logits.is_cuda and tokens:
        where, asked = to_device(torch.tensor([rows, tokens]), logits.device)
        found: list[float] = from_device(logprobs(logits, where.int(), asked, 0).chosen)().tolist()
        return found
    found, last, row = [], -1, logits[:0]
    for at, token in zip(rows, tokens, strict=True):
        if at != last:
            last, row = at, row_logprobs(logits[at])
        found.append(float(row[token]))
    return found


def _on_device(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    asked = to_device(torch.tensor(tokens), logits.device)
    rows = torch.arange(len(tokens), dtype=torch.int32, device=logits.device)
    parts: list[Tensor] = []
    for some_rows, some in zip(rows.split(ROWS), asked.split(ROWS), strict=True):
        found = logprobs(logits, some_rows, some, k)
        floats = torch.cat([found.chosen[:, None], found.values], 1)
        parts.append(torch.cat([floats.view(torch.int32), found.tokens.int()], 1))
    whole = from_device(torch.cat(parts))().numpy()
    floats_of, ids = np.split(whole, [(whole.shape[1] + 1) // 2], axis=1)
    values = np.ascontiguousarray(floats_of).view(np.float32).tolist()
    return [
        TokenLogprob(token, chosen, tuple(zip(top_ids, top, strict=True)))
        for token, (chosen, *top), top_ids in zip(tokens, values, ids.tolist(), strict=True)
    ]
