"""Qwen3.5's encoder of images (Alibaba 2026): a vision transformer on patches of a picture that keeps its shape.

Learned positions are resampled to the picture's grid, queries and keys rotate by row and column (2-D RoPE), and squares
of patches are merged into the rows of a prompt. Computed in units, as SigLIP is: see `vision_encoder`. The two frames
that a patch has are one picture twice, so the patches' weights of both are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.layers import ACTIVATIONS
from engine.model.loader import Weights
from engine.model.model_spec import GridVisionSpec, WeightNames
from engine.multimodal.grid_encoder import GridEncoder
from engine.multimodal.qwen3_5_processor import Qwen35ImageProcessor
from engine.multimodal.vision_encoder import Affine, rotated

EPS = 1e-6  # of its norms


@dataclass(frozen=True, slots=True)
class _Block:
    attention_norm: Affine
    qkv: Affine
    out: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine


class Qwen35Encoder(GridEncoder[_Block]):
    """The encoder of one checkpoint, loaded. `hidden_size` is the width of the text model's embeddings.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """

    planar = True

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
        super().__init__(processor, spec.patch_size, hidden_size, dtype, device)
        self.spec, self._activation = spec, ACTIVATIONS[spec.activation]
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

    def _embedded(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the patches of an image with their positions, those of a square together."""
        patch, merge = self.spec.patch_size, self.spec.merge
        x = pixels.view(len(pixels), merge, patch, -1, merge, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
        side = int(self.spec.positions**0.5)
        table = self._positions.float().T.view(1, -1, side, side)
        places = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
        return self._patches.linear(x.reshape(rows * columns, -1)) + self._by_squares(places).to(self.dtype)

    def _by_squares(self, of_patches: Tensor) -> Tensor:
        """Orders (rows, columns, n) of patches as squares have them: (patches, n)."""
        merge = self.spec.merge
        rows, columns, width = of_patches.shape
        squares = of_patches.view(rows // merge, merge, columns // merge, merge, width)
        return squares.transpose(1, 2).reshape(-1, width)

    def _rotations(self, rows: int, columns: int) -> Tensor:
        """Returns unit rotations by row, then by column: (patches, 1, width of a head / 2) complex64."""
        half = self.spec.hidden_size // self.spec.heads // 2
        frequencies = 1.0 / self.spec.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(rows, columns, 2)
        angles = (self._by_squares(places).float()[:, :, None] * frequencies).flatten(1)
        return torch.polar(torch.ones_like(angles), angles)[:, None]

    def _heads(self, block: _Block, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = block.qkv.linear(block.attention_norm.norm(x, EPS)).view(len(x), 3, self.spec.heads, -1)
        queries, keys, values = made.unbind(1)
        return rotated(queries, turns), rotated(keys, turns), values

    def _attention_out(self, block: _Block, attended: Tensor) -> Tensor:
        return block.out.linear(attended)

    def _mlp(self, block: _Block, x: Tensor) -> Tensor:
        return block.down.linear(self._activation(block.up.linear(block.mlp_norm.norm(x, EPS))))

    def _squares(self, x: Tensor, rows: int, columns: int) -> Tensor:
        return self._norm.norm(x, EPS).view(-1, self.spec.merge**2 * x.shape[1])

    def _connected(self, squares: Tensor) -> Tensor:
        first, second = self._merge
        return second.linear(F.gelu(first.linear(squares)))

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
