"""`ponder backup`: a consistent copy of the data directory while a server runs, verified, and put back.

Databases are copied by SQLite's online backup, and checked; files are those that the copied database points to. Indexes
and caches are left out: they are made again. A manifest has the digest of every file. Putting a backup back deletes
nothing: replaced files are renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import importlib.metadata
import json
import os
import shutil
import sqlite3
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from app.config import BadSetting, Settings
from app.db.sqlite import DATABASES, RESTORING, damage_of, damaged, open_for_reading
from retrieval.durable import digest_of, make_folder, sync_file, sync_folder, write_whole

FORMAT = 1
MANIFEST = "manifest.json"
BACKUPS = "backups"
DOCUMENTS, FILES = "documents/documents.db", "documents/files"
# Paths that are made again, belong to a running server, or are backups themselves.
_LEFT_OUT = ("lock", "server.url", BACKUPS, RESTORING, "documents/lock", "documents/index", FILES, "kv", "constraints")
_ARCHIVES = (".tar.gz", ".tgz")
_TRIES = 3  # to catch the documents and their files at one moment
_READ = 1 << 20

Digests = dict[str, str]  # by path from the backup's folder


def create(to: Path | None, settings: Settings) -> None:
    """Make a backup and print where it is.

    Raises:
        BadSetting: there is nothing to copy, it can't be written there, or a database is damaged.
    """
    data_dir = settings.resolved_data_dir
    if not data_dir.is_dir():
        raise BadSetting(f"There is no data directory {data_dir}; name it with --data-dir.")
    target = to or data_dir / BACKUPS / f"ponder-{_stamp()}.tar.gz"
    if target.suffix in (".zst", ".xz", ".bz2", ".zip", ".tar", ".gz") and not target.name.endswith(_ARCHIVES):
        raise BadSetting(
            f"{target.name} is of no kind that is written; accepted: a name ending in .tar.gz, or a folder."
        )
    if target.exists():
        raise BadSetting(f"{target} is there already; choose another name.")
    partial = target.with_name(f".{target.name}.partial")
    try:
        make_folder(target.parent)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        try:
            made = _collect(data_dir, partial, target, all_files=settings.database is not None)
            _write_manifest(partial, made)
            if target.name.endswith(_ARCHIVES):
                _pack(partial, target)
            else:
                partial.rename(target)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, sqlite3.Error) as error:
        raise BadSetting(f"The backup {target} cannot be made: {error}.") from None
    print(target)
    if settings.database is not None:
        print(
            "It has no chats, runs and users: those are in PostgreSQL, whose pg_dump copies them, and so are the texts "
            "of documents; the files of documents are in it.",
            file=sys.stderr,
        )


def verify(path: Path) -> None:
    """Say that a backup is whole.

    Raises:
        BadSetting: it is not; the message names the fault.
    """
    files = _verified(path)
    print(f"{path} is whole: {files} files.")


def restore(path: Path | None, only: Sequence[str] | None, settings: Settings) -> None:
    """Put a backup in place and print the renamed files.

    Raises:
        BadSetting: it is damaged, a server runs, or something can't be written. Present files stay then.
    """
    data_dir = settings.resolved_data_dir
    source = path or _newest(data_dir)
    _verified(source)
    stage = data_dir / f".restoring-{_stamp()}"
    try:
        make_folder(data_dir)
        with _locked(data_dir):
            try:
                _unpack(source, stage)
                _verified(stage)  # as it lies here now
                (stage / MANIFEST).unlink()
                chosen = _chosen(stage, only)
                _sync_all(stage)
                write_whole(data_dir / RESTORING, str(source).encode())
                renamed = [line for name in chosen for line in _put_back(stage, data_dir, name)]
                sync_folder(data_dir)
                (data_dir / RESTORING).unlink()
                sync_folder(data_dir)
            finally:
                shutil.rmtree(stage, ignore_errors=True)
    except (OSError, tarfile.TarError) as error:
        raise BadSetting(f"The backup {source} cannot be put in place: {error}.") from None
    print(f"{data_dir} has {', '.join(chosen)} of {source.name}.")
    for line in renamed:
        print(f"Kept: {line}")


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


# Making one


def _collect(data_dir: Path, folder: Path, target: Path, *, all_files: bool) -> Digests:
    """Copy everything below `folder`. Returns the digests. `all_files`: of documents that another database points to.

    Raises:
        BadSetting: a database is damaged.
    """
    for path, reason in damaged(data_dir):
        raise _refused(path, reason)
    for path in _others(data_dir):
        if target not in (path, *path.parents) and folder not in path.parents:
            _copy(path, folder / path.relative_to(data_dir))
    for name in DATABASES:
        if (data_dir / name).is_file() and name != DOCUMENTS:
            _copy_database(data_dir / name, folder / name)
    if (data_dir / DOCUMENTS).is_file():
        for _ in range(_TRIES):
            _copy_database(data_dir / DOCUMENTS, folder / DOCUMENTS)
            # A file that is pointed to and not there was deleted meanwhile, or long ago by hand.
            names = _pointed_to(folder / DOCUMENTS)
            if len(names) == sum(_copy(data_dir / FILES / name, folder / FILES / name) for name in names):
                break
        for copied in (folder / FILES).glob("*"):
            if copied.name not in _pointed_to(folder / DOCUMENTS):
                copied.unlink()
    for path in (data_dir / FILES).glob("*") if all_files else ():
        _copy(path, folder / FILES / path.name)
    return {str(path.relative_to(folder)): digest_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _others(data_dir: Path) -> Iterator[Path]:
    """Files that are no databases and can't be made again."""
    for above, folders, names in os.walk(data_dir):
        here = Path(above).relative_to(data_dir)
        folders[:] = [name for name in folders if not _left_out(str(here / name))]
        yield from (Path(above) / name for name in names if not _left_out(str(here / name)))


