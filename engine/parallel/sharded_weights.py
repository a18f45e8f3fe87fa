"""A rank's part of a checkpoint's tensors, under the names of a model of that part alone.

A reader asks for the tensors of a smaller model; it gets slices of the whole one's, and its layers are numbered from 0.
Only those slices are read from the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.model.loader import SafetensorsWeights, Weights
from engine.model.model_spec import ModelSpec, WeightNames
from engine.parallel.placement import Placement, row_parallel_biases, slices_of


class ShardedWeights(Weights):
    """The tensors of `source`, the checkpoint of a model `spec`, that the rank at `place` has."""

    def __init__(self, source: SafetensorsWeights, spec: ModelSpec, names: WeightNames, place: Placement) -> None:
        super().__init__(source.place)
        self._source, self._place = source, place
        self._layers, self._stem = place.layers(spec.layers), f"{names.root}layers."
        self._slices = slices_of(spec, names, place)
        self._zeros = row_parallel_biases(spec, names, place) if place.shard else frozenset[str]()
        looked_up = place.stage == 0 or (place.last and spec.tied_embeddings)
        self._absent = set() if looked_up else {f"{names.root}{names.embedding}.weight"}
        if not place.last:
            self._absent.add(names.lm_head)
        self._expert, self._experts = names.expert.partition("{index}")[0], range(0)
        self._routers: dict[str, tuple[int, int]] = {}  # of which a rank has all: the dimension of experts, and these
        if spec.experts is not None and place.expert_parallel:
            self._experts = place.share(spec.experts.count)
            by = (f"{names.router}.weight", 0), (f"{names.router}.bias", 0)
            for index in self._layers:
                for stem, dim in (*by, (names.selection_bias, int(names.selection_bias_rows))):
                    self._routers[f"{self._stem}{index}.{stem}"] = dim, spec.experts.count

    def names(self) -> Iterable[str]:
        """Returns the names, in the checkpoint, of all tensors but those of other stages."""
        return [name for name in self._source.names() if name not in self._absent and self._is_here(name)]

    def parameters(self) -> int:
        """Returns the number of elements that this rank reads."""
        return sum(self._elements(name) for name in self.names())

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        name = self._in_checkpoint(name)
        self._taken.add(name)
        if name in self._absent or name in self._zeros:
            return torch.zeros(()).expand(shape)
        part = self._slices.get(name)
        if name in self._routers:
            dim, count = self._routers[name]
            shape = (*shape[:dim], count, *shape[dim + 1 :])
        if part is None:
            return self._source.take(name, shape)
        whole = (*shape[: part.dim], part.length, *shape[part.dim + 1 :])
        read = [self._source.take_range(name, whole, part.dim, each) for each in part.ranges]
        tensor = read[0] if len(read) == 1 else torch.cat(read, part.dim)
        missing = shape[part.dim] - tensor.shape[part.dim]  # rows that pad the vocabulary
        return torch.cat([tensor, tensor.new_zeros(missing, *shape[1:])]) if missing else tensor

    def _in_checkpoint(self, name: str) -> str:
        if not name.startswith(self._stem):
            return name
        index, _, rest = name.removeprefix(self._stem).partition(".")
        if self._experts and rest.startswith(self._expert):
            expert, _, rest = rest.removeprefix(self._expert).partition(".")
            rest = f"{self._expert}{int(expert) + self._experts.start}.{rest}"
        return f"{self._stem}{int(index) + self._layers.start}.{rest}"

    def _is_here(self, name: str) -> bool:
        if not name.startswith(self._stem):
            return True
        index, _, rest = name.removeprefix(self._stem).partition(".")
        expert = rest.removeprefix(self._expert).partition(".")[0] if rest.startswith(self._expert) else ""
        elsewhere = self._experts and expert.isdigit() and int(expert) not in self._experts
        return not index.isdigit() or (int(index) in self._layers and not elsewhere)

    def _elements(self, name: str) -> int:
        shape, part = self._source.describe(name)[0], self._slices.get(name)
        whole = 0 if name in self._zeros else math.prod(shape)
        return whole if part is None else whole // part.length * sum(map(len, part.ranges))
