"""Pixtral's encoder of images (Agrawal et al. 2024), as Mistral 3 has it: a vision transformer on patches of a picture
that keeps its shape.

Queries and keys rotate by row and column (2-D RoPE), nothing has a bias, and squares of patches are merged by a matrix
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
from engine.model.model_spec import PixtralVisionSpec, WeightNames
from engine.multimodal.pixtral_processor import PixtralImageProcessor
from engine.multimodal.vision_encoder import ROWS, rotated

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


class PixtralEncoder:
    """The encoder of one checkpoint, loaded. `hidden_size` is the width of the text model's embeddings.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """

    features, whole_tokens, planar = 1, 0, False

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
        self.spec, self.device, self.dtype, self.hidden_size = spec, device, dtype, hidden_size
        self._activation, self._projected = ACTIVATIONS[spec.activation], ACTIVATIONS[spec.projector_activation]
        self._scale = processor.scale
        self._mean = torch.tensor(processor.mean, device=device)
        self._std = torch.tensor(processor.std, device=device)
        self._weights = weights
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

    def encode(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Encodes an image (rows, size, width, 3) uint8, and yields after each unit. Run it in inference mode.

        Returns:
            The rows for the text model: (rows * columns, hidden_size) in the model's dtype.
        """
        merge = self.spec.merge
        rows, columns = len(pixels), pixels.shape[2] // (self.spec.patch_size * merge)
        x = self._embedded(pixels.to(self.device), rows * merge, columns * merge)
        turns = self._rotations(rows * merge, columns * merge)
        yield
        step = len(x) if self.device.type == "cuda" else ROWS
        for block in self._blocks:
            yield from self._run(block, x, turns, step)
        squares = self._normed(x, self._merge_norm, self.spec.merge_eps).view(rows, merge, columns, merge, -1)
        squares = squares.permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        out = []
        for some in squares.split(step):
            merged = F.linear(some, self._merge)
            first, second = self._linear
            out.append(F.linear(self._projected(F.linear(merged, *first)), *second))
            yield
        return torch.cat(out)

    def _embedded(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the patches of an image, row by row: (rows * columns, width)."""
        patch = self.spec.patch_size
        x = ((pixels.float() * self._scale - self._mean) / self._std).to(self.dtype)
        x = x.view(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        return self._normed(F.linear(x, self._patches), self._norm)

    def _rotations(self, rows: int, columns: int) -> Tensor:
        """Returns unit rotations, the first half of them by row, with every other frequency, the rest by column:
        (patches, 1, width of a head / 2) complex64."""
        width = self.spec.hidden_size // self.spec.heads
        frequencies = 1.0 / self.spec.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = torch.cat([row.reshape(-1, 1) * frequencies[0::2], column.reshape(-1, 1) * frequencies[1::2]], 1)
        return torch.polar(torch.ones_like(angles), angles)[:, None].to(self.device)

    def _run(self, block: _Block, x: Tensor, turns: Tensor, rows: int) -> Generator[None, None, None]:
        """Runs a block on `x` (patches, width) in place, for `rows` patches at a time."""
        heads = self.spec.heads
        qkv = x.new_empty(3, len(x), heads, x.shape[1] // heads)
        for at in range(0, len(x), rows):
            some = slice(at, at + rows)
            made = F.linear(self._normed(x[some], block.attention_norm), block.qkv).view(-1, 3, heads, qkv.shape[3])
            made[:, :2] = rotated(made[:, :2], turns[some, None])
            qkv[:, some] = made.transpose(0, 1)
            yield
        queries, keys, values = qkv.transpose(1, 2)  # (heads, patches, width of a head) each
        for at in range(0, len(x), rows):
            some = slice(at, at + rows)
            attended = F.scaled_dot_product_attention(queries[:, some], keys, values)
            x[some] += F.linear(attended.transpose(0, 1).flatten(1), block.out)
            yield
        for at in range(0, len(x), rows):
            some = slice(at, at + rows)
            normed = self._normed(x[some], block.mlp_norm)
            opened = self._activation(F.linear(normed, block.gate)) * F.linear(normed, block.up)
            x[some] += F.linear(opened, block.down)
            yield

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
