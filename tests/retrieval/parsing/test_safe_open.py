"""Files opened below a folder: no link is followed, wherever it stands on the way."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from retrieval.parsing import safe_open


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "inner").mkdir(parents=True)
    (tmp_path / "root" / "inner" / "a.txt").write_text("inside")
    (tmp_path / "secret.txt").write_text("outside")
    (tmp_path / "root" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "root" / "way").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "root" / "pipe")
    return tmp_path / "root"


def open_below(folder: Path) -> int:
    """The descriptors of this process that lead to the folder or below it; other threads may have any elsewhere."""
    paths = [folder, *(Path(at, name) for at, folders, names in os.walk(folder) for name in folders + names)]
    there, found = {(each.lstat().st_dev, each.lstat().st_ino) for each in paths}, 0
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed since
            stat = os.fstat(int(number))
            found += (stat.st_dev, stat.st_ino) in there
    return found


def test_a_file_below_the_root_is_opened(root: Path) -> None:
    with safe_open.opened(root / "inner" / "a.txt", root) as path:
        assert path.read_text() == "inside" and path.read_text() == "inside"
        assert open_below(root) > 0
    assert open_below(root) == 0


def test_an_open_file_stays_itself_whatever_takes_its_name(root: Path) -> None:
    with safe_open.opened(root / "inner" / "a.txt", root) as path:
        (root / "inner" / "a.txt").unlink()
        (root / "inner" / "a.txt").symlink_to(root.parent / "secret.txt")
        assert path.read_text() == "inside"


def test_the_root_itself_may_stand_behind_a_link(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    with safe_open.opened(root.parent / "alias" / "inner" / "a.txt", root.parent / "alias") as path:
        assert path.read_text() == "inside"


@pytest.mark.parametrize("name", ["link.txt", "way/secret.txt", "../secret.txt", "inner/../../secret.txt", "pipe"])
def test_links_and_what_is_no_file_are_refused(root: Path, name: str) -> None:
    with pytest.raises(OSError, match="Links are not followed") as refused:
        safe_open.descriptor(root / name, root)
    assert refused.value.errno == errno.ELOOP and open_below(root.parent) == 0


def test_a_file_elsewhere_is_refused(root: Path) -> None:
    with pytest.raises(OSError, match="Links are not followed"):
        safe_open.descriptor(root.parent / "secret.txt", root)


def test_an_absent_file_is_told_by_its_path(root: Path) -> None:
    with pytest.raises(FileNotFoundError) as refused:
        safe_open.descriptor(root / "none.txt", root)
    assert refused.value.filename == str(root / "none.txt")
