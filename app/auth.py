"""Authentication: keys, sessions, scopes, and the login throttle.

`RequireUser` stands before all routes, so a new route is closed by default. Open are only the page's own files,
`/health`, and `/api/session`, where a user signs in. Credentials are a key in `Authorization: Bearer` or `x-api-key`,
or else the session's cookie. Each route has at most one scope, and a path without one is for keys of every scope; a
test compares the table with the routes. An address may show an unknown key five times at once, then after waits that
double; a key accepted a short time ago is never delayed, so one user with a wrong key does not lock out others at the
same address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from app.config import LOCAL_USER
from app.db.accounts import NO_QUOTA, Account, ApiKey, KeyState, Role, hashed
from app.db.quotas import Quota, Used
from app.errors import OLLAMA_PATHS, ApiError, note
from app.page import is_pages

if TYPE_CHECKING:  # SQLAlchemy comes with it, and API workers open no database
    from app.db.account_store import Accounts

FREE = 5
MAX_S = 300.0
_FORGOTTEN_S = 900.0
_ADDRESSES, _ACCEPTED = 4096, 4096  # remembered at once


class LoginThrottle:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failed = OrderedDict[str, tuple[int, float]]()  # by address: how often, and when last
        self._accepted = OrderedDict[str, None]()

    def wait_s(self, address: str, shown: str) -> float:
        """Returns the seconds that this address has to wait before its key is checked; 0 for not at all."""
        if shown in self._accepted:
            return 0.0
        times, last = self._failed.get(_network(address), (0, 0.0))
        if times < FREE or self._now() - last > _FORGOTTEN_S:
            return 0.0
        return max(0.0, last + min(MAX_S, 2.0 ** (times - FREE)) - self._now())

    def failed(self, address: str) -> None:
        network = _network(address)
        times, last = self._failed.pop(network, (0, 0.0))
        self._failed[network] = (1 if self._now() - last > _FORGOTTEN_S else times + 1, self._now())
        if len(self._failed) > _ADDRESSES:
            self._failed.popitem(last=False)

    def accepted(self, shown: str) -> None:
        self._accepted[shown] = None
        self._accepted.move_to_end(shown)
        if len(self._accepted) > _ACCEPTED:
            self._accepted.popitem(last=False)


def _network(address: str) -> str:
    """An IPv6 client has a whole network of addresses: 64 bits of it count."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else address


COOKIE = "ponder_session"


def api_key(headers: Headers) -> str | None:
    """The key, as a bearer token or, as Anthropic's clients send it, in `x-api-key`. Other schemes of `Authorization`
    are for others, such as a proxy in front, and count as nothing."""
    scheme, _, text = headers.get("authorization", "").strip().partition(" ")
    bearer = text.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key", "").strip() or None


def session_token(headers: Headers) -> str | None:
    """The token of the cookie, where no key says it already."""
    if api_key(headers) is not None or (sent := headers.get("cookie")) is None:
        return None
    return cookie_parser(sent).get(COOKIE) or None


KeyScope = Literal["chat", "v1", "sequences", "documents", "tools", "metrics", "operator"]

SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)

# The first that fits, by how a path begins.
_BEGINNINGS: tuple[tuple[str, KeyScope], ...] = (
    ("/v1/(un)?load_lora_adapter", "operator"),
    ("/v1", "v1"),
    (OLLAMA_PATHS, "v1"),
    ("/api/operator", "operator"),
    ("/api/sequences", "sequences"),
    ("/api/(documents|collections|files|invitations|jobs|search)", "documents"),
    ("/api/(permissions|tools)", "tools"),
    ("/api/chats/[^/]+/permissions", "tools"),
    ("/mcp", "tools"),
    ("/api/(artifacts|chats|diffusion|folders|memory|presets|prompts|runs|server|shares|strategies)", "chat"),
    ("/metrics", "metrics"),
)
_TABLE = tuple((re.compile(rf"{pattern}(/|$)"), scope) for pattern, scope in _BEGINNINGS)

_METERED = re.compile(
    r"/v1/(chat/completions|completions|responses|embeddings|rerank|messages|audio/(transcriptions|translations|speech))/?"
    r"|/api/(chat|diffusion|generate|embed|embeddings|chats/[^/]+/runs|search|sequences|sequences/[^/]+/(generate|score))/?"
)


def scope_of(path: str) -> KeyScope | None:
    return next((scope for pattern, scope in _TABLE if pattern.match(path)), None)


def is_metered(method: str, path: str) -> bool:
    """Returns whether a request makes a model work, and so counts towards limits."""
    return method == "POST" and _METERED.fullmatch(path) is not None


T = TypeVar("T")
log = logging.getLogger("ponder")

NOTHING_USED = Used()
SESSION_PATH = "/api/session"
WHO = "ponder.who"  # of a request's scope
_OPEN = frozenset({"/health", SESSION_PATH})


@dataclass(frozen=True, slots=True)
class Principal:
    """The user that a request comes from, the key that says so, and when a session ends, if it is one."""

    id: str
    name: str
    role: Role
    key_id: str | None = None
    session_ends_at: float | None = None
    scopes: frozenset[str] | None = None  # that the key is for; None: all
    models: frozenset[str] | None = None  # names of those that the key is for; None: all
    quota: Quota = NO_QUOTA
    used: Used = NOTHING_USED

    def may(self, scope: str | None) -> bool:
        return scope is None or self.scopes is None or scope in self.scopes


_MODELS: ContextVar[frozenset[str] | None] = ContextVar("models", default=None)


@contextmanager
def limited_to(models: frozenset[str] | None) -> Iterator[None]:
    """Lets all that is done within ask for these models alone; None: for all."""
    token = _MODELS.set(models)
    try:
        yield
    finally:
        _MODELS.reset(token)


