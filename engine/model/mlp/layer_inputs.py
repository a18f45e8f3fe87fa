"""The inputs that each layer has of its own (Gemma 3n, Google 2025; Gemma 4), and the gated MLP by which it takes them.

A token's input of a layer is a row of a second embedding, plus a projection of the model's own embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.linear import Linear, ProjectionReader
from engine.model.model_spec import PerLayerInput


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The weights of all layers' inputs."""

    table: Tensor  # (vocab, layers * size)
    projection: Linear  # hidden -> layers * size
    norm: Linear  # over a layer's `size` numbers
    size: int

    @classmethod
    def read(cls, read: ProjectionReader, of: PerLayerInput, root: str, layers: int, hidden: int) -> LayerInputs:
        """Reads the weights of a model whose names begin with `root`. Raises CheckpointError."""
        width = layers * of.size
        return cls(
            read.tensor(f"{root}embed_tokens_per_layer.weight", of.vocab_size, width),
            read.linear(f"{root}per_layer_model_projection", width, hidden),
            read.plain_norm(f"{root}per_layer_projection_norm.weight", of.size),
            of.size,
        )

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Returns the inputs (layers, tokens, size) of tokens whose embeddings are (tokens, hidden)."""
        # rounded like the embeddings it scales, as the checkpoints were trained
        multiplier = float(torch.tensor(self.size**0.5).to(self.table.dtype))
        own = self.table.index_select(0, token_ids).mul_(multiplier)
        projected = self.projection(embedded).mul_(embedded.shape[1] ** -0.5)
        both = self.norm(projected.unflatten(1, (-1, self.size))).add_(own.unflatten(1, (-1, self.size)))
        return both.mul_(2**-0.5).transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class InputGate:
    """The weights by which one layer takes its inputs."""

    gate: Linear  # hidden -> size
    out: Linear  # size -> hidden
    norm: Linear

    @classmethod
    def read(cls, read: ProjectionReader, of: PerLayerInput, prefix: str, hidden: int) -> InputGate:
        """Reads the weights of a layer whose names begin with `prefix`. Raises CheckpointError."""
        return cls(
            read.linear(f"{prefix}per_layer_input_gate", of.size, hidden),
            read.linear(f"{prefix}per_layer_projection", hidden, of.size),
            read.plain_norm(f"{prefix}post_per_layer_input_norm.weight", hidden),
        )

    def __call__(self, x: Tensor, inputs: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what is added to the hidden states `x` (tokens, hidden), of `inputs` (tokens, size)."""
        return self.norm(self.out(activation(self.gate(x)).mul_(inputs)))
