"""Sequences that outlive their server: written to one file when it stops, and taken up when it starts again.

The file has each one's snapshot and lease; K/V is in the engine's disk tier, where it has one, or is read again. It is
read once: a server that was killed leaves none, since an older file lacks its sequences' later tokens. Knows nothing of
HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from app.errors import ApiError
from engine.errors import EngineError
from retrieval.durable import sync_folder, write_whole

if TYPE_CHECKING:
    from app.answering.model_registry import ModelRegistry
    from app.sequences.leased import LeasedSequence
    from app.sequences.registry import Sequences

KEEPING_S = 3.0  # for all of them: the stop of a server waits for it

log = logging.getLogger("ponder")


class PersistedSequences(msgspec.Struct):
    """One sequence. `scope` is the id of that with which it closes."""

    id: str
    user: str
    model: str
    created_at: float
    lease_s: float
    scope: str | None
    snapshot: bytes


def file_of(data_dir: Path) -> Path:
    return data_dir / "sequences.msgpack"


async def keep(sequences: Sequences, path: Path) -> int:
    """Write down all sequences but those on which something runs, as far as there is time; how many.

    A server's stop is not delayed: sequences that cannot be kept are logged.
    """
    kept: list[PersistedSequences] = []
    try:
        async with asyncio.timeout(KEEPING_S):
            for leased in sequences:
                if (one := await _kept(leased)) is not None:
                    kept.append(one)  # noqa: PERF401  # those before a timeout are kept
    except TimeoutError:
        log.warning("%d sequences are kept, and there was no time for the rest", len(kept))
    try:
        if kept:
            await asyncio.to_thread(_write, path, msgspec.msgpack.encode(kept))
    except OSError as error:
        log.error("no sequence is kept: %s cannot be written: %s", path, error)
        return 0
    return len(kept)


async def take_up(sequences: Sequences, models: ModelRegistry, path: Path) -> int:
    """Restore an earlier server's sequences; how many. Their leases begin anew."""
    try:
        data = await asyncio.to_thread(_read_once, path)
    except OSError as error:
        log.error("no sequence is taken up: %s cannot be read and removed: %s", path, error)
        return 0
    if data is None:
        return 0
    try:
        kept = msgspec.msgpack.decode(data, type=list[PersistedSequences])
    except msgspec.DecodeError:
        log.warning("%s is damaged: the sequences that it kept are lost", path)
        return 0
    taken = 0
    for one in kept:  # a scope stands before the sequences that close with it
        try:
            served = models.get(one.model)
            seq = await served.engine.resume(one.snapshot, tenant=one.user)
        except (ApiError, EngineError) as error:
            log.warning("the sequence %s cannot go on: %s", one.id, error)
            continue
        sequences.take_up(one.id, one.user, served, seq, one.lease_s, one.created_at, one.scope)
        taken += 1
    return taken


async def _kept(leased: LeasedSequence) -> PersistedSequences | None:
    try:
        with leased.call() as seq:
            snapshot = await seq.snapshot()
    except (ApiError, EngineError) as error:
        log.warning("the sequence %s is not kept: %s", leased.id, error)
        return None
    scope = None if leased.scope is None else leased.scope.id
    return PersistedSequences(
        leased.id, leased.user, leased.served.name, leased.created_at, leased.lease.length_s, scope, snapshot
    )


def _write(path: Path, data: bytes) -> None:
    write_whole(path, data)


def _read_once(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    path.unlink()
    sync_folder(path.parent)  # a file that came back with the power would be of sequences that went on since
    return data
