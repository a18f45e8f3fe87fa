"""Decides which calls may run, by the arguments that approvals were given for.

Once a run has read text that somebody else may have written, its model may be following that text. So from then on a
call that writes, executes or leaves the machine is shown to a person first, in spite of the tool's own approval
setting, unless they have approved exactly this call for good (taint). Decisions are plain data; asking is the
executor's part. Approvals and the journal are bound to a hash of the arguments' canonical JSON, so two calls are the
same if and only if their canonical JSON is.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tools.grants import Grant, Grants, MemoryGrants
from tools.options import Permission
from tools.tool import Tool


def canonical(arguments: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no white space.

    Raises:
        ValueError: they are not JSON: a number that is none, a value of another type, nesting without end.
    """
    try:
        return json.dumps(dict(arguments), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"they are not JSON: {error}") from None


def parsed(arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """A copy of the arguments, which nobody else can change; a string is read as JSON.

    Raises:
        ValueError: they are not a JSON object.
    """
    text = arguments if isinstance(arguments, str) else canonical(arguments)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("they are nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"they must be a JSON object, and are {text[:60]}")
    canonical(value)  # `NaN` is read by Python's parser, and is no JSON
    return value


def fingerprint(name: str, arguments: Mapping[str, Any], origin: str = "") -> str:
    """SHA-256 in hex of the tool, where it comes from, and the arguments."""
    identity = json.dumps([origin, name, canonical(arguments)], ensure_ascii=False)
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()


def preview(name: str, arguments: Mapping[str, Any], limit: int = 4000) -> str:
    """The call as a person reads it before approving. Characters that do not show, or turn text around, are escaped."""
    written = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in f"{name}({written})")
    hidden = len(text) - limit
    return text if hidden <= 0 else f"{text[:limit]}… ({hidden} more characters are not shown)"


Risk = Literal["low", "medium", "high"]
TAINTED: frozenset[Permission] = frozenset({"write", "network", "execute"})
_RISKS: Mapping[Permission, Risk] = {
    "none": "low",
    "read": "low",
    "write": "medium",
    "network": "medium",
    "execute": "high",
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The call may run."""


@dataclass(frozen=True, slots=True)
class NeedsApproval:
    """A person must see `preview` and answer first. The answer names `arguments_hash`, so it is for this call alone."""

    call_id: str
    tool: str
    reason: str
    risk: Risk
    preview: str
    arguments_hash: str


@dataclass(frozen=True, slots=True)
class Denied:
    """The call may not run; the reason is for the model and the person."""

    reason: str


Ruling = Allowed | NeedsApproval | Denied


@dataclass(frozen=True, slots=True)
class Decision:
    """A person's answer: this call only ("once", "no"), or from now on ("always", "never").

    A remembered answer applies to these `arguments`, or for the whole `tool`, for `expires_s` seconds or for good.

    Raises:
        ValueError: a scope or an expiry with an answer that is not remembered, or an expiry that is not above 0.
    """

    answer: Literal["once", "no", "always", "never"]
    arguments_hash: str
    scope: Literal["arguments", "tool"] = "arguments"
    expires_s: float | None = None

    def __post_init__(self) -> None:
        if self.answer in ("once", "no") and (self.scope != "arguments" or self.expires_s is not None):
            raise ValueError(f'"{self.answer}" is for one call; to have it remembered, answer "always" or "never".')
        if self.expires_s is not None and not self.expires_s > 0:
            raise ValueError(f"expires_s is {self.expires_s}; give seconds above 0, or None for good.")


class CallPolicy:
    """The rules. `default` are the permissions of a user without grants; the clock gives seconds since the epoch."""

    def __init__(
        self,
        grants: Grants | None = None,
        *,
        default: Collection[Permission] = ("none", "read"),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.grants: Grants = MemoryGrants() if grants is None else grants
        self.default = frozenset(default)
        self._clock = clock

    def permitted(self, user: str, chat: str | None) -> frozenset[Permission]:
        """Returns the user's permissions in the chat: a chat can only narrow those of its user."""
        granted = self.grants.classes(user, None)
        mine = self.default if granted is None else granted
        here = None if chat is None else self.grants.classes(user, chat)
        return mine if here is None else mine & here

    def decide(
        self,
        tool: Tool,
        arguments: Mapping[str, Any],
        *,
        user: str,
        chat: str | None = None,
        call_id: str = "",
        tainted_by: Collection[str] = (),
    ) -> Ruling:
        """Returns whether the call may run now. `tainted_by` names the tools with untrusted output that the run has
        read."""
        if tool.permission not in self.permitted(user, chat):
            return Denied(f"{tool.name} needs the permission {tool.permission!r}, which is not granted here.")
        digest = fingerprint(tool.name, arguments, tool.origin)
        kept = self.grants.of(user, tool.name, tool.origin)
        live = [grant for grant in kept if self._holds(grant, tool, chat, digest)]
        if any(not grant.allow for grant in live):
            return Denied(f"The person does not want {tool.name} to be called like this.")
        if any(grant.arguments_hash == digest for grant in live):
            return Allowed()
        tainted = tool.permission in TAINTED and bool(tainted_by)
        if not tainted and (tool.approval == "never" or live):
            return Allowed()
        if tainted:
            read = ", ".join(sorted(set(tainted_by)))
            reason = f"What was read before this call (from {read}) may be by others, and may have asked for it."
        else:
            reason = f"{tool.name} asks before it runs: its permission is {tool.permission!r}."
        risk = "high" if tainted else _RISKS[tool.permission]
        return NeedsApproval(call_id, tool.name, reason, risk, preview(tool.name, arguments), digest)

    def accept(
        self, tool: Tool, asked: NeedsApproval, decision: Decision, *, user: str, chat: str | None = None
    ) -> Allowed | Denied:
        """Returns the answer's verdict for the call that was asked about, and remembers a lasting answer."""
        if decision.arguments_hash != asked.arguments_hash:
            return Denied(f"The answer was given for another call of {tool.name}; ask again.")
        allow = decision.answer in ("once", "always")
        if decision.answer in ("always", "never"):
            digest = asked.arguments_hash if decision.scope == "arguments" else None
            expires_at = None if decision.expires_s is None else self._clock() + decision.expires_s
            self._remember(tool, asked, Grant(user, tool.name, tool.origin, allow, None, digest, expires_at))
        elif allow and tool.approval == "once" and chat is not None:
            self._remember(tool, asked, Grant(user, tool.name, tool.origin, True, chat))
        return Allowed() if allow else Denied(f"The person declined this call of {tool.name}.")

    def _remember(self, tool: Tool, asked: NeedsApproval, grant: Grant) -> None:
        made = replace(grant, definition=tool.definition, preview=asked.preview, given_at=self._clock())
        self.grants.put(made)

    def _holds(self, grant: Grant, tool: Tool, chat: str | None, digest: str) -> bool:
        # A tool with another definition than when it was approved is another tool. A refusal stays one.
        changed = grant.allow and grant.definition != tool.definition
        return (
            not changed
            and grant.chat in (None, chat)
            and grant.arguments_hash in (None, digest)
            and (grant.expires_at is None or self._clock() < grant.expires_at)
        )
