"""Ways of answering, measured on tasks: how many answers are right, and how many tokens they took.

A way is a strategy with options, or plain answering; a row is the result of one way on all tasks. Tokens are all that
the model wrote, those of candidates and branches that were given up included. Knows nothing of files or terminals.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine.errors import ContextLengthExceeded, InvalidParameter
from engine.params import GREEDY, Span
from reasoning.evaluate.judging import Judge
from reasoning.strategies import Strategies, StrategyError, run_strategy
from reasoning.strategy import Context, Event, Options, Spent
from reasoning.thinking import Markers, Piece, think_and_answer

if TYPE_CHECKING:
    from engine import Engine

AT_ONCE = 48  # answers and branches, so that the engine's batches are full
MAX_S = 3600.0  # that one answer may take
PLAIN = "plain"


class BadWay(ValueError):
    """A way that cannot be measured; the message names the accepted values."""


@dataclass(frozen=True, slots=True)
class Task:
    """A question and how its answer is judged. `checker` scores without knowing the answer, where that is possible.

    `messages` are a chat's, up to the question.
    """

    messages: tuple[dict[str, Any], ...]  # Any: as the chat template takes them
    judge: Judge
    checker: Callable[[str], float] | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """`name` is unique, `curve` is its group. `strategy` may be `plain`: the model as it answers.

    Without `thinking` the chat template gets `enable_thinking=False`.
    """

    name: str
    curve: str
    strategy: str = PLAIN
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON, checked by the strategy
    thinking: bool = True

    def checked(self, strategies: Strategies) -> Options | None:
        """The strategy's options.

        Raises:
            BadWay: there is no such strategy, or its options are not right.
        """
        if self.strategy == PLAIN:
            if self.options:
                raise BadWay(f"{self.name}: plain has no options; accepted: {PLAIN} alone.")
            return None
        if self.strategy not in {each.name for each in strategies}:
            accepted = ", ".join([PLAIN, *sorted(each.name for each in strategies)])
            raise BadWay(f"{self.name}: there is no strategy {self.strategy!r}; accepted: {accepted}.")
        try:
            return strategies.options(self.strategy, self.options)
        except InvalidParameter as error:
            raise BadWay(f"{self.name}: {error}") from None


@dataclass(frozen=True, slots=True)
class MeasuredWay:
    """The result of one way: `right` of `n`; the interval `low` to `high` contains the true share with 95% confidence.

    `tokens` that the model wrote and `thinking` tokens of the answers that were given are means. `cut` answers ended at
    a limit of tokens and count as wrong, as do those that `failed`. `seconds` are of all tasks together. `fallback` is
    the mean of the tokens that the engine's fallback weights sampled, in `deferred` answers.
    """

    name: str
    curve: str
    n: int
    right: int
    share: float
    low: float
    high: float
    tokens: float
    thinking: float
    cut: int
    failed: int
    seconds: float
    fallback: float = 0.0
    deferred: int = 0


@dataclass(slots=True)
class _Answered:
    right: bool = False
    tokens: int = 0
    thinking: int = 0
    cut: bool = False
    failed: bool = False
    fallback: int = 0


def wilson(right: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval of Wilson (1927), sound also near 0 and 1. `right` may be an expected number."""
    share, denominator = right / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / denominator
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5 / denominator
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))  # rounding goes no other way


