"""A K/V store over TCP: what clients get of it, and what they do not; and where several stores keep which block."""

from __future__ import annotations

import hashlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.kv_cache.block_pool import chain_digest, root_digest
from engine.kv_cache.kv_store import client as client_module
from engine.kv_cache.kv_store import wire
from engine.kv_cache.kv_store.block_images import BlockImages
from engine.kv_cache.kv_store.client import NOT_STORED, KVStoreClient
from engine.kv_cache.kv_store.server import KVStoreServer
from engine.kv_cache.kv_store.wire import Operation
from engine.kv_cache.snapshot import header
from engine.kv_cache.transport.peer_handshake import GREETING, PROOF, VERDICT, PeerRefused, prove, received
from tests.engine.kv_cache.kv_store.conftest import LAYOUT, SECRET, client_of


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload(number: int) -> bytes:
    return digest(number) * 6 + bytes(4)


def saved(client: KVStoreClient, numbers: Sequence[int]) -> set[bytes]:
    return client.save([(digest(each), payload(each)) for each in numbers])[0]


def loaded(client: KVStoreClient, digests: Sequence[bytes]) -> tuple[dict[bytes, bytes], str | None]:
    """Returns what a load brings, and why it ended."""
    came: dict[bytes, bytes] = {}
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    client.fetch(
        ("", 0), 0, tuple(digests), lambda each, data, layers=None: came.update({each[0]: bytes(data)}), ended.put
    )
    return came, ended.get(timeout=30)


@contextmanager
def connected(*ports: int, **options: object) -> Iterator[KVStoreClient]:
    client = client_of(*ports, **options)  # type: ignore[arg-type]  # its keywords
    try:
        yield client
    finally:
        client.close()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        threading.Event().wait(0.005)


def test_blocks_before_the_first_gap_are_loaded(store: KVStoreServer) -> None:
    with connected(store.port) as one, connected(store.port) as other:
        assert saved(one, [1, 2, 4]) == {digest(1), digest(2), digest(4)}
        came, why = loaded(other, [digest(each) for each in (1, 2, 3, 4)])
        assert came == {digest(1): payload(1), digest(2): payload(2)} and why == NOT_STORED
        assert loaded(other, [digest(4)]) == ({digest(4): payload(4)}, None)
        assert one.save([(digest(4), payload(4))]) == ({digest(4)}, 0)  # it is there


def test_engines_of_other_layouts_share_a_store_and_see_nothing_of_each_other(store: KVStoreServer) -> None:
    with connected(store.port) as one, connected(store.port, layout=b"another layout..") as other:
        saved(one, [1])
        assert loaded(other, [digest(1)]) == ({}, NOT_STORED)


def test_a_client_without_the_secret_is_refused_and_gets_nothing(store: KVStoreServer) -> None:
    with connected(store.port) as one, connected(store.port, secret=b"another secret, as long") as other:
        saved(one, [1])
        assert other.up == 0 and loaded(other, [digest(1)]) == ({}, NOT_STORED) and saved(other, [2]) == set()
    assert store.images.stats().put == 1


def test_a_server_without_the_secret_is_not_used() -> None:
    """One that only pretends to be a store cannot prove that it knows what the client does."""
    wrong = KVStoreServer(BlockImages(1 << 20), b"not the secret at all", "127.0.0.1", 0)
    with connected(wrong.port) as client:
        assert client.up == 0
    wrong.close()


def test_a_client_that_asks_without_proof_is_told_nothing(store: KVStoreServer) -> None:
    """It sends what a client sends, and looks at nothing that it is told."""
    with connected(store.port) as one:
        saved(one, [1])
    with socket.create_connection(("127.0.0.1", store.port), 5) as sock:
        received(sock, GREETING.size)
        sock.sendall(PROOF.pack(bytes(32), LAYOUT, bytes(32)) + wire.request(Operation.GET, [digest(1)]))
        assert ends(sock)
    assert store.images.stats().asked == 0


def test_a_server_that_accepts_without_proof_is_not_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(GREETING.pack(wire.MAGIC, bytes(32)))
                received(sock, PROOF.size)
                sock.sendall(VERDICT.pack(True, bytes(32)))
                ends(sock)

        thread = threading.Thread(target=accept)
        thread.start()
        with connected(server.getsockname()[1]) as client:
            assert client.up == 0 and "does not know the shared secret" in client._stores[0].said
        thread.join(10)


