"""Compiles constraints beside the engine's loop: each once, within a deadline, and keeps what was made.

Whoever asks is called back, so nobody waits for anybody else's constraint. What was made is kept in an LRU bounded by
bytes; a refusal is remembered too, one for lack of time only for a while. Constraints that are registered are compiled
a second time, slowly and in the background, into something quicker to use. Knows nothing of sequences or masks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.constrain import threads
from engine.constrain.matcher import AheadBackend, Backend, Compiled, CompileTimeout, ConstraintRefused
from engine.constrain.spec import Constraint
from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Outcome = Compiled | ConstraintRefused
Done = Callable[[Outcome], None]
MOST_REFUSALS = 1024
MOST_QUEUED = 256
AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Backends:
    """`prompt` compiles while a request waits; `ahead`, where there is one, what was registered."""

    prompt: Backend
    ahead: AheadBackend | None = None


@dataclass(slots=True)
class CompilerStats:
    """Counts since start, and what is there now."""

    hits: int = 0  # answered at once, a remembered refusal included
    compiled: int = 0
    loaded: int = 0  # compiled in an earlier run, and kept
    refused: int = 0
    timed_out: int = 0
    ahead: int = 0  # registered ones that are ready in their quicker form
    not_ahead: int = 0  # registered ones that have no quicker form
    kept: int = 0
    kept_bytes: int = 0
    running: int = 0
    queued: int = 0


@dataclass(slots=True)
class _Made:
    """What was made, with its key: finding that again by identity compares no constraints."""

    constraint: Constraint
    compiled: Compiled


@dataclass(slots=True)
class _Refusal:
    error: ConstraintRefused
    until: float  # by the clock; infinity for a refusal that more time would not change


class Compiler:
    """Thread-safe: `get` may be called from any thread, and calls back from one of its own.

    `backends` is called once, when the first constraint comes: building them reads the whole vocabulary.
    """

    def __init__(
        self,
        backends: Callable[[], Backends],
        *,
        deadline_s: float = 2.0,
        cache_bytes: int = 256 << 20,
        remember_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        self._make = backends
        self._deadline_s = deadline_s
        self._cache_bytes = cache_bytes
        self._remember_s = remember_s
        self._clock = clock
        self._timer = timer
        self._lock = threading.Lock()
        self._made: OrderedDict[Constraint, _Made] = OrderedDict()
        self._bytes = 0
        self._refusals: OrderedDict[Constraint, _Refusal] = OrderedDict()
        self._waiting: dict[Constraint, list[Done]] = {}
        self._queue: deque[Constraint] = deque()
        self._running = 0
        self._overdue = 0  # of those that run, how many are beyond their deadline
        self._ahead: deque[Constraint] = deque()
        self._ahead_runs = False
        self._registered: set[Constraint] = set()
        self._backends: Backends | None = None
        self._building = threading.Lock()
        self._closed = False
        self._stats = CompilerStats()

    @property
    def stats(self) -> CompilerStats:
        """A copy, as of now."""
        with self._lock:
            s = self._stats
            return CompilerStats(
                s.hits, s.compiled, s.loaded, s.refused, s.timed_out, s.ahead, s.not_ahead,
                len(self._made), self._bytes, self._running, len(self._queue),
            )  # fmt: skip

    def get(self, constraint: Constraint, done: Done) -> Outcome | None:
        """What the constraint compiles to, if known; otherwise None, and `done` is called with it later, once."""
        with self._lock:
            if (known := self._known(constraint)) is not None:
                self._stats.hits += 1
                return known
            if (waiting := self._waiting.get(constraint)) is not None:
                waiting.append(done)
                return None
            if (busy := self._busy()) is not None:
                return busy
            self._waiting[constraint] = [done]
            self._queue.append(constraint)
            self._start_some()
        return None

    def cancel(self, constraint: Constraint, done: Done) -> bool:
        """Call `done` no more. False where it was called already, or is being called. What nobody else waits for and
        has not begun is not compiled."""
        with self._lock:
            waiting = self._waiting.get(constraint, [])
            if done not in waiting:
                return False
            waiting.remove(done)
            if not waiting and constraint in self._queue:
                self._queue.remove(constraint)
                del self._waiting[constraint]
        return True

    def register(self, constraint: Constraint) -> None:
        """Compile it now, and then again in the background into its quicker form, if it has one. Until that is ready,
        and where there is none, `get` gives the other. Registering it again does nothing."""

        def taken(outcome: Outcome) -> None:
            if isinstance(outcome, ConstraintRefused):
                return
            with self._lock:
                self._ahead.append(constraint)
                if not self._ahead_runs and not self._closed:
                    self._ahead_runs = True
                    threads.start(self._compile_ahead)

        with self._lock:
            if constraint in self._registered:
                return
            self._registered.add(constraint)
        known = self.get(constraint, taken)
        if known is not None:
            taken(known)

    def warm(self) -> None:
        """Build the backends in the background now, so that the first constraint does not wait for them."""
        threads.start(self._build)

    def close(self) -> None:
        """Stop what the backends run beside this process. Who waits is told; nothing is compiled after that."""
        with self._lock:
            self._closed = True
            waiting = [done for each in self._waiting.values() for done in each]
            self._waiting.clear()
            self._queue.clear()
            self._ahead.clear()
        for done in waiting:
            done(_CLOSED)
        with self._building:
            backends = self._backends
        if backends is not None:
            backends.prompt.close()
            if backends.ahead is not None:
                backends.ahead.close()

    # -- parts; those marked "locked" are called with the lock held

    def _known(self, constraint: Constraint) -> Outcome | None:
        """Locked."""
        if self._closed:
            return _CLOSED
        if (made := self._made.get(constraint)) is not None:
            self._made.move_to_end(made.constraint)
            return made.compiled
        refusal = self._refusals.get(constraint)
        return refusal.error if refusal is not None and self._clock() < refusal.until else None

    def _busy(self) -> CompileTimeout | None:
        """Locked. A refusal that is not remembered."""
        if self._overdue == AT_ONCE:
            return _STUCK
        if len(self._queue) >= MOST_QUEUED:
            return CompileTimeout(f"{MOST_QUEUED} constraints wait to be compiled; try again in some seconds")
        return None

    def _start_some(self) -> None:
        """Locked."""
        while self._queue and self._running < AT_ONCE:
            self._running += 1
            threads.start(self._compile, self._queue.popleft())

    def _compile(self, constraint: Constraint) -> None:
        overdue = False

        def too_slow() -> None:
            nonlocal overdue
            with self._lock:
                if finished:
                    return
                overdue = True
                self._overdue += 1
                dropped = self._drop_queue() if self._overdue == AT_ONCE else []
            self._settle(constraint, CompileTimeout(f"compiling it takes longer than {self._deadline_s:g} s"))
            for done in dropped:
                done(_STUCK)

        finished = False
        loaded = False
        watch = self._timer(self._deadline_s, too_slow)
        watch.daemon = True
        try:
            backends = self._ready()
            backends.prompt.prepare(constraint)
            watch.start()
            stored = backends.ahead.stored(constraint) if backends.ahead is not None else None
            loaded = stored is not None
            outcome: Outcome = stored if stored is not None else backends.prompt.compile(constraint)
        except ConstraintRefused as refused:
            outcome = refused
        except Exception as error:  # a backend's own failure must reach whoever waits, not end a thread in silence
            outcome = ConstraintRefused([f"{type(error).__name__}: {error}"])
        watch.cancel()
        with self._lock:
            finished = True
            self._running -= 1
            self._overdue -= overdue
            self._stats.loaded += loaded
            self._start_some()
        self._settle(constraint, outcome)

    def _drop_queue(self) -> list[Done]:
        """Locked. Forget all that has not begun; who waits for it."""
        dropped = [done for constraint in self._queue for done in self._waiting.pop(constraint, [])]
        self._queue.clear()
        return dropped

    def _compile_ahead(self) -> None:
        """One registered constraint after another."""
        while True:
            with self._lock:
                constraint = self._ahead.popleft() if self._ahead else None
            if constraint is None:
                self._rest()
                with self._lock:
                    if not self._ahead:
                        self._ahead_runs = False
                        return
                continue
            quick = self._quick(constraint)
            with self._lock:
                self._stats.ahead += quick is not None
                self._stats.not_ahead += quick is None
                if quick is not None and not self._closed:
                    self._put(constraint, quick)

    def _rest(self) -> None:
        if (ahead := self._ready().ahead) is not None:
            ahead.rest()

    def _quick(self, constraint: Constraint) -> Compiled | None:
        """Whatever goes wrong here, `get` still has the other form."""
        try:
            ahead = self._ready().ahead
            if ahead is None or ahead.check(constraint) is not None:
                return None
            return ahead.stored(constraint) or ahead.compile(constraint)
        except ConstraintRefused:  # it has no quicker form
            return None
        except Exception:
            log.warning("a registered constraint could not be compiled ahead", exc_info=True)
            return None

    def _build(self) -> None:
        try:
            self._ready()
        except Exception as error:  # whoever brings a constraint is told; others can do without
            log.warning("constraints are not available: %s", error)

    def _ready(self) -> Backends:
        with self._building:
            if self._backends is None:
                self._backends = self._make()
            return self._backends

    def _settle(self, constraint: Constraint, outcome: Outcome) -> None:
        """Keep the outcome and tell who waits. What comes after its deadline is kept all the same."""
        with self._lock:
            waiting = self._waiting.pop(constraint, [])
            if not self._closed:
                self._keep(constraint, outcome)
        for done in waiting:
            done(outcome)

    def _keep(self, constraint: Constraint, outcome: Outcome) -> None:
        """Locked."""
        if isinstance(outcome, ConstraintRefused):
            slow = isinstance(outcome, CompileTimeout)
            self._stats.timed_out += slow
            self._stats.refused += not slow
            if constraint not in self._made:
                until = self._clock() + self._remember_s if slow else float("inf")
                self._refusals[constraint] = _Refusal(outcome, until)
                self._refusals.move_to_end(constraint)
            if len(self._refusals) > MOST_REFUSALS:
                self._refusals.popitem(last=False)
            return
        self._stats.compiled += 1
        if constraint not in self._made:  # its quicker form may have come first
            self._put(constraint, outcome)

    def _put(self, constraint: Constraint, made: Compiled) -> None:
        """Locked. The newest stays whatever its size: somebody waits for it."""
        self._refusals.pop(constraint, None)
        if (old := self._made.pop(constraint, None)) is not None:
            self._bytes -= old.compiled.size
        self._made[constraint] = _Made(constraint, made)
        self._bytes += made.size
        while self._bytes > self._cache_bytes and len(self._made) > 1:
            _, dropped = self._made.popitem(last=False)
            self._bytes -= dropped.compiled.size


_STUCK = CompileTimeout("constraints that take too long are still being compiled; try again in some seconds")
_CLOSED = ConstraintRefused(["the engine is stopping"])


def default_compiler(
    tokenizer: Tokenizer, vocab_size: int, *, cache_dir: Path | None = None, deadline_s: float = 2.0
) -> Compiler:
    """llguidance for what requests bring, outlines-core for what is registered; both loaded with the first constraint.

    `vocab_size` is the width of the logits; what was compiled ahead is kept in `cache_dir`, or in memory only.
    """

    def backends() -> Backends:
        from engine.constrain.fsm import FiniteStates
        from engine.constrain.guidance import Guidance
        from engine.constrain.vocabulary import Vocabulary

        vocabulary = Vocabulary.of(tokenizer, vocab_size)
        return Backends(Guidance(vocabulary, deadline_s=deadline_s), FiniteStates(vocabulary, cache_dir=cache_dir))

    return Compiler(backends, deadline_s=deadline_s)
