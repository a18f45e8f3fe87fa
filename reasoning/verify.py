"""Scores a candidate: a program's check, the model's own log-probabilities, or its judgement when asked.

Every verifier scores from 0 to 1, so that one score can be compared with another of its kind and with `enough`. Knows
nothing of how candidates come about.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import DeadlineExceeded, InvalidParameter
from reasoning.candidate import Candidate
from reasoning.dialogue import after_answer
from reasoning.strategy import Check, Context

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence
    from engine import Tokenizer

JUDGE = "Is your answer right? Answer with yes or no."


class Verifier(Protocol):
    """Scores candidates from 0 to 1. `measures`: they must come with their log-probabilities."""

    @property
    def measures(self) -> bool: ...

    async def score(self, candidate: Candidate, seq: EngineSequence) -> float:
        """`seq` ends with the candidate, and is the verifier's to fork, not to change."""
        ...


@dataclass(frozen=True, slots=True)
class Checker:
    """The request's checker, of the answer's text."""

    check: Check
    measures: bool = False

    async def score(self, candidate: Candidate, seq: EngineSequence) -> float:
        return await run_check(self.check, candidate.text)


async def run_check(check: Check, text: str) -> float:
    """Score a text, from 0 to 1.

    Raises:
        InvalidParameter: the score is out of range. Other errors are the checker's.
    """
    score = check(text)
    score = float(await score if inspect.isawaitable(score) else score)
    if not 0 <= score <= 1:
        raise InvalidParameter("checker", f"checker scored an answer {score:g}; accepted: 0 to 1.")
    return score


@dataclass(frozen=True, slots=True)
class Confidence:
    """The geometric mean of the probabilities of its tokens, thinking included."""

    measures: bool = True

    async def score(self, candidate: Candidate, seq: EngineSequence) -> float:
        return candidate.confidence


@dataclass(frozen=True, slots=True)
class Judge:
    """The model is asked, on a throw-away fork, and the probability of the good word against the bad one is read; 0
    where the deadline leaves no time to."""

    tokenizer: Tokenizer
    question: str = JUDGE
    good: str = "yes"
    bad: str = "no"
    variables: Mapping[str, Any] = field(default_factory=dict)  # Any: a model's authors name them
    measures: bool = False

    async def score(self, candidate: Candidate, seq: EngineSequence) -> float:
        """Raises `CannotContinue` where the chat template takes no second question, and the errors of `score`."""
        (fork,) = seq.fork()
        try:
            fork.append(after_answer(self.tokenizer, self.question, {"enable_thinking": False, **self.variables}))
            good, bad = await read_labels(fork, [self.tokenizer.encode(word) for word in (self.good, self.bad)])
        except DeadlineExceeded:
            return 0.0
        finally:
            fork.close()
        return good / (good + bad) if good + bad > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ValueVerifier:
    """The model's value head, read after the candidate's last token (as the verifiers of Cobbe et al. 2021); 0 where
    the deadline leaves no time to."""

    measures: bool = False

    async def score(self, candidate: Candidate, seq: EngineSequence) -> float:
        try:
            return await seq.value()
        except DeadlineExceeded:
            return 0.0


def verifier(name: str, context: Context) -> Verifier:
    """`checker`, `confidence`, `judge` or `value`, as options name them.

    Raises:
        InvalidParameter: there is none of this name, nobody gave a checker, or the model has no value head.
    """
    if name == "checker":
        if context.checker is None:
            message = "verifier is 'checker', and there is none; accepted: a checker in the request, confidence, judge."
            raise InvalidParameter("verifier", message)
        return Checker(context.checker)
    if name == "confidence":
        return Confidence()
    if name == "judge":
        return Judge(context.tokenizer, variables=context.variables)
    if name == "value":
        if not context.value_head:
            message = "verifier is 'value', and the model has no value head that is read; accepted: checker, confidence"
            raise InvalidParameter("verifier", f"{message}, judge.")
        return ValueVerifier()
    raise InvalidParameter("verifier", f"verifier is {name!r}; accepted: checker, confidence, judge, value.")


async def read_labels(seq: EngineSequence, labels: Sequence[Sequence[int]]) -> list[float]:
    """Probabilities of labels as the next words, read in one batch.

    Labels with different first tokens are distinguished by those alone: one row of logits then reads them all.

    Raises the errors of `score`.
    """
    firsts = [tuple(label[:1]) for label in labels]
    distinct = len(set(firsts)) == len(firsts)
    scores = await seq.score(firsts if distinct else labels)
    return [math.exp(sum(each)) for each in scores]
