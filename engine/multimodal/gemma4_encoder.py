"""Gemma 4's encoder of images (Google 2026): a vision transformer on patches of a picture that keeps its shape.

Patches have a learned position for their row and one for their column, and by these queries and keys rotate, too (2-D
RoPE). Queries, keys and values are normalised by head, and what a layer adds once more. Squares of patches are averaged
to the rows of a prompt. Computed in units, as SigLIP is: see `vision_encoder`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.layers import ACTIVATIONS
from engine.model.loader import Weights
from engine.model.model_spec import PooledVisionSpec, WeightNames
from engine.multimodal.gemma4_processor import Gemma4ImageProcessor
from engine.multimodal.vision_encoder import ROWS, rotated


@dataclass(frozen=True, slots=True)
class _Projection:
    """A matrix without a bias, and the least and the largest inputs and outputs where those are held to ranges."""

    weight: Tensor
    limits: tuple[float, float, float, float] | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.limits is None:
            return F.linear(x, self.weight)
        low, high, least, most = self.limits
        return F.linear(x.clamp(low, high), self.weight).clamp_(least, most)


@dataclass(frozen=True, slots=True)
class _Block:
    attention_norm: Tensor
    qkv: tuple[_Projection, _Projection, _Projection]
    query_norm: Tensor
    key_norm: Tensor
    out: _Projection
    attention_post_norm: Tensor
    mlp_norm: Tensor
    gate: _Projection
    up: _Projection
    down: _Projection
    mlp_post_norm: Tensor


class Gemma4Encoder:
    """The encoder of one checkpoint, loaded. `hidden_size` is the width of the text model's embeddings.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """

    features, planar = 1, False

    def __init__(
        self,
        spec: PooledVisionSpec,
        names: WeightNames,
        weights: Weights,
        processor: Gemma4ImageProcessor,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.device, self.dtype, self.hidden_size = spec, device, dtype, hidden_size
        self.whole_tokens = spec.whole_tokens
        self._activation = ACTIVATIONS[spec.activation]
        self._scale = processor.scale
        self._mean = torch.tensor(processor.mean, device=device)
        self._std = torch.tensor(processor.std, device=device)
        self._weights, self._root = weights, names.vision
        width = spec.hidden_size
        self._patches = self._take("patch_embedder.input_proj.weight", width, 3 * spec.patch_size**2)
        self._positions = self._take("patch_embedder.position_embedding_table", 2, spec.positions, width)
        self._blocks = [self._block(f"encoder.layers.{index}.") for index in range(spec.layers)]
        self._standard: tuple[Tensor, Tensor] | None = None
        if spec.standardized:
            self._standard = self._take("std_bias", width).float(), self._take("std_scale", width).float()
        self._connector = weights.take(names.connector, (hidden_size, width)).to(device, dtype)
        del self._weights

    def encode(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Encodes an image (rows, size, width, 3) uint8, and yields after each unit. Run it in inference mode.

        Returns:
            The rows for the text model: (rows * columns, hidden_size) in the model's dtype.
        """
        pool = self.spec.pool
        rows, columns = len(pixels), pixels.shape[2] // (self.spec.patch_size * pool)
        x = self._embedded(pixels.to(self.device), rows * pool, columns * pool)
        turns = self._rotations(rows * pool, columns * pool)
        yield
        step = len(x) if self.device.type == "cuda" else ROWS
        for block in self._blocks:
            yield from self._run(block, x, turns, step)
        means = x.float().view(rows, pool, columns, pool, -1).mean((1, 3)).flatten(0, 1).to(self.dtype)
        pooled = means.float() * self.spec.hidden_size**0.5
        if self._standard is not None:
            pooled = (pooled - self._standard[0]) * self._standard[1]
        return F.linear(self._normed(pooled.to(self.dtype)), self._connector)

    def _embedded(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the patches of an image with their positions, row by row: (rows * columns, width)."""
        patch = self.spec.patch_size
        x = ((pixels.float() * self._scale - self._mean) / self._std).to(self.dtype)
        x = x.view(rows, patch, columns, patch, 3).transpose(1, 2).reshape(rows * columns, -1)
        of_columns, of_rows = self._positions
        places = of_columns[:columns] + of_rows[:rows, None]
        return F.linear(x, self._patches) + places.flatten(0, 1)

    def _rotations(self, rows: int, columns: int) -> Tensor:
        """Returns unit rotations by column and by row: (patches, 1, 2, width of a head / 4) complex64."""
        half = self.spec.head_dim // 2
        frequencies = 1.0 / self.spec.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = torch.stack([column, row], -1).view(-1, 1, 2, 1) * frequencies
        return torch.polar(torch.ones_like(angles), angles).to(self.device)

    def _run(self, block: _Block, x: Tensor, turns: Tensor, rows: int) -> Generator[None, None, None]:
        """Runs a block on `x` (patches, width) in place, for `rows` patches at a time."""
        spec = self.spec
        queries = x.new_empty(len(x), spec.heads, spec.head_dim)
        keys, values = x.new_empty(2, len(x), spec.kv_heads, spec.head_dim)
        for at in range(0, len(x), rows):
            some = slice(at, at + rows)
            normed = self._normed(x[some], block.attention_norm)
            q, k, v = (project(normed).unflatten(1, (-1, spec.head_dim)) for project in block.qkv)
            queries[some] = self._rotated(q, block.query_norm, turns[some])
            keys[some] = self._rotated(k, block.key_norm, turns[some])
            values[some] = self._normed(v)
            yield
        shared = spec.heads // spec.kv_heads
        k, v = (each.repeat_interleave(shared, 1).transpose(0, 1) for each in (keys, values))
        for at in range(0, len(x), rows):
            some = slice(at, at + rows)
            attended = F.scaled_dot_product_attention(queries[some].transpose(0, 1), k, v, scale=1.0)
            x[some] += self._normed(block.out(attended.transpose(0, 1).flatten(1)), block.attention_post_norm)
            yield
        for at in range(0, len(x), rows):
            some = slice(at, at + rows)
            normed = self._normed(x[some], block.mlp_norm)
            opened = self._activation(block.gate(normed)) * block.up(normed)
            x[some] += self._normed(block.down(opened), block.mlp_post_norm)
            yield

    def _rotated(self, heads: Tensor, norm: Tensor, turns: Tensor) -> Tensor:
        """Normalises heads (..., width) and rotates each half of them on its own."""
        return rotated(self._normed(heads, norm).unflatten(-1, (2, -1)), turns).flatten(-2)

    def _normed(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Returns the RMSNorm of `x` (..., width), in float32 within."""
        weight = None if weight is None else weight.float()
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.spec.norm_eps).to(self.dtype)

    def _block(self, name: str) -> _Block:
        spec, width, inner = self.spec, self.spec.hidden_size, self.spec.intermediate_size
        attention, mlp = f"{name}self_attn.", f"{name}mlp."
        q, k, v = (
            self._projection(f"{attention}{part}_proj", heads * spec.head_dim, width)
            for part, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads))
        )
        return _Block(
            self._take(f"{name}input_layernorm.weight", width), (q, k, v),
            self._take(f"{attention}q_norm.weight", spec.head_dim),
            self._take(f"{attention}k_norm.weight", spec.head_dim),
            self._projection(f"{attention}o_proj", width, spec.heads * spec.head_dim),
            self._take(f"{name}post_attention_layernorm.weight", width),
            self._take(f"{name}pre_feedforward_layernorm.weight", width),
            self._projection(f"{mlp}gate_proj", inner, width), self._projection(f"{mlp}up_proj", inner, width),
            self._projection(f"{mlp}down_proj", width, inner),
            self._take(f"{name}post_feedforward_layernorm.weight", width),
        )  # fmt: skip

    def _projection(self, name: str, *shape: int) -> _Projection:
        weight = self._take(f"{name}.linear.weight", *shape)
        if not self.spec.clipped:
            return _Projection(weight, None)
        limits = (self._take(f"{name}.{each}") for each in ("input_min", "input_max", "output_min", "output_max"))
        low, high, least, most = (float(each) for each in limits)
        return _Projection(weight, (low, high, least, most))

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(f"{self._root}{name}", shape).to(self.device, self.dtype)
