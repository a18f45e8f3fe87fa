"""A small decoder in the shape of LFM2, for training.

Each layer mixes tokens by a gated short convolution or by grouped-query attention (queries and keys normed per head,
rotary positions), then has a gated feed-forward; norms are root-mean-square, before each part, and the output is tied
to the embedding. Parameter names are those of a Hugging Face `Lfm2ForCausalLM`, so export is a rename of nothing. Rows
of about one length are padded on the right to the longest, where nothing looks, so attention needs no mask; batches of
several lengths lie one behind the other in all other operations, which need few launches so. Rows may share a prefix,
which is computed once and lies before them. One head for each role of
`training.alignment` has its targets in the loss, in layers from the first that attends to the last. Knows nothing of
text or of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.alignment import ROLES

Scored = tuple[Tensor, Tensor]  # a head's queries and keys, (tokens, head_dim)
Shapes = Sequence[tuple[int, int, int]]  # of each batch: tokens of the prefix, rows, and their length
NO_PREFIX = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Rows of about one length, padded on the right: tokens (rows, length).

    `learned` (learned,) are the places, among the rows · length, whose next token is learned, with the loss weights
    `shares` (learned,). `looks` (looks,) are the places, among the roles · rows · length, at which a role's head is to
    look at the tokens from `spans[:, 0]` on to before `spans[:, 1]` of its row. `prefix` (prefix,) comes before every
    row; none of it is learned, and rows with one have no looks.
    """

    tokens: Tensor
    learned: Tensor
    shares: Tensor
    looks: Tensor
    spans: Tensor
    prefix: Tensor = field(default_factory=lambda: NO_PREFIX)


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
        """Normalises each row, in what products compute in: it is cast once for all that read it."""
        normed = F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)
        device = x.device.type
        return normed.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else normed


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what is mixed, (tokens, width), and queries and keys, (tokens, heads, head_dim)."""
        q = self.q_layernorm(self.q_proj(x).view(len(x), -1, self.head_dim))
        k = self.k_layernorm(self.k_proj(x).view(len(x), -1, self.head_dim))
        v = self.v_proj(x).view(len(x), -1, self.head_dim)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.out_proj(attend(q.to(v.dtype), k.to(v.dtype), v, shapes)), q, k


def attend(q: Tensor, k: Tensor, v: Tensor, shapes: Shapes) -> Tensor:
    """Attends causally within each row and its prefix. Takes (tokens, heads, head_dim), and returns (tokens, width)."""
    sizes = [shared + rows * length for shared, rows, length in shapes]
    mixed: list[Tensor] = []  # `list[Tensor]()` would end a compiled graph here
    for (shared, rows, length), *parts in zip(shapes, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        queries, keys, values = (part[shared:].view(rows, length, -1, part.shape[-1]).transpose(1, 2) for part in parts)
        visible = None
        if shared:
            prefix_q, prefix_k, prefix_v = (part[None, :shared].transpose(1, 2) for part in parts)
            of_prefix = F.scaled_dot_product_attention(prefix_q, prefix_k, prefix_v, is_causal=True, enable_gqa=True)
            mixed.append(of_prefix[0].transpose(0, 1).reshape(shared, -1))
            keys = torch.cat((prefix_k.expand(rows, -1, -1, -1), keys), 2)
            values = torch.cat((prefix_v.expand(rows, -1, -1, -1), values), 2)
            visible = torch.ones(length, shared + length, dtype=torch.bool, device=q.device).tril(shared)
        of_rows = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, is_causal=not shared, enable_gqa=True
        )
        mixed.append(of_rows.transpose(1, 2).reshape(rows * length, -1))
    return torch.cat(mixed)


def shifted(x: Tensor, back: int, at: Tensor, shapes: Shapes) -> Tensor:
    """Returns (tokens, width) shifted by `back` tokens within each row and its prefix, zeros where there is none.
    `at` (tokens, 1) is each token's position; `shapes` are needed only where there are prefixes."""
    if not shapes:
        return F.pad(x, (0, 0, back, 0))[: len(x)] * (at >= back)  # of the first in a row it is another row's
    earlier: list[Tensor] = []
    for (shared, rows, length), part in zip(shapes, x.split([s + r * n for s, r, n in shapes]), strict=True):
        prefix = F.pad(part[:shared], (0, 0, back, 0))
        own = part[shared:].view(rows, length, -1)
        earlier.append(prefix[:shared])
        earlier.append(torch.cat((prefix[shared:].expand(rows, -1, -1), own), 1)[:, :length].flatten(0, 1))
    return torch.cat(earlier)


