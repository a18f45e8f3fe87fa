"""The process of one rank after the first: `python -m engine.parallel.rank`, started by `rank_processes.py` only.

It loads its part of the model and follows rank 0, until that stops it or is gone. Signals that a terminal or a service
manager sends to a whole group are for the server, which stops this process itself.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch

from engine.child_process import end_with_parent, read_start
from engine.config import EngineConfig
from engine.errors import RankDied
from engine.model.batch import KVCache
from engine.model.memory import MAX_LEN_BY_DEFAULT, kv_groups
from engine.parallel.collectives import file_store
from engine.parallel.placement import Placement
from engine.parallel.sharded_decoder import RankGroups, ShardedDecoder, load_sharded

STORE = "ranks"  # the file, of a directory, by which ranks find each other


class RankStart(msgspec.Struct):
    """The first message to the process. `path` has the checkpoint, `directory` the store."""

    config: EngineConfig
    path: str
    dtype: str
    rank: int
    threads: int
    directory: str


def load_rank(start: RankStart) -> ShardedDecoder:
    """Connects a rank to the others, of which each does so at the same time, and loads its part of the model.

    Raises:
        RankDied: another rank does not connect.
        UnsupportedArchitecture, CheckpointError: of the model.
    """
    config = start.config
    place = Placement.of(config, start.rank)
    store = file_store(Path(start.directory) / STORE)
    store.set(f"rank {start.rank}", "")
    return load_sharded(
        Path(start.path),
        place,
        RankGroups.connect(store, place),
        dtype=getattr(torch, start.dtype),
        max_model_len=config.max_model_len,
        deterministic=config.deterministic,
    )


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start = read_start(RankStart)
    threading.Thread(target=end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    torch.set_num_threads(start.threads)
    config = start.config
    with contextlib.suppress(RankDied):  # rank 0 says so, or is gone itself
        decoder = load_rank(start)
        spec, dtype, device = decoder.spec, decoder.dtype, decoder.device
        max_len = config.max_model_len or min(spec.max_position_embeddings, MAX_LEN_BY_DEFAULT)
        groups = kv_groups(config, spec, dtype, device, max_len)
        part = config.block_size // config.prefill_context_parallel_size
        decoder.serve(lambda blocks: KVCache.of(spec, blocks, part, dtype, device, groups=groups))


if __name__ == "__main__":
    main()
