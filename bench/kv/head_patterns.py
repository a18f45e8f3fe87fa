"""Attention patterns of heads, and the K/V that each needs (FastGen, Ge et al. 2023, arXiv 2310.01801).

Profiles a prompt: each K/V head gets the cheapest policy whose tokens received a given share of its attention mass.
`PatternAttention` is the attention of a decoder that shows its weights, and hides the K/V that a head would not have
kept. So quality is measured before any cache has layouts by head. Knows nothing of questions and answers.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.families import family_of
from engine.model.attention import AttentionPlan
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder
from engine.model.model_spec import ModelSpec
from engine.model.quantization.checkpoint import open_weights, read_config
from engine.model.tokenizer import Tokenizer

BLOCK = 16
Policy = tuple[str, ...]  # parts of a prompt that are kept: their union

PUNCTUATION: Policy = ("special", "punctuation")
FULL: Policy = ("full",)
# The paper adds heavy hitters before the window; here each is tried alone, too.
POLICIES: tuple[Policy, ...] = (
    ("special",), PUNCTUATION, (*PUNCTUATION, "local"), (*PUNCTUATION, "frequent"),
    (*PUNCTUATION, "frequent", "local"), FULL,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenKinds:
    """Kinds of a prompt's tokens: `special` and `punctuation` are (tokens,) bool."""

    special: Tensor
    punctuation: Tensor

    @classmethod
    def of(cls, tokenizer: Tokenizer, tokens: Sequence[int]) -> TokenKinds:
        """Reads the kinds off a tokenizer. The first token counts as special: attention that has no use goes there
        (StreamingLLM, Xiao et al. 2023)."""
        special = [at == 0 or tokenizer.is_special(id) for at, id in enumerate(tokens)]
        return cls(torch.tensor(special), torch.tensor([_is_punctuation(tokenizer, id) for id in tokens]))


def _is_punctuation(tokenizer: Tokenizer, id: int) -> bool:
    text = tokenizer.token_text(id).strip()
    return bool(text) and all(unicodedata.category(each).startswith("P") for each in text)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention of one layer's queries at `positions` (queries,): `weights` (kv_heads, shared heads, queries, keys).
    `received` (kv_heads, keys) is the sum over all queries, which scores heavy hitters (H2O, Zhang et al. 2023)."""

    positions: Tensor
    weights: Tensor
    received: Tensor


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """K/V of a prompt that one layer's heads keep: the tokens of `fixed` (kv_heads, prompt), and before a query those
    of the head's `windows` (kv_heads,), in tokens. K/V of generated tokens is kept by every head."""

    policies: tuple[Policy, ...]
    fixed: Tensor
    windows: Tensor

    def visible(self, positions: Tensor, keys: int) -> Tensor:
        """Returns the keys that queries at `positions` see, beside causality: (kv_heads, queries, keys) bool."""
        heads, prompt = self.fixed.shape
        generated = torch.ones(heads, max(0, keys - prompt), dtype=torch.bool)
        fixed = torch.cat([self.fixed, generated], 1)[:, None, :keys]
        near = positions[:, None] - torch.arange(keys) < self.windows[:, None, None]
        return fixed | near

    @property
    def kept(self) -> Tensor:
        """Returns the tokens of the prompt that each head keeps at the prompt's end, (kv_heads,)."""
        prompt = self.fixed.shape[1]
        return self.visible(torch.tensor([prompt - 1]), prompt).sum((1, 2))


def layout_of(policies: Sequence[Policy], kinds: TokenKinds, received: Tensor, ratio: float) -> HeadLayout:
    """Returns the layout of heads with these policies; `ratio` of the prompt's tokens are a window, and heavy hitters.
    `received` is (kv_heads, prompt or more)."""
    prompt = len(kinds.special)
    count = max(1, math.ceil(ratio * prompt))
    frequent = torch.zeros(len(policies), prompt, dtype=torch.bool)
    frequent.scatter_(1, received[:, :prompt].topk(count).indices, True)
    fixed, windows = torch.zeros_like(frequent), torch.zeros(len(policies), dtype=torch.long)
    for head, parts in enumerate(policies):
        every = torch.ones_like(kinds.special)
        tokens = {
            "special": kinds.special,
            "punctuation": kinds.punctuation,
            "frequent": frequent[head],
            "full": every,
            "local": ~every,
        }
        for part in parts:
            fixed[head] |= tokens[part]
        windows[head] = count if "local" in parts else 0
    return HeadLayout(tuple(policies), fixed, windows)


def recovered(layout: HeadLayout, attention: LayerAttention) -> Tensor:
    """Returns the share of attention mass that each K/V head's tokens received, (kv_heads,): the mean over queries, of
    the query head with the least."""
    seen = layout.visible(attention.positions, attention.weights.shape[-1])
    return (attention.weights * seen[:, None]).sum(-1).mean(-1).amin(1)


