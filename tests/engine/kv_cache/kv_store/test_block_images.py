"""Images of blocks within budgets: against a model of one dictionary, on disk across restarts, and when disks fail."""

from __future__ import annotations

import errno
import random
import threading
from collections import OrderedDict
from pathlib import Path

import pytest

from engine.errors import InvalidParameter
from engine.kv_cache.disk_tier import DiskTier
from engine.kv_cache.kv_store.block_images import BlockImages
from engine.kv_cache.snapshot import HEADER_BYTES, header

LAYOUT, OTHER = b"a layout of tests", b"another layout...."
LAYOUTS = LAYOUT[:16], OTHER[:16]
NBYTES = 100
SIZE = NBYTES + HEADER_BYTES


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def image(number: int, layout: bytes = LAYOUTS[0], nbytes: int = NBYTES) -> bytes:
    payload = ((layout + digest(number)) * (nbytes // 32 + 1))[:nbytes]
    return header(layout, digest(number), payload) + payload


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("disk", [0, 7], ids=["memory", "memory and disk"])
def test_a_thousand_operations_do_what_a_dictionary_in_order_of_use_does(disk: int, seed: int, tmp_path: Path) -> None:
    """The model: the blocks in memory are the last ones used; with a disk, those that memory gave up may be there."""
    rows, chance = 5, random.Random(seed)
    images = BlockImages(rows * SIZE + 3, disk * SIZE, tmp_path if disk else None)
    model: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
    gone = set[tuple[bytes, int]]()
    for _ in range(1000):
        key = chance.choice(LAYOUTS), chance.randrange(16)
        layout, number = key
        operation = chance.choice(["put", "get", "get", "exists"])
        if operation == "put":
            assert images.put(layout, digest(number), image(number, layout))
            model[key] = image(number, layout)
            model.move_to_end(key)
        elif operation == "exists":
            there = images.exists(layout, digest(number))
            assert there == (key in model) or (disk and there)
            if key in model:
                model.move_to_end(key)
        else:
            found = images.get(layout, digest(number))
            assert found == model.get(key) or (disk and key in gone and found == image(number, layout))
            if found is not None:
                model[key] = found
                model.move_to_end(key)
        while len(model) > rows:
            gone.add(model.popitem(last=False)[0])
        images.check()
    stats = images.stats()
    assert stats.memory_blocks == rows and stats.evicted > 100
    assert (stats.hits_disk > 20 and 0 < stats.disk_blocks <= disk) if disk else not stats.disk_blocks
    images.close(1.0)


def test_what_was_used_least_recently_leaves_first_and_comes_back_from_disk(tmp_path: Path) -> None:
    images = BlockImages(2 * SIZE, 10 * SIZE, tmp_path)
    for number in (1, 2):
        images.put(LAYOUTS[0], digest(number), image(number))
    assert images.exists(LAYOUTS[0], digest(1))  # used: 2 leaves first
    images.put(LAYOUTS[0], digest(3), image(3))
    assert images.stats().written == 1 and images.stats().disk_blocks == 1
    assert images.get(LAYOUTS[0], digest(1)) == image(1) and images.stats().hits_disk == 0
    assert images.get(LAYOUTS[0], digest(2)) == image(2) and images.stats().hits_disk == 1
    images.close(0.0)


def test_a_block_of_one_layout_is_not_found_in_another() -> None:
    images = BlockImages(10 * SIZE)
    images.put(LAYOUTS[0], digest(1), image(1))
    assert not images.exists(LAYOUTS[1], digest(1)) and images.get(LAYOUTS[1], digest(1)) is None


@pytest.mark.parametrize("nbytes", [NBYTES + 1, 11 * SIZE])
def test_blocks_of_another_size_or_larger_than_the_memory_are_refused(nbytes: int) -> None:
    images = BlockImages(10 * SIZE)
    images.put(LAYOUTS[0], digest(1), image(1))
    layout = LAYOUTS[0] if nbytes == NBYTES + 1 else LAYOUTS[1]
    assert not images.put(layout, digest(2), image(2, layout, nbytes)) and images.stats().refused == 1
    images.check()


def test_a_store_that_was_closed_is_found_again_the_most_recently_used_first(tmp_path: Path) -> None:
    images = BlockImages(8 * SIZE, 4 * SIZE, tmp_path)
    for number in range(8):
        images.put(LAYOUTS[0], digest(number), image(number))
    images.close(10.0)
    again = BlockImages(8 * SIZE, 4 * SIZE, tmp_path)
    assert [again.get(LAYOUTS[0], digest(number)) for number in range(8)] == [None] * 4 + [
        image(number) for number in range(4, 8)
    ]
    again.check()
    again.close(0.0)
    smaller = BlockImages(8 * SIZE, 2 * SIZE, tmp_path)  # files beyond a smaller budget are removed
    assert smaller.stats().disk_blocks == 2
    smaller.check()
    smaller.close(0.0)
    assert len([each for each in tmp_path.rglob("*") if each.is_file() and each.name != "lock"]) == 2


def test_a_directory_is_of_one_store_at_a_time(tmp_path: Path) -> None:
    images = BlockImages(SIZE, SIZE, tmp_path)
    with pytest.raises(InvalidParameter, match="is used by another store; accepted"):
        BlockImages(SIZE, SIZE, tmp_path)
    images.close(0.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParameter, match="cannot be used"):
        BlockImages(SIZE, SIZE, tmp_path / "file" / "below")


@pytest.mark.parametrize("how", ["damaged", "cut short", "removed"])
def test_a_file_that_is_not_whole_is_a_miss_and_is_forgotten(how: str, tmp_path: Path) -> None:
    images = BlockImages(SIZE, 9 * SIZE, tmp_path)
    for number in (1, 2):
        images.put(LAYOUTS[0], digest(number), image(number))
    (file,) = tmp_path.rglob(digest(1).hex())
    data = file.read_bytes()
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if how == "cut short" else data[:-1] + b"!")
    assert images.get(LAYOUTS[0], digest(1)) is None
    assert not images.exists(LAYOUTS[0], digest(1)) and images.stats().bad == int(how != "removed")
    images.check()
    images.close(0.0)


def test_an_image_that_was_damaged_in_memory_is_not_written(tmp_path: Path) -> None:
    images = BlockImages(SIZE, 9 * SIZE, tmp_path)
    images.put(LAYOUTS[0], digest(1), image(1))
    images._memory[LAYOUTS[0], digest(1)] = image(1)[:-1] + b"!"
    images.put(LAYOUTS[0], digest(2), image(2))
    assert (images.stats().bad, images.stats().written) == (1, 0) and not images.exists(LAYOUTS[0], digest(1))
    images.check()
    images.close(0.0)


def test_a_disk_that_fails_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, tried = [0.0], [0]

    def full(*_: object) -> None:
        tried[0] += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskTier, "write", full)
    images = BlockImages(SIZE, 9 * SIZE, tmp_path, clock=lambda: now[0])
    for number in range(4):
        images.put(LAYOUTS[0], digest(number), image(number))
    assert tried[0] == 1 and images.stats().dropped == 3 and images.stats().disk_bytes == 0
    now[0] = 31.0
    monkeypatch.undo()
    images.put(LAYOUTS[0], digest(9), image(9))
    assert images.stats().written == 1
    images.check()
    images.close(0.0)


def test_many_threads_never_have_more_than_the_budget(tmp_path: Path) -> None:
    images = BlockImages(4 * SIZE, 6 * SIZE, tmp_path)
    wrong: list[object] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(300):
            number = chance.randrange(12)
            if chance.random() < 0.5:
                images.put(LAYOUTS[0], digest(number), image(number))
            elif (found := images.get(LAYOUTS[0], digest(number))) not in (None, image(number)):
                wrong.append(found)
            stats = images.stats()
            if stats.memory_bytes > stats.memory_bytes_total or stats.disk_bytes > stats.disk_bytes_total:
                wrong.append(stats)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    images.check()
    images.close(5.0)
    assert (
        sum(each.stat().st_size for each in tmp_path.rglob("*") if each.name != "lock" and each.is_file()) <= 6 * SIZE
    )