async def measure(
    engine: Engine,
    tasks: Sequence[Task],
    way: Way,
    *,
    strategies: Strategies | None = None,
    span: Span | None = None,
    at_once: int = AT_ONCE,
    done: Callable[[int], None] = lambda answered: None,
) -> MeasuredWay:
    """One way on all tasks, many at once. `done` is called after every answer with their count.

    `span` has the sampling and the limit of tokens: greedy and 2,048 by default, less where the remaining context is
    shorter. Where it samples, the task's place is added to its seed.

    Raises:
        BadWay: there are no tasks, no such strategy, or its options contradict the model or each other.
        EngineStopped: see there.
    """
    if not tasks:
        raise BadWay("there are no tasks; accepted: one or more.")
    strategies = strategies or Strategies()
    options = way.checked(strategies)
    span = span or Span(GREEDY, 2048)
    gate, answered = asyncio.Semaphore(max(1, at_once // _branches(options))), 0

    async def one(at: int, task: Task) -> _Answered:
        nonlocal answered
        async with gate:
            made = await _answer(engine, task, way, options, strategies, _seeded(span, at))
        answered += 1
        done(answered)
        return made

    began = time.monotonic()
    jobs = [asyncio.ensure_future(one(at, task)) for at, task in enumerate(tasks)]
    try:
        made = await asyncio.gather(*jobs)
    except InvalidParameter as error:
        raise BadWay(f"{way.name}: {error}") from None
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    n, right = len(made), sum(each.right for each in made)
    return MeasuredWay(
        way.name, way.curve, n, right, right / n, *wilson(right, n), sum(each.tokens for each in made) / n,
        sum(each.thinking for each in made) / n, sum(each.cut for each in made), sum(each.failed for each in made),
        time.monotonic() - began, sum(each.fallback for each in made) / n, sum(each.fallback > 0 for each in made),
    )  # fmt: skip


def _branches(options: Options | None) -> int:
    """Sequences that an answer writes side by side, as far as its options say."""
    named = {} if options is None else dict(options)
    beam = named.get("n") or named.get("width") or named.get("beam") or 1
    return int(beam) * int(named.get("samples") or 1)


def _asks_checker(options: Options | None) -> bool:
    """Returns whether options name the checker. By default nothing is checked: a measurement would compare other
    things."""
    return options is not None and "checker" in dict(options).values()


def _seeded(span: Span, at: int) -> Span:
    seed = span.sampling.seed or 0
    return replace(span, sampling=replace(span.sampling, seed=seed + at))


async def _answer(
    engine: Engine, task: Task, way: Way, options: Options | None, strategies: Strategies, span: Span
) -> _Answered:
    tokenizer = engine.tokenizer
    variables: dict[str, Any] = {} if way.thinking else {"enable_thinking": False}
    prompt = tokenizer.apply_chat_template(list(task.messages), **variables)
    remaining = engine.max_model_len - len(prompt)
    made = _Answered()
    if remaining < 1:
        made.failed = True
        return made
    markers = Markers.of(tokenizer)
    context = Context(
        tokenizer, replace(span, max_tokens=min(span.max_tokens or remaining, remaining)), markers,
        opened=markers is not None and markers.left_open(prompt, tokenizer),
        closed=markers is not None and markers.left_closed(prompt, tokenizer),
        checker=task.checker if _asks_checker(options) else None, variables=variables,
        value_head=engine.value_head,
    )  # fmt: skip
    text, last = "", None
    try:
        async with (
            await engine.open(prompt) as seq,
            aclosing(_written(way, strategies, seq, context, options)) as written,
        ):
            async for item in written:
                match item:
                    case Piece():
                        made.tokens += item.spent
                        made.fallback += item.fallback
                        made.thinking += item.spent if item.part == "thinking" else 0
                        text += item.text if item.part == "answer" else ""
                        last = item.finish_reason or last
                    case Spent(tokens):
                        made.tokens += tokens
    except (ContextLengthExceeded, StrategyError):
        made.failed = True
        return made
    made.cut = last != "stop"
    made.right = not made.cut and task.judge(text.strip())
    return made


def _written(
    way: Way, strategies: Strategies, seq: Any, context: Context, options: Options | None
) -> AsyncGenerator[Piece | Event, None]:  # Any: the engine's sequence
    if options is None:
        return _plain(seq, context)
    return run_strategy(
        strategies.get(way.strategy), seq, context, options, timeout_s=MAX_S, silent_s=MAX_S
    )  # fmt: skip


async def _plain(seq: Any, context: Context) -> AsyncGenerator[Piece | Event, None]:  # Any: the engine's sequence
    async with aclosing(
        think_and_answer(seq, context.span, context.markers, opened=context.opened, closed=context.closed)
    ) as pieces:
        async for piece in pieces:
            yield piece