def _left_out(name: str) -> bool:
    last = name.rpartition("/")[2]
    return (
        name in _LEFT_OUT
        or name in DATABASES
        or any(name == f"{database}{part}" for database in DATABASES for part in ("-wal", "-shm", "-journal"))
        or last.endswith(".partial")
        or last.startswith(".restoring-")
        or ".damaged-" in last
        or ".replaced-" in last
        or last == "__pycache__"
    )


def _copy(path: Path, to: Path) -> bool:
    """Copies a file unless it is copied already; returns whether it was there to copy."""
    if to.exists():
        return True
    make_folder(to.parent)
    try:
        with path.open("rb") as file, _new(to) as copy:
            shutil.copyfileobj(file, copy, _READ)
    except FileNotFoundError:
        to.unlink(missing_ok=True)
        return False
    return True


def _new(path: Path) -> IO[bytes]:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _copy_database(path: Path, to: Path) -> None:
    """One state of a database, even with writers meanwhile, in one file without a log.

    Raises:
        BadSetting: it is damaged.
    """
    make_folder(to.parent)
    to.unlink(missing_ok=True)
    to.touch(mode=0o600)
    try:
        with closing(open_for_reading(path)) as source, closing(sqlite3.connect(to)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
            found = [str(row[0]) for row in copy.execute("PRAGMA integrity_check(3)")]
        reason = None if found == ["ok"] else "; ".join(found)
    except sqlite3.Error as error:
        reason = str(error)
    if reason is not None:
        raise _refused(path, reason)


def _refused(path: Path, reason: str) -> BadSetting:
    return BadSetting(f"The database {path} is damaged: {reason:.300}. No backup is made; those there are stay.")


def _pointed_to(database: Path) -> set[str]:
    """The names of our files that documents and running jobs have."""
    with closing(open_for_reading(database)) as db:
        rows = db.execute(
            "SELECT file FROM documents WHERE owned AND file IS NOT NULL UNION SELECT path FROM job_files f "
            "JOIN jobs j ON j.id = f.job WHERE f.owned AND j.status = 'running'"
        ).fetchall()
    return {Path(row[0]).name for row in rows}


def _write_manifest(folder: Path, digests: Digests) -> None:
    try:
        version = importlib.metadata.version("ponder")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    manifest_fields = {"format": FORMAT, "ponder": version, "made_at": datetime.now(UTC).isoformat(), "sha256": digests}
    write_whole(folder / MANIFEST, json.dumps(manifest_fields, indent=1).encode())
    _sync_all(folder)


def _sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync_folder(path) if path.is_dir() else sync_file(path)
    sync_folder(folder)


def _pack(folder: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial.gz")
    partial.unlink(missing_ok=True)
    try:
        with _new(partial) as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
            archive.add(folder, arcname="", filter=_private)
        sync_file(partial)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


def _private(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


# Reading one


def _verified(path: Path) -> int:
    """Verifies a backup; returns how many files it has.

    Raises:
        BadSetting: it is no backup, or damaged.
    """
    try:
        held, found = _read_folder(path) if path.is_dir() else _read_archive(path)
        manifest: Any = json.loads(held)
        digests = manifest["sha256"]
        if manifest["format"] != FORMAT:
            raise BadSetting(f"{path} has format {manifest['format']!r:.20}; accepted: {FORMAT}.")
        items = set(digests.items())
    except FileNotFoundError as error:
        raise BadSetting(f"{path} is no backup: {Path(str(error.filename)).name} is not there.") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadSetting(f"The backup {path} is damaged: {str(error) or type(error).__name__}.") from None
    if wrong := sorted({name for name, _ in items ^ set(found.items())}):
        raise BadSetting(f"The backup {path} is damaged: {', '.join(wrong[:5])} differ from the manifest.")
    return len(found)


def _read_folder(folder: Path) -> tuple[bytes, Digests]:
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST]
    return (folder / MANIFEST).read_bytes(), {str(path.relative_to(folder)): digest_of(path) for path in files}


def _read_archive(path: Path) -> tuple[bytes, Digests]:
    held, found = b"", Digests()
    with gzip.open(path) as raw, tarfile.open(fileobj=raw, mode="r|") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is None:
                continue
            if member.name == MANIFEST:
                held = file.read()
            else:
                digest = hashlib.sha256()
                while data := file.read(_READ):
                    digest.update(data)
                found[member.name] = digest.hexdigest()
        while raw.read(_READ):  # its own checksum stands at the end
            pass
    return held, found


# Putting one back


def _newest(data_dir: Path) -> Path:
    found = sorted((data_dir / BACKUPS).glob("ponder-*")) if (data_dir / BACKUPS).is_dir() else []
    if not found:
        raise BadSetting(f"There is no backup in {data_dir / BACKUPS}; name one: `ponder backup restore PATH`.")
    return found[-1]


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Keep servers out meanwhile.

    Raises:
        BadSetting: one has it open.
    """
    with contextlib.ExitStack() as closing_all:
        for name in ("lock", "documents/lock"):
            if name != "lock" and not (data_dir / name).parent.is_dir():
                continue
            lock = closing_all.enter_context((data_dir / name).open("a+"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadSetting(f"A server or a command uses {data_dir}; stop it first.") from None
        yield


def _unpack(source: Path, stage: Path) -> None:
    stage.mkdir(mode=0o700)
    if source.is_dir():
        for path in source.rglob("*"):
            if path.is_file():
                _copy(path, stage / path.relative_to(source))
        return
    with tarfile.open(source, "r:gz") as archive:
        archive.extractall(stage, filter="data")
    for path in (stage, *stage.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def _chosen(stage: Path, only: Sequence[str] | None) -> list[str]:
    there = sorted(path.name for path in stage.iterdir())
    if unknown := set(only or ()) - set(there):
        raise BadSetting(f"--only is {', '.join(sorted(unknown))!r:.80}; accepted, of this backup: {', '.join(there)}.")
    return [name for name in there if only is None or name in only]


def _put_back(stage: Path, data_dir: Path, name: str) -> Iterator[str]:
    """Rename the present files, with their logs, and move the backup's into their place. Yields the renamed ones."""
    place = data_dir / name
    database = data_dir / DOCUMENTS if name == "documents" else place
    if place.exists() or any((data_dir / f"{name}{part}").exists() for part in ("-wal", "-shm")):
        is_damaged = f"{name}/documents.db" in DATABASES or name in DATABASES
        why = "damaged" if is_damaged and damage_of(database) is not None else "replaced"
        kept = f"{name}.{why}-{_stamp()}"
        number = 1
        while (data_dir / kept).exists():
            number += 1
            kept = f"{name}.{why}-{_stamp()}-{number}"
        for part in ("", "-wal", "-shm"):
            if (data_dir / f"{name}{part}").exists():
                (data_dir / f"{name}{part}").rename(data_dir / f"{kept}{part}")
        yield str(data_dir / kept)
    (stage / name).rename(place)