@contextmanager
def proven(store: KVStoreServer, layout: bytes = LAYOUT) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", store.port), 5) as sock:
        prove(sock, SECRET, wire.MAGIC, layout)
        yield sock


def ends(sock: socket.socket) -> bool:
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "asked",
    [
        wire.REQUEST.pack(9, 1) + digest(1),
        wire.REQUEST.pack(Operation.GET, 0),
        wire.REQUEST.pack(Operation.GET, wire.MAX_BLOCKS + 1),
        wire.request(Operation.PUT, [digest(1)]) + b"no header of an image".ljust(200),
        wire.request(Operation.PUT, [digest(1)]) + header(LAYOUT, digest(2), payload(2)) + payload(2),
        wire.request(Operation.PUT, [digest(1)]) + header(LAYOUT[::-1], digest(1), payload(1)) + payload(1),
        wire.request(Operation.PUT, [digest(1)]) + header(LAYOUT, digest(1), bytes(65 << 20)),
    ],
    ids=["operation", "no blocks", "too many", "no image", "another block", "another layout", "too large"],
)
def test_what_is_no_request_ends_the_connection(store: KVStoreServer, asked: bytes) -> None:
    with proven(store) as sock:
        sock.sendall(asked)
        assert ends(sock)
    assert store.images.stats().memory_blocks == 0
    until(lambda: store.connections == 0)


def test_an_image_that_came_damaged_is_not_kept(store: KVStoreServer) -> None:
    with proven(store) as sock:
        data = payload(1)[:-1] + b"!"
        sock.sendall(wire.request(Operation.PUT, [digest(1)]) + header(LAYOUT, digest(1), payload(1)) + data)
        assert sock.recv(1) == b"\0"
        sock.sendall(wire.request(Operation.EXISTS, [digest(1)]))  # the connection goes on
        assert sock.recv(1) == b"\0"
    assert store.images.stats().bad == 1


def test_an_image_that_was_damaged_at_the_store_is_refused_and_put_anew(store: KVStoreServer) -> None:
    with connected(store.port) as client:
        saved(client, [1, 2])
        key = LAYOUT, digest(2)
        store.images._memory[key] = store.images._memory[key][:-1] + b"!"
        came, why = loaded(client, [digest(1), digest(2)])
        assert came == {digest(1): payload(1)} and why is not None and "checksum" in why
        assert client.up == 1  # the store itself is well
        assert client.save([(digest(each), payload(each)) for each in (1, 2)]) == ({digest(1), digest(2)}, 1)
        assert loaded(client, [digest(2)]) == ({digest(2): payload(2)}, None)


def test_a_block_that_left_between_the_lookup_and_the_load_is_missing_alone(
    store: KVStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store.images.get
    monkeypatch.setattr(store.images, "get", lambda layout, each: None if each == digest(2) else kept(layout, each))
    with connected(store.port) as client:
        saved(client, [1, 2, 3])
        assert loaded(client, [digest(each) for each in (1, 2, 3)]) == (
            {digest(1): payload(1), digest(3): payload(3)},
            NOT_STORED,
        )


def test_a_peer_of_the_engines_is_no_store(store: KVStoreServer) -> None:
    with socket.create_connection(("127.0.0.1", store.port), 5) as sock, pytest.raises(PeerRefused):
        prove(sock, SECRET, b"PonderT1", LAYOUT)


def test_an_address_that_is_taken_is_refused(store: KVStoreServer) -> None:
    with pytest.raises(InvalidParameter, match="cannot listen at .* accepted"):
        KVStoreServer(BlockImages(1 << 20), SECRET, "127.0.0.1", store.port)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tenants=st.lists(st.text(max_size=8), min_size=2, max_size=4, unique=True),
    tokens=st.lists(st.integers(0, 3), min_size=4, max_size=12),
    adapters=st.tuples(st.sampled_from(["", "a"]), st.sampled_from(["", "a"])),
)
def test_no_tenant_finds_a_block_of_another_by_the_same_tokens(
    store: KVStoreServer, tenants: list[str], tokens: list[int], adapters: tuple[str, str]
) -> None:
    """Every tenant saves a prompt, of the same tokens. Each block that a tenant gets is its own."""

    def chain(tenant: str, adapter: str) -> list[bytes]:
        digests = [root_digest(SECRET, "model", adapter, tenant)]
        for at in range(0, len(tokens), 4):
            digests.append(chain_digest(digests[-1], tokens[at : at + 4]))
        return digests[1:]

    def own(tenant: str) -> bytes:
        """A payload of the tenant, the same in every example: the store keeps what earlier ones saved."""
        return payload(int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "big"))

    last, *others = tenants
    with connected(store.port) as client:
        for tenant in others:
            client.save([(each, own(tenant)) for each in chain(tenant, adapters[0])])
        mine = chain(last, adapters[1])
        assert not set(mine) & {each for tenant in others for each in chain(tenant, adapters[0])}
        store_has = loaded(client, mine)[0]
        assert all(data == own(last) for data in store_has.values())
        client.save([(each, own(last)) for each in mine])


