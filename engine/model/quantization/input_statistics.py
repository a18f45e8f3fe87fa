"""Statistics of the inputs of a layer's linears, gathered over the calibration text.

Knows activations alone. The idea: no activation is kept but an even sample of rows, so memory is that of one layer's
second moments, whatever the text's length.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 1024  # rows at most, to search scales on


class InputStatistics:
    """Second moments of inputs (tokens, in) of one linear, where `moments` is set, and an even sample of them.

    `tokens` is the number that will be added in all.
    """

    def __init__(self, tokens: int, *, moments: bool) -> None:
        self._every = -(-tokens // SAMPLE)
        self._moments = moments
        self._seen = 0
        self._sampled: list[Tensor] = []
        self._hessian: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Adds inputs (tokens, in) float32. They are multiplied in float32 and summed in float64."""
        if self._moments:
            product = (x.t() @ x).double()
            self._hessian = product if self._hessian is None else self._hessian.add_(product)
        first = -self._seen % self._every
        self._sampled.append(x[first :: self._every].clone())
        self._seen += len(x)

    @property
    def hessian(self) -> Tensor:
        """Returns the sum of outer products of all inputs: (in, in) float64."""
        assert self._hessian is not None, "moments were not asked for"
        return self._hessian

    @property
    def sample(self) -> Tensor:
        """Returns at most `SAMPLE` inputs, evenly spread: (rows, in) float32."""
        return torch.cat(self._sampled)
