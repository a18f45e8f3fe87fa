"""`ponder keys`: API keys on the data directory, made, listed and revoked, also while a server runs on it.

Who may write the data directory may do this: no key is asked for. Knows nothing of servers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from rich.console import Console
from rich.table import Table

from app.config import BadSetting, Settings
from app.data.accounts import MAX_EXPIRES_S, USER_ID, Accounts, ApiKey, Role, RoleDiffers
from app.data.errors import NotThere

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_NAME_CHARACTERS = 100


def create(user: str, role: str | None, expires: str | None, name: str, as_json: bool, settings: Settings) -> None:
    """Make a key and print it: alone on the output, so that a script can take it.

    Raises:
        BadSetting: something of it is not accepted.
    """
    if re.fullmatch(USER_ID, user) is None:
        raise BadSetting(f"--user is {user!r:.80}; accepted: 1 to 64 small letters, digits, '.', '_' and '-'.")
    if len(name) > _NAME_CHARACTERS or not name.isprintable():
        raise BadSetting(f"--name is {name!r:.120}; accepted: a line of at most {_NAME_CHARACTERS} characters.")
    expires_s = None if expires is None else _seconds(expires)
    wanted = None if role is None else _role(role)
    with _opened(settings) as accounts:
        try:
            account = accounts.ensure_user(user, wanted)
        except RoleDiffers as differs:
            raise BadSetting(
                f"{differs} Leave --role out; an operator changes roles on the page, or with PATCH /api/operator/users."
            ) from None
        key, text = accounts.create_key(user, name, expires_s)
    if as_json:
        print(json.dumps({"key": text, **key.told(), "role": account.role}, indent=2))
        return
    print(text)
    if sys.stderr.isatty():
        until = "does not expire" if key.expires_at is None else f"expires {_date(key.expires_at)}"
        print(f"A key of {user} ({account.role}); it {until}. It is not shown again.", file=sys.stderr)


def list_keys(as_json: bool, settings: Settings) -> None:
    """Print what is known of the keys, which is not the keys."""
    with _opened(settings) as accounts:
        keys, roles = accounts.keys_of(), {each.id: each.role for each in accounts.users()}
    if as_json:
        print(json.dumps({"keys": [{**each.told(), "role": roles[each.user]} for each in keys]}, indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("id", "key", "user", "role", "name", "made", "expires", "last used", "state"):
        table.add_column(heading, overflow="fold")
    for each in keys:
        table.add_row(
            each.id, f"{each.prefix}…", each.user, roles[each.user], each.name, _date(each.created_at),
            _date(each.expires_at), _date(each.used_at), each.state,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 240, markup=False).print(table)


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
            raise BadSetting(f"There is no key {id!r:.80}; `ponder keys list` has them.") from None
    print(f"{revoked.prefix}… of {revoked.user} is revoked, and the sessions it opened are over.")


def _named(keys: list[ApiKey], id: str) -> str:
    begins = [each.id for each in keys if each.prefix == id.rstrip("…")]
    if len(begins) > 1:
        raise BadSetting(f"{len(begins)} keys begin with {id!r:.80}; accepted: the id of one, as `keys list` has it.")
    return begins[0] if begins else id


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
    accounts = Accounts.open(settings.resolved_data_dir)
    try:
        yield accounts
    finally:
        accounts.close()
