"""Users and their API keys, as plain data.

Of a key and of a session only a hash is kept; both are long and random, so a fast hash is enough. Knows nothing of how
they are stored, nor of what a role may do.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from app.db.quotas import USER_QUOTAS, Quota

Role = Literal["operator", "user"]
KeyState = Literal["valid", "expired", "revoked", "disabled"]

NO_QUOTA = Quota()
SESSION_S = 30 * 24 * 3600.0  # that a page stays signed in
MAX_EXPIRES_S = 10 * 365 * 24 * 3600  # of a key
USER_ID = r"[a-z0-9][a-z0-9._-]{0,63}"


@dataclass(frozen=True, slots=True)
class Account:
    """A user. Times are seconds since the epoch, here and below."""

    id: str
    name: str
    role: Role
    created_at: float
    disabled_at: float | None = None  # since when none of the user's keys is valid
    quota: Quota = NO_QUOTA  # what their keys have that say nothing themselves
    models: tuple[str, ...] | None = None  # names of those that all their keys are for; None: all

    @classmethod
    def of_row(cls, found: dict[str, Any]) -> Account:
        return cls(**{**found, "quota": Quota.read(found["quota"]), "models": read_models(found["models"])})

    def told(self) -> dict[str, Any]:
        """As JSON."""
        quota = {name: getattr(self.quota, name) for name in USER_QUOTAS}
        return {**asdict(self), "quota": quota, "models": self.models and list(self.models)}


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
    models: tuple[str, ...] | None = None  # names of those that it is for; None: all

    @classmethod
    def of_row(cls, found: dict[str, Any]) -> ApiKey:
        scopes: str | None = found["scopes"]
        parts = {"scopes": None if scopes is None else tuple(scopes.split()), "quota": Quota.read(found["quota"])}
        return cls(**{**found, **parts, "models": read_models(found["models"]), "disabled": bool(found["disabled"])})

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
        return {
            **told, "scopes": self.scopes and list(self.scopes), "models": self.models and list(self.models),
            "state": self.state,
        }  # fmt: skip


def read_models(stored: str | None) -> tuple[str, ...] | None:
    """Returns the names of models as they were stored; None for all."""
    return None if stored is None else tuple(json.loads(stored))


class RoleDiffers(ValueError):
    """The user is there, with another role."""


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
