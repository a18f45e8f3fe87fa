"""The compiler with backends that the test controls: no clocks and no waiting."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import pytest

from engine.structured_output import compiler as module
from engine.structured_output.compiler import AT_ONCE, Compiler
from engine.structured_output.matcher import CompileTimeout, ConstraintRefused
from engine.structured_output.spec import (
    Constraint,
    Literal,
    OneOf,
    Optional,
    Regex,
    Repeat,
    Sequence,
    choice,
    sequence,
)
from tests.engine.structured_output.words import Words

PATIENCE = 20.0  # seconds until a test that hangs fails


@dataclass(frozen=True)
class Made:
    of: Constraint
    size: int = 1

    def matcher(self) -> Any:
        return Words([[1]], 0).matcher()


class Slow:
    """A backend that compiles when `let` says so. A text that begins with "no" is refused, and "oops" breaks it."""

    def __init__(self, size: int = 1) -> None:
        self.begun: Queue[str] = Queue()
        self.may: dict[str, threading.Event] = {}
        self.all_may = False
        self.size = size
        self.closed = False
        self.prepared: list[str] = []

    def prepare(self, constraint: Constraint) -> None:
        assert isinstance(constraint, Literal)
        if constraint.text.startswith("unprepared"):
            raise ConstraintRefused(["could not start"])
        self.prepared.append(constraint.text)

    def let(self, text: str) -> None:
        self.may.setdefault(text, threading.Event()).set()

    def compile(self, constraint: Constraint) -> Made:
        assert isinstance(constraint, Literal)
        text = constraint.text
        self.begun.put(text)
        if not self.all_may:
            assert self.may.setdefault(text, threading.Event()).wait(PATIENCE)
        if text.startswith("no"):
            raise ConstraintRefused([f"keyword {text}"])
        if text.startswith("oops"):
            raise RuntimeError("broken")
        return Made(constraint, self.size)

    def close(self) -> None:
        self.closed = True


class Timers:
    """Stands for `threading.Timer`: `ring` does what the clock would."""

    def __init__(self) -> None:
        self.started: Queue[Timer] = Queue()

    def __call__(self, seconds: float, ring: Callable[[], None]) -> Any:
        return Timer(self, seconds, ring)


@dataclass
class Timer:
    of: Timers
    seconds: float
    ring: Callable[[], None]
    daemon: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self.of.started.put(self)

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class Fixture:
    compiler: Compiler
    backend: Slow
    timers: Timers
    now: list[float]

    def ask(self, text: str, tenant: str = "") -> Queue[Any]:
        """A queue that gets the outcome of `get`, now or later."""
        answers: Queue[Any] = Queue()
        known = self.compiler.get(Literal(text), answers.put, tenant)
        if known is not None:
            answers.put(known)
        return answers

    def made(self, text: str) -> Any:
        self.backend.let(text)
        return self.ask(text).get(timeout=PATIENCE)

    def begin(self, text: str) -> Timer:
        """The timer of a compile that has begun."""
        assert self.backend.begun.get(timeout=PATIENCE) == text
        return self.timers.started.get(timeout=PATIENCE)


def make(*, size: int = 1, **options: Any) -> Fixture:
    backend, timers, now = Slow(size), Timers(), [0.0]
    compiler = Compiler(lambda: backend, clock=lambda: now[0], timer=timers, **options)
    return Fixture(compiler, backend, timers, now)


def unexpected(answer: object) -> None:
    pytest.fail(f"answered later: {answer!r}")


def test_what_was_compiled_is_answered_at_once_afterwards() -> None:
    it = make()
    made = it.made("a")
    assert made.of == Literal("a")
    assert it.compiler.get(Literal("a"), unexpected) is made
    assert it.compiler.stats.hits == 1 and it.compiler.stats.compiled == 1


def test_the_same_constraint_asked_for_twice_at_once_is_compiled_once() -> None:
    it = make()
    first, second = it.ask("a"), it.ask("a")
    it.begin("a")
    it.backend.let("a")
    assert first.get(timeout=PATIENCE) is second.get(timeout=PATIENCE)
    assert it.backend.begun.empty()


def test_a_tenant_cannot_tell_by_time_what_another_asked_for() -> None:
    it = make()
    for text in ("a", "no"):
        it.backend.let(text)
        it.ask(text, "alice").get(timeout=PATIENCE)
        assert it.backend.begun.get(timeout=PATIENCE) == text
        it.ask(text, "bob").get(timeout=PATIENCE)
        assert it.backend.begun.get(timeout=PATIENCE) == text, "what another asked for was answered at once"
        assert not it.ask(text, "bob").empty() and it.backend.begun.empty()


def test_a_tenant_waits_for_its_own_compile_beside_an_equal_one() -> None:
    it = make()
    alice, bob = it.ask("a", "alice"), it.ask("a", "bob")
    assert [it.backend.begun.get(timeout=PATIENCE) for _ in range(2)] == ["a", "a"]
    it.backend.let("a")
    assert alice.get(timeout=PATIENCE) is not bob.get(timeout=PATIENCE)
    assert it.compiler.stats.kept == 2


def test_nobody_waits_for_another_constraint() -> None:
    it = make()
    slow = it.ask("slow")
    it.begin("slow")
    assert it.made("quick").of == Literal("quick")
    assert slow.empty()
    it.backend.let("slow")
    assert slow.get(timeout=PATIENCE).of == Literal("slow")


def test_no_more_than_some_are_compiled_at_once_and_the_others_follow() -> None:
    it = make()
    texts = [f"t{i}" for i in range(AT_ONCE + 2)]
    answers = [it.ask(text) for text in texts]
    begun = {it.backend.begun.get(timeout=PATIENCE) for _ in range(AT_ONCE)}
    assert begun == set(texts[:AT_ONCE]) and it.backend.begun.empty()
    assert it.compiler.stats.running == AT_ONCE and it.compiler.stats.queued == 2
    it.backend.let(texts[0])
    assert it.backend.begun.get(timeout=PATIENCE) == texts[AT_ONCE]
    for text in texts:
        it.backend.let(text)
    assert [answer.get(timeout=PATIENCE).of for answer in answers] == [Literal(text) for text in texts]
    assert it.compiler.stats.queued == 0


def test_a_refusal_names_its_reasons_and_is_remembered() -> None:
    it = make()
    refused = it.made("not")
    assert isinstance(refused, ConstraintRefused) and refused.reasons == ("keyword not",)
    it.now[0] = 1e9
    assert it.compiler.get(Literal("not"), unexpected) is refused
    assert it.compiler.stats.refused == 1


def test_a_backend_that_breaks_refuses_and_the_next_constraint_is_compiled() -> None:
    it = make()
    broken = it.made("oops")
    assert isinstance(broken, ConstraintRefused) and "RuntimeError: broken" in broken.reasons[0]
    assert it.made("a").of == Literal("a")


def test_past_its_deadline_a_constraint_is_refused_for_a_while_and_kept_when_it_is_ready_after_all() -> None:
    it = make(deadline_s=2.0, remember_s=60.0)
    answer = it.ask("slow")
    timer = it.begin("slow")
    assert timer.seconds == 2.0
    timer.ring()
    refused = answer.get(timeout=PATIENCE)
    assert isinstance(refused, CompileTimeout) and "2 s" in str(refused)
    assert it.compiler.get(Literal("slow"), unexpected) is refused
    it.now[0] = 61.0
    again = it.ask("slow")  # the time has passed: it is tried again
    it.begin("slow")
    it.backend.let("slow")
    assert again.get(timeout=PATIENCE).of == Literal("slow")
    assert it.compiler.stats.timed_out == 1


def test_a_deadline_that_comes_late_changes_nothing() -> None:
    it = make()
    made = it.made("a")
    timer = it.timers.started.get(timeout=PATIENCE)
    assert timer.cancelled.wait(PATIENCE)
    timer.ring()
    assert it.compiler.get(Literal("a"), unexpected) is made and it.compiler.stats.timed_out == 0


def test_what_it_needs_is_prepared_before_its_time_begins() -> None:
    it = make()
    refused = it.ask("unprepared").get(timeout=PATIENCE)
    assert refused.reasons == ("could not start",)
    assert it.timers.started.empty() and it.backend.begun.empty()
    it.made("a")
    assert it.backend.prepared == ["a"]


def test_compiles_that_cannot_be_stopped_do_not_pile_up() -> None:
    it = make(remember_s=0.0)
    stuck = [f"stuck{i}" for i in range(AT_ONCE)]
    answers = [it.ask(text) for text in stuck]
    timers = [it.timers.started.get(timeout=PATIENCE) for _ in stuck]
    waiting = it.ask("waiting")
    for timer in timers:
        timer.ring()
    assert all(isinstance(answer.get(timeout=PATIENCE), CompileTimeout) for answer in answers)
    assert isinstance(waiting.get(timeout=PATIENCE), CompileTimeout)  # it never began
    assert isinstance(it.ask("another").get_nowait(), CompileTimeout)
    assert {it.backend.begun.get(timeout=PATIENCE) for _ in stuck} == set(stuck) and it.backend.begun.empty()
    it.backend.let(stuck[0])
    while it.compiler.stats.running == AT_ONCE:  # until its thread has ended
        pass
    assert it.made("waiting").of == Literal("waiting")
    it.backend.let(stuck[1])


def test_a_constraint_that_is_equal_but_another_object_is_the_same() -> None:
    def constraint() -> Constraint:
        return sequence("x", choice(["a", "b"]), Repeat(Optional(Regex("c")), ","))

    assert constraint() == constraint() and hash(constraint()) == hash(constraint())
    assert hash(Sequence((Literal("a"),))) != hash(OneOf((Literal("a"),)))
    again = pickle.loads(pickle.dumps(constraint()))
    assert again == constraint() and hash(again) == hash(constraint())
    assert "_hash" not in repr(again)


def test_refused_for_being_busy_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 1)
    it = make()
    answers = [it.ask(f"t{i}") for i in range(AT_ONCE + 1)]
    assert isinstance(it.ask("one too many").get_nowait(), CompileTimeout)
    it.backend.all_may = True
    for i in range(AT_ONCE):
        it.backend.let(f"t{i}")
    for answer in answers:
        answer.get(timeout=PATIENCE)
    assert it.made("one too many").of == Literal("one too many")


def test_the_longest_unused_goes_first_when_the_bytes_are_too_many() -> None:
    it = make(size=40, cache_bytes=100)
    a, _ = it.made("a"), it.made("b")
    assert it.compiler.get(Literal("a"), unexpected) is a
    it.made("c")
    assert it.compiler.stats.kept == 2 and it.compiler.stats.kept_bytes == 80
    assert it.compiler.get(Literal("a"), unexpected) is a
    assert it.made("b").of == Literal("b")
    assert [it.backend.begun.get_nowait() for _ in range(4)] == ["a", "b", "c", "b"]


def test_one_that_is_larger_than_the_cache_is_kept_alone() -> None:
    it = make(size=400, cache_bytes=100)
    made = it.made("a")
    assert it.compiler.get(Literal("a"), unexpected) is made
    it.made("b")
    assert it.compiler.stats.kept == 1


def test_a_cancelled_request_is_not_called_back_and_others_are() -> None:
    it = make()
    called: list[Any] = []
    assert it.compiler.get(Literal("a"), called.append) is None
    other = it.ask("a")
    it.begin("a")
    assert it.compiler.cancel(Literal("a"), called.append) is True
    assert it.compiler.cancel(Literal("a"), called.append) is False
    it.backend.let("a")
    assert other.get(timeout=PATIENCE).of == Literal("a")
    assert called == []


def test_what_everybody_cancelled_before_it_began_is_not_compiled() -> None:
    it = make()
    for i in range(AT_ONCE):
        it.ask(f"t{i}")

    def done(outcome: object) -> None:
        pytest.fail("it was cancelled")

    assert it.compiler.get(Literal("later"), done) is None
    assert it.compiler.cancel(Literal("later"), done) is True
    it.backend.all_may = True
    for i in range(AT_ONCE):
        it.backend.let(f"t{i}")
    assert it.made("last").of == Literal("last")
    assert "later" not in [it.backend.begun.get_nowait() for _ in range(AT_ONCE + 1)]
    assert it.compiler.cancel(Literal("last"), done) is False


def test_closing_tells_who_waits_and_refuses_the_rest() -> None:
    it = make()
    answer = it.ask("a")
    it.begin("a")
    it.compiler.close()
    assert "stopping" in str(answer.get(timeout=PATIENCE))
    assert "stopping" in str(it.ask("b").get_nowait())
    assert it.backend.closed
    it.backend.let("a")


def test_the_backend_is_made_with_the_first_constraint_and_once() -> None:
    made: list[int] = []
    backend = Slow()
    backend.all_may = True

    def make_backend() -> Slow:
        made.append(1)
        return backend

    compiler = Compiler(make_backend)
    compiler.close()
    assert made == []
    compiler = Compiler(make_backend)
    for text in ("a", "b"):
        answers: Queue[Any] = Queue()
        compiler.get(Literal(text), answers.put)
        answers.get(timeout=PATIENCE)
    assert made == [1]


def test_the_backend_can_be_built_before_the_first_constraint() -> None:
    built = threading.Event()
    backend = Slow()
    backend.all_may = True

    def make_backend() -> Slow:
        built.set()
        return backend

    compiler = Compiler(make_backend)
    compiler.warm()
    assert built.wait(PATIENCE) and backend.begun.empty()
    compiler.close()
