"""Gemma 3's encoder of images (Google 2025): SigLIP on one square, whose patches are averaged."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.multimodal.vision_encoder import VisionEncoder


class Gemma3Encoder(VisionEncoder):
    """SigLIP, and the connector of `Gemma3MultiModalProjector`: the mean of each square of patches, an RMSNorm whose
    weight is stored less one, and a projection."""

    def _root_of(self, root: str) -> str:
        """transformers 5 leaves `vision_model.` out of the names when it saves."""
        shorter = root.removesuffix("vision_model.")
        published = any(name.startswith(root) for name in self._weights.names())
        return root if published else shorter

    def _places(self, trained: int) -> Tensor:
        return torch.arange(trained**2)

    def _read_connector(self, name: str) -> None:
        width = self.spec.hidden_size
        self._projection = self._weights.take(name, (width, self.hidden_size)).to(self.device, self.dtype)
        norm = f"{name.rpartition('.')[0]}.mm_soft_emb_norm.weight"
        self._norm_weight = self._weights.take(norm, (width,)).to(self.device).float() + 1.0

    def _connected(self, x: Tensor) -> Tensor:
        """Returns the rows of tiles (n, patches, width): (n * features, hidden_size)."""
        side, kernel = self._side, self.spec.pixel_shuffle
        squares = x.transpose(1, 2).reshape(len(x), -1, side, side)
        rows = F.avg_pool2d(squares, kernel).flatten(2).transpose(1, 2).reshape(len(x) * self.features, -1)
        normed = F.rms_norm(rows.float(), (rows.shape[-1],), self._norm_weight, self.spec.norm_eps)
        return normed.to(self.dtype) @ self._projection
