"""Ranks of a model as threads of one process, on the same gloo and the same commands as processes have."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.model.batch import KVCache
from engine.model.decoder import load_decoder
from engine.parallel.collectives import thread_store
from engine.parallel.context_shards import RingKind
from engine.parallel.placement import Placement
from engine.parallel.sharded_decoder import RankGroups, ShardedDecoder, load_sharded
from tests.engine.model import tiny
from tests.engine.model.stepping import Stepper, apart

BLOCK_SIZE = 16


@contextmanager
def ranks_of(
    path: Path,
    *,
    shards: int = 1,
    stages: int = 1,
    contexts: int = 1,
    expert_parallel: bool = False,
    kind: RingKind = "auto",
    dtype: torch.dtype = torch.float32,
) -> Iterator[list[ShardedDecoder]]:
    """All ranks of a model, of which those after the first follow it until the end."""
    store, size = thread_store(), shards * stages * contexts

    def load(rank: int) -> ShardedDecoder:
        place = Placement(rank, shards, stages, expert_parallel, contexts)
        return load_sharded(path, place, RankGroups.connect(store, place, kind), dtype=dtype)

    with ThreadPoolExecutor(size) as pool:
        decoders = list(pool.map(load, range(size)))
    threads = [threading.Thread(target=follow, args=(each,), daemon=True) for each in decoders[1:]]
    for thread in threads:
        thread.start()
    yield decoders  # with an error here the others are in the middle of a step, and no command reaches them
    decoders[0].stop()
    for thread in threads:
        thread.join(10)


def follow(decoder: ShardedDecoder) -> None:
    part = BLOCK_SIZE // decoder.placement.contexts
    decoder.serve(lambda blocks: KVCache.of(decoder.spec, blocks, part, decoder.dtype, "cpu"))


def stepper_of(decoders: Sequence[ShardedDecoder], prompts: Sequence[Sequence[int]]) -> Stepper:
    """Sequences that all ranks run."""
    stepper = Stepper(decoders[0], prompts, seed=3)
    stepper._kv = decoders[0].allocate(stepper._kv.layers()[0].shape[1], BLOCK_SIZE, None)
    return stepper


def prompts() -> list[list[int]]:
    drawn = random.Random(5)
    return [[drawn.randrange(3, 380) for _ in range(length)] for length in (1, 2, 33, 40, 70)]


def furthest(path: Path, chunk: int = 30, **ranks: Any) -> float:
    """The largest difference from one device's logits, relative to the largest logit. Any: options of `ranks_of`."""
    whole = Stepper(load_decoder(path, dtype=torch.float32, kernels="torch"), prompts(), seed=3).run(chunk)
    with ranks_of(path, **ranks) as decoders:
        found = stepper_of(decoders, prompts()).run(chunk)
    return max(apart(one, other) for one, other in zip(found, whole, strict=True))


def written(name: str, path: Path, **changed: Any) -> Path:
    """A model of random weights. Any: options of a configuration of transformers."""
    config, model, options = tiny.MODELS[name]
    return tiny.save(tiny.build(config, model, {**options, **changed}), path)
