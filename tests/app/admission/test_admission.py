"""The estimate of a wait against a simulated engine, and the limits of a key against a simulated clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission.admission import Admission
from app.admission.queue_estimate import AdmittedWork, QueueEstimate, ThroughputEstimate
from app.admission.rate_limits import KeyLimits, RateWindows, Window
from app.auth import Principal
from app.config import BadSetting, Settings, load_settings
from app.errors import ApiError
from engine.outputs import Stats

ANA, BOB = Principal("ana", "Ana", "user", "key_a"), Principal("bob", "Bob", "user", "key_b")
STEP_S, READ_S, WRITE_S = 0.02, 0.002, 0.001


@dataclass
class Asked:
    """A request in the simulated engine."""

    work: AdmittedWork
    at: float
    expected_s: float
    prompt: int
    output: int
    began: float | None = None


@dataclass
class Simulated:
    """An engine of some places that decodes first and reads 64 tokens of prompts a step beside that, first come first
    served. Its steps take exactly what `ThroughputEstimate` has to learn."""

    places: int
    now: float = 0.0
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.queue_estimate = QueueEstimate(self.places, clock=lambda: self.now)
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.begun: list[Asked] = []

    def ask(self, prompt: int, output: int) -> None:
        expected_s = self.queue_estimate.wait_s()
        self.waiting.append(
            Asked(self.queue_estimate.admit("ana", prompt, 4 * output), self.now, expected_s, prompt, output)
        )

    def step(self) -> None:
        while self.waiting and len(self.running) < self.places:
            self.running.append(self.waiting.pop(0))
        writing = [each for each in self.running if not each.prompt]
        reading, left = 0, 64
        for each in self.running:
            took = min(left, each.prompt)
            each.prompt -= took
            left -= took
            reading += took
        seconds = STEP_S + READ_S * reading + WRITE_S * len(writing)
        self.now += seconds
        for each in writing:
            each.output -= 1
            each.work.got(1, 0)
            if each.began is None:
                each.began = self.now
                self.begun.append(each)
            if not each.output:
                each.work.end(whole=True)
                self.running.remove(each)
        was = self.stats
        self.stats = Stats(
            steps=was.steps + 1, step_seconds=was.step_seconds + seconds, step_tokens=was.step_tokens + reading
            + len(writing), generated_tokens=was.generated_tokens + len(writing),
        )  # fmt: skip
        self.queue_estimate.seen(self.stats)


def test_the_pace_is_found_in_the_counters() -> None:
    pace, steps, read, written, seconds = ThroughputEstimate(), 0, 0, 0, 0.0
    for each in range(100):  # looks at the counters, of some steps each
        more = (10 + each % 3 * 10, each % 7 * 100, each % 5 * 100)
        steps, read, written = (a + b for a, b in zip((steps, read, written), more, strict=True))
        seconds += STEP_S * more[0] + READ_S * more[1] + WRITE_S * more[2]
        pace.seen(Stats(steps=steps, step_seconds=seconds, step_tokens=read + written, generated_tokens=written))
    assert pace.step_s == pytest.approx(STEP_S, rel=0.1)
    assert pace.read_s == pytest.approx(READ_S, rel=0.1)
    assert pace.write_s == pytest.approx(WRITE_S, rel=0.5)


def test_nothing_of_the_pace_is_ever_negative() -> None:
    pace, counts = ThroughputEstimate(), [(1, 10, 0, 5.0), (1, 1000, 1, 0.001), (1, 10, 60, 4.0), (1, 2000, 1, 0.001)]
    steps = read = written = 0
    seconds = 0.0
    for more_steps, more_read, more_written, more_seconds in counts * 20:
        steps, read, written = steps + more_steps, read + more_read, written + more_written
        seconds += more_seconds
        pace.seen(Stats(steps=steps, step_seconds=seconds, step_tokens=read + written, generated_tokens=written))
        assert min(pace.step_s, pace.read_s, pace.write_s) >= 0


def test_who_comes_to_an_idle_model_does_not_wait() -> None:
    assert QueueEstimate(4).wait_s() == 0


def test_a_burst_is_told_how_long_it_waits() -> None:
    engine = Simulated(places=4)
    for _ in range(8):  # so that pace and lengths are known
        engine.ask(prompt=100, output=50)
    while engine.running or engine.waiting:
        engine.step()
    engine.begun.clear()
    for _ in range(40):
        engine.ask(prompt=100, output=50)
    while engine.running or engine.waiting:
        engine.step()
    waited = [(each.expected_s, each.began - each.at) for each in engine.begun if each.began is not None]
    assert len(waited) == 40
    for expected_s, real_s in waited[8:]:
        assert real_s / 2 < expected_s < real_s * 2, waited


def test_under_a_steady_overload_the_expectation_is_right_on_average() -> None:
    engine = Simulated(places=4)
    asked = 0
    while engine.now < 200:
        if asked < engine.now * 2:  # about twice what it can do
            asked += 1
            if engine.queue_estimate.wait_s() < 20:
                engine.ask(prompt=200, output=40)
        engine.step()
    late = [(each.expected_s, (each.began or 0.0) - each.at) for each in engine.begun if each.at > 50]
    ratio = sum(expected for expected, _ in late) / sum(real for _, real in late)
    assert len(late) > 50 and 0.7 < ratio < 1.4, ratio
    assert max(real for _, real in late) < 40  # so the wait is bounded, whatever comes


def test_prompts_in_the_cache_are_not_waited_for() -> None:
    cold, warm = QueueEstimate(4), QueueEstimate(4)
    for _ in range(60):
        work = warm.admit("ana", 1000, 100)
        work.got(10, 1000)
        work.end(whole=True)
    for queue_estimate in (cold, warm):
        queue_estimate.admit("ana", 1000, 100)
    assert warm.wait_s() < cold.wait_s() / 10
    before = warm.wait_s()
    warm.admit("bob", 1000, 100)  # whose prompts were never seen
    assert warm.wait_s() - before > 100 * before


def test_what_ended_is_waited_for_no_more() -> None:
    queue_estimate = QueueEstimate(1)
    works = [queue_estimate.admit("ana", 100, 100) for _ in range(3)]
    assert len(queue_estimate) == 3 and queue_estimate.wait_s() > 0 and queue_estimate.tokens == 600
    for work in works:
        work.end(whole=False)
        work.end(whole=False)
    assert len(queue_estimate) == 0 and queue_estimate.wait_s() == 0 and queue_estimate.tokens == 0


@given(steps=st.lists(st.tuples(st.sampled_from(["admit", "got", "end"]), st.integers(0, 5), st.integers(0, 3000))))
def test_nothing_is_left_of_what_is_gone(steps: list[tuple[str, int, int]]) -> None:
    queue_estimate, open_works = QueueEstimate(2), list[AdmittedWork]()
    for what, place, tokens in steps:
        if what == "admit":
            open_works.append(queue_estimate.admit(f"t{place}", tokens, 100, place + 1))
        elif open_works and what == "got":
            open_works[place % len(open_works)].got(tokens % 7, tokens)
        elif open_works:
            open_works.pop(place % len(open_works)).end(whole=bool(tokens % 2))
        assert len(queue_estimate) == sum(work.answers for work in open_works)
        assert queue_estimate._sums.unread == sum(work.unread for work in open_works if work.reading)
    for work in open_works:
        work.end(whole=True)
    assert queue_estimate._sums == type(queue_estimate._sums)() and queue_estimate.wait_s() == 0


# -- limits of a key


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000_040.0  # a third of a minute into one of the clock's

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("limits.storage.memory.time.time", clock.time)
    monkeypatch.setattr("app.admission.rate_limits.monotonic", clock.time)
    return clock


def test_a_request_counts_for_exactly_a_minute(clock: Clock) -> None:
    rates = RateWindows()
    for _ in range(3):
        assert rates.request("a", 3) == 0
        clock.now += 10
    assert rates.request("b", 3) == 0  # another key's are its own
    assert rates.request("a", 3) == pytest.approx(30, abs=0.01)
    (window,) = rates.windows("a", KeyLimits(requests=3))
    assert window == Window("requests", 3, 0, window.reset_s) and window.reset_s == pytest.approx(50)
    clock.now += 29.9
    assert rates.request("a", 3) == pytest.approx(0.1, abs=0.01)
    clock.now += 0.2
    assert rates.request("a", 3) == 0


@pytest.mark.parametrize("later_s", [0.0, 13.0, 47.0, 59.0])
@pytest.mark.parametrize("wanted", [1, 300, 1000])
def test_tokens_are_there_when_it_was_said(clock: Clock, later_s: float, wanted: int) -> None:
    rates = RateWindows()
    rates.spend("a", 700)
    clock.now += later_s
    rates.spend("a", 500)
    wait_s = rates.wait_s("a", 1000, wanted)
    if wait_s:
        clock.now += wait_s - 0.11
        assert rates.wait_s("a", 1000, wanted) > 0
        clock.now += 0.22
    assert rates.wait_s("a", 1000, wanted) == 0


def test_tokens_that_nobody_foresaw_count_too(clock: Clock) -> None:
    rates = RateWindows()
    rates.spend("a", 450)
    (window,) = rates.windows("a", KeyLimits(tokens=100))
    assert window == Window("tokens", 100, 0, window.reset_s) and window.reset_s == pytest.approx(100)
    assert rates.wait_s("a", 100, 1) == pytest.approx(40 + 60 * (1 - 99 / 450), abs=0.01)


def test_a_wait_for_a_key_ends_when_it_was_said(clock: Clock) -> None:
    settings = Settings(requests_per_minute=2, concurrent_requests=2, tokens_per_minute=50)
    reasons: list[str] = []
    admission = Admission(settings, {"m": QueueEstimate(4)}, reasons.append)
    first, second = admission.begin(ANA), admission.begin(ANA)
    with pytest.raises(ApiError) as refused:
        admission.begin(ANA)
    assert refused.value.code == "concurrency_limit_exceeded" and "at most 2" in refused.value.message
    admission.begin(BOB).leave()
    first.leave()
    with pytest.raises(ApiError) as refused:
        admission.begin(ANA)
    assert refused.value.code == "rate_limit_exceeded" and "2 a minute" in refused.value.message
    clock.now += int(refused.value.headers["Retry-After"])
    admission.begin(ANA).leave()
    with pytest.raises(ApiError) as refused:
        second.charge(51)
    assert refused.value.code == "request_too_large" and "50" in refused.value.message
    second.charge(40)
    with pytest.raises(ApiError) as refused:
        second.charge(20)
    clock.now += int(refused.value.headers["Retry-After"])
    second.charge(20)
    second.leave()
    assert reasons == ["concurrency", "requests", "tokens", "tokens"]


def test_an_overloaded_model_refuses_and_says_until_when() -> None:
    settings = Settings(max_wait_s=2, max_running=4, max_waiting=2)
    queue_estimate = QueueEstimate(4)
    reasons: list[str] = []
    admission = Admission(settings, {"m": queue_estimate}, reasons.append)
    queue_estimate.admit("a", 20_000, 1)
    with pytest.raises(ApiError) as refused:
        admission.begin(ANA)
    seconds = int(refused.value.headers["Retry-After"])
    assert refused.value.code == "overloaded" and seconds == math.ceil(queue_estimate.wait_s() - 2)
    empty = QueueEstimate(4)
    either = Admission(settings, {"m": queue_estimate, "n": empty}, reasons.append)
    either.begin(ANA).leave()  # which of them it asks is not known yet
    for _ in range(6):
        empty.admit("a", 1, 1)
    with pytest.raises(ApiError) as refused:
        either.begin(ANA)
    assert refused.value.code == "queue_full" and "at most 6" in refused.value.message
    assert reasons == ["overload", "queue"]


def test_less_than_is_refused_at_is_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    settings = load_settings(max_wait_s="5", reduce_wait_s="5")
    with pytest.raises(BadSetting, match="less than that"):
        settings.check_limits()
    assert load_settings(max_wait_s="5").reduce_from_s == 1.25
