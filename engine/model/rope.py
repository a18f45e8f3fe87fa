"""Rotary positions: the frequencies of every kind, and the rotation of heads.

The idea: pairs that rotate together are made adjacent when the weights are loaded (`interleave`), so a rotation is one
complex product in place, and a head that rotates only in part is the same product with angle zero in its last pairs.
Attention scores do not change when queries and keys are permuted alike.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from engine.model.model_spec import ModelSpec, Rope


def inverse_frequencies(rope: Rope, *, long_context: bool = False) -> Tensor:
    """Returns radians per position of each rotating pair: (dim / 2,) float32. `long_context` picks longrope's set."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    base = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return base
        case "linear":
            return base / rope.factor
        case "llama3":
            return _llama3(rope, base)
        case "yarn":
            return _yarn(rope, base)
        case "proportional":
            return torch.where(torch.arange(rope.dim // 2) < rope.rotating // 2, base / rope.factor, 0.0)
        case "longrope":
            divisors = rope.long_factors if long_context else rope.short_factors
            return base / torch.tensor(divisors, dtype=torch.float32)


def _llama3(rope: Rope, base: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between are blended."""
    turns = rope.original_context * base / (2 * math.pi)  # full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * base / rope.factor + blend * base


def _yarn(rope: Rope, base: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolate pairs of few turns, keep pairs of many, a ramp between."""

    def pair_of(turns: float) -> float:  # the (fractional) component that makes this many turns
        return rope.dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return base / rope.factor * ramp + base * (1.0 - ramp)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Returns YaRN's factor of the length of queries and keys (section 3.4), of DeepSeek's `weight`."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Returns the factor of sine and cosine; with both of DeepSeek's mscales, less that which its scores have."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """LongRoPE (Ding et al. 2024), as Phi-3 uses it."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original_context))


def served_context(spec: ModelSpec, max_model_len: int | None) -> tuple[ModelSpec, bool]:
    """Returns the architecture with the positions that are served, and whether longrope's long set serves them: it does
    where more than the pre-training context is asked for."""
    if spec.longrope_context is None:
        return spec, False
    if max_model_len is not None and max_model_len > spec.longrope_context:
        return spec, True
    return replace(spec, max_position_embeddings=min(spec.max_position_embeddings, spec.longrope_context)), False


class Rotation:
    """The rotation of one Rope for heads of `head_dim` components; the frequencies live on `device`."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, *, long_context: bool) -> None:
        frequencies = torch.zeros(head_dim // 2)  # the pairs that do not rotate keep angle 0 ...
        frequencies[: rope.dim // 2] = inverse_frequencies(rope, long_context=long_context)
        lengths = torch.ones(head_dim // 2)  # ... and length 1
        lengths[: rope.dim // 2] = rope.attention_factor
        self._frequencies = frequencies.to(device)
        self._lengths = lengths.to(device)
        self._axes = axes_of(rope, head_dim).to(device)
        self._beta, self._context, self._offset = rope.query_beta, rope.query_context, rope.query_offset

    def at(self, positions: Tensor) -> Tensor:
        """Unit rotations at `positions` (tokens,), or (3, tokens) by frame, row and column: (tokens, 1, head_dim / 2)
        complex64."""
        if positions.dim() == 2:
            angles = positions.float()[self._axes].T * self._frequencies
        else:
            angles = torch.outer(positions.float(), self._frequencies)
        return torch.polar(self._lengths.expand_as(angles), angles).unsqueeze(1)

    def by(self, positions: int) -> Tensor:
        """Returns the unit rotations that move keys by so many positions, whatever they are at: (1, 1, head_dim / 2)
        complex64. Exact, as rotations add up; the angle is made in float64."""
        angles = (positions * self._frequencies.double()).remainder(2 * math.pi).float()
        return torch.polar(torch.ones_like(angles), angles)[None, None]

    def growth(self, positions: Tensor) -> Tensor | None:
        """Returns the factors of queries at `positions`, (tokens,) float32; None unless they grow with position."""
        if not self._beta:
            return None
        return 1 + self._beta * torch.log1p(torch.floor((positions + self._offset) / self._context))

    def of_queries(self, at: Tensor, positions: Tensor) -> Tensor:
        """Returns the rotations of queries, given those of keys: the same tensor unless queries grow with position."""
        growth = self.growth(positions)
        return at if growth is None else at * growth[:, None, None]


def axes_of(rope: Rope, head_dim: int) -> Tensor:
    """Returns the axis by which each pair rotates, 0 to 2 for frame, row and column: (head_dim / 2,)."""
    axes = torch.zeros(head_dim // 2, dtype=torch.int64)
    for axis in (1, 2) if rope.sections else ():
        axes[axis : rope.sections[axis] * 3 : 3] = axis
    axes[rope.dim // 2 :] = 0  # they do not rotate
    return axes


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Rotates `heads` (tokens, heads, head_dim) in place by `rotations` (tokens, 1, head_dim / 2) complex64."""
    if heads.dtype == torch.float32:
        heads.view(torch.complex64).mul_(rotations)
    else:  # the product is made in float32: bfloat16 has no complex type, and positions need the precision
        heads.copy_((heads.float().view(torch.complex64) * rotations).view(torch.float32))


def rotated(heads: Tensor, rotations: Tensor) -> Tensor:
    """Returns what `rotate_` makes of `heads` as a new tensor, through which gradients pass."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotations).flatten(-2).to(heads.dtype)


def interleave(weight: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorders the rows of a query or key projection so that component i and i + rotary_dim/2 become neighbours.

    `weight` is (heads * head_dim, ...): a matrix, a bias, or a norm's weight (head_dim,). Components past `rotary_dim`
    stay where they are.
    """
    half = rotary_dim // 2
    order = torch.arange(head_dim)
    order[0:rotary_dim:2] = torch.arange(half)
    order[1:rotary_dim:2] = torch.arange(half, rotary_dim)
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def interleave_tails(rows: Tensor, width: int, rope: Rope | None) -> Tensor:
    """Reorders rows of heads of `width` likewise, of which the last `rope.dim` rotate."""
    if rope is None or rope.neighbours:
        return rows
    rest, tails = rows.unflatten(0, (-1, width)).split((width - rope.dim, rope.dim), 1)
    return torch.cat([rest, interleave(tails.flatten(), rope.dim, rope.dim).view(-1, rope.dim)], 1).flatten()
