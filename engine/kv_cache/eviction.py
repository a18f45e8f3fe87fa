"""Eviction policy: scores blocks by the cost of recomputing them.

A block's score is the time of its last use, counted in evictions. A block that was used again, while it was kept or
shortly after its eviction, scores as one used a whole capacity later; a priority class adds half a capacity. So
content used once is evicted before content that returns, and anything unused is evicted in the end.
docs/performance.md compares this and other policies with the clairvoyant order (Belady 1966).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection
from typing import Literal

_Entry = tuple[float, int, bytes, bytes]  # score, number, key, group


class EvictionOrder:
    """Keys by eviction score. `capacity`: the number of keys kept where this order is used; as many evicted ones are
    remembered.

    With a `share` below 1, a group (a tenant) that has more than that share of the capacity evicts its own first.
    """

    def __init__(self, capacity: int, share: float = 1.0) -> None:
        self._capacity = max(1, capacity)
        self._share = share
        self._evicted = 0
        self._number = 0  # breaks ties: the earlier put is evicted first
        self._kept: dict[bytes, _Entry] = {}
        self._heaps: dict[bytes, list[_Entry]] = {}
        self._sizes: dict[bytes, int] = {}
        self._remembered: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def knew(self, key: bytes) -> bool:
        """Returns whether the key was evicted not long ago."""
        return key in self._remembered

    def put(self, key: bytes, *, group: bytes = b"", reused: bool = False, priority: int = 0) -> None:
        """Adds a key without holders. A lower `priority` scores higher."""
        self.take(key)
        group = group if self._share < 1 else b""
        reused = reused or key in self._remembered
        score = self.score(reused, priority)
        self._number += 1
        entry = self._kept[key] = (score, self._number, key, group)
        heap = self._heaps.setdefault(group, [])
        heapq.heappush(heap, entry)
        size = self._sizes[group] = self._sizes.get(group, 0) + 1
        if len(heap) > 2 * size + 64:
            heap[:] = [each for each in heap if self._kept.get(each[2]) is each]
            heapq.heapify(heap)

    def take(self, key: bytes) -> bool:
        """Removes a key that is held again or gone; returns whether it was here."""
        entry = self._kept.pop(key, None)
        if entry is None:
            return False
        self._shrink(entry[3])
        return True

    def pop(self, first: Collection[bytes] = ()) -> bytes | None:
        """Evicts the key with the lowest score: of the groups `first` if they have any, else of those above their
        share, else of all. None: there is none."""
        lowest = self._lowest(first)
        if lowest is None:
            return None
        key = lowest[2]
        heapq.heappop(self._heaps[lowest[3]])
        del self._kept[key]
        self._shrink(lowest[3])
        self._evicted += 1
        self._remembered[key] = None
        if len(self._remembered) > self._capacity:
            self._remembered.popitem(last=False)
        return key

    def yields(self, priority: int, first: Collection[bytes] = ()) -> bool:
        """Returns whether `pop` would evict a key that scores no more than a new one of this priority, used once."""
        lowest = self._lowest(first)
        return lowest is not None and lowest[0] <= self.score(False, priority)

    def lowest(self, first: Collection[bytes] = ()) -> float | None:
        """Returns the score of the key that `pop` would evict; None: there is none."""
        entry = self._lowest(first)
        return None if entry is None else entry[0]

    def passed(self, count: int) -> None:
        """Counts evictions of what this order does not have: its time goes on."""
        self._evicted += count

    def keys(self) -> list[bytes]:
        """Lists all keys by falling score."""
        return [entry[2] for entry in sorted(self._kept.values(), reverse=True)]

    def _lowest(self, first: Collection[bytes]) -> _Entry | None:
        """Returns the entry that `pop` evicts."""
        lowest: _Entry | None = None
        groups = [each for each in first if each in self._heaps] or list(self._heaps)
        if len(groups) > 1 and (over := [each for each in groups if self._sizes[each] > self._share * self._capacity]):
            groups = over
        for group in groups:
            head = self._head(group)
            if head is not None and (lowest is None or head < lowest):
                lowest = head
        return lowest

    def _head(self, group: bytes) -> _Entry | None:
        """Returns the group's live entry with the lowest score; throws away entries that were taken out meanwhile."""
        heap = self._heaps[group]
        while heap and self._kept.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def score(self, reused: bool, priority: int) -> float:
        """Returns the score of a key that is put now."""
        return self._evicted + self._capacity * (reused - 0.5 * priority)

    def _shrink(self, group: bytes) -> None:
        self._sizes[group] -= 1
        if not self._sizes[group]:
            del self._sizes[group], self._heaps[group]


Tier = Literal["host", "disk", "store"]

_FIRST: dict[Tier, float] = {"host": 4e9, "disk": 1e9, "store": 1e9}  # bytes a second, until a rate is measured
_NEW = 0.2  # weight of the newest copy
_RECOVERY = 0.02  # step of a rate too low to load back towards the first guess: the disk may recover


class TransferRates:
    """Measured bytes a second of each tier."""

    def __init__(self) -> None:
        self._rates = dict(_FIRST)

    def per_s(self, tier: Tier) -> float:
        return self._rates[tier]

    def seconds(self, tier: Tier, nbytes: int) -> float:
        return nbytes / self._rates[tier]

    def copied(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """Learns that so many bytes were loaded in so many seconds."""
        if seconds > 0:
            self._rates[tier] += _NEW * (nbytes / seconds - self._rates[tier])

    def passed_over(self, tier: Tier) -> None:
        """Learns that a load was skipped, since recomputing seemed faster."""
        self._rates[tier] += _RECOVERY * (_FIRST[tier] - self._rates[tier])
