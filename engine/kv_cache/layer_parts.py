"""Parts of blocks by layer: the K/V of some layers of several blocks as one run of bytes, and the header of such bytes.

What layer-wise transfer sends while later layers are computed (vLLM's `save_kv_layer`; LMCache's `use_layerwise`). A
run has its layers in order, of each layer the tensors of the cache in turn, and of each tensor (parts, blocks, ...), so
that one copy gathers a layer of all blocks. Knows nothing of peers, nor of which blocks are computed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.buffers import to_device
from engine.kv_cache.snapshot import HEADER_BYTES, BadImage, Bytes

LAYERS_MAGIC = b"PonderLy"
# magic, layout, digest of the first block, layers (first, end), blocks, CRC-32, bytes of the payload
_LAYERS_HEADER = struct.Struct("<8s16s16sHHIII")
assert _LAYERS_HEADER.size == HEADER_BYTES, "a receiver reads one header, whatever follows it"


class LayerParts:
    """The tensors of a cache by layer: `layers[i]` has those of layer i's own K/V, each (parts, blocks, ...).

    A layer has none if it keeps no K/V by blocks, or reads that of another layer. The first `decoder_layers` are those
    of the decoder; layers of multi-token prediction follow.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]], decoder_layers: int) -> None:
        self._layers, self.decoder_layers = layers, decoder_layers
        self.nbytes = tuple(sum(part[:, 0].nbytes for part in parts) for parts in layers)  # of a block

    def read(self, blocks: Sequence[int], layers: range, run: Tensor) -> None:
        """Copies layers of blocks to a run of bytes, (nbytes,) uint8 on the tensors' device."""
        index = to_device(torch.tensor(blocks), run.device)  # only queued on a GPU, as what follows
        for part, kept in self._views(len(blocks), layers, run):
            torch.index_select(part, 1, index, out=kept)

    def write(self, blocks: Sequence[int], layers: range, run: Tensor) -> None:
        """Copies a run that `read` filled to those layers of blocks."""
        index = to_device(torch.tensor(blocks), run.device)
        for part, kept in self._views(len(blocks), layers, run):
            part.index_copy_(1, index, kept)

    def _views(self, blocks: int, layers: range, run: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor of the layers with its share of a run."""
        at = 0
        for layer in layers:
            for part in self._layers[layer]:
                nbytes = blocks * part[:, 0].nbytes
                shape = (len(part), blocks, *part.shape[2:])
                yield part, run[at : at + nbytes].view(part.dtype).view(shape)
                at += nbytes


@dataclass(frozen=True, slots=True)
class LayersHeader:
    """Names the payload that follows: `layers` of `blocks` consecutive blocks, from the one of `digest` on."""

    layout: bytes
    digest: bytes
    layers: range
    blocks: int
    checksum: int
    nbytes: int

    @classmethod
    def read(cls, data: Bytes) -> LayersHeader:
        """Decodes `HEADER_BYTES` bytes that begin with LAYERS_MAGIC."""
        _, layout, digest, first, end, blocks, checksum, nbytes = _LAYERS_HEADER.unpack(data)
        return cls(layout, digest, range(first, end), blocks, checksum, nbytes)

    def check(self, digests: Sequence[bytes], payload: Bytes) -> None:
        """Raises BadImage unless the payload is that of these blocks, undamaged."""
        if layers_checksum(digests, payload) != self.checksum:
            raise BadImage("its checksum is wrong")


def layers_header(layout: bytes, digests: Sequence[bytes], layers: range, payload: Bytes) -> bytes:
    """Returns the header of `layers` of the consecutive blocks `digests`. `layout` has 16 bytes, as each digest."""
    checksum, nbytes = layers_checksum(digests, payload), memoryview(payload).nbytes
    where = (layers.start, layers.stop, len(digests))
    return _LAYERS_HEADER.pack(LAYERS_MAGIC, layout, digests[0], *where, checksum, nbytes)


def layers_checksum(digests: Sequence[bytes], payload: Bytes) -> int:
    """Returns the CRC-32 of the blocks' digests and the payload."""
    return zlib.crc32(payload, zlib.crc32(b"".join(digests)))
