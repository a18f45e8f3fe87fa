"""The tensors of a GGUF file under Hugging Face's names. Knows how converters change a checkpoint, and undoes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.loader import Weights
from engine.model.quantization.gguf_blocks import decode_blocks, decode_floats
from engine.model.quantization.gguf_config import FREQUENCIES, Metadata, architecture_of, name_of
from engine.model.quantization.gguf_file import GgufFile, GgufTensor
from engine.model.quantization.quantized_weight import AffineWeight

_CHUNK = 1 << 24  # values decoded at once: the steps between take several times their memory


class GgufWeights(Weights):
    """The tensors of one GGUF file.

    Raises:
        UnsupportedArchitecture, CheckpointError: see `architecture_of`.
    """

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file.path)
        self._file, metadata = file, Metadata(file)
        self._architecture = architecture_of(metadata)
        self._tensors = {name_of(self._architecture, name): tensor for name, tensor in file.tensors.items()}
        self._heads = {"q_proj": metadata.integer("attention.head_count")}
        self._heads["k_proj"] = metadata.integer("attention.head_count_kv", self._heads["q_proj"])

    def names(self) -> Iterable[str]:
        return self._tensors.keys() - FREQUENCIES  # those are read as configuration

    def parameters(self) -> int:
        return sum(math.prod(self._tensors[name].shape) for name in self.names())

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._find(name, shape)
        if tensor.type.items == 1:
            rows = self._rows(tensor)
            floats = decode_floats(rows if len(shape) > 1 else rows.flatten(), tensor.type)
            assert floats is not None, "types of one value are floats"
            order = self._order(name, shape[0])
            floats = floats if order is None else floats[order]
        else:
            floats = torch.empty(shape)
            for first, codes in self._decoded(name, tensor):
                floats.view(-1, shape[-1])[first : first + len(codes.codes)] = codes.dequantize()
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            floats = floats.float() - self._architecture.norm_offset
        return floats.reshape(shape)

    def take_quantized(self, name: str, shape: tuple[int, ...]) -> AffineWeight | None:
        tensor = self._find(name, shape)
        if tensor.type.items == 1 or len(shape) != 2:
            return None
        parts = [part for _, part in self._decoded(name, tensor)]
        minimums = [part.minimums for part in parts if part.minimums is not None]
        return AffineWeight(
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            minimums=torch.cat(minimums) if minimums else None,
            bits=parts[0].bits,
            group=parts[0].group,
            zero=parts[0].zero,
        )

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.place}: tensor {name!r} is missing from the weights.")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self.place}: tensor {name!r} has shape {tensor.shape}; the metadata asks for {shape}."
            )
        self._taken.add(name)
        return tensor

    def _rows(self, tensor: GgufTensor) -> Tensor:
        """Returns the tensor's bytes (rows, row bytes), a copy: torch takes no memory that is read-only."""
        return torch.frombuffer(bytearray(self._file.bytes_of(tensor)), dtype=torch.uint8).view(-1, tensor.row_bytes)

    def _decoded(self, name: str, tensor: GgufTensor) -> Iterator[tuple[int, AffineWeight]]:
        """Decodes some rows at a time, in the checkpoint's order; gives the first row's number with them."""
        rows = self._rows(tensor)
        order = self._order(name, len(rows))
        count = max(1, _CHUNK // tensor.shape[-1])
        for first in range(0, len(rows), count):
            chunk = slice(first, first + count)
            yield first, decode_blocks(rows[chunk if order is None else order[chunk]], tensor.type)

    def _order(self, name: str, rows: int) -> Tensor | None:
        """Returns the places of the checkpoint's rows: converters put the halves of each head that rotate together
        side by side."""
        heads = self._heads.get(name.rpartition(".")[0].rpartition(".")[2])
        if heads is None or not self._architecture.interleaved:
            return None
        if rows % (2 * heads):
            raise CheckpointError(f"{self.place}: tensor {name!r} has {rows} rows for {heads} heads of pairs.")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
