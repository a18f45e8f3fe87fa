"""A small decoder in the shape of LFM2, for training.

Each layer mixes tokens by a gated short convolution or by grouped-query attention (queries and keys normed per head,
rotary positions), then has a gated feed-forward; norms are root-mean-square, before each part, and the output is tied
to the embedding. Parameter names are those of a Hugging Face `Lfm2ForCausalLM`, so export is a rename of nothing. Every
row of a batch starts at position 0 and is padded on the right, where nothing looks: there is no mask. One head for each
role of `training.alignment` has its targets in the loss, in layers from the first that attends to the last. Knows
nothing of text or of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.alignment import ROLES

Scored = tuple[Tensor, Tensor]  # a head's queries and keys, (batch, length, head_dim)


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 6144
    hidden_size: int = 256
    intermediate_size: int = 512
    layer_types: tuple[str, ...] = ("conv", "full_attention", "full_attention", "conv", "full_attention") * 2
    conv_taps: int = 3  # tokens that a convolution mixes
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096


class TrainingNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotary_tables(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (length, head_dim), in the half-split layout of Hugging Face."""
    powers = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * config.rope_theta**-powers
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns (…, length, head_dim) by its positions."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.out_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_layernorm = TrainingNorm(config.head_dim, config.rms_norm_eps)
        self.k_layernorm = TrainingNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what is mixed, (batch, length, width), and queries and keys, (batch, heads, length, head_dim)."""
        batch, length, _ = x.shape
        q = self.q_layernorm(self.q_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        k = self.k_layernorm(self.k_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, length, -1)), q, k


class ShortConv(nn.Module):
    """Gated convolution over the last `conv_taps` tokens, per channel (the LFM2 report, Liquid AI, 2025)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Conv1d(width, width, config.conv_taps, groups=width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate_in, gate_out, value = self.in_proj(x).chunk(3, dim=-1)
        product = gate_in * value
        taps = self.conv.weight[:, 0].to(product.dtype)  # (width, taps); the last tap is the token itself
        mixed = product * taps[:, -1]
        for back in range(1, taps.shape[1]):
            mixed = mixed + F.pad(product, (0, 0, back, 0))[:, : x.shape[1]] * taps[:, -1 - back]
        return self.out_proj(gate_out * mixed)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TrainingLayer(nn.Module):
    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.operator_norm = TrainingNorm(config.hidden_size, config.rms_norm_eps)
        if kind == "conv":
            self.conv = ShortConv(config)
        else:
            self.self_attn = Attention(config)
        self.ffn_norm = TrainingNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        queries = keys = None
        if hasattr(self, "conv"):
            mixed = self.conv(self.operator_norm(x))
        else:
            mixed, queries, keys = self.self_attn(self.operator_norm(x), cos, sin)
        x = x + mixed
        return x + self.feed_forward(self.ffn_norm(x)), queries, keys


class TrainingDecoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TrainingLayer(config, kind) for kind in config.layer_types)
        self.embedding_norm = TrainingNorm(config.hidden_size, config.rms_norm_eps)


class Model(nn.Module):
    """`forward` gives logits; `loss` what training lowers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = TrainingDecoder(config)
        cos, sin = rotary_tables(config, config.max_position_embeddings, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Parts that write to the residual stream start at zero, so the first step sees a plain embedding."""
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                continue
            if name.endswith(("out_proj.weight", "w2.weight")):
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def compile_hidden(self) -> None:
        """Fuse the decoder's small operations, once for all shapes. Needs a C++ compiler on a CPU."""
        self._hidden = torch.compile(self._hidden, dynamic=True)  # type: ignore[method-assign]  # as torch has it

    def hidden(self, tokens: Tensor) -> Tensor:
        """The last normed states, (batch, length, hidden_size), of tokens (batch, length)."""
        return self._hidden(tokens)[0]

    def guided(self, tokens: Tensor) -> tuple[Tensor, list[Scored]]:
        """Returns the last normed states, and the head of each role."""
        return self._hidden(tokens)

    def _hidden(self, tokens: Tensor) -> tuple[Tensor, list[Scored]]:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.model.embed_tokens(tokens)
        scored = list[Scored]()
        for layer in self.model.layers:
            x, queries, keys = layer(x, cos, sin)
            if queries is not None:
                scored.append((queries, keys))
        return self.model.embedding_norm(x), [self._guided(scored, role) for role in range(len(ROLES))]

    def _guided(self, scored: list[Scored], role: int) -> Scored:
        """Returns the head of `role`; layers that attend are shared where there are fewer than roles."""
        layers, roles = len(scored), len(ROLES)
        queries, keys = scored[role * (layers - 1) // (roles - 1) if layers >= roles else role * layers // roles]
        head = role % queries.shape[1]
        return queries[:, head], keys[:, head * keys.shape[1] // queries.shape[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, weights: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the next token's cross-entropy, (), and the sum of each role's, (roles,).

        `weights[b, t]` is the loss weight of predicting `tokens[b, t]`, 0 on padding. `spans`, (batch, roles, length,
        2), has for each position the first token that its head is to look at and the one after the last, or -1. On the
        CPU all three: what counts is found there, so that a GPU is never waited for.
        """
        device, length = self.cos.device, tokens.shape[1]
        learned = _positions(weights[:, 1:] > 0, length)
        targets, shares = (_sent(each.flatten()[learned + 1], device) for each in (tokens, weights))
        hidden, scored = self._hidden(_sent(tokens, device))
        of_learned = hidden.flatten(0, 1).index_select(0, _sent(learned, device))
        logits = F.linear(of_learned, self.model.embed_tokens.weight)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        with torch.autocast(device.type, enabled=False):
            roles = [missed(*each, spans[:, role]) for role, each in enumerate(scored)]
        return (losses * shares).sum(), torch.stack(roles)


def _positions(chosen: Tensor, length: int) -> Tensor:
    """Returns where `chosen`, (batch, at most `length`), holds, in rows of `length` one behind the other, (chosen,)."""
    row, at = chosen.nonzero(as_tuple=True)
    return row * length + at


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a CPU's tensor, not waiting for what a GPU has to do before."""
    return tensor.to(device, non_blocking=True)


def missed(queries: Tensor, keys: Tensor, spans: Tensor) -> Tensor:
    """Returns the sum of −log of the attention that falls into the spans, (): queries and keys (batch, length,
    head_dim), spans (batch, length, 2), on the CPU, negative where a position may look anywhere."""
    device, length = queries.device, queries.shape[1]
    looks = _positions(spans[..., 0] >= 0, length)
    first, end = _sent(spans.flatten(0, 1)[looks], device).unbind(-1)
    looks = _sent(looks, device)
    scores = queries.float() @ keys.float().mT * queries.shape[-1] ** -0.5
    scores = scores.flatten(0, 1).index_select(0, looks)
    at = torch.arange(length, device=device)
    scores = scores.masked_fill(at > (looks % length)[:, None], float("-inf"))
    inside = (at >= first[:, None]) & (at < end[:, None])
    return (scores.logsumexp(-1) - scores.masked_fill(~inside, float("-inf")).logsumexp(-1)).sum()
