"""Users, their API keys and the sessions that keys open: one SQLite file, which several processes may share.

So `ponder keys` changes them while the server runs, and every request sees the change. Of a key and of a session only a
hash is kept; both are long and random, so a fast hash is enough. Knows nothing of HTTP, nor of what a role may do.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.config import LOCAL_USER, BadSetting
from app.db.migrations import NewerDatabase, migrate
from app.db.quotas import USAGE_TABLE, USER_QUOTAS, Quota, Used, add_use, used
from app.db.sqlite import NameTaken, NotThere, insert, make_data_dir, new_id, row, rows

Role = Literal["operator", "user"]
KeyState = Literal["valid", "expired", "revoked", "disabled"]

NO_QUOTA = Quota()
SESSION_S = 30 * 24 * 3600.0  # that a page stays signed in
MAX_EXPIRES_S = 10 * 365 * 24 * 3600  # of a key
USER_ID = r"[a-z0-9][a-z0-9._-]{0,63}"
_SHOWN_CHARACTERS = 13  # of a key, to recognise it by
_USED_S = 60.0  # between two notes that a key was used

_STEPS = (
    (
        "CREATE TABLE users (id TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, created_at REAL NOT NULL)",
        """CREATE TABLE keys (
            id TEXT PRIMARY KEY, user TEXT NOT NULL REFERENCES users (id), name TEXT NOT NULL, prefix TEXT NOT NULL,
            hash TEXT NOT NULL UNIQUE, created_at REAL NOT NULL, expires_at REAL, revoked_at REAL, used_at REAL)""",
        """CREATE TABLE sessions (
            hash TEXT PRIMARY KEY, key_id TEXT NOT NULL REFERENCES keys (id) ON DELETE CASCADE,
            expires_at REAL NOT NULL) WITHOUT ROWID""",
        "CREATE INDEX sessions_key ON sessions (key_id)",
        # Owns everything where nobody has to say who they are: a key for this user opens it from then on.
        f"INSERT INTO users VALUES ('{LOCAL_USER}', '{LOCAL_USER}', 'operator', strftime('%s'))",
    ),
    (
        "ALTER TABLE keys ADD COLUMN scopes TEXT",  # with blanks between; null: all there are and will be
        "ALTER TABLE keys ADD COLUMN quota TEXT",  # as JSON
        "ALTER TABLE users ADD COLUMN disabled_at REAL",
        USAGE_TABLE,
    ),
    ("ALTER TABLE users ADD COLUMN quota TEXT",),  # as JSON, for all keys of the user
)


@dataclass(frozen=True, slots=True)
class Account:
    """A user. Times are seconds since the epoch, here and below."""

    id: str
    name: str
    role: Role
    created_at: float
    disabled_at: float | None = None  # since when none of the user's keys is valid
    quota: Quota = NO_QUOTA  # what their keys have that say nothing themselves

    @classmethod
    def of_row(cls, found: dict[str, Any]) -> Account:
        return cls(**{**found, "quota": Quota.read(found["quota"])})

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "quota": {name: getattr(self.quota, name) for name in USER_QUOTAS}}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, without the key: `prefix` is how it begins. It was used at `used_at` or up to a minute later."""

    id: str
    user: str
    name: str
    prefix: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    used_at: float | None
    scopes: tuple[str, ...] | None = None  # what it is for; None: everything
    quota: Quota = NO_QUOTA
    disabled: bool = False  # its user is

    @classmethod
    def of_row(cls, found: dict[str, Any]) -> ApiKey:
        scopes: str | None = found["scopes"]
        parts = {"scopes": None if scopes is None else tuple(scopes.split()), "quota": Quota.read(found["quota"])}
        return cls(**{**found, **parts, "disabled": bool(found["disabled"])})

    @property
    def state(self) -> KeyState:
        if self.revoked_at is not None:
            return "revoked"
        if self.disabled:
            return "disabled"
        return "expired" if self.expires_at is not None and self.expires_at <= time.time() else "valid"

    def told(self) -> dict[str, Any]:
        """As JSON, for those who may see whose keys there are."""
        told = asdict(self)
        del told["disabled"]
        return {**told, "scopes": self.scopes and list(self.scopes), "state": self.state}


class RoleDiffers(ValueError):
    """The user is there, with another role."""


