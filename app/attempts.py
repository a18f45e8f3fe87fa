"""Limits how often an address may show an unknown key: five times at once, then after waits that double.

A key accepted a short time ago is never held up: where many people come from one address, one of them with a wrong
key does not lock the others out. Knows nothing of keys, which it is given as hashes.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

FREE = 5
LONGEST_S = 300.0
_FORGOTTEN_S = 900.0
_ADDRESSES, _ACCEPTED = 4096, 4096  # remembered at once


class Attempts:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failed = OrderedDict[str, tuple[int, float]]()  # by address: how often, and when last
        self._accepted = OrderedDict[str, None]()

    def wait_s(self, address: str, shown: str) -> float:
        """Returns the seconds that this address has to wait before what it shows is looked at; 0 for not at all."""
        if shown in self._accepted:
            return 0.0
        times, last = self._failed.get(_network(address), (0, 0.0))
        if times < FREE or self._now() - last > _FORGOTTEN_S:
            return 0.0
        return max(0.0, last + min(LONGEST_S, 2.0 ** (times - FREE)) - self._now())

    def failed(self, address: str) -> None:
        network = _network(address)
        times, last = self._failed.pop(network, (0, 0.0))
        self._failed[network] = (1 if self._now() - last > _FORGOTTEN_S else times + 1, self._now())
        if len(self._failed) > _ADDRESSES:
            self._failed.popitem(last=False)

    def accepted(self, shown: str) -> None:
        self._accepted[shown] = None
        self._accepted.move_to_end(shown)
        if len(self._accepted) > _ACCEPTED:
            self._accepted.popitem(last=False)


def _network(address: str) -> str:
    """An IPv6 client has a whole network of addresses: 64 bits of it count."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else address
