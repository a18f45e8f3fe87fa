"""Replicas of a router: where each is, whether it takes requests, and which of them a request goes to.

Two kinds of requests differ. A stateless one (`/v1/chat/completions`) may go to any replica, and the policy chooses. A
stateful one (chats, runs, documents, sign-in) goes to its owner's replica alone, which has the data; with a database
that all replicas share, another one takes over while that one is away. Knows nothing of HTTP but health checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import httpx

from app.routing.disaggregation import DecodeLoad, PrefillLoad
from app.routing.event_subscriber import EventSubscriber
from app.routing.policies import POLICIES, PolicyName, ReplicaState, load_cap
from app.routing.prefix_index import PrefixIndex, prefix_keys

log = logging.getLogger("ponder")

SESSIONS = 100_000  # remembered at once, the least recently used one forgotten first
HEALTH_TIMEOUT_S = 5.0


DEFAULT_KV_PORT = 14579  # of `kv_transfer`
Role = Literal["decode", "prefill", "both"]  # decode: answers requests, and reads the prompts that no other one does


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """A server, and the sockets of its K/V events where it publishes them. Of a server that reads prompts for others,
    `kv` is where they load the K/V from.

    Raises:
        ValueError: it is no such address.
    """

    url: str
    events: str | None = None
    replay: str | None = None
    role: Role = "decode"
    kv: tuple[str, int] | None = None

    @classmethod
    def parse(cls, text: str) -> ReplicaAddress:
        """Reads URL[,EVENTS[,REPLAY]]."""
        url, *rest = (part.strip() for part in text.split(","))
        if not url.startswith(("http://", "https://")) or url.count("/") > 3 or len(rest) > 2:
            raise ValueError(
                f"{text!r} is no replica; accepted: http://HOST:PORT, and perhaps the endpoints of its K/V events: "
                "http://HOST:PORT,tcp://HOST:PORT,tcp://HOST:PORT."
            )
        events, replay = (*(part or None for part in rest), None, None)[:2]
        return cls(url.rstrip("/"), events, replay)

    @classmethod
    def prefill(cls, text: str, role: Role = "prefill") -> ReplicaAddress:
        """Reads URL[,HOST:PORT] of a server that reads prompts for others, always or with role `both`: by itself its
        host, and `kv_transfer`'s port."""
        url, _, kv = (part.strip() for part in text.partition(","))
        address = urlsplit(url)
        host, separator, port = kv.rpartition(":") if kv else (address.hostname or "", ":", str(DEFAULT_KV_PORT))
        known = url.startswith(("http://", "https://")) and url.count("/") <= 3 and host and separator
        if not known or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"{text!r} is no prefill server; accepted: http://HOST:PORT, and perhaps kv_ip and kv_port of its "
                "kv_transfer: http://HOST:PORT,HOST:PORT."
            )
        return cls(url.rstrip("/"), role=role, kv=(host.strip("[]"), int(port)))


