"""A remote program's sequence, and the lease after which it is closed.

A lease runs only while nothing is done on the sequence; work under way pauses it, and its whole length begins again at
the end. Using a fork also renews the leases of the sequences above it, which close it with them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from app.errors import ApiError
from engine.errors import SequenceClosed

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from engine import Sequence


_JUMP_S = 1.0  # of the wall clock, from which on it was set


class Lease:
    """Calls `run_out` once, `length_s` seconds after it was last renewed. Belongs to a running event loop."""

    def __init__(self, length_s: float, run_out: Callable[[], None]) -> None:
        self.length_s = length_s
        self._run_out = run_out
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at = 0.0  # by the wall clock, as it stood then
        self._ends_at = 0.0  # by the loop's clock, which nobody sets
        self._holders = 0
        self._over = False
        self.renew()

    @property
    def expires_at(self) -> float | None:
        """Time at which it runs out, in seconds since the epoch; None while work pauses it."""
        if self._holders:
            return None
        ends_at = time.time() + self._ends_at - self._loop.time()
        return ends_at if abs(ends_at - self._expires_at) > _JUMP_S else self._expires_at

    def renew(self) -> None:
        """Begin anew. Without effect while it is paused, or over."""
        self._stop()
        if not self._holders and not self._over:
            self._expires_at = time.time() + self.length_s
            self._ends_at = self._loop.time() + self.length_s
            self._timer = self._loop.call_at(self._ends_at, self._run_out)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Pauses it; it begins anew after the last user of the context."""
        self._holders += 1
        self._stop()
        try:
            yield
        finally:
            self._holders -= 1
            self.renew()

    def end(self) -> None:
        """It never runs out any more. Idempotent."""
        self._over = True
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LeasedSequence:
    """A live sequence of one model's, with an owner and an end. `call` is the only way to change it."""

    def __init__(
        self,
        user: str,
        served: ServedModel,
        seq: Sequence,
        lease_s: float,
        run_out: Callable[[LeasedSequence], None],
        scope: LeasedSequence | None = None,
        *,
        id: str | None = None,
        created_at: float | None = None,
    ) -> None:
        """`id` and `created_at` of a restored one."""
        self.id = id or f"seq-{uuid.uuid4().hex}"
        self.user = user
        self.served = served
        self.created_at = created_at or time.time()
        self.lease = Lease(lease_s, lambda: run_out(self))
        self.scope = scope
        self.forks: set[LeasedSequence] = set()  # those that close with this one
        self.busy = False
        self.closed = False  # by its user, or because its lease ran out
        self._seq = seq
        self._most = 0  # tokens that running work may bring it to
        if scope is not None:
            scope.forks.add(self)

    @property
    def tokens(self) -> list[int]:
        """A copy of its tokens, those of a span that runs included."""
        return self._seq.tokens

    @property
    def handle(self) -> Sequence:
        """The engine's handle, to name it as a scope; for anything else `call`."""
        return self._seq

    def __len__(self) -> int:
        return len(self._seq)

    @property
    def held_tokens(self) -> int:
        """Tokens that count towards its user's quota: its own, and those that work running on it may add."""
        return max(len(self._seq), self._most)

    def line(self) -> Iterator[LeasedSequence]:
        """It and the sequences above that close it with them."""
        at: LeasedSequence | None = self
        while at is not None:
            yield at
            at = at.scope

    def touch(self) -> None:
        """Somebody asked for it: the leases of its line begin anew."""
        for each in self.line():
            each.lease.renew()

    @contextmanager
    def call(self) -> Iterator[Sequence]:
        """The engine's handle, for one call at a time; no lease of its line runs out meanwhile.

        Raises:
            ApiError: 409: another call is under way, or the sequence was closed during this one.
        """
        if self.busy:
            raise ApiError(
                409, f"A call is under way on the sequence {self.id}; accepted: one at a time. Wait for its end, or "
                "fork the sequence first.", code="sequence_busy",
            )  # fmt: skip
        if self.closed:  # since it was looked up
            raise self._gone()
        with ExitStack() as holding:
            for each in self.line():
                holding.enter_context(each.lease.held())
            self.busy = True
            try:
                yield self._seq
            except SequenceClosed:
                if self.closed:
                    raise self._gone() from None
                raise  # the engine's end
            finally:
                self.busy = False

    @contextmanager
    def growing(self, tokens: int) -> Iterator[None]:
        """Count so many more tokens towards the quota while a call lasts. The quota was checked before."""
        self._most = len(self._seq) + tokens
        try:
            yield
        finally:
            self._most = 0

    def end(self) -> list[LeasedSequence]:
        """Close it and all that closes with it, which are returned. Work on them ends."""
        ended = [self]
        for each in ended:
            ended += each.forks
            each.closed = True
            each.lease.end()
            each._seq.close()  # also of forks: where they were taken up, the engine knows of no scope
        if self.scope is not None:
            self.scope.forks.discard(self)
        return ended

    def _gone(self) -> ApiError:
        message = f"The sequence {self.id} was closed while this call was under way."
        return ApiError(409, message, code="sequence_closed")
