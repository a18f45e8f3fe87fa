"""Distance of a quantised model from the one that it was made from, on texts whose every token is given.

The original is read in float32, a layer at a time; the quantised one both so, for the error after each layer, and by
the engine's own loader and kernels, as it is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import InvalidParameter
from engine.model.batch import KVCache
from engine.model.decoder import load_decoder
from engine.model.linear import default_dtype
from engine.model.quantization.layerwise import LayerwiseModel, Tokens, whole_text

MIN_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over `tokens` positions. `layers` has the relative error of the hidden states after each layer.

    The KL divergence is from the original's next-token distribution to the other's, in nats.
    """

    tokens: int
    layers: tuple[float, ...]
    kl_mean: float
    kl_p99: float
    same_top1: float
    perplexity_before: float
    perplexity: float


def check_texts(texts: Tokens) -> None:
    """Raises InvalidParameter where there is too little text to measure on."""
    tokens = sum(map(len, texts))
    if tokens < MIN_TOKENS or min(map(len, texts)) < 2:
        raise InvalidParameter(
            "text", f"there are {tokens:,} tokens to measure on, and {MIN_TOKENS:,} are needed; give more text."
        )


def measure(
    source: Path,
    quantized: Path,
    texts: Tokens,
    dtype: torch.dtype | None = None,
    *,
    of_text: Callable[[Tensor], None] = lambda divergences: None,
) -> Divergence:
    """Reads `texts` with both models, the quantised one in `dtype` or, without one, the machine's default.

    `of_text` is given each text's divergences (tokens,) float32, one text after the other.

    Raises:
        CheckpointError: a model cannot be loaded.
        InvalidParameter: there is too little text.
    """
    check_texts(texts)
    original, other = LayerwiseModel(source), LayerwiseModel(quantized)
    states, errors = original.embed(texts), list[float]()
    rounded = other.embed(texts)
    for index in range(original.spec.layers):
        states = list(original.outputs(index, original.layer(index), states))
        rounded = list(other.outputs(index, other.layer(index), rounded))
        errors.append(_relative(torch.cat(rounded), torch.cat(states)))
    served = _Served(quantized, dtype or default_dtype("cpu"), max(map(len, texts)))
    divergences, same, losses = list[Tensor](), 0, [0.0, 0.0]
    for text, each in zip(texts, states, strict=True):
        before, after = original.log_probs(each), served.log_probs(text)
        divergences.append((before.exp() * (before - after)).sum(-1))
        of_text(divergences[-1])
        same += int((before.argmax(-1) == after.argmax(-1)).sum())
        following = torch.tensor(text[1:])[:, None]
        for at, found in enumerate((before, after)):
            losses[at] -= float(found[:-1].gather(1, following).sum())
    all_kl = torch.cat(divergences)
    predicted = len(all_kl) - len(texts)
    before_ppl, ppl = (float(torch.tensor(loss / predicted).exp()) for loss in losses)
    return Divergence(
        len(all_kl), tuple(errors), float(all_kl.mean()), float(all_kl.quantile(0.99)), same / len(all_kl),
        before_ppl, ppl,
    )  # fmt: skip


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


class _Served:
    """A model as the engine loads it, for whole texts of up to `longest` tokens."""

    def __init__(self, path: Path, dtype: torch.dtype, longest: int) -> None:
        self._decoder = load_decoder(path, dtype=dtype)
        self._kv = KVCache.of(self._decoder.spec, -(-longest // 16) + 1, 16, dtype, "cpu")

    def log_probs(self, text: Sequence[int]) -> Tensor:
        batch = whole_text(text)
        return self._decoder.forward(batch, self._kv).log_softmax(-1)
