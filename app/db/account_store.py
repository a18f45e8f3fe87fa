"""Users, their API keys and the sessions that keys open: in one database, which several processes may share.

So `ponder keys` changes them while the server runs, and every request sees the change. Knows nothing of HTTP, nor of
what a role may do.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from sqlalchemy import Connection, bindparam, cast, delete, func, literal, select, update
from sqlalchemy.dialects.postgresql import insert as upsert  # SQLite's compiler takes it, too

from app.config import BadSetting
from app.db.accounts import NO_QUOTA, SESSION_S, Account, ApiKey, Role, RoleDiffers, hashed
from app.db.connection import insert, row, rows, transaction
from app.db.migrations import NewerDatabase, open_database
from app.db.quotas import Quota, RemoteUse, Used, day_of
from app.db.sqlite import STORAGE_ERRORS, NameTaken, NotThere, make_data_dir, new_id
from app.db.tables import BIG, keys, remote_use, sessions, usage, users

_SHOWN_CHARACTERS = 13  # of a key, to recognise it by
_USED_S = 60.0  # between two notes that a key was used

_DISABLED = select(users.c.disabled_at.is_not(None)).where(users.c.id == keys.c.user).scalar_subquery()
_KEYS = select(*(column for column in keys.c if column is not keys.c.hash), _DISABLED.label("disabled"))
_KEY = _KEYS.where(keys.c.id == bindparam("id"))
_KEY_OF_TEXT = _KEYS.where(keys.c.hash == bindparam("hash"))
_USER = select(users).where(users.c.id == bindparam("id"))
_NOTE_USE = update(keys).where(keys.c.id == bindparam("key")).values(used_at=bindparam("now"))
_SESSION = select(sessions.c.key_id, sessions.c.expires_at).where(
    sessions.c.hash == bindparam("hash"), sessions.c.expires_at > bindparam("now")
)
_TODAY = usage.c.day == bindparam("day")
_USED = select(
    cast(func.coalesce(func.sum(usage.c.requests).filter(_TODAY), 0), BIG).label("requests_today"),
    cast(func.coalesce(func.sum(usage.c.tokens).filter(_TODAY), 0), BIG).label("tokens_today"),
    cast(func.coalesce(func.sum(usage.c.tokens), 0), BIG).label("tokens_this_month"),
).where(usage.c.key_id == bindparam("key"), usage.c.day >= bindparam("first"))
_USED_BY_USERS = (
    select(keys.c.user, *_USED.selected_columns)
    .join_from(keys, usage, usage.c.key_id == keys.c.id)
    .where(usage.c.day >= bindparam("first"))
    .group_by(keys.c.user)
)
_ADDED = upsert(usage).from_select(
    ["key_id", "day", "requests", "tokens"],
    select(keys.c.id, bindparam("today", type_=usage.c.day.type), bindparam("count", type_=usage.c.requests.type),
           bindparam("spent", type_=usage.c.tokens.type)).where(keys.c.id == bindparam("key")),
)  # fmt: skip
_ADD_USE = _ADDED.on_conflict_do_update(
    index_elements=[usage.c.key_id, usage.c.day],
    set_={name: usage.c[name] + _ADDED.excluded[name] for name in ("requests", "tokens")},
)

_REMOTE = upsert(remote_use)
_ADD_REMOTE_USE = _REMOTE.on_conflict_do_update(
    index_elements=[remote_use.c.remote, remote_use.c.day],
    set_={name: remote_use.c[name] + _REMOTE.excluded[name] for name in ("requests", "prompt", "completion", "cost")},
)
_REMOTE_USE = select(*(column for column in remote_use.c if column is not remote_use.c.remote)).where(
    remote_use.c.remote == bindparam("remote"), remote_use.c.day >= bindparam("first")
)


class Accounts:
    """The users of one server. Every method may block, and may come from any thread."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self._lock = threading.Lock()

    @classmethod
    def open(cls, data_dir: Path, database: str | None = None) -> Accounts:
        """
        Args:
            database: the address of a PostgreSQL database; None: users.db in the directory.

        Raises:
            BadSetting: the directory or the database cannot be used; the message says why.
        """
        try:
            make_data_dir(data_dir)
            data_dir.chmod(0o700)
            db = open_database(database or data_dir / "users.db", "users", busy_timeout_s=30)
        except (OSError, *STORAGE_ERRORS, NewerDatabase) as error:
            place = data_dir if database is None else "the PostgreSQL database"
            raise BadSetting(f"The users in {place} cannot be read: {error}.") from None
        return cls(db)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def users(self) -> list[Account]:
        with self._reading():
            return [Account.of_row(each) for each in rows(self._db, select(users).order_by(users.c.id))]

    def user(self, id: str) -> Account:
        """
        Raises:
            NotThere: there is none.
        """
        with self._reading():
            return self._user(id)

    def create_user(self, id: str, name: str, role: Role) -> Account:
        """
        Raises:
            NameTaken: there is one with this id.
        """
        with self._writing():
            if row(self._db, _USER, id=id) is not None:
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
        with self._writing():
            found = self._user(id)
            changes: dict[str, object] = {"name": name, "role": role, "quota": quota and quota.stored()}
            changes = {field: value for field, value in changes.items() if value is not None}
            if disabled is not None:
                changes["disabled_at"] = (found.disabled_at or time.time()) if disabled else None
            if changes:
                self._db.execute(update(users).where(users.c.id == id).values(changes))
            if disabled:
                theirs = select(keys.c.id).where(keys.c.user == id)
                self._db.execute(delete(sessions).where(sessions.c.key_id.in_(theirs)))
            return self._user(id)

    def delete_user(self, id: str) -> None:
        """Deletes a user with the keys, their sessions and their usage.

        Raises:
            NotThere: there is none.
        """
        with self._writing():
            self._user(id)
            self._db.execute(delete(keys).where(keys.c.user == id))
            self._db.execute(delete(users).where(users.c.id == id))

    def ensure_user(self, id: str, role: Role | None) -> Account:
        """The user, made if need be, by default as a `user`.

        Raises:
            RoleDiffers: there is one, with another role than is wanted.
        """
        with self._writing():
            try:
                found = self._user(id)
            except NotThere:
                return self._add(id, id, role or "user")
            if role not in (None, found.role):
                raise RoleDiffers(f"There is a user {id!r} already, whose role is {found.role}.")
            return found

    def keys_of(self, user: str | None = None) -> list[ApiKey]:
        """Of one user, or all, the newest first; those that are no longer valid too."""
        found = _KEYS.order_by(keys.c.created_at.desc(), keys.c.id)
        if user is not None:
            found = found.where(keys.c.user == user)
        with self._reading():
            return [ApiKey.of_row(each) for each in rows(self._db, found)]

    def create_key(
        self,
        user: str,
        name: str = "",
        expires_s: float | None = None,
        scopes: Sequence[str] | None = None,
        quota: Quota = NO_QUOTA,
        models: Sequence[str] | None = None,
    ) -> tuple[ApiKey, str]:
        """A new key, and its text, which cannot be had again.

        Raises:
            NotThere: there is no such user.
        """
        text, now = f"ponder_{secrets.token_hex(24)}", time.time()
        key = ApiKey(
            new_id("key"), user, name, text[:_SHOWN_CHARACTERS], now, None if expires_s is None else now + expires_s,
            None, None, None if scopes is None else tuple(scopes), quota,
            models=None if models is None else tuple(models),
        )  # fmt: skip
        with self._writing():
            key = replace(key, disabled=self._user(user).disabled_at is not None)
            given = {**asdict(key), "hash": hashed(text), "scopes": _joined(scopes), "quota": quota.stored()}
            given["models"] = _stored_models(models)
            del given["disabled"]
            insert(self._db, keys, given)
        return key, text

    def limit_user(self, id: str, models: Sequence[str] | None) -> Account:
        """Has all keys of a user be for these models alone, as far as they are for them; None: for all.

        Raises:
            NotThere: there is no such user.
        """
        with self._writing():
            self._db.execute(update(users).where(users.c.id == id).values(models=_stored_models(models)))
            return self._user(id)

    def limit_key(self, id: str, models: Sequence[str] | None) -> ApiKey:
        """Has a key be for these models alone; None: for all.

        Raises:
            NotThere: there is no such key.
        """
        with self._writing():
            self._db.execute(update(keys).where(keys.c.id == id).values(models=_stored_models(models)))
            return self._key(id)

    def change_key(self, id: str, *, name: str, scopes: Sequence[str] | None, quota: Quota) -> ApiKey:
        """
        Raises:
            NotThere: there is no such key.
        """
        with self._writing():
            changes = {"name": name, "scopes": _joined(scopes), "quota": quota.stored()}
            self._db.execute(update(keys).where(keys.c.id == id).values(changes))
            return self._key(id)

    def key(self, id: str) -> ApiKey:
        """
        Raises:
            NotThere: there is no such key.
        """
        with self._reading():
            return self._key(id)

    def used(self, key_id: str) -> Used:
        """Returns the usage of a key in this day and this month."""
        day = day_of(time.time())
        with self._reading():
            return Used(**rows(self._db, _USED, key=key_id, day=day, first=f"{day[:8]}01")[0])

    def used_by_users(self) -> dict[str, Used]:
        """Returns the usage of all keys of each user in this day and this month; of those who used nothing, nothing."""
        day = day_of(time.time())
        with self._reading():
            found = rows(self._db, _USED_BY_USERS, day=day, first=f"{day[:8]}01")
        return {each.pop("user"): Used(**each) for each in found}

    def add_use(self, key_id: str, requests: int, tokens: int) -> None:
        """Count what a key has used; of a key that is gone, nothing."""
        with self._writing():
            self._db.execute(
                _ADD_USE, {"key": key_id, "today": day_of(time.time()), "count": requests, "spent": tokens}
            )

    def add_remote_use(self, remote: str, use: RemoteUse) -> None:
        """Counts what a remote model has used on a day."""
        with self._writing():
            self._db.execute(_ADD_REMOTE_USE, {"remote": remote, **asdict(use)})

    def remote_use(self, remote: str) -> list[RemoteUse]:
        """Returns what a remote model has used in this month, by day."""
        first = f"{day_of(time.time())[:8]}01"
        with self._reading():
            return [RemoteUse(**each) for each in rows(self._db, _REMOTE_USE, remote=remote, first=first)]

    def revoke(self, id: str) -> ApiKey:
        """End a key, with the sessions that it opened. One that has ended stays as it is.

        Raises:
            NotThere: there is no such key.
        """
        with self._writing():
            ended = func.coalesce(keys.c.revoked_at, literal(time.time(), keys.c.revoked_at.type))
            self._db.execute(update(keys).where(keys.c.id == id).values(revoked_at=ended))
            self._db.execute(delete(sessions).where(sessions.c.key_id == id))
            return self._key(id)

    def forget_key(self, id: str) -> None:
        """Take it out as if it had never been."""
        with self._writing():
            self._db.execute(delete(keys).where(keys.c.id == id))

    def find(self, text: str) -> tuple[Account, ApiKey] | None:
        """The key of this text and whose it is; valid or not, which `ApiKey.state` says. A valid one has been used."""
        with self._lock:
            with transaction(self._db):
                if (found := row(self._db, _KEY_OF_TEXT, hash=hashed(text))) is None:
                    return None
                key = ApiKey.of_row(found)
                user = self._user(key.user)
            self._note_use(key)
        return user, key

    def open_session(self, key_id: str) -> tuple[str, float]:
        """A session's token, which is not kept, and when it ends: in 30 days, or with its key."""
        token, now = secrets.token_urlsafe(32), time.time()
        with self._writing():
            self._db.execute(delete(sessions).where(sessions.c.expires_at <= now))
            until = self._key(key_id).expires_at
            ends = now + SESSION_S if until is None else min(until, now + SESSION_S)
            insert(self._db, sessions, {"hash": hashed(token), "key_id": key_id, "expires_at": ends})
        return token, ends

    def session(self, token: str) -> tuple[Account, ApiKey, float] | None:
        """Returns the session's user, the key that opened it, and when it ends; None where it is over."""
        with self._lock:
            with transaction(self._db):
                held = row(self._db, _SESSION, hash=hashed(token), now=time.time())
                found = held and row(self._db, _KEY, id=held["key_id"])
                if not held or not found or (key := ApiKey.of_row(found)).state != "valid":
                    return None
                user = self._user(key.user)
            self._note_use(key)
        return user, key, held["expires_at"]

    def close_session(self, token: str) -> None:
        with self._writing():
            self._db.execute(delete(sessions).where(sessions.c.hash == hashed(token)))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, transaction(self._db):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, transaction(self._db, immediate=True):  # what is read first still holds when it is written
            yield

    def _user(self, id: str) -> Account:
        if (found := row(self._db, _USER, id=id)) is None:
            raise NotThere("user", id)
        return Account.of_row(found)

    def _key(self, id: str) -> ApiKey:
        if (found := row(self._db, _KEY, id=id)) is None:
            raise NotThere("key", id)
        return ApiKey.of_row(found)

    def _add(self, id: str, name: str, role: Role) -> Account:
        made = Account(id, name, role, time.time())
        insert(self._db, users, {**asdict(made), "quota": made.quota.stored()})
        return made

    def _note_use(self, key: ApiKey) -> None:
        now = time.time()
        if key.state == "valid" and (key.used_at is None or now - key.used_at >= _USED_S):
            with transaction(self._db, immediate=True):
                self._db.execute(_NOTE_USE, {"key": key.id, "now": now})


def _joined(scopes: Sequence[str] | None) -> str | None:
    return None if scopes is None else " ".join(scopes)


def _stored_models(models: Sequence[str] | None) -> str | None:
    return None if models is None else json.dumps(models)
