"""A model run one layer at a time: all texts pass through a layer before the next one is read.

Only the embedding, one layer and the hidden states are in memory, in float32. Layers come from any `Weights`, so the
same texts pass through the checkpoint and through what is made of it. Knows nothing of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.families import family_of
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder
from engine.model.layers import Layer, LayerReader
from engine.model.linear import Packing
from engine.model.loader import Weights
from engine.model.model_spec import ModelSpec, WeightNames
from engine.model.quantization.checkpoint import open_weights, read_config

Tokens = Sequence[Sequence[int]]  # texts
LinearName = Literal["qkv", "o", "gate_up", "down"]  # of the fields of `Layer`
LINEARS: tuple[LinearName, ...] = get_args(LinearName)
Observe = Callable[[LinearName, Tensor], None]  # with a linear's input, (tokens, in) float32
BLOCK = 16  # tokens of K/V


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of a checkpoint: the tensor `name` + ".weight" is (rows, columns)."""

    name: str
    rows: int
    columns: int


def projections(spec: ModelSpec, names: WeightNames, index: int) -> dict[LinearName, tuple[Projection, ...]]:
    """Returns the stored parts of each linear of layer `index`, in the order of its rows; they share its input."""
    prefix, hidden = f"{names.root}layers.{index}.", spec.hidden_size
    q, kv, wide = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate_size

    def parts(stems: tuple[str, ...], rows: tuple[int, ...]) -> tuple[Projection, ...]:
        rows = rows if len(stems) == len(rows) else (sum(rows),)  # joined in the checkpoint already
        return tuple(Projection(prefix + stem, each, hidden) for stem, each in zip(stems, rows, strict=True))

    mlp: dict[LinearName, tuple[Projection, ...]] = {
        "gate_up": parts(names.gate_up, (wide, wide)),
        "down": (Projection(prefix + names.down, hidden, wide),),
    }
    if index in spec.conv_layers:
        return {
            "qkv": (Projection(f"{prefix}conv.in_proj", 3 * hidden, hidden),),
            "o": (Projection(f"{prefix}conv.out_proj", hidden, hidden),),
            **mlp,
        }
    return {"qkv": parts(names.qkv, (q, kv, kv)), "o": (Projection(prefix + names.o, hidden, q),), **mlp}


@dataclass(frozen=True, slots=True)
class _ObservedLinear:
    """A linear layer in float32 that shows its inputs to `observe` first."""

    weight: Tensor
    bias: Tensor | None
    observe: Callable[[Tensor], None] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.observe is not None:
            self.observe(x)
        return F.linear(x, self.weight, self.bias)


class LayerwiseModel:
    """A checkpoint's model in float32 on torch, without its layers.

    Raises:
        UnsupportedArchitecture: no family here runs it.
        CheckpointError: an option is not supported exactly, or the weights are incomplete.
    """

    def __init__(self, path: Path) -> None:
        config = read_config(path)
        family = family_of(config)
        self.spec, self.names, self.weights = family.spec(config), family.names(config), open_weights(path)
        self._packing = Packing(_ObservedLinear, _ObservedLinear)
        self._decoder = Decoder(  # the layers are read later, one at a time
            replace(self.spec, layers=0), self.names, self.weights, dtype=torch.float32, device=torch.device("cpu"),
            kernels="torch", packing=self._packing,
        )  # fmt: skip

    def embed(self, texts: Tokens) -> list[Tensor]:
        """Returns each text's hidden states before the first layer, (tokens, hidden)."""
        return [self._decoder.embed(torch.tensor(text)) for text in texts]

    def layer(self, index: int, weights: Weights | None = None) -> Layer:
        """Reads layer `index` from `weights`, or from the checkpoint itself."""
        cpu = torch.device("cpu")
        return LayerReader(
            self.spec, self.names, weights or self.weights, torch.float32, cpu, self._packing
        ).layer(index)  # fmt: skip

    def outputs(
        self, index: int, layer: Layer, states: Sequence[Tensor], observe: Observe | None = None
    ) -> Iterator[Tensor]:
        """Yields each text's hidden states after the layer, which is number `index`; `states` are left as they are."""
        if observe is not None:
            qkv, o, gate_up, down = (_observed(layer, name, observe) for name in LINEARS)
            layer = replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)
        cache = self._cache(index in self.spec.conv_layers, max(map(len, states)))
        for each in states:
            x = each.clone()
            self._decoder.run_layers([layer], x, whole_text(range(len(x))), cache)
            yield x

    def log_probs(self, states: Tensor) -> Tensor:
        """Returns log-probabilities after each of the last layer's hidden states: (tokens, vocab) float32."""
        with torch.inference_mode():
            return self._decoder.logits(states).log_softmax(-1)

    def _cache(self, convolution: bool, longest: int) -> KVCache:
        blocks, spec = -(-longest // BLOCK) + 1, self.spec
        return KVCache(
            1, blocks, BLOCK, spec.kv_heads, spec.head_dim, torch.float32, "cpu",
            conv_layers=(0,) if convolution else (), conv_width=spec.hidden_size,
        )  # fmt: skip


def _observed(layer: Layer, name: LinearName, observe: Observe) -> _ObservedLinear:
    linear = getattr(layer, name)
    assert isinstance(linear, _ObservedLinear), "of `LayerwiseModel.layer`"
    return replace(linear, observe=lambda x: observe(name, x))


def whole_text(text: Sequence[int]) -> Batch:
    """Returns the step that reads a text at once, with logits after each token; block 0 is the null block."""
    at = torch.arange(len(text))
    table = torch.arange(1, -(-len(text) // BLOCK) + 1)[None]
    return Batch(torch.tensor(text), at, at + BLOCK, (0, len(text)), (len(text),), table, at)
