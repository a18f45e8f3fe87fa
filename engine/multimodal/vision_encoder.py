"""SigLIP's encoder (Zhai et al. 2023) with the connector of Idefics3, computed in units between which others may run.

A tile of 512 pixels has 1,024 patches, and encoding it takes a CPU longer than many decodes. So `encode` is a generator
that yields after each unit of work: on a CPU one part of a layer for `ROWS` patches of a tile, on a GPU a layer of a
few tiles. Units depend on the tile alone, and so do its bits. Knows nothing of tokens or sequences.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.layers import ACTIVATIONS
from engine.model.loader import Weights
from engine.model.model_spec import VisionSpec, WeightNames
from engine.multimodal.gemma3_processor import Gemma3ImageProcessor
from engine.multimodal.image_processor import ImageProcessor

ROWS = 64  # patches of a unit on a CPU
TILES = 4  # of a unit on a GPU


@dataclass(frozen=True, slots=True)
class Affine:
    """A weight and a bias, of a linear layer or a norm."""

    weight: Tensor
    bias: Tensor

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def norm(self, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, eps)


@dataclass(frozen=True, slots=True)
class _EncoderLayer:
    attention_norm: Affine
    qkv: Affine
    out: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine


class VisionEncoder:
    """The encoder of one checkpoint, loaded. `hidden_size` is the width of the text model's embeddings.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """

    def __init__(
        self,
        spec: VisionSpec,
        names: WeightNames,
        weights: Weights,
        processor: ImageProcessor | Gemma3ImageProcessor,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.device, self.dtype, self.hidden_size = spec, device, dtype, hidden_size
        self.features, self.planar = processor.features, False  # rows of a tile
        self._side = processor.tile // spec.patch_size  # patches
        self._activation = ACTIVATIONS[spec.activation]
        self._scale = processor.scale
        self._mean = torch.tensor(processor.mean, device=device)
        self._std = torch.tensor(processor.std, device=device)
        self.whole_tokens = spec.whole_tokens
        self._weights = weights
        self._root = self._root_of(names.vision)
        width, patch, places = spec.hidden_size, spec.patch_size, (spec.image_size // spec.patch_size) ** 2
        self._patches = Affine(
            self._take("embeddings.patch_embedding.weight", width, 3, patch, patch).flatten(1),
            self._take("embeddings.patch_embedding.bias", width),
        )
        table = self._take("embeddings.position_embedding.weight", places, width)
        self._positions = table[self._places(spec.image_size // patch).to(device)]
        self._layers = [self._layer(f"encoder.layers.{index}.") for index in range(spec.layers)]
        self._norm = self._affine("post_layernorm", width)
        self._read_connector(names.connector)
        del self._weights

    def encode(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Encodes tiles (tiles, size, size, 3) uint8, and yields after each unit. Run it in inference mode.

        Returns:
            The rows for the text model: (tiles * features, hidden_size) in the model's dtype.
        """
        rows, tiles = (self._side**2, TILES) if self.device.type == "cuda" else (ROWS, 1)
        out = []
        for some in pixels.split(tiles):
            x = self._embedded(some.to(self.device))
            yield
            for layer in self._layers:
                yield from self._run(layer, x, rows)
            out.append(self._connected(self._norm.norm(x, self.spec.norm_eps)))
            yield
        return torch.cat(out)

    def _embedded(self, pixels: Tensor) -> Tensor:
        """Returns the patches of tiles (n, size, size, 3) with their positions: (n, patches, width)."""
        side, patch = self._side, self.spec.patch_size
        x = ((pixels.float() * self._scale - self._mean) / self._std).to(self.dtype)
        x = x.view(len(x), side, patch, side, patch, 3).permute(0, 1, 3, 5, 2, 4).reshape(len(x), side * side, -1)
        return self._patches.linear(x) + self._positions

    def _run(self, layer: _EncoderLayer, x: Tensor, rows: int) -> Generator[None, None, None]:
        """Runs a layer on `x` (tiles, patches, width) in place, for `rows` patches at a time."""
        spec, patches = self.spec, x.shape[1]
        qkv = x.new_empty(len(x), patches, 3 * spec.hidden_size)
        for at in range(0, patches, rows):
            some = slice(at, at + rows)
            qkv[:, some] = layer.qkv.linear(layer.attention_norm.norm(x[:, some], spec.norm_eps))
            yield
        heads = qkv.view(len(x), patches, 3, spec.heads, -1).permute(2, 0, 3, 1, 4)  # (3, tiles, heads, patches, width)
        queries, keys, values = heads.unbind(0)
        for at in range(0, patches, rows):
            some = slice(at, at + rows)
            attended = F.scaled_dot_product_attention(queries[:, :, some], keys, values)
            x[:, some] += layer.out.linear(attended.transpose(1, 2).flatten(2))
            yield
        for at in range(0, patches, rows):
            some = slice(at, at + rows)
            opened = layer.up.linear(layer.mlp_norm.norm(x[:, some], spec.norm_eps))
            x[:, some] += layer.down.linear(self._activation(opened))
            yield

    def _connected(self, x: Tensor) -> Tensor:
        """Joins squares of patches (pixel shuffle) and projects them: (tiles * features, hidden_size)."""
        side, shuffle = self._side, self.spec.pixel_shuffle
        squares = x.view(len(x), side // shuffle, shuffle, side // shuffle, shuffle, -1).transpose(2, 3)
        return F.linear(squares.reshape(len(x) * self.features, -1), self._projection)

    def _root_of(self, root: str) -> str:
        """Returns what the names of the encoder's weights begin with."""
        return root

    def _places(self, trained: int) -> Tensor:
        """Returns the learned position of each patch of a tile, of `trained` a side: (patches,)."""
        return _positions(self._side, trained)

    def _read_connector(self, name: str) -> None:
        joined = self.spec.hidden_size * self.spec.pixel_shuffle**2
        found = self._weights.take(f"{name}.weight", (self.hidden_size, joined))
        self._projection = found.to(self.device, self.dtype)

    def _layer(self, name: str) -> _EncoderLayer:
        width, inner = self.spec.hidden_size, self.spec.intermediate_size
        parts = [self._affine(f"{name}self_attn.{part}_proj", width, width) for part in "qkv"]
        qkv = Affine(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))
        return _EncoderLayer(
            self._affine(f"{name}layer_norm1", width), qkv, self._affine(f"{name}self_attn.out_proj", width, width),
            self._affine(f"{name}layer_norm2", width), self._affine(f"{name}mlp.fc1", inner, width),
            self._affine(f"{name}mlp.fc2", width, inner),
        )  # fmt: skip

    def _affine(self, name: str, *shape: int) -> Affine:
        return Affine(self._take(f"{name}.weight", *shape), self._take(f"{name}.bias", shape[0]))

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(f"{self._root}{name}", shape).to(self.device, self.dtype)


def _positions(side: int, trained: int) -> Tensor:
    """Returns the position of each patch of a square of `side` patches in one of `trained` (NaViT, Dehghani et al.
    2023): (side * side,). Rounded as the reference rounds it."""
    boundaries = torch.arange(1 / trained, 1.0, 1 / trained)
    fractions = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    buckets = torch.bucketize(fractions, boundaries, right=True)
    return (buckets[:, None] * trained + buckets).flatten()


def rotated(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotates heads (..., width), whose components i and i + width / 2 are pairs, by complex `turns`."""
    real, imaginary = heads.float().chunk(2, -1)
    turned = torch.complex(real, imaginary) * turns
    return torch.cat([turned.real, turned.imag], -1).to(heads.dtype)