def test_several_stores_share_the_blocks_and_one_that_leaves_moves_its_own_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = [KVStoreServer(BlockImages(64 << 20), SECRET, "127.0.0.1", 0) for _ in range(3)]
    numbers = range(600)
    with connected(*[each.port for each in servers]) as client:
        assert len(saved(client, numbers)) == 600
        counts = [each.images.stats().memory_blocks for each in servers]
        assert sum(counts) == 600 and min(counts) > 120
        assert loaded(client, [digest(each) for each in numbers]) == ({digest(n): payload(n) for n in numbers}, None)
        placed = {each: store.address for store, found in client.placed(map(digest, numbers)).items() for each in found}
        servers[0].close()
        came, why = loaded(client, [digest(each) for each in numbers])
        assert client.up == 2 and why is not None and why != NOT_STORED and len(came) < 600
        moved = {each: store.address for store, found in client.placed(map(digest, numbers)).items() for each in found}
    assert {each for each in placed if placed[each] != moved[each]} == {
        each for each, address in placed.items() if address[1] == servers[0].port
    }
    for each in servers[1:]:
        each.close()


def test_a_store_that_starts_again_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_S", 0.05)
    server = KVStoreServer(BlockImages(1 << 20), SECRET, "127.0.0.1", 0)
    with connected(server.port) as client:
        generation = client.generation
        server.close()
        assert saved(client, [1]) == set() and client.up == 0 and client.generation > generation
        again = KVStoreServer(BlockImages(1 << 20), SECRET, "127.0.0.1", server.port)
        until(lambda: client.up == 1)
        assert saved(client, [1]) == {digest(1)} and loaded(client, [digest(1)])[1] is None
        again.close()


def test_an_idle_connection_that_ended_meanwhile_is_no_failure(store: KVStoreServer) -> None:
    with connected(store.port) as client:
        assert saved(client, [1]) == {digest(1)}
        until(lambda: store.connections == 1)
        for sock in list(store._connected):
            sock.shutdown(socket.SHUT_RDWR)
        until(lambda: store.connections == 0)
        assert loaded(client, [digest(1)])[1] is None and client.up == 1


@pytest.mark.parametrize("says", ["nothing", "a byte now and then"])
def test_a_store_that_is_slow_costs_its_time_once_and_is_left_alone(
    store: KVStoreServer, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Event(), store.images.exists
    over = threading.Event()

    def slow(layout: bytes, each: bytes) -> bool:
        asked.set()
        over.wait(0.05 if says != "nothing" else 20)
        return answer(layout, each)

    with connected(store.port, lookup_timeout_s=0.3) as client:
        saved(client, range(40))
        monkeypatch.setattr(store.images, "exists", slow)
        came, why = loaded(client, [digest(each) for each in range(40)])
        assert came == {} and why is not None and why != NOT_STORED and asked.is_set()
        assert client.up == 0 and client.lookups == 1 and 0.25 < client.lookup_seconds < 4
        assert loaded(client, [digest(1)]) == ({}, NOT_STORED) and client.lookup_seconds < 4
        over.set()
