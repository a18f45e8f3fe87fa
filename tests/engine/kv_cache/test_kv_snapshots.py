"""Sequences that survive their engine: they continue elsewhere with the same tokens, and bad snapshots are refused."""

from __future__ import annotations

import dataclasses
import errno
import zlib
from pathlib import Path

import msgspec
import pytest

from engine import GREEDY, BadSnapshot, Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.core.request import SequenceState
from engine.kv_cache.allocation import allocate, blocks_of
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.disk_tier import DiskTier
from engine.kv_cache.snapshot import _HEADER, MAGIC, Snapshot, packed, unpacked
from tests.engine.fake import FakeRunner
from tests.engine.kv_below import Told, tiers_below
from tests.engine.kv_cache.test_kv_tiers import config, prompt

MODEL = b"a model's digest"
TOLD = Snapshot("alice", 1, (3, 4, 5), b"\0\0\1", 7, 2, 2)
DRAWN = Span(Sampling(temperature=1.0, seed=5, frequency_penalty=0.5), max_tokens=6, ignore_eos=True)
LONG = Span(GREEDY, max_tokens=13, ignore_eos=True)


def on_disk(model: Path, directory: Path) -> EngineConfig:
    return config(model, kv_blocks=64, kv_disk_bytes=64 << 20, kv_dir=str(directory))


def test_a_snapshot_is_read_as_it_was_written() -> None:
    assert unpacked(packed(TOLD, MODEL), MODEL) == TOLD


def test_one_from_before_there_were_adapters_is_read() -> None:
    body = msgspec.msgpack.encode((*msgspec.msgpack.decode(packed(TOLD, MODEL)[_HEADER.size :])[:-1],))
    written = _HEADER.pack(MAGIC, 2, zlib.crc32(body), len(body)) + body
    assert unpacked(written, MODEL) == TOLD
    told = dataclasses.replace(TOLD, adapter=("sql", "00ff"))
    assert unpacked(packed(told, MODEL), MODEL) == told


def test_every_cut_and_every_flipped_byte_is_refused() -> None:
    data = packed(TOLD, MODEL)
    damaged = [data[:at] for at in range(len(data))]
    damaged += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for each in (*damaged, data + b"\0", b"", b"no snapshot at all, and longer than a header"):
        with pytest.raises(BadSnapshot, match="accepted"):
            unpacked(each, MODEL)


def test_a_snapshot_of_another_model_or_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(BadSnapshot, match="another model"):
        unpacked(packed(TOLD, MODEL), b"another digest..")
    with pytest.raises(BadSnapshot, match="add up"):
        unpacked(packed(dataclasses.replace(TOLD, tail=4), MODEL), MODEL)


@pytest.mark.parametrize(
    ("model", "windows"),
    [
        *((model, 0) for model in ("random_model", "random_latent", "random_gemma4", "random_hybrid")),
        ("random_llama4", 3 * 1),  # groups, and their blocks from the last multiple of 24 on
        ("random_windows", 5 * 7),  # and those of the 24 tokens before the next
    ],
)
async def test_a_sequence_goes_on_after_a_restart_where_it_was_and_reads_nothing_again(
    model: str, windows: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(model)
    async with await Engine.start(on_disk(path, tmp_path)) as engine:
        seq = await engine.open(prompt(0, 37), tenant="alice")
        await seq.generate_all(LONG)
        snapshot = await seq.snapshot()
        expected = [(await seq.generate_all(DRAWN)).token_ids, (await seq.fork()[0].generate_all(DRAWN)).token_ids]
    async with await Engine.start(on_disk(path, tmp_path)) as engine:
        with pytest.raises(BadSnapshot, match="another tenant"):
            await engine.resume(snapshot)
        seq = await engine.resume(snapshot, tenant="alice")
        first = await seq.generate_all(DRAWN)
        assert [first.token_ids, (await seq.fork()[0].generate_all(DRAWN)).token_ids] == expected
        assert first.cached_tokens == 37 + 13 - 1
        assert (await engine.stats()).tiers.disk_hit_blocks == 13 + windows


def test_blocks_that_a_sequence_has_lost_go_to_the_disk_with_its_snapshot(tmp_path: Path) -> None:
    pool, worker = BlockPool(2), Told()
    tiers, disk = tiers_below(pool, FakeRunner(pool, 4), worker, rows=2, directory=tmp_path, files=4)
    seq = SequenceState(1, prompt(0, 13), b"root", 1)
    allocate(seq, 8, pool, 4)
    for index, block in enumerate(seq.table):
        pool.publish(block, seq.digest(index, 4), seq.root)
    pool.release(seq.drop_kv())
    pool.release([pool.allocate()])  # evicts one of the two
    tiers.save(tiers.saves())
    tiers.ran()
    assert disk is not None and not disk.files()
    tiers.keep(blocks_of(seq, 4, tiers), seq.root, seq.priority)
    worker.work()
    assert len(disk.files()) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "of another model"])
async def test_damaged_files_cost_time_and_never_an_answer(
    random_model: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with await Engine.start(on_disk(random_model, tmp_path)) as engine:
        seq = await engine.open(prompt(1, 37))
        await seq.generate_all(LONG)
        snapshot = await seq.snapshot()
        expected = (await seq.generate_all(LONG)).token_ids
    files = sorted(path for path in tmp_path.glob("*/*/*") if path.is_file())
    for path in files:
        image = path.read_bytes()
        match damage:
            case "cut":
                path.write_bytes(image[:-1])
            case "flipped":
                path.write_bytes(image[:-1] + bytes([image[-1] ^ 1]))
            case "of another model":
                path.write_bytes(image[:12] + bytes(16) + image[28:])
            case _:
                path.unlink()
    async with await Engine.start(on_disk(random_model, tmp_path)) as engine:
        seq = await engine.resume(snapshot)
        assert (await seq.generate_all(LONG)).token_ids == expected
        stats = await engine.stats()
        told = damage in ("flipped", "of another model")  # the others are not there at all
        assert (stats.tiers.bad_blocks > 0) is told and ("not used, and removed" in caplog.text) is told
        assert stats.tiers.disk_hit_blocks == 0
        engine._core.check()


async def test_another_engine_cannot_have_the_same_directory(random_model: Path, tmp_path: Path) -> None:
    async with await Engine.start(on_disk(random_model, tmp_path)):
        with pytest.raises(InvalidParameter, match="used by another engine"):
            await Engine.start(on_disk(random_model, tmp_path))
    async with await Engine.start(on_disk(random_model, tmp_path)):
        assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


async def test_a_full_disk_is_told_and_changes_no_answer(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: DiskTier, *arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskTier, "write", full)
    async with await Engine.start(on_disk(random_model, tmp_path)) as engine:
        texts = [prompt(at % 3, 60 + at) for at in range(12)]
        answers = []
        for tokens in texts:
            async with await engine.open(tokens) as seq:
                answers.append((await seq.generate_all(LONG)).token_ids)
        stats = await engine.stats()
        engine._core.check()
    assert stats.tiers.failed_writes > 0 and stats.tiers.disk_bytes == 0 and "is full" in caplog.text
    async with await Engine.start(config(random_model, kv_blocks=64, prefix_cache=False)) as fresh:
        for tokens, ids in zip(texts, answers, strict=True):
            async with await fresh.open(tokens) as seq:
                assert (await seq.generate_all(LONG)).token_ids == ids
