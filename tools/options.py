"""A tool's declared options: names, classes and limits, read strictly.

Each option is checked where it is declared, and the message names the accepted values. Knows nothing of functions, nor
of how an option is enforced.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from tools.errors import ToolDeclarationError
from tools.limits import Rate

Permission = Literal["none", "read", "write", "network", "execute"]
Approval = Literal["never", "once", "always"]
PERMISSIONS: tuple[Permission, ...] = get_args(Permission)
APPROVALS: tuple[Approval, ...] = get_args(Approval)

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_S = 3600.0  # of a timeout
FEWEST_CHARS = 200  # of max_chars: the note on what was cut must fit


def named(name: str, where: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ToolDeclarationError(
            f"{where}: the name {name!r} is not 1 to 64 of the characters a-z, A-Z, 0-9, _ and -."
        )
    return name


def options(
    where: str,
    permission: Permission,
    timeout: float,
    rate: str | None,
    approval: Approval | None,
    idempotent: bool | None,
    cache: float,
    max_chars: int,
) -> dict[str, Any]:
    """The options as Tool's fields, with their defaults by permission."""
    if permission not in PERMISSIONS:
        raise ToolDeclarationError(
            f"{where}: permission {permission!r} is unknown; accepted: {', '.join(PERMISSIONS)}."
        )
    if approval is not None and approval not in APPROVALS:
        raise ToolDeclarationError(f"{where}: approval {approval!r} is unknown; accepted: {', '.join(APPROVALS)}.")
    if not 0 < timeout <= MAX_S:
        raise ToolDeclarationError(f"{where}: timeout {timeout!r} is not above 0 and at most {MAX_S:g} seconds.")
    if not cache >= 0:
        raise ToolDeclarationError(f"{where}: cache {cache!r} is not a number of seconds; write 0 for no cache.")
    if max_chars < FEWEST_CHARS:
        raise ToolDeclarationError(
            f"{where}: max_chars {max_chars!r} is below {FEWEST_CHARS}, the fewest that leave sense."
        )
    harmless = permission in ("none", "read") if idempotent is None else idempotent
    if cache and (permission in ("write", "execute") or not harmless):
        raise ToolDeclarationError(
            f"{where} is cached, so that a call may not run, yet running it matters; remove cache, or declare it "
            "idempotent with permission none, read or network."
        )
    try:
        limit = None if rate is None else Rate.parse(rate)
    except ValueError as error:
        raise ToolDeclarationError(f"{where}: rate {error}.") from None
    return {
        "permission": permission,
        "timeout_s": float(timeout),
        "rate": limit,
        "approval": approval or ("always" if permission in ("write", "execute") else "never"),
        "idempotent": harmless,
        "cache_s": float(cache),
        "max_chars": max_chars,
    }
