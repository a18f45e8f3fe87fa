"""The router's HTTP application: takes a request, chooses a replica, and passes its answer on as it comes.

A stateless request whose answer has not begun is tried on another replica when one fails; an answer of `/v1` that
breaks off in mid-stream ends with an error event. Prompts are tokenised by a replica (`POST /v1/tokenize`), as only it
knows its template; where that fails, the request goes to the least loaded one. Bodies are never logged.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.auth import api_key, session_token
from app.connections import finish, while_connected
from app.errors import OLLAMA_PATHS, ApiError, ErrorResponse, is_anthropic
from app.middleware import is_loopback
from app.request_body import MAX_BODY_BYTES
from app.routing.disaggregation import (
    NO_OBJECTIVES,
    Objectives,
    decode_request,
    estimated_tokens,
    is_disaggregable,
    prefill_request,
)
from app.routing.replicas import Choice, Replica, ReplicaAddress, ReplicaSet, replica_id
from app.routing.router_metrics import RouterMetrics

SESSION_HEADER = "x-session-id"
OWNER_COOKIE = "ponder_replica"
CONNECT_S, TOKENIZE_S = 5.0, 5.0
MAX_DRAIN_S = 3600.0
DISCOVER_S = 1.0
LEARNT_PIECES = 8  # of an answer's stream, to learn the time of a token from
MIN_REMOTE_TOKENS = 512  # of a prompt that is worth two requests
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade"}
)  # fmt: skip
_STATELESS = re.compile(
    r"/v1/(chat/completions|completions|messages(/count_tokens)?|embeddings|rerank|tokenize|detokenize|models(/.*)?"
    rf"|audio/\w+)|{OLLAMA_PATHS}"
)
_ADAPTERS = re.compile(r"/v1/(un)?load_lora_adapter")
_CHAT_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")  # that make a prompt, as /v1/tokenize takes them
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A request's part that routing looks at."""

    tokens: list[int] = field(default_factory=list)
    model: str | None = None


class ReplicaFailed(Exception):
    """A replica gave no answer. `sent`: it may have begun to work on the request."""

    def __init__(self, *, sent: bool) -> None:
        self.sent = sent


class ReplicaAnswer(StreamingResponse):
    """A replica's answer, whose connection is closed whatever becomes of the client."""

    def __init__(self, upstream: httpx.Response, body: AsyncIterator[bytes], replica: Replica) -> None:
        super().__init__(body, upstream.status_code)
        self.raw_headers = [
            (name.lower(), value)
            for name, value in upstream.headers.raw
            if name.lower().decode("latin-1") not in _HOP_BY_HOP
        ]
        self._upstream, self._replica = upstream, replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.release()

    async def release(self) -> None:
        self._replica.in_flight -= 1
        await self._upstream.aclose()


