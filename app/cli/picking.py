"""Picks the files that `ponder index` takes from the paths it is given, and names them for the library.

Of a folder: everything below it in sorted order, but for what is hidden, what programs made for themselves, and what
cannot be read anyway. A name begins with the folder that was given, so files of different folders stay apart.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.config import BadSetting
from retrieval.parsing import sniff
from retrieval.parsing.parsed import Unreadable

MACHINE_MADE = frozenset({"node_modules", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Picked:
    """A file, and the name that it is kept under."""

    source: str
    path: Path
    bytes: int


@dataclass(slots=True)
class Picks:
    files: list[Picked] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    failed: list[tuple[str, str]] = field(default_factory=list)  # name and reason


def pick(paths: Sequence[Path]) -> Picks:
    """
    Raises:
        BadSetting: a path is not there, or two files would have one name.
    """
    picks = Picks()
    taken: dict[str, Path] = {}
    for given in paths:
        path = given.resolve()
        found: Iterator[tuple[Path, str]]
        if path.is_dir():
            found = ((file, file.relative_to(path.parent).as_posix()) for file in _below(path, picks))
        elif path.is_file():
            found = iter([(path, path.name)])
        else:
            raise BadSetting(f"There is no file or folder {given}.")
        for file, source in found:
            if taken.get(source) == file:
                continue
            if source in taken:
                raise BadSetting(
                    f"{taken[source]} and {file} would both be called {source!r}; index them in different collections, "
                    "or the folder that both are in."
                )
            taken[source] = file
            _take(picks, file, source, walked=path.is_dir())
    return picks


def _below(folder: Path, picks: Picks) -> Iterator[Path]:
    """The files below a folder. Links to folders are not followed: they may lead round in circles."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        picks.failed.append((str(folder), error.strerror or str(error)))
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in MACHINE_MADE:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), picks)
        elif entry.is_file():
            yield Path(entry.path)


def _take(picks: Picks, file: Path, source: str, *, walked: bool) -> None:
    try:
        source.encode()
        size = file.stat().st_size
        if walked and (reason := _unreadable(file, size)):
            picks.skipped[reason] += 1
            return
    except UnicodeEncodeError:
        shown = source.encode("utf-8", "replace").decode()
        picks.failed.append((shown, "Its name is not valid UTF-8. Rename it."))
    except OSError as error:
        picks.failed.append((source, error.strerror or str(error)))
    else:
        picks.files.append(Picked(source, file, size))


def _unreadable(file: Path, size: int) -> str | None:
    """Why a file is not even tried; None for one that is, be it that it then fails."""
    if not size:
        return "empty"
    try:
        sniff.media_type(file, file.name)
    except Unreadable as error:
        return "of a kind that is not read" if sniff.ACCEPTED in str(error) else None
    return None
