"""Gemma 4's encoder of images (Google 2026): a vision transformer on patches of a picture that keeps its shape.

Patches have a learned position for their row and one for their column, and by these queries and keys rotate, too (2-D
RoPE). Queries, keys and values are normalised by head, and what a layer adds once more. Squares of patches are averaged
to the rows of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.layers import ACTIVATIONS
from engine.model.loader import Weights
from engine.model.model_spec import PooledVisionSpec, WeightNames
from engine.multimodal.gemma4_processor import Gemma4ImageProcessor
from engine.multimodal.grid_encoder import GridEncoder
from engine.multimodal.vision_encoder import rotated


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


class Gemma4Encoder(GridEncoder[_Block]):
    """The encoder of one checkpoint, loaded. `hidden_size` is the width of the text model's embeddings.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """

    attention_scale = 1.0  # queries and keys are normalised

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
        super().__init__(processor, spec.patch_size, hidden_size, dtype, device)
        self.spec, self.whole_tokens = spec, spec.whole_tokens
        self._activation = ACTIVATIONS[spec.activation]
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

    def _embedded(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        patch = self.spec.patch_size
        x = pixels.view(rows, patch, columns, patch, 3).transpose(1, 2).reshape(rows * columns, -1)
        of_columns, of_rows = self._positions
        places = of_columns[:columns] + of_rows[:rows, None]
        return F.linear(x, self._patches) + places.flatten(0, 1)

    def _rotations(self, rows: int, columns: int) -> Tensor:
        """Returns unit rotations by column and by row: (patches, 1, 2, width of a head / 4) complex64."""
        half = self.spec.head_dim // 2
        frequencies = 1.0 / self.spec.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = torch.stack([column, row], -1).view(-1, 1, 2, 1) * frequencies
        return torch.polar(torch.ones_like(angles), angles)

    def _heads(self, block: _Block, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values; heads that share keys have copies of them."""
        normed, shared = self._normed(x, block.attention_norm), self.spec.heads // self.spec.kv_heads
        q, k, v = (project(normed).unflatten(1, (-1, self.spec.head_dim)) for project in block.qkv)
        keys, values = self._rotated(k, block.key_norm, turns), self._normed(v)
        queries = self._rotated(q, block.query_norm, turns)
        return queries, keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)

    def _attention_out(self, block: _Block, attended: Tensor) -> Tensor:
        return self._normed(block.out(attended), block.attention_post_norm)

    def _mlp(self, block: _Block, x: Tensor) -> Tensor:
        normed = self._normed(x, block.mlp_norm)
        return self._normed(block.down(self._activation(block.gate(normed)) * block.up(normed)), block.mlp_post_norm)

    def _squares(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the means of squares of patches."""
        pool = self.spec.pool
        return x.float().view(rows // pool, pool, columns // pool, pool, -1).mean((1, 3)).flatten(0, 1).to(self.dtype)

    def _connected(self, squares: Tensor) -> Tensor:
        pooled = squares.float() * self.spec.hidden_size**0.5
        if self._standard is not None:
            pooled = (pooled - self._standard[0]) * self._standard[1]
        return F.linear(self._normed(pooled.to(self.dtype)), self._connector)

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
