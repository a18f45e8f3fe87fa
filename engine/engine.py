"""The engine's async face: starts the core in a thread of its own and carries commands and replies across.

One queue leads to the core, one wake-up a step leads back, so the event loop is never blocked by the model and a step
costs it one callback, however many sequences ran. Knows nothing of scheduling or tensors.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from engine import messages as m
from engine.assemble import assemble, use_threads
from engine.client import Request
from engine.config import EngineConfig
from engine.constrain.compiler import Compiler, Outcome
from engine.constrain.matcher import ConstraintRefused
from engine.constrain.spec import Constraint
from engine.core import EngineCore
from engine.errors import ContextLengthExceeded, EngineError, EngineStopped, InvalidParameter, QueueFull
from engine.handle import Sequence
from engine.outputs import Stats
from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Engine:
    """A running engine. Get one from `Engine.start`; stop it with `stop` or by leaving `async with`."""

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        compiler: Compiler,
        tokenizer: Tokenizer,
        path: Path,
        vocab_size: int,
        max_model_len: int,
        max_tokens: int,
        device: str,
        dtype: str,
        threads: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model_path = path
        self.model_name = path.name if Path(config.model).is_dir() else config.model
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len  # tokens that the model's positions allow
        self.max_tokens = max_tokens  # tokens that one sequence can have here: the same, or what the KV pool holds
        self.device = device
        self.dtype = dtype
        self.threads = threads  # CPU threads of the model
        self._core = core
        self._compiler = compiler
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[m.Command] = queue.SimpleQueue()
        core.post_with(self._commands.put)
        self._requests: dict[int, Request] = {}
        self._queued: set[int] = set()  # of those, what waits for the model: spans and scores
        self._ids = itertools.count(1)
        self._stopped: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine:
        """Load the model and start the core.

        Raises:
            CheckpointError: the model cannot be found or read.
            UnsupportedArchitecture: it can be read, but not run exactly.
            InvalidParameter: the configuration does not fit the model or this machine.
        """
        parts = await asyncio.to_thread(assemble, config)
        engine = cls(
            config,
            parts.core,
            parts.compiler,
            parts.tokenizer,
            parts.path,
            parts.vocab_size,
            parts.max_model_len,
            parts.max_tokens,
            parts.device,
            parts.dtype,
            parts.threads,
        )
        engine._thread.start()
        return engine

    async def open(
        self,
        tokens: Iterable[int],
        *,
        tenant: str = "",
        priority: int = 0,
        adapter: None = None,
        deadline_s: float | None = None,
    ) -> Sequence:
        """A new sequence. Nothing is computed until it generates or scores.

        `tenant` separates prefix caches: tenants never share blocks. Lower `priority` runs first. After `deadline_s`
        seconds the sequence closes; a span then ends with the finish reason "deadline".

        Raises:
            ContextLengthExceeded: the tokens leave no room to generate one more.
            InvalidParameter: a token id is outside the vocabulary, or an adapter is named: there are none yet.
            QueueFull: too many spans wait already.
            EngineStopped: see there.
        """
        if adapter is not None:
            raise InvalidParameter("adapter", "adapter is set; this engine has no adapters yet; accepted: None.")
        if deadline_s is not None and deadline_s <= 0:
            raise InvalidParameter("deadline_s", f"deadline_s is {deadline_s}; accepted: None, or more than 0 seconds.")
        given = list(tokens)
        self.check_tokens(given)
        self.check_length(len(given) + 1)
        self.check_queue()
        id = self.next_id()
        self.post(m.Open(id, tuple(given), tenant, priority, deadline_s))
        return Sequence(self, id, given)

    async def compile(self, constraint: Constraint) -> None:
        """Compile a constraint before a span needs it; the span then finds it ready.

        Raises:
            ConstraintRefused: no backend can hold it exactly; `CompileTimeout`: not in time.
        """
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if not ready.done():
                ready.set_result(outcome)

        outcome = self._compiler.get(constraint, lambda made: self._call(settle, made))
        outcome = await ready if outcome is None else outcome
        if isinstance(outcome, ConstraintRefused):
            raise outcome

    def register(self, constraint: Constraint) -> None:
        """Say that a constraint will be asked for often: what can be made of it ahead is made, in the background."""
        self._compiler.register(constraint)

    async def stats(self) -> Stats:
        """A snapshot between two steps. Raises `EngineStopped`."""
        request = self.request(queued=False)
        try:
            self.post(m.GetStats(request.id))
            (reply,) = await request.replies()
        finally:
            self.forget(request)
        assert isinstance(reply, m.StatsReply)
        return reply.stats

    @property
    def healthy(self) -> bool:
        """Whether the core is running."""
        return self._stopped is None

    async def stop(self) -> None:
        """Close every sequence and end the core's thread. Idempotent."""
        if self._stopped is None:
            self._commands.put(m.Stop())
        await asyncio.to_thread(self._thread.join)
        self._compiler.close()
        self._fail(EngineStopped("The engine was stopped."))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- for handles

    def next_id(self) -> int:
        return next(self._ids)

    def post(self, command: m.Command) -> None:
        """Send a command to the core; commands keep their order. Without effect once the engine has stopped."""
        if self._stopped is None:
            self._commands.put(command)

    def request(self, *, queued: bool = True) -> Request:
        """Somewhere for replies to arrive; `queued` counts it towards the limit of spans. Raises `EngineStopped`."""
        if self._stopped is not None:
            raise self._stopped
        request = Request(self.next_id())
        self._requests[request.id] = request
        if queued:
            self._queued.add(request.id)
        return request

    def forget(self, request: Request) -> None:
        """Whatever still comes for this request is dropped."""
        self._requests.pop(request.id, None)
        self._queued.discard(request.id)

    def check_tokens(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InvalidParameter(
                    "tokens", f"token id {token} is outside the vocabulary; accepted: 0 to {self.vocab_size - 1}."
                )

    def check_length(self, length: int) -> None:
        if length > self.max_tokens:
            raise ContextLengthExceeded(
                f"{length} tokens are needed; the context holds {self.max_tokens}, of which at least one is generated."
            )

    def check_queue(self) -> None:
        limit = self.config.max_running + self.config.max_waiting
        if len(self._queued) >= limit:
            raise QueueFull(f"{len(self._queued)} spans run or wait already; the limit is {limit}.", retry_after_s=1.0)

    # -- the core's thread

    def _run(self) -> None:
        error = EngineStopped("The engine was stopped.")
        try:
            use_threads(self.threads)
            while self._serve():
                self._core.step()
                self._send()
        except Exception as failure:
            log.exception("the engine's core failed")
            error = EngineStopped(f"The engine's core failed: {failure!r}.")
        finally:
            self._send()
            self._call(self._fail, error)

    def _serve(self) -> bool:
        """Take the commands that have come, waiting for one when there is nothing else to do; False to end."""
        wait = not self._core.has_work
        while True:
            try:
                command = self._commands.get(block=wait, timeout=self._patience() if wait else None)
            except queue.Empty:
                return True
            self._core.handle(command)
            if isinstance(command, m.Stop):
                return False
            self._send_if_idle()
            wait = wait and not self._core.has_work

    def _patience(self) -> float | None:
        deadline = self._core.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _send_if_idle(self) -> None:
        if not self._core.has_work:
            self._send()

    def _send(self) -> None:
        replies = self._core.take_replies()
        if replies:
            self._call(self._deliver, replies)

    def _call(self, callback: object, *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)  # type: ignore[arg-type]  # any callable will do
        except RuntimeError:
            log.debug("the event loop closed before the engine stopped")

    # -- back on the event loop

    def _deliver(self, replies: list[m.Reply]) -> None:
        for reply in replies:
            request = self._requests.get(reply.request)
            if request is not None:
                request.deliver(reply)

    def _fail(self, error: EngineError) -> None:
        if self._stopped is None:
            self._stopped = error
            for request in self._requests.values():
                request.fail(error)
