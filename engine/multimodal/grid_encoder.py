"""Vision transformers on patches of a picture that keeps its shape: what the encoders of Qwen3.5, Gemma 4 and Pixtral
share. Queries and keys rotate by row and column (2-D RoPE), and squares of patches become the rows of a prompt.

Computed in units between which others may run, as SigLIP is: see `vision_encoder`. Knows no family's weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.multimodal.vision_encoder import ROWS

Block = TypeVar("Block")


class GridProcessor(Protocol):
    """The processor of pictures that keep their shape. `tile` is pixels a side of a square of patches; a byte is
    normalised to (byte * scale - mean) / std."""

    @property
    def tile(self) -> int: ...

    @property
    def scale(self) -> float: ...

    @property
    def mean(self) -> tuple[float, ...]: ...

    @property
    def std(self) -> tuple[float, ...]: ...


class GridEncoder(ABC, Generic[Block]):
    """An encoder with `patch` pixels a side of a patch. `hidden_size` is the width of the text model's embeddings."""

    features, planar, whole_tokens = 1, False, 0
    attention_scale: float | None = None  # of scores; None: by the width of a head
    _blocks: Sequence[Block]

    def __init__(
        self, processor: GridProcessor, patch: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device, self.dtype, self.hidden_size = device, dtype, hidden_size
        self._patch, self._square = patch, processor.tile // patch
        self._scale = processor.scale
        self._mean = torch.tensor(processor.mean, device=device)
        self._std = torch.tensor(processor.std, device=device)

    def encode(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Encodes an image (rows, size, width, 3) uint8, and yields after each unit. Run it in inference mode.

        Returns:
            The rows for the text model: (rows * columns, hidden_size) in the model's dtype.
        """
        rows, columns = len(pixels) * self._square, pixels.shape[2] // self._patch
        pixels = ((pixels.to(self.device).float() * self._scale - self._mean) / self._std).to(self.dtype)
        x, turns = self._embedded(pixels, rows, columns), self._rotations(rows, columns).to(self.device)
        yield
        step = len(x) if self.device.type == "cuda" else ROWS
        for block in self._blocks:
            yield from self._run(block, x, turns, step)
        out = []
        for some in self._squares(x, rows, columns).split(step):
            out.append(self._connected(some))
            yield
        return torch.cat(out)

    def _run(self, block: Block, x: Tensor, turns: Tensor, step: int) -> Generator[None, None, None]:
        """Runs a block on `x` (patches, width) in place, for `step` patches at a time."""
        parts = []
        for at in range(0, len(x), step):
            parts.append(self._heads(block, x[at : at + step], turns[at : at + step]))
            yield
        queries, keys, values = (torch.cat(each).transpose(0, 1) for each in zip(*parts, strict=True))
        for at in range(0, len(x), step):
            some = queries[:, at : at + step]
            attended = F.scaled_dot_product_attention(some, keys, values, scale=self.attention_scale)
            x[at : at + step] += self._attention_out(block, attended.transpose(0, 1).flatten(1))
            yield
        for at in range(0, len(x), step):
            x[at : at + step] += self._mlp(block, x[at : at + step])
            yield

    @abstractmethod
    def _embedded(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the `rows` * `columns` patches of normalised strips (n, size, width, 3): (patches, width)."""

    @abstractmethod
    def _rotations(self, rows: int, columns: int) -> Tensor:
        """Returns unit rotations of the patches' heads: (patches, 1, ...) complex64."""

    @abstractmethod
    def _heads(self, block: Block, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values of patches, (patches, heads, width of a head) each."""

    @abstractmethod
    def _attention_out(self, block: Block, attended: Tensor) -> Tensor:
        """Returns what attention adds to patches: (patches, width)."""

    @abstractmethod
    def _mlp(self, block: Block, x: Tensor) -> Tensor:
        """Returns what the MLP adds to patches: (patches, width)."""

    @abstractmethod
    def _squares(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Returns squares of patches, of `rows` and `columns` of these: (squares, numbers of one)."""

    @abstractmethod
    def _connected(self, squares: Tensor) -> Tensor:
        """Returns the rows of squares for the text model: (squares, hidden_size)."""