class Accounts:
    """The file of one data directory. Every method may block, and may come from any thread."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._lock = threading.Lock()

    @classmethod
    def open(cls, data_dir: Path) -> Accounts:
        """
        Raises:
            BadSetting: the directory cannot be used; the message says why.
        """
        try:
            make_data_dir(data_dir)
            data_dir.chmod(0o700)
            db = sqlite3.connect(data_dir / "users.db", check_same_thread=False, timeout=30)
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # a key that was revoked must not come back with the power
            migrate(db, _STEPS)
        except (OSError, sqlite3.Error, NewerDatabase) as error:
            raise BadSetting(f"The users in {data_dir} cannot be read: {error}.") from None
        return cls(db)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def users(self) -> list[Account]:
        with self._lock:
            return [Account.of_row(each) for each in rows(self._db, "SELECT * FROM users ORDER BY id")]

    def user(self, id: str) -> Account:
        """
        Raises:
            NotThere: there is none.
        """
        with self._lock:
            return self._user(id)

    def create_user(self, id: str, name: str, role: Role) -> Account:
        """
        Raises:
            NameTaken: there is one with this id.
        """
        with self._lock, self._db:
            if row(self._db, "SELECT 1 FROM users WHERE id = ?", id) is not None:
                raise NameTaken(f"There is a user {id!r:.70} already; choose another id.")
            return self._add(id, name, role)

    def change_user(
        self,
        id: str,
        *,
        name: str | None = None,
        role: Role | None = None,
        disabled: bool | None = None,
        quota: Quota | None = None,
    ) -> Account:
        """Changes a user; None leaves a field as it is. Every session of a disabled user ends.

        Raises:
            NotThere: there is none.
        """
        with self._lock, self._db:
            self._user(id)
            change = "UPDATE users SET name = coalesce(?, name), role = coalesce(?, role) WHERE id = ?"
            self._db.execute(change, [name, role, id])
            if quota is not None:
                self._db.execute("UPDATE users SET quota = ? WHERE id = ?", [quota.stored(), id])
            if disabled is False:
                self._db.execute("UPDATE users SET disabled_at = NULL WHERE id = ?", [id])
            if disabled:
                since = "UPDATE users SET disabled_at = coalesce(disabled_at, ?) WHERE id = ?"
                self._db.execute(since, [time.time(), id])
                over = "DELETE FROM sessions WHERE key_id IN (SELECT id FROM keys WHERE user = ?)"
                self._db.execute(over, [id])
            return self._user(id)

    def ensure_user(self, id: str, role: Role | None) -> Account:
        """The user, made if need be, by default as a `user`.

        Raises:
            RoleDiffers: there is one, with another role than is wanted.
        """
        with self._lock, self._db:
            try:
                found = self._user(id)
            except NotThere:
                return self._add(id, id, role or "user")
            if role not in (None, found.role):
                raise RoleDiffers(f"There is a user {id!r} already, whose role is {found.role}.")
            return found

    def keys_of(self, user: str | None = None) -> list[ApiKey]:
        """Of one user, or all, the newest first; those that are no longer valid too."""
        sql = f"SELECT {_KEY} FROM keys WHERE ?1 IS NULL OR user = ?1 ORDER BY created_at DESC, id"
        with self._lock:
            return [ApiKey.of_row(each) for each in rows(self._db, sql, user)]

    def create_key(
        self,
        user: str,
        name: str = "",
        expires_s: float | None = None,
        scopes: Sequence[str] | None = None,
        quota: Quota = NO_QUOTA,
    ) -> tuple[ApiKey, str]:
        """A new key, and its text, which cannot be had again.

        Raises:
            NotThere: there is no such user.
        """
        text, now = f"ponder_{secrets.token_hex(24)}", time.time()
        key = ApiKey(
            new_id("key"), user, name, text[:_SHOWN_CHARACTERS], now, None if expires_s is None else now + expires_s,
            None, None, None if scopes is None else tuple(scopes), quota,
        )  # fmt: skip
        with self._lock, self._db:
            key = replace(key, disabled=self._user(user).disabled_at is not None)
            given = {**asdict(key), "hash": hashed(text), "scopes": _joined(scopes), "quota": quota.stored()}
            del given["disabled"]
            insert(self._db, "keys", given)
        return key, text

    def change_key(self, id: str, *, name: str, scopes: Sequence[str] | None, quota: Quota) -> ApiKey:
        """
        Raises:
            NotThere: there is no such key.
        """
        with self._lock, self._db:
            change = "UPDATE keys SET name = ?, scopes = ?, quota = ? WHERE id = ?"
            self._db.execute(change, [name, _joined(scopes), quota.stored(), id])
            return self._key(id)

    def key(self, id: str) -> ApiKey:
        """
        Raises:
            NotThere: there is no such key.
        """
        with self._lock:
            return self._key(id)

    def used(self, key_id: str) -> Used:
        """Returns the usage of a key in this day and this month."""
        with self._lock:
            return used(self._db, key_id, time.time())

    def add_use(self, key_id: str, requests: int, tokens: int) -> None:
        """Count it."""
        with self._lock, self._db:
            add_use(self._db, key_id, requests, tokens, time.time())

    def revoke(self, id: str) -> ApiKey:
        """End a key, with the sessions that it opened. One that has ended stays as it is.

        Raises:
            NotThere: there is no such key.
        """
        with self._lock, self._db:
            self._db.execute("UPDATE keys SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?", [time.time(), id])
            self._db.execute("DELETE FROM sessions WHERE key_id = ?", [id])
            return self._key(id)

    def forget_key(self, id: str) -> None:
        """Take it out as if it had never been."""
        with self._lock, self._db:
            self._db.execute("DELETE FROM keys WHERE id = ?", [id])

    def find(self, text: str) -> tuple[Account, ApiKey] | None:
        """The key of this text and whose it is; valid or not, which `ApiKey.state` says. A valid one has been used."""
        with self._lock:
            found = row(self._db, f"SELECT {_KEY} FROM keys WHERE hash = ?", hashed(text))
            if found is None:
                return None
            key = ApiKey.of_row(found)
            self._note_use(key)
            return self._user(key.user), key

    def open_session(self, key_id: str) -> tuple[str, float]:
        """A session's token, which is not kept, and when it ends: in 30 days, or with its key."""
        token, now = secrets.token_urlsafe(32), time.time()
        with self._lock, self._db:
            self._db.execute("DELETE FROM sessions WHERE expires_at <= ?", [now])
            (until,) = self._db.execute("SELECT expires_at FROM keys WHERE id = ?", [key_id]).fetchone()
            ends = now + SESSION_S if until is None else min(until, now + SESSION_S)
            insert(self._db, "sessions", {"hash": hashed(token), "key_id": key_id, "expires_at": ends})
        return token, ends

    def session(self, token: str) -> tuple[Account, ApiKey, float] | None:
        """Returns the session's user, the key that opened it, and when it ends; None where it is over."""
        sql = "SELECT key_id, expires_at FROM sessions WHERE hash = ? AND expires_at > ?"
        with self._lock:
            held = row(self._db, sql, hashed(token), time.time())
            found = held and row(self._db, f"SELECT {_KEY} FROM keys WHERE id = ?", held["key_id"])
            if not held or not found or (key := ApiKey.of_row(found)).state != "valid":
                return None
            self._note_use(key)
            return self._user(key.user), key, held["expires_at"]

    def close_session(self, token: str) -> None:
        with self._lock, self._db:
            self._db.execute("DELETE FROM sessions WHERE hash = ?", [hashed(token)])

    def _user(self, id: str) -> Account:
        if (found := row(self._db, "SELECT * FROM users WHERE id = ?", id)) is None:
            raise NotThere("user", id)
        return Account.of_row(found)

    def _key(self, id: str) -> ApiKey:
        if (found := row(self._db, f"SELECT {_KEY} FROM keys WHERE id = ?", id)) is None:
            raise NotThere("key", id)
        return ApiKey.of_row(found)

    def _add(self, id: str, name: str, role: Role) -> Account:
        made = Account(id, name, role, time.time())
        insert(self._db, "users", {**asdict(made), "quota": made.quota.stored()})
        return made

    def _note_use(self, key: ApiKey) -> None:
        now = time.time()
        if key.state == "valid" and (key.used_at is None or now - key.used_at >= _USED_S):
            with self._db:
                self._db.execute("UPDATE keys SET used_at = ? WHERE id = ?", [now, key.id])


_KEY = (
    "id, user, name, prefix, created_at, expires_at, revoked_at, used_at, scopes, quota, "
    "(SELECT disabled_at IS NOT NULL FROM users WHERE users.id = keys.user) AS disabled"
)


def _joined(scopes: Sequence[str] | None) -> str | None:
    return None if scopes is None else " ".join(scopes)


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
