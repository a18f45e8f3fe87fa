"""Compiles constraints beside the engine's loop: each once, within a deadline, and caches the results.

Callers are called back, so no caller waits for another's constraint. Results are kept in an LRU bounded by bytes; a
refusal is remembered too, one for lack of time only for a while. A tenant finds only its own constraints: a hit on
another tenant's would show in the time it takes. Knows nothing of sequences or masks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.model.tokenizer import Tokenizer
from engine.structured_output import sandboxed_compile
from engine.structured_output.matcher import Backend, Compiled, CompileTimeout, ConstraintRefused
from engine.structured_output.spec import Constraint

log = logging.getLogger(__name__)

Outcome = Compiled | ConstraintRefused
Done = Callable[[Outcome], None]
Key = tuple[str, Constraint]  # the tenant, and its constraint
MAX_REFUSALS = 1024
MAX_QUEUED = 256
AT_ONCE = 2


@dataclass(slots=True)
class CompilerStats:
    """Counts since start, and present numbers."""

    hits: int = 0  # answered at once, a remembered refusal included
    compiled: int = 0
    refused: int = 0
    timed_out: int = 0
    kept: int = 0
    kept_bytes: int = 0
    running: int = 0
    queued: int = 0


@dataclass(slots=True)
class _Made:
    """A compiled constraint with its key: finding that key again by identity compares no constraints."""

    key: Key
    compiled: Compiled


@dataclass(slots=True)
class _Refusal:
    error: ConstraintRefused
    until: float  # by the clock; infinity for a permanent refusal


class Compiler:
    """Thread-safe: `get` may be called from any thread, and calls back from one of its own.

    `make` is called once, when the first constraint comes: building a backend reads the whole vocabulary.
    """

    def __init__(
        self,
        make: Callable[[], Backend],
        *,
        deadline_s: float = 2.0,
        cache_bytes: int = 256 << 20,
        remember_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        self._make = make
        self._deadline_s = deadline_s
        self._cache_bytes = cache_bytes
        self._remember_s = remember_s
        self._clock = clock
        self._timer = timer
        self._lock = threading.Lock()
        self._made: OrderedDict[Key, _Made] = OrderedDict()
        self._bytes = 0
        self._refusals: OrderedDict[Key, _Refusal] = OrderedDict()
        self._waiting: dict[Key, list[Done]] = {}
        self._queue: deque[Key] = deque()
        self._running = 0
        self._overdue = 0  # of those that run, how many are beyond their deadline
        self._backend: Backend | None = None
        self._building = threading.Lock()
        self._closed = False
        self._stats = CompilerStats()

    @property
    def stats(self) -> CompilerStats:
        """Returns a copy, as of now."""
        with self._lock:
            s = self._stats
            return CompilerStats(
                s.hits, s.compiled, s.refused, s.timed_out,
                len(self._made), self._bytes, self._running, len(self._queue),
            )  # fmt: skip

    def get(self, constraint: Constraint, done: Done, tenant: str = "") -> Outcome | None:
        """Returns the compiled constraint if `tenant` asked for it before; else None, and calls `done` with it once."""
        key = (tenant, constraint)
        with self._lock:
            if (known := self._known(key)) is not None:
                self._stats.hits += 1
                return known
            if (waiting := self._waiting.get(key)) is not None:
                waiting.append(done)
                return None
            if (busy := self._busy()) is not None:
                return busy
            self._waiting[key] = [done]
            self._queue.append(key)
            self._start_some()
        return None

    def cancel(self, constraint: Constraint, done: Done, tenant: str = "") -> bool:
        """Calls `done` no more. False where it was called already, or is being called. A compilation that has not begun
        and has no other waiter is dropped."""
        key = (tenant, constraint)
        with self._lock:
            waiting = self._waiting.get(key, [])
            if done not in waiting:
                return False
            waiting.remove(done)
            if not waiting and key in self._queue:
                self._queue.remove(key)
                del self._waiting[key]
        return True

    def warm(self) -> None:
        """Starts building the backend in the background, so that the first constraint does not wait for it."""
        sandboxed_compile.start(self._build)

    def close(self) -> None:
        """Stops the processes of the backend. Waiters are called back; nothing is compiled after that."""
        with self._lock:
            self._closed = True
            waiting = [done for each in self._waiting.values() for done in each]
            self._waiting.clear()
            self._queue.clear()
        for done in waiting:
            done(_CLOSED)
        with self._building:
            backend = self._backend
        if backend is not None:
            backend.close()

    # -- parts; those with "locked" in their docstring are called with the lock held

    def _known(self, key: Key) -> Outcome | None:
        """Locked."""
        if self._closed:
            return _CLOSED
        if (made := self._made.get(key)) is not None:
            self._made.move_to_end(made.key)
            return made.compiled
        refusal = self._refusals.get(key)
        return refusal.error if refusal is not None and self._clock() < refusal.until else None

    def _busy(self) -> CompileTimeout | None:
        """Locked. A refusal that is not remembered."""
        if self._overdue == AT_ONCE:
            return _STUCK
        if len(self._queue) >= MAX_QUEUED:
            return CompileTimeout(f"{MAX_QUEUED} constraints wait to be compiled; try again in some seconds")
        return None

    def _start_some(self) -> None:
        """Locked."""
        while self._queue and self._running < AT_ONCE:
            self._running += 1
            sandboxed_compile.start(self._compile, self._queue.popleft())

    def _compile(self, key: Key) -> None:
        overdue = False

        def too_slow() -> None:
            nonlocal overdue
            with self._lock:
                if finished:
                    return
                overdue = True
                self._overdue += 1
                dropped = self._drop_queue() if self._overdue == AT_ONCE else []
            self._settle(key, CompileTimeout(f"compiling it takes longer than {self._deadline_s:g} s"))
            for done in dropped:
                done(_STUCK)

        finished = False
        watch = self._timer(self._deadline_s, too_slow)
        watch.daemon = True
        try:
            backend = self._ready()
            constraint = key[1]
            backend.prepare(constraint)
            watch.start()
            outcome: Outcome = backend.compile(constraint)
        except ConstraintRefused as refused:
            outcome = refused
        except Exception as error:  # a backend's own failure must reach the waiters, not end a thread in silence
            outcome = ConstraintRefused([f"{type(error).__name__}: {error}"])
        watch.cancel()
        with self._lock:
            finished = True
            self._running -= 1
            self._overdue -= overdue
            self._start_some()
        self._settle(key, outcome)

    def _drop_queue(self) -> list[Done]:
        """Locked. Forgets all compilations that have not begun; returns their waiters."""
        dropped = [done for key in self._queue for done in self._waiting.pop(key, [])]
        self._queue.clear()
        return dropped

    def _build(self) -> None:
        try:
            self._ready()
        except Exception as error:  # warming up has no waiter to tell; a constraint has
            log.warning("constraints are not available: %s", error)

    def _ready(self) -> Backend:
        with self._building:
            if self._backend is None:
                self._backend = self._make()
            return self._backend

    def _settle(self, key: Key, outcome: Outcome) -> None:
        """Keeps the outcome and calls the waiters. A result after its deadline is kept all the same."""
        with self._lock:
            waiting = self._waiting.pop(key, [])
            if not self._closed:
                self._keep(key, outcome)
        for done in waiting:
            done(outcome)

    def _keep(self, key: Key, outcome: Outcome) -> None:
        """Locked."""
        if isinstance(outcome, ConstraintRefused):
            slow = isinstance(outcome, CompileTimeout)
            self._stats.timed_out += slow
            self._stats.refused += not slow
            if key not in self._made:
                until = self._clock() + self._remember_s if slow else float("inf")
                self._refusals[key] = _Refusal(outcome, until)
                self._refusals.move_to_end(key)
            if len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)
            return
        self._stats.compiled += 1
        self._put(key, outcome)

    def _put(self, key: Key, made: Compiled) -> None:
        """Locked. Evicts. The newest stays at any size: it has a waiter."""
        self._refusals.pop(key, None)
        if (old := self._made.pop(key, None)) is not None:
            self._bytes -= old.compiled.size
        self._made[key] = _Made(key, made)
        self._bytes += made.size
        while self._bytes > self._cache_bytes and len(self._made) > 1:
            _, dropped = self._made.popitem(last=False)
            self._bytes -= dropped.compiled.size


_STUCK = CompileTimeout("constraints that take too long are still being compiled; try again in some seconds")
_CLOSED = ConstraintRefused(["the engine is stopping"])


def default_compiler(tokenizer: Tokenizer, vocab_size: int, *, deadline_s: float = 2.0) -> Compiler:
    """Makes a compiler with llguidance, which is loaded with the first constraint. `vocab_size` is the width of the
    logits."""

    def backend() -> Backend:
        from engine.structured_output.llguidance_backend import Guidance
        from engine.structured_output.vocabulary import Vocabulary

        return Guidance(Vocabulary.of(tokenizer, vocab_size), deadline_s=deadline_s)

    return Compiler(backend, deadline_s=deadline_s)
