"""Chooses the masked places that a pass fills, and their tokens: low-confidence remasking (LLaDA, Nie et al. 2025).

A pass predicts all masked places of a block at once. The predictions that the model is surest of stay, the others are
masked again: a fixed number of them (LLaDA), or all above a threshold (Fast-dLLM, Wu et al. 2025). Knows logits and
positions, nothing of the model or of its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.sampler import sample
from engine.core.sampling_types import RowSampling
from engine.errors import InvalidParameter
from engine.kernels.sampling import GREEDY_BELOW
from engine.params import Sampling

MAX_BLOCK = 1024  # places


@dataclass(frozen=True, slots=True)
class Unmasking:
    """Parameters by which masked places are filled.

    A pass fills the `tokens_per_step` places of the block whose predicted tokens are the likeliest, or, with a
    `threshold`, all those of at least that probability and always the likeliest one. `temperature` is of the samples;
    the probability of a sampled token is the model's own, at temperature 1. Samples are keyed by (`seed`, the pass, the
    place), so a seed gives the same text.

    Raises:
        InvalidParameter: a value is out of range, or both ways are asked for; the message has the accepted values.
    """

    block_size: int = 16  # places that are filled together
    tokens_per_step: int | None = None  # None: 1, unless there is a threshold
    threshold: float | None = None
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check(1 <= self.block_size <= MAX_BLOCK, "block_size", self.block_size, f"1 to {MAX_BLOCK}")
        count, least = self.tokens_per_step, self.threshold
        _check(count is None or 1 <= count <= MAX_BLOCK, "tokens_per_step", count, f"1 to {MAX_BLOCK}")
        _check(least is None or 0.0 <= least <= 1.0, "threshold", least, "0 to 1")
        if count is not None and least is not None:
            raise InvalidParameter("threshold", "tokens_per_step and threshold exclude each other; give one of them.")
        Sampling(temperature=self.temperature, seed=self.seed)  # refuses what it does not accept


def _check(good: bool, name: str, value: object, accepted: str) -> None:
    if not good:
        raise InvalidParameter(name, f"{name} is {value!r}; accepted: {accepted}.")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A token for a masked place, an index of the block, with the probability that the model gives it."""

    place: int
    token: int
    confidence: float


def predict(
    logits: Tensor, places: Sequence[int], keys: Sequence[int], step: int, params: Unmasking
) -> list[Prediction]:
    """Samples a token for each masked place of a block, the likeliest at temperature 0.

    `logits` (places, vocabulary) float32 are changed. `keys` key the samples of the places: each place's position in
    the text.
    """
    probabilities = torch.softmax(logits, -1)
    requests: list[RowSampling | None] = [None] * len(places)
    if params.temperature >= GREEDY_BELOW:
        sampling = Sampling(temperature=params.temperature)
        requests = [RowSampling(sampling, params.seed, step, key, {}, frozenset()) for key in keys]
    tokens = sample(logits, requests).token_ids
    sure = probabilities.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    return [Prediction(*each) for each in zip(places, tokens, sure, strict=True)]


def keep(predicted: Sequence[Prediction], params: Unmasking) -> list[Prediction]:
    """Returns the predictions that stay, the surest first; of equally sure ones, earlier places. At least one stays."""
    ordered = sorted(predicted, key=lambda each: (-each.confidence, each.place))
    if params.threshold is None:
        return ordered[: params.tokens_per_step or 1]
    return ordered[:1] + [each for each in ordered[1:] if each.confidence >= params.threshold]
