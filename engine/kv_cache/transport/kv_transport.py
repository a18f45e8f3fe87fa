"""Interface between a connector and what moves its blocks: requests of peers, staging rows, and `KVTransport`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from torch import Tensor

from engine.kv_cache.transfers import at_once


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """A staging row: the image of one block, or `layers` of consecutive ones as `LayerParts` has them."""

    digests: tuple[bytes, ...]
    row: int
    nbytes: int
    layers: range | None = None  # None: the image
    whole: bool = True  # the peer has all of these blocks with it
    arrived: Callable[[], None] = at_once  # waits until the device has copied it


@dataclass(slots=True, eq=False)
class BlockFilling:
    """Consecutive blocks of a request, from number `first` of its digests on, of which `layers` are staged so far."""

    first: int
    digests: tuple[bytes, ...]
    blocks: tuple[int, ...]
    layers: int = 0


@dataclass(slots=True, eq=False)
class BlockRequest:
    """Blocks that a peer asks for: `digests[i]` is of block number `first + i` of a prompt.

    `ready` has staging rows, then whether all were found. Whole blocks are in that order; layers of others between.
    """

    first: int
    digests: tuple[bytes, ...]
    asked_at: float
    ready: SimpleQueue[StagedBlocks | bool] = field(default_factory=SimpleQueue)
    found: int = 0  # blocks handed to the sender, or among `filling`
    filling: list[BlockFilling] = field(default_factory=list)  # blocks that it has some layers of
    staged: int = 0  # rows handed to the sender
    sent: int = 0  # of those, rows that it is done with
    computed: bool = False  # the last one was seen computed
    lost: bool = False  # a block left the pool before all of its layers were staged

    @property
    def complete(self) -> bool:
        """Returns whether all were handed to the sender."""
        return self.found == len(self.digests) and not self.filling


class BlockSource(Protocol):
    """The connector, as the sending side of a transport sees it. Called from the transport's threads."""

    def serve(self, first: int, digests: tuple[bytes, ...]) -> BlockRequest: ...

    def payload(self, staged: StagedBlocks) -> memoryview:
        """Returns the bytes of a staging row, once the device has copied them."""
        ...

    def sent(self, request: BlockRequest, staged: StagedBlocks, seconds: float) -> None:
        """Gives a staging row back. `seconds`: of sending it; 0 where that failed."""
        ...

    def release(self, request: BlockRequest) -> None:
        """Ends a request, whose peer has all of it or is gone."""
        ...

    def poke(self) -> None:
        """Has the core look whether more blocks can be sent."""
        ...

    @property
    def memory(self) -> Tensor:
        """Returns the memory of all staging rows, for a transport that registers it."""
        ...


class Arrived(Protocol):
    """Takes checked payloads in the transport's thread: a block's image without `layers`, else these `layers` of
    consecutive blocks. A block's layers come in order, each once."""

    def __call__(self, digests: Sequence[bytes], payload: memoryview, layers: range | None = None) -> None: ...


class BlockFetcher(Protocol):
    """Loads block images from where others keep them."""

    def fetch(
        self, peer: tuple[str, int], first: int, digests: tuple[bytes, ...],
        arrived: Arrived, ended: Callable[[str | None], None],
    ) -> Callable[[], None]:  # fmt: skip
        """Fetches blocks in another thread. `ended` gets why some are missing, or None. Returns a function that cancels
        it: `ended` comes all the same."""
        ...

    def close(self) -> None:
        """Ends all transfers and their threads."""
        ...


class KVTransport(BlockFetcher, Protocol):
    """Moves block images between engines: TCP, or a transfer engine behind the same calls."""

    def listen(self, source: BlockSource) -> None:
        """Serves peers from now on."""
        ...
