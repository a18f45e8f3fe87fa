"""How long it takes to bring a block up from a tier, learnt from those that were. Knows nothing of blocks or tokens."""

from __future__ import annotations

from typing import Literal

Tier = Literal["host", "disk"]

_FIRST = {"host": 4e9, "disk": 1e9}  # bytes a second, until something is known
_NEW = 0.2  # what the newest copy counts
_HOPE = (
    0.02  # how far a rate that was too low to copy comes back to the first guess, each time: it may have been a spell
)


class Rates:
    """Bytes a second of each tier."""

    def __init__(self) -> None:
        self._rates: dict[Tier, float] = {"host": _FIRST["host"], "disk": _FIRST["disk"]}

    def per_s(self, tier: Tier) -> float:
        return self._rates[tier]

    def seconds(self, tier: Tier, nbytes: int) -> float:
        return nbytes / self._rates[tier]

    def copied(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """So many bytes came up in so many seconds."""
        if seconds > 0:
            self._rates[tier] += _NEW * (nbytes / seconds - self._rates[tier])

    def passed_over(self, tier: Tier) -> None:
        """Nothing was copied, since computing seemed faster."""
        self._rates[tier] += _HOPE * (_FIRST[tier] - self._rates[tier])
