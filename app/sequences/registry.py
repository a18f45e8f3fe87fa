"""All sequences that users have open on a server's engines, within each user's quota.

Everything is found by its user and its id, so somebody else's is not there. Forks count like any other sequence, and
whole: that they share blocks is the engine's luck, not their owner's right. Knows nothing of HTTP bodies.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from app.admission.request_budget import priority
from app.errors import ApiError, invalid
from app.sequences.leased import LeasedSequence

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from app.config import Settings
    from engine import Sequence

DEFAULT_LEASE_S = 60.0


class Sequences:
    """Leaving `with` closes every sequence."""

    def __init__(self, *, most: int, most_tokens: int, longest_lease_s: float) -> None:
        """A user has at most `most` sequences with `most_tokens` tokens together, each for at most `longest_lease_s`
        seconds that nobody touches it."""
        self.most = most
        self.most_tokens = most_tokens
        self.longest_lease_s = longest_lease_s
        self._held: dict[str, LeasedSequence] = {}

    @classmethod
    def of_settings(cls, settings: Settings) -> Self:
        return cls(
            most=settings.sequences_per_user,
            most_tokens=settings.sequence_tokens_per_user,
            longest_lease_s=settings.sequence_lease_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for leased in list(self._held.values()):
            if leased.id in self._held:
                self.close(leased)

    def __iter__(self) -> Iterator[LeasedSequence]:
        """All users', the oldest first, as they are now."""
        return iter(list(self._held.values()))

    def of(self, user: str) -> list[LeasedSequence]:
        """All of a user's, the oldest first."""
        return [leased for leased in self._held.values() if leased.user == user]

    def get(self, user: str, id: str, *, param: str | None = None) -> LeasedSequence:
        """The user's sequence, with its lease renewed.

        Raises:
            ApiError: 404: the user has no such sequence; 400 where `param` names the field of a body that has the id.
        """
        leased = self._held.get(id)
        if leased is None or leased.user != user:
            message = f"There is no sequence {id!r:.60}; it may have been closed, or its lease may have run out."
            raise ApiError(400 if param else 404, message, param=param, code="sequence_not_found")
        leased.touch()
        return leased

    async def open(
        self, user: str, served: ServedModel, tokens: list[int], lease_s: float | None = None
    ) -> LeasedSequence:
        """
        Raises:
            ApiError: 429: it is more than the user's quota; 400: the lease is too long.
            ContextLengthExceeded, InvalidParameter, QueueFull, EngineStopped: see `Engine.open`.
        """
        length_s = self._lease(lease_s, DEFAULT_LEASE_S)
        seq = await served.open(tokens, tenant=user, priority=priority())
        try:
            self.check(user, 1, len(tokens))
        except ApiError:
            seq.close()
            raise
        return self._lend(user, served, seq, length_s)

    def fork(
        self, leased: LeasedSequence, n: int, *, scope: LeasedSequence | None = None, lease_s: float | None = None
    ) -> list[LeasedSequence]:
        """`n` forks, which close with `scope`, by default with the sequence itself, and have its lease's length.

        Raises:
            ApiError: 429 and 400 as for `open`; 409 as for a call; 400: the scope's closing would not close the
                sequence, so that it may be none of the same search.
        """
        scope = leased if scope is None else scope
        length_s = self._lease(lease_s, leased.lease.length_s)
        if scope not in leased.line():
            raise invalid(
                "scope", f"scope is {scope.id!r}; accepted: the sequence itself, or one that it was forked from and "
                "closes with.",
            )  # fmt: skip
        with leased.call() as seq:
            self.check(leased.user, n, n * len(leased))
            children = seq.fork(n, scope=scope.handle)
            return [self._lend(leased.user, leased.served, child, length_s, scope) for child in children]

    def take_up(
        self,
        id: str,
        user: str,
        served: ServedModel,
        seq: Sequence,
        length_s: float,
        created_at: float,
        scope: str | None,
    ) -> None:
        """Takes up an earlier server's sequence `id`. It closes with the sequence of id `scope`, if that is here."""
        self._lend(user, served, seq, length_s, self._held.get(scope or ""), id=id, created_at=created_at)

    def close(self, leased: LeasedSequence) -> None:
        """End a sequence and all that closes with it."""
        for each in leased.end():
            del self._held[each.id]

    def check(self, user: str, sequences: int, tokens: int) -> None:
        """
        Raises:
            ApiError: 429: so many more sequences and tokens exceed the user's quota.
        """
        held = self.of(user)
        if sequences and len(held) + sequences > self.most:
            raise _over(f"{len(held)} sequences are open and {sequences} more asked for", f"{self.most} sequences")
        used = sum(leased.held_tokens for leased in held)
        if tokens and used + tokens > self.most_tokens:
            raise _over(
                f"The open sequences hold {used} tokens and {tokens} more are asked for", f"{self.most_tokens} tokens"
            )

    def _lease(self, asked_s: float | None, default_s: float) -> float:
        if asked_s is not None and asked_s > self.longest_lease_s:
            raise invalid(
                "lease_s", f"lease_s is {asked_s:g}; accepted: more than 0, at most {self.longest_lease_s:g} seconds."
            )
        return min(default_s, self.longest_lease_s) if asked_s is None else asked_s

    def _lend(
        self,
        user: str,
        served: ServedModel,
        seq: Sequence,
        length_s: float,
        scope: LeasedSequence | None = None,
        **known: Any,  # of LeasedSequence
    ) -> LeasedSequence:
        leased = LeasedSequence(user, served, seq, length_s, self.close, scope, **known)
        self._held[leased.id] = leased
        return leased


def _over(asked: str, limit: str) -> ApiError:
    message = (
        f"{asked}; accepted: at most {limit} for one user, forks included. Close some, or let their leases run out."
    )
    return ApiError(429, message, code="quota_exceeded", kind="rate_limit_error")