def profile(attention: LayerAttention, kinds: TokenKinds, mass: float, ratio: float) -> HeadLayout:
    """Chooses for each K/V head of a layer the policy that keeps fewest tokens, of those that recover `mass`
    (section 3.3 of the paper; `mass` is its T)."""
    heads = len(attention.received)
    layouts = [layout_of([policy] * heads, kinds, attention.received, ratio) for policy in POLICIES]
    enough = torch.stack([recovered(each, attention) for each in layouts]) >= mass
    enough[-1] = True  # all of it, up to rounding
    costs = torch.stack([each.kept for each in layouts]).masked_fill(~enough, len(kinds.special) + 1)
    best = [int(costs[:, head].argmin()) for head in range(heads)]
    return layout_of([POLICIES[at] for at in best], kinds, attention.received, ratio)


Record = Callable[[Tensor, Tensor], None]  # of positions and weights, see `LayerAttention`


class PatternAttention:
    """Attention of steps of one row, with the signature of `attention.paged`, in the order of a model's layers.

    `layouts` hide K/V by layer and head; `record` is called with each layer's weights.
    """

    def __init__(self, layers: int) -> None:
        self._layers, self._at = layers, 0
        self.layouts: Sequence[HeadLayout] | None = None
        self.record: Record | None = None

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        plan: AttentionPlan,
        *,
        window: int | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        latent: object = None,
    ) -> Tensor:
        assert window is None and softcap is None and sinks is None and latent is None, "see `why_not`"
        batch = plan.batch
        (keys,) = batch.context_lens
        rows = cache[:, batch.block_tables[0]].flatten(1, 2)[:, :keys]
        k, v = rows.transpose(1, 2)[:, :, None]  # (kv_heads, 1, keys, head_dim) each
        tokens, heads, width = query.shape
        q = query.reshape(tokens, len(k), heads // len(k), width).permute(1, 2, 0, 3)
        seen = torch.arange(keys) <= batch.positions[:, None]
        if self.layouts is not None:
            seen = (seen & self.layouts[self._at].visible(batch.positions, keys))[:, None]
        scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
        weights = scores.masked_fill_(~seen, float("-inf")).softmax(-1)
        if self.record is not None:
            self.record(batch.positions, weights)
        self._at = (self._at + 1) % self._layers
        return torch.matmul(weights, v).permute(2, 0, 1, 3).reshape(tokens, heads, width)


def why_not(spec: ModelSpec) -> str | None:
    """Says why an architecture's heads are not measured; None where they are."""
    if spec.latent is not None:
        return "its K/V are latents, which all heads share"
    if any(spec.windows) or spec.chunked:
        return "layers of it attend within windows already"
    if spec.sinks or spec.attention_softcap is not None:
        return "its scores have sinks or are capped"
    if spec.recurrent_layers:
        return "it has recurrent layers"
    return None


class PatternReader:
    """Reads one sequence at a time with a decoder whose attention shows its weights, in float32.

    Raises:
        ValueError: the model's heads are not measured, see `why_not`.
    """

    def __init__(self, model: Path, length: int) -> None:
        """`length`: tokens of the longest sequence."""
        config = read_config(model)
        family = family_of(config)
        spec = replace(family.spec(config), mtp_layers=0)
        if (why := why_not(spec)) is not None:
            raise ValueError(f"{model.name}: {why}.")
        self.attention = PatternAttention(len(spec.attending_layers))
        self.spec, device = spec, torch.device("cpu")
        self._decoder = Decoder(
            spec, family.names(config), open_weights(model), dtype=torch.float32, device=device,
            attend=self.attention, kernels="torch",
        )  # fmt: skip
        self._kv = KVCache.of(spec, -(-length // BLOCK) + 1, BLOCK, torch.float32, device)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], start: int, layouts: Sequence[HeadLayout] | None = None) -> Tensor:
        """Reads `tokens` from `start` on, those before having been read; returns the log-probabilities after each,
        (len(tokens) - start, vocabulary)."""
        self.attention.layouts = layouts
        positions = torch.arange(start, len(tokens))
        count = len(positions)
        table = torch.arange(1, -(-len(tokens) // BLOCK) + 1)[None]
        ids = torch.tensor(tokens[start:])
        batch = Batch(ids, positions, positions + BLOCK, (0, count), (len(tokens),), table, torch.arange(count))
        return self._decoder.forward(batch, self._kv).log_softmax(-1)

    def watch(self, tokens: Sequence[int], start: int, queries: Sequence[slice]) -> list[list[LayerAttention]]:
        """Reads as `read` does; returns the attention of each layer, for each choice of `queries`."""
        found: list[list[LayerAttention]] = [[] for _ in queries]

        def record(positions: Tensor, weights: Tensor) -> None:
            received = weights.sum((1, 2))
            for some, each in zip(queries, found, strict=True):
                each.append(LayerAttention(positions[some], weights[:, :, some].clone(), received))

        self.attention.record = record
        try:
            self.read(tokens, start)
        finally:
            self.attention.record = None
        return found

    def attending_share(self) -> float:
        """Returns the share of a block's bytes that attention's K/V take: a short convolution's part stays whole."""
        attending = sum(2 * math.prod(self.spec.kv_shape(layer)) for layer in self.spec.attending_layers)
        return attending / (attending + self.spec.hidden_size * len(self.spec.conv_layers))
