"""Files that survive the loss of power: written whole and synced, and read only as they were written.

A record is a JSON object with its own digest. Knows nothing of the files' content.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # a JSON object: its reader knows the fields


class Damaged(ValueError):
    """A file is not as it was written; the message names it and the fault."""


def sync_file(path: Path) -> None:
    """Returns once the file's bytes are on the disk; its name needs `sync_folder`."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Returns once the names in a folder are on the disk: a new file without it may be gone after a loss of power."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_folder(path: Path, mode: int = 0o700) -> None:
    """Make a folder and those above it, each of which is there after a loss of power too."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for each in reversed(missing):
        sync_folder(each.parent)


def put_in_place(partial: Path, path: Path) -> None:
    """Sync a file that was written and give it a name, in place of the file or folder that has it."""
    sync_file(partial)
    if path.is_dir():
        clear_away(path)
    os.replace(partial, path)
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Writes all of `data` or leaves the file as it was, at any failure. Readable by its owner alone."""
    partial = path.with_suffix(".partial")
    clear_away(partial)
    try:
        partial.touch(mode=0o600)
        partial.write_bytes(data)
        put_in_place(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Write a JSON object beside its digest."""
    write_whole(path, json.dumps({"record": dict(record), "sha256": _of_record(record)}).encode())


def read_record(path: Path) -> Record:
    """
    Raises:
        FileNotFoundError: there is none.
        Damaged: it is not as `write_record` wrote it, or something else wrote it.
    """
    try:
        held = json.loads(path.read_text("utf-8"))
        record, digest = held["record"], held["sha256"]
    except FileNotFoundError:
        raise
    except (KeyError, TypeError):
        raise Damaged(f"{path.name} has no digest; an earlier version may have written it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} cannot be read: {str(error) or type(error).__name__}") from None
    if not isinstance(record, dict) or _of_record(record) != digest:
        raise Damaged(f"{path.name} does not match its digest")
    return record


def _of_record(record: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's bytes.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def clear_away(path: Path) -> None:
    """Delete a file, a link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