@dataclass(slots=True)
class Replica:
    """A server behind the router."""

    address: ReplicaAddress
    up: bool = False  # its last health check, or a request since then, found it
    draining: bool = False  # an operator takes it out; what it runs goes on
    in_flight: int = 0  # requests of this router
    prefills: PrefillLoad = field(default_factory=PrefillLoad)
    decodes: DecodeLoad = field(default_factory=DecodeLoad)
    subscriber: EventSubscriber | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.address.url

    @property
    def takes(self) -> bool:
        """Returns whether new requests may go to it."""
        return self.up and not self.draining


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, and the leading blocks of the prompt that it has, of all."""

    replica: Replica
    matched: int = 0
    blocks: int = 0


@dataclass(slots=True)
class ReplicaSet:
    """All replicas, the index of their prefixes and the sessions that stick to one."""

    addresses: Sequence[ReplicaAddress]
    policy: PolicyName = "prefix_aware"
    shared_state: bool = False  # all have one database
    health_s: float = 2.0
    index: PrefixIndex = field(default_factory=PrefixIndex)
    replicas: dict[str, Replica] = field(init=False)
    _sessions: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _turn: int = 0

    def __post_init__(self) -> None:
        self.replicas = {each.url: Replica(each) for each in self.addresses}

    def follow(self, addresses: Sequence[ReplicaAddress], http: httpx.AsyncClient) -> None:
        """Takes in the replicas that are new among `addresses`, and drops those that are no longer among them. What a
        dropped one answers goes on."""
        for gone in self.replicas.keys() - {each.url for each in addresses}:
            replica = self.replicas.pop(gone)
            for task in replica.tasks:
                task.cancel()
            self.index.remove(gone)
        for each in addresses:
            if each.url not in self.replicas:
                self.replicas[each.url] = Replica(each)
                self._begin(self.replicas[each.url], http)

    def _begin(self, replica: Replica, http: httpx.AsyncClient) -> None:
        address = replica.address
        if address.events is not None:
            replica.subscriber = EventSubscriber(address.url, self.index, address.events, address.replay)
            replica.tasks.append(asyncio.create_task(replica.subscriber.run(), name="kv-events"))
        replica.tasks.append(asyncio.create_task(self._check_often(replica, http), name="health"))

    async def start(self, http: httpx.AsyncClient) -> None:
        """Checks all replicas once, then keeps them in view until `stop`."""
        await asyncio.gather(*(self._check(each, http) for each in self.replicas.values()))
        for each in self.replicas.values():
            self._begin(each, http)

    async def stop(self) -> None:
        tasks = [task for each in self.replicas.values() for task in each.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_often(self, replica: Replica, http: httpx.AsyncClient) -> None:
        while True:
            await self._check(replica, http)
            await asyncio.sleep(self.health_s)

    async def _check(self, replica: Replica, http: httpx.AsyncClient) -> None:
        try:
            answer = await http.get(f"{replica.name}/health", timeout=HEALTH_TIMEOUT_S)
            up = answer.status_code == 200
        except httpx.HTTPError:
            up = False
        if not up:
            self.lost(replica)
        elif not replica.up:
            log.warning("the replica %s is up", replica.name)
            replica.up = True

    def lost(self, replica: Replica) -> None:
        """Marks a replica that a request could not reach: the next health check may find it again."""
        if replica.up:
            log.warning("the replica %s is down", replica.name)
        replica.up = False
        if replica.subscriber is not None:
            replica.subscriber.forget()

    def usable(self, without: Collection[str] = ()) -> list[Replica]:
        """Returns the replicas that answer requests and take new ones; those that read prompts just now only where
        there is no other."""
        able = [each for each in self._answering if each.takes and each.name not in without]
        return [each for each in able if not each.prefills.prompts] or able

    @property
    def _answering(self) -> list[Replica]:
        return [each for each in self.replicas.values() if each.address.role != "prefill"]

    def prefiller(self, tokens: int) -> Replica | None:
        """Returns the server that would have read a prompt of so many tokens first; None: none reads prompts for
        others. While all prefill servers are busy, a server of both roles that answers nothing is one of them, as long
        as another one answers."""
        taking = [each for each in self.replicas.values() if each.takes]
        able = [each for each in taking if each.address.role == "prefill"]
        if all(each.prefills.prompts for each in able):
            idle = [each for each in taking if each.address.role == "both" and not each.in_flight]
            able += [each for each in idle if any(other is not each for other in self.usable())]
        return min(able, key=lambda each: (each.prefills.ttft_s(tokens) or 0.0, each.prefills.tokens), default=None)

    def choose(
        self,
        tokens: Sequence[int] = (),
        model: str | None = None,
        session: str | None = None,
        without: Collection[str] = (),
    ) -> Choice | None:
        """Returns the replica for a stateless request: that of its session below the load cap, else the policy's.

        Args:
            tokens: the prompt's, empty where they are not known.
            model: the name that the request asks for; prefixes of an adapter are its own.
            session: a name for requests that belong together.
            without: replicas that have failed this request.

        Returns:
            None: no replica takes requests.
        """
        usable = self.usable(without)
        if not usable:
            return None
        states = [ReplicaState(each.name, each.in_flight, self.index.blocks(each.name)) for each in usable]
        keys = list[bytes]()
        if self.index.block_size is not None:
            adapter = model if model in self.index.adapters else None
            keys = prefix_keys(tokens, self.index.block_size, adapter)
        matched = self.index.matches(keys, [each.name for each in usable])
        cap = load_cap(states)
        kept = None if session is None else self._sessions.get(session)
        if kept is None or not any(each.name == kept and each.in_flight < cap for each in usable):
            kept = POLICIES[self.policy](states, matched, self._turn)
            self._turn += 1
        if session is not None:
            self._stick(session, kept)
        return Choice(self.replicas[kept], matched[kept], len(keys))

    def _stick(self, session: str, replica: str) -> None:
        self._sessions[session] = replica
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def owner(self, of: str, without: Collection[str] = ()) -> Replica | None:
        """Returns the replica that has somebody's data: always the same one, by rendezvous hashing (Thaler and
        Ravishankar 1998) over all replicas. With shared state, the next one where it takes no requests; else None."""
        if not self._answering:
            return None
        ranked = sorted(self._answering, key=lambda each: _weight(each.name, of), reverse=True)
        if not self.shared_state:
            first = ranked[0]
            return first if first.up and first.name not in without else None  # a drained one keeps its users' data
        usable = {each.name for each in self.usable(without)}
        return next((each for each in ranked if each.name in usable), None)

    def by_id(self, id: str) -> Replica | None:
        """Returns the replica of an id that `replica_id` gave, while it is up, or at all where state is its own."""
        found = next((each for each in self._answering if replica_id(each.name) == id), None)
        if found is None or (self.shared_state and not found.takes):
            return None
        return found

    async def drain(self, name: str, timeout_s: float) -> bool:
        """Sends a replica nothing new that another can answer, and waits for what it runs; returns whether all is
        done."""
        replica = self.replicas[name]
        replica.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while replica.in_flight or replica.prefills.prompts:
                    await asyncio.sleep(0.05)
        return not (replica.in_flight or replica.prefills.prompts)


def replica_id(name: str) -> str:
    """Returns a short id of a replica, which tells a client nothing of its address."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def _weight(name: str, of: str) -> bytes:
    return hashlib.blake2b(of.encode(), key=name.encode()[:64], digest_size=8).digest()
