"""Qwen3.5's encoder of images (Alibaba 2026): a vision transformer on patches of a picture that keeps its shape.

Learned positions are resampled to the picture's grid, queries and keys rotate by row and column (2-D RoPE), and squares
of patches are merged into the rows of a prompt. Computed in units, as SigLIP is: see `vision_encoder`. The two frames
that a patch has are one picture twice, so the patches' weights of both are added.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.layers import ACTIVATIONS
from engine.model.loader import Weights
from engine.model.model_spec import GridVisionSpec, WeightNames
from engine.multimodal.qwen3_5_processor import Qwen35ImageProcessor
from engine.multimodal.vision_encoder import ROWS, Affine, rotated

EPS = 1e-6  # of its norms


@dataclass(frozen=True, slots=True)
class _Block:
    attention_norm: Affine
    qkv: Affine
    out: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine


class Qwen35Encoder:
    """The encoder of one checkpoint, loaded. `hidden_size` is the width of the text model's embeddings.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """

    features, whole_tokens, planar = 1, 0, True

    def __init__(
        self,
        spec: GridVisionSpec,
        names: WeightNames,
        weights: Weights,
        processor: Qwen35ImageProcessor,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.device, self.dtype, self.hidden_size = spec, device, dtype, hidden_size
        self._activation = ACTIVATIONS[spec.activation]
        self._scale = processor.scale
        self._mean = torch.tensor(processor.mean, device=device)
        self._std = torch.tensor(processor.std, device=device)
        self._weights, self._root = weights, names.vision
        width, patch, merged = spec.hidden_size, spec.patch_size, spec.hidden_size * spec.merge**2
        kernel = self._weight("patch_embed.proj.weight", width, 3, spec.frames, patch, patch)
        self._patches = Affine(
            kernel.sum(2).flatten(1).to(dtype), self._weight("patch_embed.proj.bias", width).to(dtype)
        )
        self._positions = self._weight("pos_embed.weight", spec.positions, width).to(dtype)
        self._blocks = [self._block(f"blocks.{index}.") for index in range(spec.layers)]
        self._norm = self._affine("merger.norm", width)
        self._merge = (
            self._affine("merger.linear_fc1", merged, merged),
            self._affine("merger.linear_fc2", hidden_size, merged),
        )
        del self._weights

    def encode(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Encodes an image (rows, size, width, 3) uint8, and yields after each unit. Run it in inference mode.

        Returns:
            The rows for the text model: (rows * columns, hidden_size) in the model's dtype.
        """
        side = self.spec.patch_size * self.spec.merge
        grid = len(pixels) * self.spec.merge, pixels.shape[2] // side * self.spec.merge
        x = self._embedded(pixels.to(self.device), grid)
        turns = self._rotations(grid)
        yield
        step = len(x) if self.device.type == "cuda" else ROWS
        for block in self._blocks:
            yield from self._run(block, x, turns, step)
        rows = self._norm.norm(x, EPS).view(-1, self.spec.merge**2 * x.shape[1])
        first, second = self._merge
        out = []
        for some in rows.split(step):
            out.append(second.linear(F.gelu(first.linear(some))))
            yield
        return torch.cat(out)

    def _embedded(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """Returns the patches of an image with their positions: (patches, width), those of a square together."""
        patch, merge = self.spec.patch_size, self.spec.merge
        x = ((pixels.float() * self._scale - self._mean) / self._std).to(self.dtype)
        x = x.view(len(x), merge, patch, -1, merge, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
        x = x.reshape(grid[0] * grid[1], -1)
        side = int(self.spec.positions**0.5)
        table = self._positions.float().T.view(1, -1, side, side)
        places = F.interpolate(table, grid, mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
        return self._patches.linear(x) + self._by_squares(places).to(self.dtype)

    def _by_squares(self, of_patches: Tensor) -> Tensor:
        """Orders (rows, columns, n) of patches as squares have them: (patches, n)."""
        merge = self.spec.merge
        rows, columns, width = of_patches.shape
        squares = of_patches.view(rows // merge, merge, columns // merge, merge, width)
        return squares.transpose(1, 2).reshape(-1, width)

    def _rotations(self, grid: tuple[int, int]) -> Tensor:
        """Returns unit rotations by row, then by column: (patches, 1, width of a head / 2) complex64."""
        half = self.spec.hidden_size // self.spec.heads // 2
        frequencies = 1.0 / self.spec.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        places = torch.cartesian_prod(*map(torch.arange, grid)).view(*grid, 2)
        angles = (self._by_squares(places).float()[:, :, None] * frequencies).flatten(1)
        return torch.polar(torch.ones_like(angles), angles)[:, None].to(self.device)

    def _run(self, block: _Block, x: Tensor, turns: Tensor, rows: int) -> Generator[None, None, None]:
        """Runs a block on `x` (patches, width) in place, for `rows` patches at a time."""
        heads = self.spec.heads
        qkv = x.new_empty(3, len(x), heads, x.shape[1] // heads)
        for at in range(0, len(x), rows):
            some = slice(at, at + rows)
            made = block.qkv.linear(block.attention_norm.norm(x[some], EPS)).view(-1, 3, heads, qkv.shape[3])
            made[:, :2] = rotated(made[:, :2], turns[some, None])
            qkv[:, some] = made.transpose(0, 1)
            yield
        queries, keys, values = qkv.transpose(1, 2)  # (heads, patches, width of a head) each
        for at in range(0, len(x), rows):
            some = slice(at, at + rows)
            attended = F.scaled_dot_product_attention(queries[:, some], keys, values)
            x[some] += block.out.linear(attended.transpose(0, 1).flatten(1))
            yield
        for at in range(0, len(x), rows):
            some = slice(at, at + rows)
            x[some] += block.down.linear(self._activation(block.up.linear(block.mlp_norm.norm(x[some], EPS))))
            yield

    def _block(self, name: str) -> _Block:
        width, inner = self.spec.hidden_size, self.spec.intermediate_size
        return _Block(
            self._affine(f"{name}norm1", width), self._affine(f"{name}attn.qkv", 3 * width, width),
            self._affine(f"{name}attn.proj", width, width), self._affine(f"{name}norm2", width),
            self._affine(f"{name}mlp.linear_fc1", inner, width), self._affine(f"{name}mlp.linear_fc2", width, inner),
        )  # fmt: skip

    def _affine(self, name: str, *shape: int) -> Affine:
        weight, bias = self._weight(f"{name}.weight", *shape), self._weight(f"{name}.bias", shape[0])
        return Affine(weight.to(self.dtype), bias.to(self.dtype))

    def _weight(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(f"{self._root}{name}", shape).to(self.device).float()