class Router:
    """Routes requests to `replicas`. `admin_key` is asked for by `/drain`, `/replicas` and `/metrics`; without one they
    answer this machine alone."""

    def __init__(
        self,
        replicas: ReplicaSet,
        admin_key: str | None = None,
        discover: Callable[[], Awaitable[list[ReplicaAddress]]] | None = None,
        objectives: Objectives = NO_OBJECTIVES,
        min_remote_tokens: int = MIN_REMOTE_TOKENS,
    ) -> None:
        """`discover` is asked every second which replicas there are, where they come and go. `min_remote_tokens`: of a
        prompt that a prefill server reads."""
        self._objectives, self._min_remote_tokens = objectives, min_remote_tokens
        self.replicas, self._admin_key, self._discover = replicas, admin_key, discover
        self.metrics = RouterMetrics(replicas)
        self._reading = set[asyncio.Task[str]]()  # prompts whose answers have begun
        self._http: httpx.AsyncClient

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/replicas", self._list, methods=["GET"]),
            Route("/drain", self._drain, methods=["POST"]),
            Route("/{path:path}", self._proxy, methods=_METHODS),
        ]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            timeout = httpx.Timeout(None, connect=CONNECT_S)
            async with httpx.AsyncClient(
                limits=limits, timeout=timeout, trust_env=False, follow_redirects=False
            ) as self._http:
                await self.replicas.start(self._http)
                discovering = asyncio.create_task(self._follow())
                try:
                    yield
                finally:
                    await finish(discovering, *self._reading)
                    await self.replicas.stop()

        async def refuse(_: Request, error: Exception) -> Response:
            assert isinstance(error, ApiError)
            return ErrorResponse(error)

        return Starlette(routes=routes, lifespan=lifespan, exception_handlers={ApiError: refuse})

    async def _follow(self) -> None:
        while self._discover is not None:
            self.replicas.follow(await self._discover(), self._http)
            await asyncio.sleep(DISCOVER_S)

    # -- the router's own routes

    async def _health(self, _: Request) -> Response:
        taking = len(self.replicas.usable())
        status = "ok" if taking else "no_replica"
        return JSONResponse({"status": status, "replicas": taking}, 200 if taking else 503)

    async def _metrics(self, request: Request) -> Response:
        self._check_admin(request)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _list(self, request: Request) -> Response:
        self._check_admin(request)
        return JSONResponse({"data": [self._shown(each) for each in self.replicas.replicas.values()]})

    def _shown(self, replica: Replica) -> dict[str, Any]:
        return {
            "replica": replica.name, "up": replica.up, "draining": replica.draining, "in_flight": replica.in_flight,
            "cached_blocks": self.replicas.index.blocks(replica.name),
            "missed_batches": 0 if replica.subscriber is None else replica.subscriber.missed,
            "role": replica.address.role, "prefilling": replica.prefills.prompts,
        }  # fmt: skip

    async def _drain(self, request: Request) -> Response:
        """Drains a replica, or with `"drain": false` takes it in again."""
        self._check_admin(request)
        wanted = _json(await request.body()) or {}
        if unknown := wanted.keys() - {"replica", "drain", "timeout_s"}:
            message = f"{min(unknown)} is no field of a drain; accepted: replica, drain and timeout_s."
            raise ApiError(400, message, param=min(unknown))
        replica = self.replicas.replicas.get(str(wanted.get("replica")).rstrip("/"))
        if replica is None:
            accepted = ", ".join(self.replicas.replicas)
            raise ApiError(404, f"replica is {wanted.get('replica')!r}; accepted: {accepted}.", param="replica")
        timeout_s, drain = wanted.get("timeout_s", 60.0), wanted.get("drain", True)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s <= MAX_DRAIN_S:
            message = f"timeout_s is {timeout_s!r}; accepted: 0 to {MAX_DRAIN_S:g} seconds."
            raise ApiError(400, message, param="timeout_s")
        if not isinstance(drain, bool):
            raise ApiError(400, f"drain is {drain!r}; accepted: true or false.", param="drain")
        if not drain:
            replica.draining = False
            return JSONResponse(self._shown(replica))
        done = await self.replicas.drain(replica.name, timeout_s)
        return JSONResponse({**self._shown(replica), "done": done})

    def _check_admin(self, request: Request) -> None:
        if self._admin_key is not None:
            if not secrets.compare_digest((api_key(request.headers) or "").encode(), self._admin_key.encode()):
                raise ApiError(401, "This route wants the router's admin key as `Authorization: Bearer KEY`.")
        elif request.client is None or not is_loopback(request.client.host) or "x-forwarded-for" in request.headers:
            message = "This route answers the router's own machine alone; accepted: --admin-key, and that key with it."
            raise ApiError(403, message, kind="permission_error")

    # -- what is passed on

    async def _proxy(self, request: Request) -> Response:
        path = request.url.path
        if _ADAPTERS.fullmatch(path):
            message = "An adapter is loaded by one server, and a router is asked; accepted: the same of each replica."
            raise ApiError(400, message, code="not_routed")
        buffered = _is_small(request)
        body = await request.body() if buffered else b""
        if _STATELESS.fullmatch(path) is None:
            return await self._to_owner(request, body if buffered else None)
        if not buffered:
            return await self._to_any(request, None, RoutedPrompt())
        return await while_connected(request, self._routed(request, body))

    async def _routed(self, request: Request, body: bytes) -> Response:
        prompt = await self._prompt(request, body)
        fields = _json(body)
        if fields is None or not is_disaggregable(request.url.path, fields):
            return await self._to_any(request, body, prompt)
        tokens = len(prompt.tokens) or estimated_tokens(body)
        prefiller = self.replicas.prefiller(tokens) if tokens >= self._min_remote_tokens else None
        self._check_objectives(tokens, prefiller)
        if prefiller is None or prefiller.address.kv is None:
            return await self._to_any(request, body, prompt)
        prefiller.prefills.begin(tokens)  # at once: it decides who answers
        reading = asyncio.create_task(self._prefill(request, prefiller, prefill_request(fields)))
        reading.add_done_callback(partial(self._prefilled, prefiller, tokens))
        try:
            decoding = json.dumps(decode_request(fields, *prefiller.address.kv)).encode()
            answer = await self._to_any(request, decoding, prompt, changed=True)
        except BaseException:
            await finish(reading)
            raise
        self._reading.add(reading)  # its K/V was loaded, and it ends by itself
        reading.add_done_callback(self._reading.discard)
        return answer

    def _check_objectives(self, tokens: int, prefiller: Replica | None) -> None:
        """
        Raises:
            ApiError: 429: no server would answer within the operator's limits.
        """
        tpots = [each.decodes.tpot_s(each.in_flight + 1) for each in self.replicas.usable()]
        tpot_s = None if not tpots or None in tpots else min(each for each in tpots if each is not None)
        missed = self._objectives.refusal(None if prefiller is None else prefiller.prefills.ttft_s(tokens), tpot_s)
        if missed is None:
            return
        name, beyond_s = missed
        self.metrics.refused.labels(name).inc()
        message = f"The predicted {name} is {beyond_s:.3g} s beyond the limit of this service; try again shortly."
        retry = {"Retry-After": str(max(1, math.ceil(beyond_s)))}
        raise ApiError(429, message, code="objective_missed", kind="rate_limit_error", headers=retry)

    async def _prefill(self, request: Request, replica: Replica, asked: dict[str, Any]) -> str:
        """Has a server read a prompt; returns its status. Where that fails, the decoding server reads it."""
        headers = _forwarded(request, new_body=True)
        try:
            answer = await self._http.post(replica.name + request.url.path, json=asked, headers=headers)
        except httpx.HTTPError:
            self.replicas.lost(replica)
            return "failed"
        return str(answer.status_code)

    def _prefilled(self, replica: Replica, tokens: int, reading: asyncio.Task[str]) -> None:
        status = "cancelled" if reading.cancelled() else "failed" if reading.exception() else reading.result()
        replica.prefills.end(tokens, read=status == "200")
        self.metrics.prefills.labels(replica.name, status).inc()

    async def _to_any(
        self, request: Request, body: bytes | None, prompt: RoutedPrompt, *, changed: bool = False
    ) -> Response:
        """Sends a stateless request to the replica that is chosen, and to the next ones as long as they fail.
        `changed`: the body is not the client's."""
        failed = set[str]()
        session = request.headers.get(SESSION_HEADER)
        if session is not None:
            session = f"{api_key(request.headers)} {session}"  # of one user alone
        while (choice := self.replicas.choose(prompt.tokens, prompt.model, session, failed)) is not None:
            replica = choice.replica
            try:
                answer = await self._sent(request, replica, body, changed=changed)
            except ReplicaFailed as failure:
                failed.add(replica.name)
                self.replicas.lost(replica)
                self.metrics.retries.labels(replica.name).inc()
                if body is None and failure.sent:
                    raise _no_replica("broke off while it read the request") from None
                continue
            if answer.status_code == 503 and self._others(failed | {replica.name}):
                failed.add(replica.name)  # it restarts or drains
                await answer.release()
                self.metrics.retries.labels(replica.name).inc()
                continue
            self._count(choice)
            return answer
        raise _no_replica("takes requests" if not failed else "answered")

    def _others(self, without: set[str]) -> bool:
        return bool(self.replicas.usable(without))

    def _count(self, choice: Choice) -> None:
        self.metrics.blocks.labels(choice.replica.name).inc(choice.blocks)
        self.metrics.matched.labels(choice.replica.name).inc(choice.matched)

    async def _to_owner(self, request: Request, body: bytes | None) -> Response:
        """Sends a request to the replica that has its user's data. A browser keeps the replica's id in a cookie, as its
        sign-in is known there alone; programs are told by their key."""
        shown = api_key(request.headers)
        replica = None if shown else self.replicas.by_id(request.cookies.get(OWNER_COOKIE, ""))
        failed = set[str]()
        while True:
            if replica is None or replica.name in failed:
                address = request.client.host if request.client else ""
                replica = self.replicas.owner(shown or session_token(request.headers) or address, failed)
            if replica is None:
                raise _no_replica("that has this user's data is up")
            try:
                answer = await self._sent(request, replica, body)
            except ReplicaFailed as failure:
                failed.add(replica.name)
                self.replicas.lost(replica)
                if failure.sent or not self.replicas.shared_state:
                    raise _no_replica("that has this user's data is up") from None
                self.metrics.retries.labels(replica.name).inc()
                continue
            id = replica_id(replica.name)
            if not shown and request.cookies.get(OWNER_COOKIE) != id:
                answer.set_cookie(OWNER_COOKIE, id, httponly=True, samesite="lax")
            return answer

    async def _sent(
        self, request: Request, replica: Replica, body: bytes | None, *, changed: bool = False
    ) -> ReplicaAnswer:
        """Returns a replica's answer once its body has begun.

        Raises:
            ReplicaFailed: it cannot be reached, or broke off before.
        """
        url = replica.name + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        content = request.stream() if body is None else body
        headers = _forwarded(request, new_body=changed)
        if changed:
            headers.append(("content-type", "application/json"))
        sending = self._http.build_request(request.method, url, headers=headers, content=content)
        replica.in_flight += 1
        answer: ReplicaAnswer | None = None
        upstream: httpx.Response | None = None
        try:
            upstream = await self._http.send(sending, stream=True)
            chunks = upstream.aiter_raw()
            first = await anext(chunks, b"")
            answer = ReplicaAnswer(upstream, self._passed(request, replica, upstream, first, chunks), replica)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise ReplicaFailed(sent=False) from None
        except httpx.HTTPError:
            raise ReplicaFailed(sent=True) from None
        finally:
            if answer is None:
                replica.in_flight -= 1
                if upstream is not None:
                    await upstream.aclose()
        self.metrics.requests.labels(replica.name, str(upstream.status_code)).inc()
        return answer

    async def _passed(
        self, request: Request, replica: Replica, upstream: httpx.Response, first: bytes, rest: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Yields an answer's bytes as they come; of a stream of events whole ones, so that an error can follow."""
        path = request.url.path
        events = upstream.headers.get("content-type", "").startswith("text/event-stream") and path.startswith("/v1/")
        held, pieces, began = b"", 0, time.monotonic()
        try:
            async for chunk in _chained(first, rest):
                whole, held = _whole_events(held + chunk) if events else (chunk, b"")
                if whole:
                    pieces += whole.count(b"\n\n") if events else 0
                    yield whole
            if pieces > LEARNT_PIECES:
                replica.decodes.answered(replica.in_flight, (time.monotonic() - began) / pieces)
        except httpx.HTTPError:
            self.metrics.broken.labels(replica.name).inc()
            self.replicas.lost(replica)
            if not events:
                raise  # the client's connection is cut as the replica's was
            yield _error_event(path)
            return
        if held:
            yield held

    async def _prompt(self, request: Request, body: bytes) -> RoutedPrompt:
        """Returns what a prompt's blocks are found by; no tokens where they are of no use, or cannot be had."""
        path, replicas = request.url.path, self.replicas
        fields = _json(body)
        if fields is None or not path.endswith("/completions"):
            return RoutedPrompt()
        named = fields.get("model")
        model = named if isinstance(named, str) else None
        able = replicas.usable()
        if replicas.policy != "prefix_aware" or replicas.index.block_size is None or len(able) < 2:
            return RoutedPrompt(model=model)
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return RoutedPrompt(prompt, model)
        asked = {"model", "prompt"} if path == "/v1/completions" else set(_CHAT_FIELDS)
        wanted = {name: fields[name] for name in asked if fields.get(name) is not None}
        replica = min(able, key=lambda each: each.in_flight)
        try:
            answer = await self._http.post(
                f"{replica.name}/v1/tokenize", json=wanted, headers=_forwarded(request, new_body=True),
                timeout=TOKENIZE_S,
            )  # fmt: skip
            tokens = answer.json()["tokens"] if answer.status_code == 200 else []
        except (httpx.HTTPError, ValueError, KeyError):
            tokens = []  # the replica that gets the request says what is wrong with it
        return RoutedPrompt(tokens, model)


def _no_replica(what: str) -> ApiError:
    message = f"No replica {what}; try again shortly."
    return ApiError(503, message, code="no_replica", kind="server_error", headers={"Retry-After": "5"})


def _is_small(request: Request) -> bool:
    """Returns whether the body is none, or JSON of a size that is kept to be sent again."""
    length = request.headers.get("content-length", "")
    if "transfer-encoding" not in request.headers and not length:
        return True
    is_json = request.headers.get("content-type", "").startswith("application/json")
    return is_json and length.isdigit() and int(length) <= MAX_BODY_BYTES


def _json(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _forwarded(request: Request, *, new_body: bool = False) -> list[tuple[str, str]]:
    """Returns the headers for a replica: the client's own, its host's name included, which the replica checks."""
    dropped = _HOP_BY_HOP | {"x-forwarded-for"} | ({"content-length", "content-type"} if new_body else frozenset())
    headers = [(name, value) for name, value in request.headers.items() if name not in dropped]
    chain = [request.headers.get("x-forwarded-for"), request.client.host if request.client else None]
    return [*headers, ("x-forwarded-for", ", ".join(each for each in chain if each))]


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Cuts a stream of events after the last whole one."""
    end = max(
        data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0, data.rfind(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 0
    )
    return data[:end], data[end:]


def _error_event(path: str) -> bytes:
    error = ApiError(
        502, "The server that wrote this answer is gone; ask again.", code="replica_lost", kind="server_error"
    )
    if is_anthropic(path):
        return b"event: error\ndata: " + json.dumps(error.anthropic_body(None)).encode() + b"\n\n"
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"
