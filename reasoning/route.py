"""A cascade (Chen et al. 2023, FrugalGPT): a small model answers first, a larger one where that is not sure enough.

Gates decide whether an answer passes: how probable the answer's tokens were, how undecided the model was, or a
program's check. Every model is tried once, the last one's answer is always taken, and a report lists escalations and
their reasons. Knows nothing of which models there are, nor of their prompts.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.outputs import TokenLogprob
from reasoning.candidate import Candidate
from reasoning.strategy import Event


@dataclass(frozen=True, slots=True)
class Verdict:
    """A gate's measurement, and whether it passes."""

    gate: str
    measured: float
    accepted: str  # such as "at least 0.9"
    passed: bool


class Gate(Protocol):
    """Decides whether an answer is good enough to be given. `measures`: it needs log-probabilities."""

    @property
    def measures(self) -> bool: ...

    def judge(self, answer: Candidate) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class Confident:
    """The geometric mean of the probabilities of its tokens, thinking included, is at least this."""

    least: float
    measures: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError where `least` is not between 0 and 1."""
        if not 0 <= self.least <= 1:
            raise ValueError(f"least is {self.least}; accepted: a probability, 0 to 1")

    def judge(self, answer: Candidate) -> Verdict:
        measured = answer.confidence
        return Verdict("confidence", measured, f"at least {self.least:g}", measured >= self.least)


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The geometric mean of the probabilities of its first `tokens`, thinking included, is at least this.

    Whoever writes the answer may ask `stops` and end it there: the rest could not make it pass.
    """

    least: float
    tokens: int = 16
    measures: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError where `least` is not between 0 and 1, or there is no token."""
        if not 0 <= self.least <= 1:
            raise ValueError(f"least is {self.least}; accepted: a probability, 0 to 1")
        if self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}; accepted: at least 1")

    def judge(self, answer: Candidate) -> Verdict:
        measured = self._measured(answer.logprobs)
        return Verdict("first tokens", measured, f"at least {self.least:g}", measured >= self.least)

    def stops(self, logprobs: Sequence[TokenLogprob]) -> bool:
        """Returns whether an answer that begins with these has too unsure a beginning."""
        return len(logprobs) >= self.tokens and self._measured(logprobs) < self.least

    def _measured(self, logprobs: Sequence[TokenLogprob]) -> float:
        return Candidate(0, (), (), tuple(logprobs[: self.tokens])).confidence


@dataclass(frozen=True, slots=True)
class Decided:
    """The mean entropy at its tokens is at most this, in nats."""

    most: float
    measures: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError where `most` is negative."""
        if not self.most >= 0:
            raise ValueError(f"most is {self.most}; accepted: 0 or more nats")

    def judge(self, answer: Candidate) -> Verdict:
        measured = answer.entropy
        return Verdict("entropy", measured, f"at most {self.most:g} nats", measured <= self.most)


@dataclass(frozen=True, slots=True)
class Checked:
    """A program finds the answer's text at least this good, 0 to 1."""

    check: Callable[[str], float]
    least: float = 1.0
    measures: bool = False

    def judge(self, answer: Candidate) -> Verdict:
        measured = float(self.check(answer.text))
        return Verdict("check", measured, f"at least {self.least:g}", measured >= self.least)


@dataclass(frozen=True, slots=True)
class Whole:
    """The answer came to its own end, rather than to a limit."""

    measures: bool = False

    def judge(self, answer: Candidate) -> Verdict:
        return Verdict("whole", float(answer.whole), "an answer that ends by itself", answer.whole)


@dataclass(frozen=True, slots=True)
class CascadeStep:
    """A model of the cascade. `answer(measured)` writes one answer; `cost` is that of one token, in any unit.

    One that is not `judged`, as its log-probabilities are not known, has to be the last.
    """

    name: str
    answer: Callable[[bool], Awaitable[Candidate]]
    cost: float = 1.0
    judged: bool = True


@dataclass(frozen=True, slots=True)
class Tried(Event):
    """One model's answer, the gates' verdicts on it, and its cost. `passed`: it is given."""

    model: str
    verdicts: tuple[Verdict, ...]
    passed: bool
    tokens: int
    cost: float
    seconds: float

    @property
    def why(self) -> str:
        """Returns the failed gates, for people; empty where it passed."""
        failed = [each for each in self.verdicts if not each.passed]
        return "; ".join(f"{each.gate} is {each.measured:.3g}, accepted: {each.accepted}" for each in failed)


@dataclass(frozen=True, slots=True)
class Routed(Event):
    """The cascade's report: every model tried, in order; the last of them gave the answer."""

    tried: tuple[Tried, ...]

    @property
    def model(self) -> str:
        return self.tried[-1].model

    @property
    def escalated(self) -> bool:
        return len(self.tried) > 1

    @property
    def cost(self) -> float:
        return sum(each.cost for each in self.tried)


async def cascade(
    steps: Sequence[CascadeStep], gates: Sequence[Gate], *, clock: Callable[[], float] = time.monotonic
) -> AsyncGenerator[Event | Candidate, None]:
    """Asks one model after the other until an answer passes every gate: `Tried` for each, `Routed`, then the answer.

    Gates are asked in order up to the first that fails. The last model's answer is judged too, and given in any case.

    Raises:
        ValueError: there are no models, or several but nothing to decide between them.
        Exception: as a model's `answer` raises it.
    """
    if not steps:
        raise ValueError("a cascade has no models; accepted: one or more")
    if len(steps) > 1 and not gates:
        raise ValueError("a cascade of several models has no gate, so it would never escalate; accepted: one or more")
    tried: list[Tried] = []
    measured = any(gate.measures for gate in gates)
    for at, step in enumerate(steps):
        began = clock()
        answer = await step.answer(measured)
        verdicts: list[Verdict] = []
        for gate in gates if step.judged else ():
            verdicts.append(gate.judge(answer))
            if not verdicts[-1].passed:
                break
        passed = all(each.passed for each in verdicts) or at == len(steps) - 1
        cost = answer.spent * step.cost
        tried.append(Tried(step.name, tuple(verdicts), passed, answer.spent, cost, clock() - began))
        yield tried[-1]
        if passed:
            yield Routed(tuple(tried))
            yield answer
            return
