"""An engine's side of K/V stores: each block is at one of them, by rendezvous hashing (Thaler and Ravishankar 1998).

A store that does not answer in time is left alone: no request asks it again before a thread of its own has connected to
it anew, and its blocks belong to the others meanwhile. So a dead store costs no more than the requests that wait for it
at that moment, each at most `lookup_timeout_s`, or `timeout_s` of a load that has begun. Implements `BlockFetcher`;
knows nothing of pools.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from engine.kv_cache.eviction import TransferRates
from engine.kv_cache.kv_store import wire
from engine.kv_cache.kv_store.wire import ABSENT, STALL_S, Operation, fill_until, remaining
from engine.kv_cache.snapshot import HEADER_BYTES, BadImage, Bytes, described, header, payload_of
from engine.kv_cache.transport.kv_transport import Arrived
from engine.kv_cache.transport.peer_handshake import PeerRefused, prove

log = logging.getLogger(__name__)

CONNECT_S = 1.0
RETRY_S = 5.0  # between attempts to reach a store that was left alone
SAVE_S = 10.0  # of a batch of blocks
IDLE_CONNECTIONS = 4  # kept for each store
_NEW, _FORGETTING = 0.2, 0.98  # weights of the newest lookup's time, and of the estimate when one is skipped
NOT_STORED = "the stores do not have them"  # ends a load, and is no failure

Address = tuple[str, int]


class KVStoreConnection:
    """A proven connection to one store. Its methods raise OSError or BadImage; after either it is of no more use."""

    def __init__(self, address: Address, secret: bytes, layout: bytes, nbytes: int, until: float) -> None:
        """
        Raises:
            PeerRefused: no store answers there, or it has another secret.
            OSError: it cannot be reached by `until`, of the monotonic clock.
        """
        self._layout, self._nbytes = layout, nbytes
        self.sock = socket.create_connection(address, min(CONNECT_S, remaining(until)))
        try:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sock.settimeout(min(CONNECT_S, remaining(until)))
            prove(self.sock, secret, wire.MAGIC, layout)
        except BaseException:
            self.sock.close()
            raise

    @property
    def alive(self) -> bool:
        """Returns whether the store has not closed a connection that is idle."""
        try:
            self.sock.settimeout(0)
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False  # it ended, or has bytes that nobody asked for

    def ask(self, operation: Operation, digests: Sequence[bytes], until: float) -> None:
        self.sock.settimeout(remaining(until))
        self.sock.sendall(wire.request(operation, list(digests)))

    def flags(self, count: int, until: float) -> list[bool]:
        """Returns the answers to EXISTS, or to PUT."""
        data = bytearray(count)
        fill_until(self.sock, memoryview(data), until)
        return [bool(each) for each in data]

    def payload(self, image: memoryview, digest: bytes, until: float) -> memoryview | None:
        """Receives the next image of a GET into `image`; None: the store has no such block. The view is valid until the
        next call.

        Raises:
            BadImage: it is damaged, or of something else.
        """
        fill_until(self.sock, image[:HEADER_BYTES], until)
        if image[:HEADER_BYTES] == ABSENT:
            return None
        if described(image[:HEADER_BYTES])[2] != self._nbytes:
            raise BadImage("it has another size")
        fill_until(self.sock, image[HEADER_BYTES:], until)
        return payload_of(image, self._layout, digest, self._nbytes)

    def send(self, digest: bytes, payload: Bytes, until: float) -> None:
        self.sock.settimeout(remaining(until))
        self.sock.sendall(header(self._layout, digest, payload))
        self.sock.settimeout(remaining(until))
        self.sock.sendall(payload)

    def close(self) -> None:
        self.sock.close()


@dataclass(eq=False, slots=True)
class _Store:
    """One store: idle connections, and whether it is used."""

    address: Address
    up: bool = False
    idle: list[KVStoreConnection] = field(default_factory=list)
    said: str = ""  # why it is not used, as logged last

    @property
    def name(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"


class KVStoreClient:
    """Connections of one engine to its stores. `nbytes`: of a block's payload, laid out as `layout` says.

    `changed` is called from another thread when the set of stores that are used changes.
    """

    def __init__(
        self, addresses: Sequence[Address], secret: bytes, layout: bytes, nbytes: int,
        *, timeout_s: float, lookup_timeout_s: float,
    ) -> None:  # fmt: skip
        """Tries to reach every store once, for at most `CONNECT_S` all together."""
        self._stores = [_Store(each) for each in addresses]
        self._secret, self._layout, self.nbytes = secret, layout, nbytes
        self._timeout_s, self._lookup_timeout_s = timeout_s, lookup_timeout_s
        self._lock = threading.Lock()
        self._busy = set[KVStoreConnection]()
        self._bad = set[bytes]()  # came damaged: to be put anew
        self._threads = set[threading.Thread]()
        self._closing = False
        self._retry, self.generation = threading.Event(), 0
        self.lookups, self.lookup_seconds = 0, 0.0
        self._rates, self._lookup_s = TransferRates(), 0.0
        first = [threading.Thread(target=self._revive, args=(each,), daemon=True) for each in self._stores]
        for thread in first:
            thread.start()
        for thread in first:
            thread.join(CONNECT_S)
        self._begin("kv-store-retry", self._revive_all)

    @property
    def up(self) -> int:
        """Counts the stores that are used."""
        return sum(each.up for each in self._stores)

    def placed(self, digests: Iterable[bytes]) -> dict[_Store, list[bytes]]:
        """Returns where each block belongs, of the stores that are used."""
        used = [(each, each.name.encode()) for each in self._stores if each.up]
        found: dict[_Store, list[bytes]] = {}
        for digest in digests if used else ():
            best = max(used, key=lambda each: hashlib.blake2b(each[1], key=digest, digest_size=8).digest())
            found.setdefault(best[0], []).append(digest)
        return found

    # -- loading

    def fetch(
        self, peer: Address, first: int, digests: tuple[bytes, ...],
        arrived: Arrived, ended: Callable[[str | None], None],
    ) -> Callable[[], None]:  # fmt: skip
        """Fetches those blocks before the first that no store has, as `BlockFetcher` says; `peer` and `first` are not
        used. Ends with NOT_STORED where the stores are well and have no more."""
        fetch = _Fetch(self, digests, arrived)

        def run() -> None:
            error: str | None = None
            try:
                error = fetch.run(self._lookup_timeout_s, self._timeout_s)
            except Exception as failure:  # of any kind: no sequence may wait for ever
                log.exception("a load from a K/V store failed")
                error = repr(failure)
            finally:
                ended(error)

        self._begin("kv-store-load", run)
        return fetch.cancel

    def seconds(self, blocks: int) -> float:
        """Estimates the seconds of loading so many blocks."""
        with self._lock:
            return self._lookup_s + self._rates.seconds("store", blocks * self.nbytes)

    def passed_over(self) -> None:
        """Learns that a lookup was skipped, since recomputing seemed faster: the estimate falls, as a store may
        recover."""
        with self._lock:
            self._rates.passed_over("store")
            self._lookup_s *= _FORGETTING

    def looked_up(self, seconds: float, *, answered: bool) -> None:
        with self._lock:
            self.lookups += 1
            self.lookup_seconds += seconds
            if answered:
                self._lookup_s += _NEW * (seconds - self._lookup_s)

    def loaded(self, blocks: int, seconds: float) -> None:
        with self._lock:
            self._rates.copied("store", blocks * self.nbytes, seconds)

    def came_damaged(self, digest: bytes) -> None:
        """Has the block put anew when it is saved next: the store would say that it has it."""
        self._bad.add(digest)

    # -- saving

    def save(self, blocks: Sequence[tuple[bytes, Bytes]]) -> tuple[set[bytes], int]:
        """Puts blocks where they belong, but for those that are there. Returns those that are there now, and how many
        were put. Called from one thread; takes at most `SAVE_S` for each store."""
        payloads, there, put = dict(blocks), set[bytes](), 0
        for store, digests in self.placed(payloads).items():
            until = time.monotonic() + SAVE_S
            connection = None
            try:
                connection = self.take(store, until)
                connection.ask(Operation.EXISTS, digests, until)
                flags = dict(zip(digests, connection.flags(len(digests), until), strict=True))
                missing = [each for each, held in flags.items() if not held or each in self._bad]
                for part in (missing[at : at + wire.MAX_BLOCKS] for at in range(0, len(missing), wire.MAX_BLOCKS)):
                    connection.ask(Operation.PUT, part, until)
                    for digest in part:
                        connection.send(digest, payloads[digest], until)
                    kept = connection.flags(len(part), until)
                    flags |= dict(zip(part, kept, strict=True))
                    put += sum(kept)
                    self._bad.difference_update(part)
                there |= {each for each, held in flags.items() if held}
                self.give_back(store, connection, usable=True)
            except (OSError, PeerRefused) as error:
                if connection is not None:
                    self.give_back(store, connection, usable=False)
                self.leave_alone(store, error)
        return there, put

    # -- connections

    def take(self, store: _Store, until: float) -> KVStoreConnection:
        while True:
            with self._lock:
                if self._closing:
                    raise ConnectionError("the engine stopped")
                connection = store.idle.pop() if store.idle else None
                if connection is not None:
                    self._busy.add(connection)
            if connection is None:
                break
            if connection.alive:
                return connection
            self.give_back(store, connection, usable=False)
        connection = KVStoreConnection(store.address, self._secret, self._layout, self.nbytes, until)
        with self._lock:
            if self._closing:
                connection.close()
                raise ConnectionError("the engine stopped")
            self._busy.add(connection)
        return connection

    def give_back(self, store: _Store, connection: KVStoreConnection, *, usable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if usable and not self._closing and store.up and len(store.idle) < IDLE_CONNECTIONS:
                store.idle.append(connection)
                return
        connection.close()

    def leave_alone(self, store: _Store, error: Exception) -> None:
        with self._lock:
            if not store.up or self._closing:
                return
            store.up = False
            self.generation += 1
            idle, store.idle = store.idle, []
        for each in idle:
            each.close()
        log.warning("the K/V store %s is not used until it answers again: %s", store.name, error)
        self._retry.set()

    def _revive(self, store: _Store) -> None:
        """Tries to reach a store, and uses it from then on."""
        try:
            made = KVStoreConnection(
                store.address, self._secret, self._layout, self.nbytes, time.monotonic() + 2 * CONNECT_S
            )
        except (OSError, PeerRefused) as error:
            if (text := str(error)) != store.said:
                store.said = text
                log.warning("the K/V store %s cannot be used: %s", store.name, text)
            return
        with self._lock:
            if self._closing:
                made.close()
                return
            store.up, store.said = True, ""
            store.idle.append(made)
            self.generation += 1
        log.info("the K/V store %s is used", store.name)

    def _revive_all(self) -> None:
        while not self._closing:
            self._retry.wait(None if self.up == len(self._stores) else RETRY_S)
            if self._retry.is_set():  # one was just left alone, or the engine stops
                self._retry.clear()
                continue
            for store in self._stores:
                if not store.up and not self._closing:
                    self._revive(store)

    def _begin(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = {each for each in self._threads if each.is_alive()}
            thread.start()
            self._threads.add(thread)

    def close(self) -> None:
        """Ends all connections, and waits for their threads."""
        with self._lock:
            self._closing = True
            open_ones = [*self._busy, *(each for store in self._stores for each in store.idle)]
            threads = list(self._threads)
        self._retry.set()
        for each in open_ones:
            with suppress(OSError):
                each.sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(2 * CONNECT_S + STALL_S)
        for each in open_ones:
            each.close()


class _Fetch:
    """One load: looks up its blocks at all stores that it has any at, then fetches those before the first gap."""

    def __init__(self, client: KVStoreClient, digests: Sequence[bytes], arrived: Arrived) -> None:
        self._client, self._digests, self._arrived = client, digests, arrived
        self._connections: dict[_Store, KVStoreConnection] = {}
        self._errors: list[str] = []
        self._cancelled = False
        self._absent = 0  # evicted between the lookup and the load

    def cancel(self) -> None:
        self._cancelled = True
        for each in list(self._connections.values()):
            with suppress(OSError):
                each.sock.shutdown(socket.SHUT_RDWR)

    def run(self, lookup_timeout_s: float, timeout_s: float) -> str | None:
        """Returns why blocks are missing; None: none are."""
        began = time.monotonic()
        places = self._client.placed(self._digests)
        held = self._look_up(places, began + lookup_timeout_s)
        self._client.looked_up(time.monotonic() - began, answered=not self._errors)
        count = next((at for at, each in enumerate(self._digests) if each not in held), len(self._digests))
        wanted = set(self._digests[:count])
        loads = {store: [each for each in digests if each in wanted] for store, digests in places.items()}
        asked = time.monotonic()
        self._receive(loads, began + timeout_s)
        if count and not self._errors and not self._cancelled:
            self._client.loaded(count, time.monotonic() - asked)
        for store, connection in list(self._connections.items()):
            del self._connections[store]
            self._client.give_back(store, connection, usable=not self._cancelled)
        if self._errors:
            return "; ".join(self._errors)
        return None if count == len(self._digests) and not self._absent else NOT_STORED

    def _look_up(self, places: dict[_Store, list[bytes]], until: float) -> set[bytes]:
        """Returns the blocks that the stores have. All are asked before the first answer is awaited."""
        held = set[bytes]()

        def ask(store: _Store) -> None:
            self._connections[store] = connection = self._client.take(store, until)
            connection.ask(Operation.EXISTS, places[store], until)

        def look(store: _Store) -> None:
            flags = self._connections[store].flags(len(places[store]), until)
            held.update(digest for digest, there in zip(places[store], flags, strict=True) if there)

        self._each(places, ask)
        self._each(list(self._connections), look)
        return held

    def _receive(self, loads: dict[_Store, list[bytes]], until: float) -> None:
        image = memoryview(bytearray(HEADER_BYTES + self._client.nbytes))

        def ask(store: _Store) -> None:
            self._connections[store].ask(Operation.GET, loads[store], until)

        def receive(store: _Store) -> None:
            for digest in loads[store]:
                try:
                    payload = self._connections[store].payload(image, digest, until)
                except BadImage:
                    self._client.came_damaged(digest)
                    raise
                if payload is None:
                    self._absent += 1
                else:
                    self._arrived((digest,), payload)

        self._each([each for each in self._connections if loads[each]], ask)
        self._each([each for each in self._connections if loads[each]], receive)

    def _each(self, stores: Iterable[_Store], action: Callable[[_Store], None]) -> None:
        """Acts on each store. One where that fails is left alone, and the load goes on with the others."""
        for store in stores:
            try:
                action(store)
            except (OSError, PeerRefused, BadImage) as error:
                self._errors.append(f"{store.name}: {error}")
                if (connection := self._connections.pop(store, None)) is not None:
                    self._client.give_back(store, connection, usable=False)
                if not (self._cancelled or isinstance(error, BadImage)):
                    self._client.leave_alone(store, error)