def may_ask(model: str) -> bool:
    """Returns whether the request that is answered may ask for a model, by its own name: `default` has another."""
    models = _MODELS.get()
    return models is None or model in models


LOCAL = Principal(LOCAL_USER, LOCAL_USER, "operator")  # everybody, where nobody is asked


class Auth:
    """The users of one server, asked from its event loop: reading them never waits behind other work."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._attempts = LoginThrottle()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="accounts")

    async def do(self, work: Callable[[Accounts], T]) -> T:
        """Runs `work` where it may block, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._accounts)

    def later(self, work: Callable[[Accounts], None]) -> None:
        """Do `work` some time soon, in order with everything else."""
        self._thread.submit(_logged, work, self._accounts)

    def close(self) -> None:
        self._thread.shutdown()
        self._accounts.close()

    async def who(self, headers: Headers, address: str) -> Principal | None:
        """Returns the sender of these headers; None where they have no key or session.

        Raises:
            ApiError: 401 for a key that is none, 429 for too many of them from one address.
        """
        if (key := api_key(headers)) is not None:
            return await self._counted(_who(*await self.of_key(key, address)))
        if (token := session_token(headers)) is not None:
            held = await self.do(lambda accounts: accounts.session(token))
            return None if held is None else await self._counted(_who(*held))
        return None

    async def required(self, path: str, headers: Headers, address: str) -> Principal:
        """Returns the sender of these headers to a path that is not open.

        Raises:
            ApiError: as `who`; 401 for nobody, 403 where the key is not for that path.
        """
        who = await self.who(headers, address)
        if who is None:
            raise unauthorised(
                "This server answers to those it knows: give an API key as `Authorization: Bearer KEY`, or sign in on "
                "its page."
            )
        if not who.may(wanted := scope_of(path)):
            raise out_of_scope(who, wanted or "")
        return who

    async def _counted(self, who: Principal) -> Principal:
        """With the key's usage, where it has a quota."""
        key_id = who.key_id
        if key_id is None or who.quota == NO_QUOTA:
            return who
        return replace(who, used=await self.do(lambda accounts: accounts.used(key_id)))

    async def of_key(self, text: str, address: str) -> tuple[Account, ApiKey]:
        """
        Raises:
            ApiError: as `who`.
        """
        shown = hashed(text)
        if (wait_s := self._attempts.wait_s(address, shown)) > 0:
            seconds = math.ceil(wait_s)
            raise ApiError(
                429, f"Too many wrong API keys came from this address; try again in {seconds} s.",
                code="too_many_wrong_keys", kind="rate_limit_error", headers={"Retry-After": str(seconds)},
            )  # fmt: skip
        found = await self.do(lambda accounts: accounts.find(text))
        state = None if found is None else found[1].state
        if found is None or state != "valid":
            if found is None:  # one that has ended cannot have been guessed: a forgotten client locks nobody out
                self._attempts.failed(address)
            what = "is not known" if found is None or state is None else _OVER[state]
            raise unauthorised(f"The API key {_recognised(text)} {what}; accepted: one of `ponder keys create`.")
        self._attempts.accepted(shown)
        return found

    async def sign_in(self, text: str, address: str) -> tuple[Principal, str]:
        """Opens a session; returns its user and its token.

        Raises:
            ApiError: as `who`.
        """
        account, key = await self.of_key(text, address)
        token, ends_at = await self.do(lambda accounts: accounts.open_session(key.id))
        return _who(account, key, ends_at), token

    async def sign_out(self, token: str) -> None:
        await self.do(lambda accounts: accounts.close_session(token))


class RequireUser:
    """ASGI middleware: 401 for anonymous requests, and for all others `WHO` in the request's scope."""

    def __init__(self, app: ASGIApp, *, auth: Callable[[], Auth]) -> None:
        self.app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["method"], scope["path"]):
            try:
                who = await self._auth().required(scope["path"], Headers(scope=scope), address_of(scope))
            except ApiError as refusal:
                await note(scope, refusal).response()(scope, receive, send)
                return
            with limited_to(who.models):
                await self.app({**scope, WHO: who}, receive, send)
            return
        await self.app(scope, receive, send)


def _logged(work: Callable[[Accounts], None], accounts: Accounts) -> None:
    try:
        work(accounts)
    except Exception:
        log.exception("what a key has used could not be noted")


def is_open(method: str, path: str) -> bool:
    """Returns whether everybody may ask for this, also where keys are asked for."""
    return path in _OPEN or is_pages(method, path)


def out_of_scope(who: Principal, wanted: str) -> ApiError:
    have = ", ".join(sorted(who.scopes or ())) or "nothing"
    message = f"This needs a key with the scope {wanted!r}, and this one is for {have}; an operator can change that."
    return ApiError(403, message, code="scope_required", kind="permission_error")


def unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def address_of(scope: Scope) -> str:
    client: Any = scope.get("client")  # ASGI: a host and a port, or None
    return str(client[0]) if client else ""


_OVER: dict[KeyState, str] = {
    "expired": "has expired", "revoked": "was revoked", "disabled": "is of a user who was disabled",
}  # fmt: skip


def _recognised(text: str) -> str:
    return repr(text if len(text) <= 8 else f"{text[:13]}…") if text.isprintable() else "given"


def _who(account: Account, key: ApiKey, session_ends_at: float | None = None) -> Principal:
    scopes = None if key.scopes is None else frozenset(key.scopes)
    limits = [frozenset(each) for each in (account.models, key.models) if each is not None]
    models = frozenset.intersection(*limits) if limits else None
    return Principal(
        account.id, account.name, account.role, key.id, session_ends_at, scopes, models, key.quota.over(account.quota)
    )
