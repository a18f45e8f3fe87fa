"""Processes of the ranks after the first, as rank 0 sees them: it starts them, and says which one died.

They end when rank 0's process does, however that ends: their stdin closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.child_process import start_child
from engine.config import EngineConfig
from engine.errors import RankDied
from engine.families import family_of
from engine.model.model_spec import ModelSpec
from engine.model.quantization.checkpoint import read_config
from engine.parallel.collectives import file_store
from engine.parallel.placement import check_parallel
from engine.parallel.rank import STORE, RankStart, load_rank
from engine.parallel.sharded_decoder import ShardedDecoder

START_S = 120.0  # for a process to import torch, on a busy machine
_END_S = 5.0  # from the stop command to the kill
_LOOK_S = 0.02

log = logging.getLogger(__name__)


class RankProcesses:
    """The ranks of one model; `decoder` is rank 0's part of it, in this process."""

    decoder: ShardedDecoder

    def __init__(self, config: EngineConfig, path: Path, spec: ModelSpec, dtype: torch.dtype, threads: int) -> None:
        """Starts the processes and loads the model; each rank has `threads` CPU threads.

        Raises:
            InvalidParameter: several ranks do not run the model, or not as configured.
            RankDied: a process ended, or has not connected.
            UnsupportedArchitecture, CheckpointError: of the model.
        """
        json = read_config(path)
        check_parallel(config, spec, family_of(json).names(json), path.name)
        directory = tempfile.mkdtemp(prefix="ponder-ranks-")  # entered by this user alone
        kind = str(dtype).removeprefix("torch.")
        starts = [RankStart(config, str(path), kind, rank, threads, directory) for rank in range(1, config.ranks)]
        self._closing = threading.Event()
        self._processes = [start_child("engine.parallel.rank", each) for each in starts]
        self._end = weakref.finalize(self, _kill, self._processes, directory)
        try:
            self._wait(Path(directory))
            self.decoder = load_rank(RankStart(config, str(path), kind, 0, threads, directory))
            self.decoder.on_death = self._death
        except RankDied as error:
            raise self._death(error) from error
        except BaseException:
            self._end()
            raise
        if config.runs_in == "process":
            for process in self._processes:
                threading.Thread(target=_end_with, args=(process, self._closing), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Returns the ids of the processes, from rank 1 on."""
        return [each.pid for each in self._processes]

    def close(self) -> None:
        """Stops the processes, and kills those that do not end. Idempotent; no step may follow."""
        if not self._end.alive:
            return
        self._closing.set()
        with contextlib.suppress(RankDied):
            self.decoder.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(_END_S)
        self._end()

    def _wait(self, directory: Path) -> None:
        """Waits until every process is about to connect."""
        store, until = file_store(directory / STORE), time.monotonic() + START_S
        names = [f"rank {at}" for at, _ in enumerate(self._processes, 1)]
        while not store.check(names):
            if any(each.poll() is not None for each in self._processes):
                raise RankDied("A rank ended before it was ready.")
            if time.monotonic() > until:
                raise RankDied(f"A rank of the model was not ready within {START_S:g} s.")
            time.sleep(_LOOK_S)

    def _death(self, error: RankDied) -> RankDied:
        """Returns an error that names the rank, and ends the others."""
        until = time.monotonic() + 1.0
        while all(each.poll() is None for each in self._processes) and time.monotonic() < until:
            time.sleep(_LOOK_S)  # its sockets close before it can be waited for
        count = len(self._processes) + 1
        ended = [(at, each.returncode) for at, each in enumerate(self._processes, 1) if each.returncode is not None]
        self._end()
        if not ended:
            return error
        at, code = ended[0]
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return RankDied(f"Rank {at} of the model's ranks 0 to {count - 1} ended {how}.")


def _end_with(process: subprocess.Popen[bytes], closing: threading.Event) -> None:
    """Ends this process when that of a rank does, though no step shows it, so that its supervisor starts all again."""
    process.wait()
    if not closing.is_set():
        log.error("a rank of the model ended with exit code %d, and so does the engine's process", process.returncode)
        os._exit(1)


def _kill(processes: Sequence[subprocess.Popen[bytes]], directory: str) -> None:
    for process in processes:
        process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    shutil.rmtree(directory, ignore_errors=True)
