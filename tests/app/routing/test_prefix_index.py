"""The index of prefixes equals a model under random events, and forgets a replica whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.routing.prefix_index import PrefixIndex, prefix_keys
from engine.core import messages as m
from engine.kv_cache.kv_event_publisher import AllBlocksCleared, BlockRemoved, BlockStored, events_of
from engine.kv_cache.kv_events import Change, KVEventLog
from tests.engine.core.test_scheduler import SIZE, Bench

PROMPTS = st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.integers(0, 12), st.sampled_from(["", "alice"]))


class Replica(Bench):
    """An engine's core whose changes an index hears."""

    def __init__(self) -> None:
        super().__init__(blocks=10, budget=64)
        self.changes: list[Change] = []
        self.pool.events = KVEventLog(self.changes.extend, lambda _: None)
        self.keys_by_digest: dict[bytes, bytes] = {}  # the model: keys of all blocks that ever were
        self.count = 0

    def run(self, length: int, first: int, tenant: str) -> None:
        self.count += 1
        self.open(self.count, length, first=first, tenant=tenant)
        self.generate(self.count, 1)
        self.drain()
        seq = self.core._sequences[self.count]
        for at, key in enumerate(prefix_keys(seq.tokens, SIZE)):
            self.keys_by_digest[seq.digest(at, SIZE)] = key
        self.core.handle(m.Close(self.count))
        self.pool.flush_events()

    def held(self) -> set[bytes]:
        digests = {content.digest for _, content in self.pool.contents()}
        return {key for digest, key in self.keys_by_digest.items() if digest in digests}


@settings(max_examples=40)
@given(st.lists(PROMPTS, min_size=1, max_size=25))
def test_the_index_knows_what_each_replica_can_find(prompts: list[tuple[str, int, int, str]]) -> None:
    index, replicas = PrefixIndex(), {name: Replica() for name in "abc"}
    for name, length, first, tenant in prompts:
        replica = replicas[name]
        replica.run(length, first, tenant)
        index.apply(name, events_of(replica.changes, SIZE))
        replica.changes.clear()
        for key in {key for each in replicas.values() for key in each.keys_by_digest.values()}:
            assert index.matches([key], "abc") == {at: key in each.held() for at, each in replicas.items()}
    index.remove("a")
    assert index.blocks("a") == 0 and "a" not in index._keys and "a" not in index._held
    everything = [key for each in replicas.values() for key in each.keys_by_digest.values()]
    assert all(index.matches([key], ["a"]) == {"a": 0} for key in everything)


def test_a_prompt_matches_up_to_its_first_block_that_is_missing() -> None:
    tokens = list(range(16))
    index = PrefixIndex()
    index.apply("a", [BlockStored([1, 2], None, tokens[:8], 4, None, None, None)])
    index.apply("b", [BlockStored([1], None, tokens[:4], 4, None, None, None)])
    index.apply("b", [BlockStored([9], 7, tokens[8:12], 4, None, None, None)])  # its parent was missed
    keys = prefix_keys(tokens, 4)
    assert index.matches(keys, ["a", "b", "c"]) == {"a": 2, "b": 1, "c": 0}
    assert index.block_size == 4


def test_an_adapters_blocks_are_no_other_models() -> None:
    index = PrefixIndex()
    index.apply("a", [BlockStored([1], None, [1, 2], 2, None, None, "sql")])
    assert index.matches(prefix_keys([1, 2], 2), ["a"]) == {"a": 0}
    assert index.matches(prefix_keys([1, 2], 2, "sql"), ["a"]) == {"a": 1}
    assert index.adapters == {"sql"}


def test_a_replica_that_starts_again_has_nothing() -> None:
    index = PrefixIndex()
    index.apply("a", [BlockStored([1], None, [1, 2], 2, None, None, None)])
    index.apply("a", [AllBlocksCleared()])
    assert index.blocks("a") == 0 and index.matches(prefix_keys([1, 2], 2), ["a"]) == {"a": 0}


def test_a_prefix_of_two_tenants_is_there_until_both_have_lost_it() -> None:
    index, keys = PrefixIndex(), prefix_keys([1, 2], 2)
    for block in (1, 2):  # the same tokens, under each tenant's own hash
        index.apply("a", [BlockStored([block], None, [1, 2], 2, None, None, None)])
    index.apply("a", [BlockRemoved([1], None)])
    assert index.matches(keys, ["a"]) == {"a": 1}
    index.apply("a", [BlockRemoved([2], None)])
    assert index.matches(keys, ["a"]) == {"a": 0}
