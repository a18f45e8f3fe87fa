"""Pixtral's encoder of images (Agrawal et al. 2024), as Mistral 3 has it: a vision transformer on patches of a picture
that keeps its shape.

Queries and keys rotate by row and column (2-D RoPE), nothing has a bias, and squares of patches are merged by a matrix
to the rows of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.layers import ACTIVATIONS
from engine.model.loader import Weights
from engine.model.model_spec import PixtralVisionSpec, WeightNames
from engine.multimodal.grid_encoder import GridEncoder
from engine.multimodal.pixtral_processor import PixtralImageProcessor
from engine.multimodal.vision_encoder import rotated

EPS = 1e-5  # of its norms


@dataclass(frozen=True, slots=True)
class _Block:
    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class PixtralEncoder(GridEncoder[_Block]):
    """The encoder of one checkpoint, loaded. `hidden_size` is the width of the text model's embeddings.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """

    def __init__(
        self,
        spec: PixtralVisionSpec,
        names: WeightNames,
        weights: Weights,
        processor: PixtralImageProcessor,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(processor, spec.patch_size, hidden_size, dtype, device)
        self.spec, self._weights = spec, weights
        self._activation, self._projected = ACTIVATIONS[spec.activation], ACTIVATIONS[spec.projector_activation]
        width, patch, tower, connector = spec.hidden_size, spec.patch_size, names.vision, names.connector
        self._patches = self._take(f"{tower}patch_conv.weight", width, 3, patch, patch).flatten(1)
        self._norm = self._take(f"{tower}ln_pre.weight", width)
        self._blocks = [self._block(f"{tower}transformer.layers.{index}.") for index in range(spec.layers)]
        self._merge_norm = self._take(f"{connector}norm.weight", width)
        self._merge = self._take(f"{connector}patch_merger.merging_layer.weight", width, width * spec.merge**2)
        self._linear = [
            (
                self._take(f"{connector}{name}.weight", hidden_size, wide),
                self._take(f"{connector}{name}.bias", hidden_size) if spec.projector_bias else None,
            )
            for name, wide in (("linear_1", width), ("linear_2", hidden_size))
        ]
        del self._weights

    def _embedded(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        patch = self.spec.patch_size
        x = pixels.view(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        return self._normed(F.linear(x, self._patches), self._norm)

    def _rotations(self, rows: int, columns: int) -> Tensor:
        """Returns unit rotations, the first half of them by row, with every other frequency, the rest by column:
        (patches, 1, width of a head / 2) complex64."""
        width = self.spec.hidden_size // self.spec.heads
        frequencies = 1.0 / self.spec.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = torch.cat([row.reshape(-1, 1) * frequencies[0::2], column.reshape(-1, 1) * frequencies[1::2]], 1)
        return torch.polar(torch.ones_like(angles), angles)[:, None]

    def _heads(self, block: _Block, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = F.linear(self._normed(x, block.attention_norm), block.qkv).view(len(x), 3, self.spec.heads, -1)
        queries, keys, values = made.unbind(1)
        return rotated(queries, turns), rotated(keys, turns), values

    def _attention_out(self, block: _Block, attended: Tensor) -> Tensor:
        return F.linear(attended, block.out)

    def _mlp(self, block: _Block, x: Tensor) -> Tensor:
        normed = self._normed(x, block.mlp_norm)
        return F.linear(self._activation(F.linear(normed, block.gate)) * F.linear(normed, block.up), block.down)

    def _squares(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the normalised patches of each square, a component after the other."""
        merge = self.spec.merge
        normed = self._normed(x, self._merge_norm, self.spec.merge_eps)
        squares = normed.view(rows // merge, merge, columns // merge, merge, -1).permute(0, 2, 4, 1, 3)
        return squares.reshape(rows * columns // merge**2, -1)

    def _connected(self, squares: Tensor) -> Tensor:
        first, second = self._linear
        return F.linear(self._projected(F.linear(F.linear(squares, self._merge), *first)), *second)

    def _normed(self, x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
        """Returns the RMSNorm of `x` (..., width), in float32 within."""
        return weight * F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(self.dtype)

    def _block(self, name: str) -> _Block:
        width, inner = self.spec.hidden_size, self.spec.intermediate_size
        attention, mlp = f"{name}attention.", f"{name}feed_forward."
        return _Block(
            self._take(f"{name}attention_norm.weight", width),
            torch.cat([self._take(f"{attention}{part}_proj.weight", width, width) for part in "qkv"]),
            self._take(f"{attention}o_proj.weight", width, width), self._take(f"{name}ffn_norm.weight", width),
            self._take(f"{mlp}gate_proj.weight", inner, width), self._take(f"{mlp}up_proj.weight", inner, width),
            self._take(f"{mlp}down_proj.weight", width, inner),
        )  # fmt: skip

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(self.device, self.dtype)
