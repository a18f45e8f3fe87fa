"""Ranks of a model as threads of one process, on the same gloo and the same commands as processes have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.model.batch import KVCache
from engine.parallel.collectives import RankGroup, thread_store
from engine.parallel.placement import Placement
from engine.parallel.sharded_decoder import ShardedDecoder, load_sharded

BLOCK_SIZE = 16


@contextmanager
def ranks_of(
    path: Path, *, shards: int = 1, stages: int = 1, expert_parallel: bool = False
) -> Iterator[list[ShardedDecoder]]:
    """All ranks of a model, of which those after the first follow it until the end."""
    store, size = thread_store(), shards * stages

    def load(rank: int) -> ShardedDecoder:
        place = Placement(rank, shards, stages, expert_parallel)
        world = RankGroup(store, "ranks", rank, size)
        own = RankGroup(store, f"stage {place.stage}", place.shard, shards)
        return load_sharded(path, place, world, own, dtype=torch.float32)

    with ThreadPoolExecutor(size) as pool:
        decoders = list(pool.map(load, range(size)))
    threads = [threading.Thread(target=follow, args=(each,), daemon=True) for each in decoders[1:]]
    for thread in threads:
        thread.start()
    try:
        yield decoders
    finally:
        decoders[0].stop()
        for thread in threads:
            thread.join(10)


def follow(decoder: ShardedDecoder) -> None:
    decoder.serve(lambda blocks: KVCache.of(decoder.spec, blocks, BLOCK_SIZE, decoder.dtype, "cpu"))
