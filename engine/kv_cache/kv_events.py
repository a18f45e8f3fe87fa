"""K/V events: a log of which blocks of the pool can be found, and which no longer.

Knows nothing of sockets (`kv_event_publisher` sends what is flushed), of tensors or requests. A step pays for appending
to a list; hashes and encoding are the publisher's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Stored = tuple[bytes, bytes | None, Sequence[int], str | None]  # digest, its parent's, token ids, adapter
Change = Stored | bytes | None  # bytes: a digest that was removed; None: all were


class KVEventLog:
    """Changes of one pool since the last flush. Blocks that were never announced, such as those of windowed groups,
    leave no removal."""

    def __init__(
        self, flushed: Callable[[list[Change]], None], adapter_name: Callable[[int], str | None],
        closed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`flushed` gets the changes, in order; `adapter_name` names an adapter by its number; `closed` ends both."""
        self._flushed, self._adapter_name, self.close = flushed, adapter_name, closed
        self._announced: set[bytes] = set()
        self._changes: list[Change] = [None]  # a subscriber may know the blocks of an engine that was here before

    def stored(self, digest: bytes, parent: bytes | None, tokens: Sequence[int], adapter: int) -> None:
        """Announces a block of `tokens` that follows `parent` and was not announced before."""
        self._announced.add(digest)
        self._changes.append((digest, parent, tokens, self._adapter_name(adapter)))

    def announced(self, digest: bytes) -> bool:
        """Returns whether subscribers know the block."""
        return digest in self._announced

    def removed(self, digest: bytes) -> None:
        if digest in self._announced:
            self._announced.discard(digest)
            self._changes.append(digest)

    def flush(self) -> None:
        """Hands on what changed, if anything did."""
        if self._changes:
            changes, self._changes = self._changes, []
            self._flushed(changes)
