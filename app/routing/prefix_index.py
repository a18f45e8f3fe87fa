"""Index of which replicas have which prefixes cached, kept from their K/V events.

Replicas key their block hashes each by a secret of its own, so the index gives blocks keys that are the same for all: a
chain over token ids, rooted in the adapter. Knows nothing of sockets, HTTP or tenants: where two tenants of a replica
sent the same tokens, it has that prefix, though each finds only his own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.kv_cache.block_pool import chain_digest, root_digest
from engine.kv_cache.kv_event_publisher import AllBlocksCleared, BlockRemoved, BlockStored

Event = BlockStored | BlockRemoved | AllBlocksCleared


def prefix_keys(tokens: Sequence[int], block_size: int, adapter: str | None = None) -> list[bytes]:
    """Returns the key of each full block of a prompt, in order; a block's key stands for all tokens up to its end."""
    previous, keys = _root(adapter), list[bytes]()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        previous = chain_digest(previous, tokens[start : start + block_size])
        keys.append(previous)
    return keys


def _root(adapter: str | None) -> bytes:
    return root_digest(b"", "", adapter or "", "")


class PrefixIndex:
    """Keys of the blocks of each replica."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[int, bytes]] = {}  # by replica: its own hash of a block, our key
        self._held: dict[str, Counter[bytes]] = {}  # by replica: its blocks of a key, one for each tenant
        self.adapters: set[str] = set()  # names that events had
        self.block_size: int | None = None  # tokens, as events told; None: no block was stored yet

    def apply(self, replica: str, events: Iterable[Event]) -> None:
        """Takes over a replica's events, in their order. A block whose parent is unknown is left out: events before it
        were missed."""
        keys = self._keys.setdefault(replica, {})
        held = self._held.setdefault(replica, Counter())
        for event in events:
            match event:
                case AllBlocksCleared():
                    keys.clear()
                    held.clear()
                case BlockRemoved():
                    for each in event.block_hashes:
                        if (key := keys.pop(each, None)) is not None:
                            held[key] -= 1
                            if not held[key]:
                                del held[key]
                case BlockStored():
                    self._store(event, keys, held)

    def _store(self, event: BlockStored, keys: dict[int, bytes], held: Counter[bytes]) -> None:
        parent = _root(event.lora_name) if event.parent_block_hash is None else keys.get(event.parent_block_hash)
        size = event.block_size
        if parent is None or size < 1:
            return
        self.block_size = size
        if event.lora_name:
            self.adapters.add(event.lora_name)
        for at, each in enumerate(event.block_hashes):
            parent = chain_digest(parent, event.token_ids[at * size : (at + 1) * size])
            if each not in keys:
                keys[each] = parent
                held[parent] += 1

    def remove(self, replica: str) -> None:
        """Forgets a replica and all that it had."""
        self._keys.pop(replica, None)
        self._held.pop(replica, None)

    def blocks(self, replica: str) -> int:
        """Counts the blocks that a replica has."""
        return len(self._keys.get(replica, ()))

    def matches(self, keys: Sequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """Returns how many leading blocks of a prompt each of the replicas has."""
        found = dict[str, int]()
        for replica in replicas:
            held = self._held.get(replica, ())
            found[replica] = next((at for at, key in enumerate(keys) if key not in held), len(keys))
        return found
