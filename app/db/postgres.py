"""PostgreSQL in SQLite's place: its connections, by psycopg, and the locks of the servers that use it.

Every transaction sees one moment (REPEATABLE READ). A writer whose reads must still hold when it writes takes turns
with all others by a lock of the schema, as with SQLite's BEGIN IMMEDIATE, so nothing fails and has to be tried again.
A sole server keeps all others out. Members share the database: each holds a lock of its own name, by which the others
see that it lives, and their transactions are SERIALIZABLE, so what was written for one server's thread holds for
several; one that comes too late is tried again (`Database`). Such locks are a connection's: PostgreSQL lets go of them
when that ends, and a connection made anew takes them again first. psycopg is imported where a database is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, text

from app.config import BadSetting

if TYPE_CHECKING:
    import psycopg

_LOCKS = 0x706F6E64  # "pond": the first of an advisory lock's two numbers; the second is the schema's
_SERVER = "hashtext('server of ' || current_schema())"
_WRITER = "hashtext('writer of ' || current_schema())"
_MEMBER = "hashtext('member ' || {name} || ' of ' || current_schema())"
_HELD = text(
    f"""SELECT name FROM unnest(CAST(:names AS text[])) AS name JOIN pg_locks ON locktype = 'advisory' AND granted
    AND classid::bigint = {_LOCKS} AND objid = {_MEMBER.format(name="name")}::oid AND objsubid = 2
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
)
_IDENTITY = text("SELECT system_identifier, current_database(), current_schema() FROM pg_control_system()")
# A machine that is gone without a word holds its lock for some 11 seconds (ignored by a Unix socket).
_KEEPALIVE = ("tcp_keepalives_idle = 5", "tcp_keepalives_interval = 2", "tcp_keepalives_count = 3")
_CONNECT_S = 10
MIN_VERSION = 140000
# PostgreSQL's texts have no NUL. A noncharacter (Unicode 23.7), which no text should have, stands before what it means.
_ESCAPE, _NUL = "\ufdd0", "\ufdd1"


def postgres_engine(address: str, busy_timeout_s: float, *, sole: bool, member: str | None = None) -> Engine:
    """Returns the source of connections to a database, without connecting.

    Args:
        address: postgresql://user:password@host:port/name, as libpq takes it.
        busy_timeout_s: seconds to wait for another's lock.
        sole: a connection keeps all others out that are `sole` or members.
        member: the name of one of several servers; None where it is the only one, or takes no part.

    Raises:
        BadSetting: psycopg is not installed.
    """
    try:
        import psycopg
    except ImportError as error:
        raise BadSetting(
            f"The driver of PostgreSQL cannot be loaded ({error}); accepted: a Ponder that is installed with it, by "
            "`pip install 'ponder[postgres]'`, or no --database: SQLite needs none."
        ) from None

    def connected() -> psycopg.Connection:
        return psycopg.connect(address, connect_timeout=_CONNECT_S, application_name="ponder")

    def set_up(db: psycopg.Connection, _: Any) -> None:  # Any: of SQLAlchemy's pool
        _escape_nul(db)
        with db.cursor() as cursor:
            _check(db, cursor)
            cursor.execute(f"SET lock_timeout = {int(busy_timeout_s * 1000)}")
            if sole:
                (free,) = cursor.execute(f"SELECT pg_try_advisory_lock({_LOCKS}, {_SERVER})").fetchone() or (False,)
                if not free:
                    raise OSError(
                        "another Ponder is using it; stop that one, or give another --database: several servers may "
                        "share one with --redis alone, each of them"
                    )
            if member is not None:
                _join(cursor, member)
        db.commit()

    engine = create_engine(
        "postgresql+psycopg://", creator=connected, poolclass=NullPool, hide_parameters=True,
        isolation_level="REPEATABLE READ" if member is None else "SERIALIZABLE",
    )  # fmt: skip
    event.listen(engine, "connect", set_up)
    event.listen(engine, "begin", _begin)
    return engine


def _check(db: psycopg.Connection, cursor: psycopg.Cursor) -> None:
    """
    Raises:
        OSError: the server is too old, or the database keeps its texts in another encoding.
    """
    if db.info.server_version < MIN_VERSION:
        raise OSError(f"it is PostgreSQL {db.info.server_version // 10000}; accepted: {MIN_VERSION // 10000} or newer")
    (encoding,) = cursor.execute("SHOW server_encoding").fetchone() or ("",)
    if encoding != "UTF8":
        raise OSError(f"its encoding is {encoding}; accepted: UTF8 (`createdb --encoding UTF8 --template template0`)")
    if cursor.execute("SELECT current_schema()").fetchone() == (None,):
        raise OSError("its search_path names no schema that is there; accepted: one with a schema for the tables")


def _join(cursor: psycopg.Cursor, member: str) -> None:
    """
    Raises:
        OSError: a sole server uses the database.
    """
    for setting in _KEEPALIVE:
        cursor.execute(f"SET {setting}".encode())
    (free,) = cursor.execute(f"SELECT pg_try_advisory_lock_shared({_LOCKS}, {_SERVER})").fetchone() or (False,)
    if not free:
        raise OSError("a Ponder without --redis is using it; stop that one, or give it the same --redis")
    named = _MEMBER.format(name="%s")
    # Shared, too: PostgreSQL may not know yet that the connection before this one was lost.
    cursor.execute(f"SELECT pg_advisory_lock_shared({_LOCKS}, {named})".encode(), (member,))


def members_connected(db: Connection, names: Sequence[str]) -> set[str]:
    """Returns those of the members whose connection holds its lock. In a transaction, as the one below."""
    return set(db.scalars(_HELD, {"names": list(names)}))


def database_identity(db: Connection) -> str:
    """Returns what tells a database's schema from all others, also those of other PostgreSQL servers."""
    return "/".join(map(str, db.execute(_IDENTITY).one()))


def _begin(db: Connection) -> None:
    if db.get_execution_options().get("immediate"):
        # Each statement sees what was committed before it: the lock's own, which may wait, must not choose the moment.
        db.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        db.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCKS}, {_WRITER})")


def _escape_nul(db: psycopg.Connection) -> None:
    """Has texts with NUL kept, and come back the same."""
    from psycopg.adapt import Buffer
    from psycopg.types.string import StrDumper, StrDumperUnknown, TextLoader

    def escaped(text: str) -> str:
        if "\0" in text or _ESCAPE in text:
            return text.replace(_ESCAPE, _ESCAPE + _ESCAPE).replace("\0", _ESCAPE + _NUL)
        return text

    class Dumper(StrDumper):
        def dump(self, obj: str) -> Buffer | None:
            return super().dump(escaped(obj))

    class UnknownDumper(StrDumperUnknown):
        def dump(self, obj: str) -> Buffer | None:
            return super().dump(escaped(obj))

    class Loader(TextLoader):
        def load(self, data: Buffer) -> str | bytes:
            text = super().load(data)
            if isinstance(text, str) and _ESCAPE in text:
                return _ESCAPE.join(part.replace(_ESCAPE + _NUL, "\0") for part in text.split(_ESCAPE + _ESCAPE))
            return text

    db.adapters.register_dumper(str, Dumper)
    db.adapters.register_dumper(str, UnknownDumper)  # the last one is taken where no type is asked for
    for kind in ("text", "varchar"):
        db.adapters.register_loader(kind, Loader)
