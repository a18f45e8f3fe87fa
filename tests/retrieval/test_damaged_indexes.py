"""Index files that were damaged by hand: the library opens, says what was wrong, and finds what it found before."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrieval import Library, Query
from retrieval.durable import read_record, write_record
from retrieval.index.publish import Text
from tests.retrieval.conftest import file_indexes
from tests.retrieval.words import WordEmbedder

pytestmark = pytest.mark.slow

WORDS = ["dam", "stone", "river", "bridge", "tower", "gate", "canal", "lock", "weir", "mill", "quarry", "barge"]


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zeroed(path: Path) -> None:
    path.write_bytes(b"\0" * max(1, path.stat().st_size))


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes() or b"x")
    at = random.Random(path.suffix).randrange(len(data))
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


def _noise(path: Path) -> None:
    path.write_bytes(random.Random(path.suffix).randbytes(path.stat().st_size + 7))


def _gone(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    (path / "inner").mkdir(parents=True)


WAYS: tuple[Callable[[Path], None], ...] = (_empty, _cut, _zeroed, _flipped, _noise, _gone, _folder)


Found = dict[tuple[str, int], Any]  # a word and a document: how it scored


def _found(folder: Path) -> Found:
    """Every document that a search for each word gives, with its cosine and what it scored."""
    found: Found = {}
    with Library.open(folder, WordEmbedder()) as opened:
        for word in WORDS:
            for hit in opened.search(Query("ana", f"the {word}", 30)).hits:
                # BM25 counts the lengths of deleted passages until their segment is merged.
                found[word, hit.passage.document] = pytest.approx((hit.dense, hit.score), abs=0.01)
        count = len(opened.store.database.rows("SELECT 1 FROM chunks"))
        assert len(file_indexes(opened).lexical) == len(file_indexes(opened).dense) == count
    return {key: found[key] for key in sorted(found)}


def _same(folder: Path, expected: Found) -> bool:
    found = _found(folder)
    return found.keys() == expected.keys() and all(found[key].expected == expected[key] for key in expected)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that was closed, with several segments, deleted chunks, and a dense index on disk."""
    folder = tmp_path_factory.mktemp("made") / "library"
    with Library.open(folder, WordEmbedder()) as opened:
        mine = opened.collection("ana").id
        drawn = random.Random(1)
        for turn in range(2):  # a segment each: tantivy merges eight
            texts = [Text(f"{turn}-{n}.md", " ".join(drawn.choices(WORDS, k=12))) for n in range(12)]
            opened.add("ana", mine, texts)
        opened.delete("ana", 2)
        opened.delete("ana", 9)
    return folder


def _files(folder: Path) -> list[Path]:
    found = sorted(path for path in (folder / "index").rglob("*") if path.is_file())
    return [path for path in found if not path.name.endswith(".lock")]


def test_every_damaged_index_file_is_made_again_and_searches_find_the_same(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(made, whole)
    undamaged = _found(whole)
    assert undamaged
    restarts = 0
    for undamaged_path in _files(whole):
        for way in WAYS:
            # A folder each: tantivy's threads may write into the one before for a moment after it was closed.
            folder = tmp_path / str(restarts)
            shutil.copytree(whole, folder)
            path = folder / undamaged_path.relative_to(whole)
            caplog.clear()
            with caplog.at_level(logging.WARNING, "ponder.retrieval"):
                way(path)
                assert _same(folder, undamaged), (path.name, way.__name__)
            # A flipped bit in the list of files that tantivy may delete makes it another list, which costs nothing.
            harmless = path.name == ".managed.json" and way is _flipped
            assert harmless or "is made again: " in caplog.text, (path.name, way.__name__)
            caplog.clear()
            restarts += 1
    assert restarts >= 50
    assert _same(folder, undamaged) and not caplog.text  # what was made again is kept


@pytest.mark.parametrize("part", ["index", "index/lexical"])
@pytest.mark.parametrize("put", ["nothing", "a file", "an empty folder", "a folder of others"])
def test_an_index_folder_that_is_none_is_made_again(made: Path, tmp_path: Path, part: str, put: str) -> None:
    folder = tmp_path / "library"
    shutil.copytree(made, folder)
    undamaged = _found(folder)
    (folder / part).rename(tmp_path / "removed")  # and not removed: tantivy may write in it for a moment yet
    if put == "a file":
        (folder / part).write_text("no folder")
    elif put != "nothing":
        (folder / part).mkdir()
    if put == "a folder of others":
        (folder / part / "other").mkdir()
        (folder / part / "meta.json").write_text("{}")
    assert _same(folder, undamaged)


def test_whole_files_of_an_earlier_state_are_not_trusted(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "library"
    shutil.copytree(made, folder)
    _found(folder)
    shutil.copytree(folder / "index", tmp_path / "earlier")
    with Library.open(folder, WordEmbedder()) as opened:
        opened.delete("ana", 5)
        opened.add("ana", opened.collection("ana").id, [Text("new.md", "quarry quarry barge")])
    now = _found(folder)
    (folder / "index").rename(tmp_path / "removed")
    shutil.copytree(tmp_path / "earlier", folder / "index")
    assert _same(folder, now)


def test_an_index_newer_than_the_documents_is_made_again(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "library"
    shutil.copytree(made, folder)
    before = _found(folder)
    shutil.copy(folder / "documents.db", tmp_path / "documents.db")
    with Library.open(folder, WordEmbedder()) as opened:
        opened.add("ana", opened.collection("ana").id, [Text("new.md", "quarry quarry barge")])
    shutil.copy(tmp_path / "documents.db", folder / "documents.db")
    assert _same(folder, before)
    assert "The lexical index is made again: it has" in caplog.text
    assert "The dense index is made again: it has" in caplog.text


def test_files_of_one_segment_in_the_place_of_anothers_are_noticed(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "library"
    shutil.copytree(made, folder)
    undamaged = _found(folder)
    stores = sorted((folder / "index/lexical").glob("*.term"))
    assert len(stores) > 1
    shutil.copy(stores[0], stores[1])
    assert _same(folder, undamaged)


def test_a_lexical_index_of_another_format_is_made_again(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "library"
    shutil.copytree(made, folder)
    undamaged = _found(folder)
    path = folder / "index/lexical/generation.json"
    write_record(path, {**read_record(path), "format": 0})
    assert _same(folder, undamaged)
    assert "has format 0" in caplog.text


def test_indexes_without_digests_are_made_again(made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "library"
    shutil.copytree(made, folder)
    undamaged = _found(folder)
    for path in (folder / "index/dense.json", folder / "index/lexical/generation.json"):
        path.write_text(json.dumps(read_record(path)))  # as earlier versions wrote it
    assert _same(folder, undamaged)
    assert caplog.text.count("has no digest") == 2
