"""`ponder keys`: API keys on the data directory, made, listed and revoked, also while a server runs on it.

Write access to the data directory is enough: no key is asked for. Knows nothing of servers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime

from rich.console import Console
from rich.table import Table

from app.auth import SCOPES
from app.config import BadSetting, Settings
from app.db.account_store import Accounts
from app.db.accounts import MAX_EXPIRES_S, USER_ID, ApiKey, Role, RoleDiffers
from app.db.quotas import MAX_DEADLINE_S, MAX_PRIORITY, QUOTAS, Quota
from app.db.sqlite import NotThere

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_NAME_CHARACTERS = 100
_MODELS_CHARACTERS = 10_000
_RANGES = {"priority": (-MAX_PRIORITY, MAX_PRIORITY), "deadline_s": (1, MAX_DEADLINE_S)}


def create(
    user: str,
    role: str | None,
    expires: str | None,
    name: str,
    scopes: Sequence[str] | None,
    quotas: Sequence[str] | None,
    models: str | None,
    as_json: bool,
    settings: Settings,
) -> None:
    """Make a key and print it: alone on the output, so that a script can take it.

    Raises:
        BadSetting: something of it is not accepted.
    """
    if re.fullmatch(USER_ID, user) is None:
        raise BadSetting(f"--user is {user!r:.80}; accepted: 1 to 64 small letters, digits, '.', '_' and '-'.")
    if len(name) > _NAME_CHARACTERS or not name.isprintable():
        raise BadSetting(f"--name is {name!r:.120}; accepted: a line of at most {_NAME_CHARACTERS} characters.")
    expires_s = None if expires is None else _seconds(expires)
    wanted, named = None if role is None else _role(role), _models(models)
    with _opened(settings) as accounts:
        try:
            account = accounts.ensure_user(user, wanted)
        except RoleDiffers as differs:
            raise BadSetting(
                f"{differs} Leave --role out; an operator changes roles on the page, or with PATCH /api/operator/users."
            ) from None
        key, text = accounts.create_key(user, name, expires_s, _scopes(scopes), _quota(Quota(), quotas), named)
    if as_json:
        print(json.dumps({"key": text, **key.told(), "role": account.role}, indent=2))
        return
    print(text)
    if sys.stderr.isatty():
        until = "does not expire" if key.expires_at is None else f"expires {_date(key.expires_at)}"
        print(f"A key of {user} ({account.role}); it {until}. It is not shown again.", file=sys.stderr)


def list_keys(as_json: bool, settings: Settings) -> None:
    """Print the keys' records, which do not contain the keys."""
    with _opened(settings) as accounts:
        keys, roles = accounts.keys_of(), {each.id: each.role for each in accounts.users()}
    if as_json:
        print(json.dumps({"keys": [{**each.told(), "role": roles[each.user]} for each in keys]}, indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("id", "key", "user", "role", "name", "for", "made", "expires", "last used", "state"):
        table.add_column(heading, overflow="fold")
    for each in keys:
        table.add_row(
            each.id, f"{each.prefix}…", each.user, roles[each.user], each.name, _limits(each), _date(each.created_at),
            _date(each.expires_at), _date(each.used_at), each.state,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 240, markup=False).print(table)


def change(
    id: str, scopes: Sequence[str] | None, quotas: Sequence[str] | None, models: str | None, settings: Settings
) -> None:
    """Change a key's scopes, quotas and models; those not given stay.

    Raises:
        BadSetting: something of it is not accepted, or there is no such key.
    """
    if not scopes and not quotas and models is None:
        raise BadSetting("There is nothing to change; accepted: --scope, --quota, --models, or some of them.")
    named = _models(models)
    with _opened(settings) as accounts:
        found = _named(accounts.keys_of(), id)
        try:
            key = accounts.key(found)
        except NotThere:
            raise _no_key(id) from None
        kept = key.scopes if not scopes else _scopes(scopes)
        changed = accounts.change_key(key.id, name=key.name, scopes=kept, quota=_quota(key.quota, quotas))
        if models is not None:
            changed = accounts.limit_key(key.id, named)
    print(f"{changed.prefix}… of {changed.user} is for {_limits(changed)}.")


def disable(user: str, disabled: bool, settings: Settings) -> None:
    """Make none of a user's keys valid, or all that are else.

    Raises:
        BadSetting: there is no such user.
    """
    with _opened(settings) as accounts:
        try:
            accounts.change_user(user, disabled=disabled)
        except NotThere:
            raise BadSetting(f"There is no user {user!r:.80}; `ponder keys list` has those with keys.") from None
    print(f"{user} is disabled: no key of theirs is valid." if disabled else f"{user} may use the server again.")


def revoke(id: str, settings: Settings) -> None:
    """End a key, by its id or by how it begins.

    Raises:
        BadSetting: there is none, or more than one.
    """
    with _opened(settings) as accounts:
        found = _named(accounts.keys_of(), id)
        try:
            revoked = accounts.revoke(found)
        except NotThere:
            raise _no_key(id) from None
    print(f"{revoked.prefix}… of {revoked.user} is revoked, and the sessions it opened are over.")


def _named(keys: list[ApiKey], id: str) -> str:
    begins = [each.id for each in keys if each.prefix == id.rstrip("…")]
    if len(begins) > 1:
        raise BadSetting(f"{len(begins)} keys begin with {id!r:.80}; accepted: the id of one, as `keys list` has it.")
    return begins[0] if begins else id


def _no_key(id: str) -> BadSetting:
    return BadSetting(f"There is no key {id!r:.80}; `ponder keys list` has them.")


def _scopes(given: Sequence[str] | None) -> list[str] | None:
    if not given or list(given) == ["all"]:
        return None
    if bad := [each for each in given if each not in SCOPES]:
        raise BadSetting(f"--scope is {bad[0]!r:.80}; accepted: {', '.join(SCOPES)}, or all by itself.")
    return [each for each in SCOPES if each in given]


def _models(given: str | None) -> list[str] | None:
    if given is None or given == "all":
        return None
    names = [each.strip() for each in given.split(",")]
    if not all(names) or len(given) > _MODELS_CHARACTERS:
        raise BadSetting(
            f"--models is {given!r:.120}; accepted: names of models, comma-separated, of at most {_MODELS_CHARACTERS} "
            "characters, or all."
        )
    return list(dict.fromkeys(names))


def _quota(quota: Quota, given: Sequence[str] | None) -> Quota:
    for each in given or ():
        name, _, value = each.partition("=")
        number = int(value) if re.fullmatch(r"-?\d{1,15}", value) else None
        least, most = _RANGES.get(name, (1, 10**15))
        if name not in QUOTAS or not (value == "none" or (number is not None and least <= number <= most)):
            raise BadSetting(
                f"--quota is {each!r:.80}; accepted: NAME=N or NAME=none, of {', '.join(QUOTAS)}, each 1 or more, but "
                f"priority from -{MAX_PRIORITY} to {MAX_PRIORITY} and deadline_s up to {MAX_DEADLINE_S}."
            )
        quota = replace(quota, **{name: None if value == "none" else int(value)})
    return quota


def _limits(key: ApiKey) -> str:
    limits = [f"{name}={value}" for name, value in asdict(key.quota).items() if value is not None]
    models = [] if key.models is None else [f"the models {' '.join(key.models)}"]
    return ", ".join(["everything" if key.scopes is None else " ".join(key.scopes), *models, *limits])


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    seconds = 0 if found is None else int(found[1]) * _UNITS[found[2]]
    if not 0 < seconds <= MAX_EXPIRES_S:
        raise BadSetting(
            f"--expires is {text!r:.80}; accepted: a number with s, m, h, d or w, such as 30d, up to ten years."
        )
    return float(seconds)


def _role(text: str) -> Role:
    match text:
        case "operator" | "user":
            return text
        case _:
            raise BadSetting(f"--role is {text!r:.80}; accepted: operator, user.")


def _date(time: float | None) -> str:
    return "–" if time is None else datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M")


@contextmanager
def _opened(settings: Settings) -> Iterator[Accounts]:
    accounts = Accounts.open(settings.resolved_data_dir, settings.database_address)
    try:
        yield accounts
    finally:
        accounts.close()