class ShortConv(nn.Module):
    """Gated convolution over the last `conv_taps` tokens, per channel (the LFM2 report, Liquid AI, 2025)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Conv1d(width, width, config.conv_taps, groups=width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, at: Tensor, shapes: Shapes) -> Tensor:
        """Mixes (tokens, width); `at` and `shapes` as `shifted` takes them."""
        gate_in, gate_out, value = self.in_proj(x).chunk(3, dim=-1)
        product = gate_in * value
        taps = self.conv.weight[:, 0].to(product.dtype)  # (width, taps); the last tap is the token itself
        mixed = product * taps[:, -1]
        for back in range(1, taps.shape[1]):
            mixed = mixed + shifted(product, back, at, shapes) * taps[:, -1 - back]
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

    def forward(
        self, x: Tensor, at: Tensor, cos: Tensor, sin: Tensor, shapes: Shapes
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        queries = keys = None
        if hasattr(self, "conv"):
            prefixed = any(shared for shared, _, _ in shapes)
            mixed = self.conv(self.operator_norm(x), at, shapes if prefixed else ())
        else:
            mixed, queries, keys = self.self_attn(self.operator_norm(x), cos, sin, shapes)
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

    def compile_parts(self) -> None:
        """Fuses feed-forwards and convolutions alone: a GPU's code for the whole takes minutes to compile."""
        for part in self.modules():
            if isinstance(part, FeedForward | ShortConv):
                part.compile(dynamic=True)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The last normed states, (batch, length, hidden_size), of tokens (batch, length)."""
        return self.guided([tokens])[0].view(*tokens.shape, -1)

    def guided(self, tokens: Sequence[Tensor], prefixes: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the last normed states, (tokens, hidden_size), of tokens (rows, length) each, and queries and keys of
        the head of each role, (roles, tokens, head_dim). Each one's prefix (prefix,) lies before its rows."""
        prefixes = prefixes or [NO_PREFIX] * len(tokens)
        shapes = tuple((len(prefix), *each.shape) for prefix, each in zip(prefixes, tokens, strict=True))
        at = [(torch.arange(shared), torch.arange(shared, shared + n).repeat(rows)) for shared, rows, n in shapes]
        flat = torch.cat([part for pair in zip(prefixes, tokens, strict=True) for part in map(torch.flatten, pair)])
        device = self.cos.device
        hidden, scored = self._hidden(_sent(flat, device), _sent(torch.cat([*chain(*at)]), device), shapes)
        queries, keys = zip(*scored, strict=True)
        return hidden, torch.stack(queries), torch.stack(keys)

    def _hidden(self, tokens: Tensor, at: Tensor, shapes: Shapes) -> tuple[Tensor, list[Scored]]:
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        x = self.model.embed_tokens(tokens)
        scored: list[Scored] = []
        for layer in self.model.layers:
            x, queries, keys = layer(x, at[:, None], cos, sin, shapes)
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

    def loss(self, batches: Sequence[TrainingBatch]) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the next token's cross-entropy, (), and the sum of each role's, (roles,), over
        batches on the CPU: a GPU is never waited for."""
        device = self.cos.device
        hidden, queries, keys = self.guided([batch.tokens for batch in batches], [batch.prefix for batch in batches])
        learned, targets, shares = (_sent(each, device) for each in _learned(batches))
        logits = F.linear(hidden.index_select(0, learned), self.model.embed_tokens.weight)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        return (losses * shares).sum(), guidance(queries, keys, batches)


def _learned(batches: Sequence[TrainingBatch]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the positions, among all batches' tokens, before the learned tokens, these tokens, and their weights."""
    begin, learned, targets = 0, list[Tensor](), list[Tensor]()
    for batch in batches:
        learned.append(batch.learned + begin + len(batch.prefix))
        targets.append(batch.tokens.flatten()[batch.learned + 1])
        begin += len(batch.prefix) + batch.tokens.numel()
    return torch.cat(learned), torch.cat(targets).long(), torch.cat([batch.shares for batch in batches])


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a CPU's tensor, not waiting for what a GPU has to do before."""
    return tensor.to(device, non_blocking=True)


def guidance(queries: Tensor, keys: Tensor, batches: Sequence[TrainingBatch]) -> Tensor:
    """Returns the sum of what each role misses, (roles,); queries and keys (roles, tokens, head_dim) of all batches."""
    sizes = [len(batch.prefix) + batch.tokens.numel() for batch in batches]
    lost = torch.zeros(len(queries), device=queries.device)
    with torch.autocast(queries.device.type, enabled=False):
        for batch, q, k in zip(batches, queries.float().split(sizes, 1), keys.float().split(sizes, 1), strict=True):
            if not len(batch.looks):
                continue
            looks, spans = _sent(batch.looks, q.device), _sent(batch.spans, q.device)
            of_rows, read = (each.reshape(len(q), *batch.tokens.shape, -1) for each in (q, k))
            lost = lost.index_add(0, looks // batch.tokens.numel(), missed(of_rows, read, looks, spans))
    return lost


def missed(queries: Tensor, keys: Tensor, looks: Tensor, spans: Tensor) -> Tensor:
    """Returns −log of the attention that falls into the spans, (looks,): queries and keys (roles, rows, length,
    head_dim), `looks` the positions that look among all of their (roles · rows · length), spans (looks, 2)."""
    length = queries.shape[2]
    scores = queries @ keys.mT * queries.shape[-1] ** -0.5
    scores = scores.view(-1, length).index_select(0, looks)
    at = torch.arange(length, device=queries.device)
    scores = scores.masked_fill(at > (looks % length)[:, None], float("-inf"))
    inside = (at >= spans[:, :1]) & (at < spans[:, 1:])
    return scores.logsumexp(-1) - scores.masked_fill(~inside, float("-inf")).logsumexp(-1)
