"""The strategies there are, by name, and running one so that nothing it does can hurt its host.

Ours and those of installed packages (entry points of the group `ponder.strategies`) go by the same API. A strategy runs
on a fork, with a deadline and a limit of tokens: even if it raises or never ends, the sequence is as it was, or has its
whole turn, and every fork is closed. A strategy that blocks the event loop itself cannot be ended, see
docs/strategies.md.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from engine.errors import DeadlineExceeded, EngineError, InvalidParameter
from reasoning.beam import beam
from reasoning.best_of_n import best_of_n
from reasoning.budget import budget
from reasoning.deep_conf import deep_conf
from reasoning.deep_research import deep_research
from reasoning.fallback import fallback
from reasoning.rag import rag_sequence, rag_token
from reasoning.self_consistency import self_consistency
from reasoning.strategy import Context, Event, Options, Strategy
from reasoning.thinking import Piece
from reasoning.tree import tree

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence

log = logging.getLogger("ponder")

GROUP = "ponder.strategies"
TIMEOUT_S = 600.0
SILENT_S = 120.0  # between two things that a strategy yields
CLOSING_S = 5.0  # for a cancelled strategy to end
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


# Any: each has its own options
BUILT_IN: tuple[Strategy[Any], ...] = (
    budget, best_of_n, self_consistency, deep_conf, tree, beam, fallback, rag_token, rag_sequence, deep_research,
)  # fmt: skip


class StrategyError(EngineError):
    """A strategy broke the contract: the message names it and says how."""

    code = "strategy_error"

    def __init__(self, strategy: Strategy[Any], message: str) -> None:
        super().__init__(f"The strategy {strategy.name!r} ({strategy.origin}) {message}")
        self.strategy = strategy.name


class StrategyTimeout(StrategyError):
    """A strategy did not end in time."""

    code = "strategy_timeout"


class Strategies:
    """Strategies by name. The first to claim a name keeps it; `faults` has those that could not be loaded, and why."""

    def __init__(self, offered: Iterable[Strategy[Any]] = BUILT_IN) -> None:
        self._by_name: dict[str, Strategy[Any]] = {}
        self.faults: dict[str, str] = {}
        for each in offered:
            self.add(each)

    def add(self, offered: object, origin: str = "ponder") -> None:
        """
        Raises:
            ValueError: `offered` is no strategy, or its name is taken or not one.
        """
        if not isinstance(offered, Strategy):
            raise ValueError(f"{offered!r} is no strategy; put @strategy(name, Options) above an async generator")
        if not _NAME.fullmatch(offered.name):
            raise ValueError(f"the name {offered.name!r} is not 1 to 64 of a-z, 0-9, _ and -, beginning with a letter")
        if offered.name in self._by_name:
            owner = self._by_name[offered.name].origin
            raise ValueError(f"the name {offered.name!r} is taken by {owner}; accepted: another name")
        self._by_name[offered.name] = replace(offered, origin=origin)

    def load_entry_points(self, group: str = GROUP) -> None:
        """Adds the strategies of installed packages; a broken one becomes a fault."""
        for point in entry_points(group=group):
            package = f" ({point.dist.name} {point.dist.version})" if point.dist is not None else ""
            origin = f"entry point {point.name}{package}"
            try:
                self.add(point.load(), origin)
            except (Exception, SystemExit) as error:  # a package's import may do anything
                self.faults[origin] = f"{type(error).__name__}: {error}"

    def __iter__(self) -> Iterator[Strategy[Any]]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Strategy[Any]:
        """
        Raises:
            InvalidParameter: there is none of this name.
        """
        if name not in self._by_name:
            raise InvalidParameter("strategy", f"strategy is {name!r}; accepted: {', '.join(sorted(self._by_name))}.")
        return self._by_name[name]

    def options(self, name: str, given: Mapping[str, Any]) -> Options:
        """A strategy's options, made of JSON.

        Raises:
            InvalidParameter: there is no such strategy, or its options are not right; the message names the field.
        """
        chosen = self.get(name)
        try:
            return chosen.options.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(["strategy_options", *map(str, first["loc"])])
            accepted = ", ".join(chosen.options.model_fields) or "none"
            hint = f"; accepted: {accepted}" if first["type"] == "extra_forbidden" else ""
            raise InvalidParameter(where, f"{where}: {first['msg']}{hint}.") from None


async def run_strategy(
    chosen: Strategy[Any],  # Any: each has its own options
    seq: EngineSequence,
    context: Context,
    options: object,
    *,
    timeout_s: float = TIMEOUT_S,
    silent_s: float = SILENT_S,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[Piece | Event, None]:
    """Yields a strategy's pieces and events, supervised. Once it is over, `seq` has the turn; if it is left or fails,
    nothing. One that fails after the sequence's deadline has a last piece that says so.

    Raises:
        DeadlineExceeded: the deadline passed before the strategy yielded a piece.
        StrategyTimeout: it did not end within `timeout_s`, or yielded nothing for `silent_s`.
        StrategyError: it raised something that is no EngineError, yielded something that is neither piece nor event,
            wrote more than `max_tokens`, changed earlier tokens of the sequence, or ended without a last piece.
        EngineError: as the strategy raised it, such as InvalidParameter for options that contradict the request.
    """
    begun, ends = len(seq), clock() + timeout_s
    (work,) = seq.fork()
    items: asyncio.Queue[object] = asyncio.Queue(1)
    running = asyncio.ensure_future(_pump(chosen, work, context, options, items))
    spent, over, part = 0, False, None
    try:
        while (item := await _next(chosen, work, items, min(silent_s, ends - clock()))) is not _END:
            if not isinstance(item, Piece | Event):
                raise StrategyError(chosen, f"yielded {type(item).__name__}; accepted: Piece and Event.")
            if isinstance(item, Piece):
                if over:
                    raise StrategyError(chosen, "went on after the piece with a finish reason.")
                spent, part = spent + item.spent, item.part
                over = item.finish_reason is not None
            if context.span.max_tokens is not None and spent > context.span.max_tokens:
                raise StrategyError(chosen, f"wrote {spent} tokens; accepted: {context.span.max_tokens}.")
            yield item
        if not over:
            raise StrategyError(chosen, "ended without a piece that has a finish reason.")
        written = work.tokens
        if written[:begun] != seq.tokens:
            raise StrategyError(chosen, "changed what stood in the sequence before it; accepted: adding to it.")
        seq.append(written[begun:])
    except DeadlineExceeded:
        if part is None:
            raise
        yield Piece(part, "", 0, finish_reason="deadline")
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=CLOSING_S)
        if not running.done():
            log.warning("The strategy %r (%s) does not end when it is told to", chosen.name, chosen.origin)
        work.close()


_END = object()


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


async def _pump(
    chosen: Strategy[Any], work: EngineSequence, context: Context, options: object, items: asyncio.Queue[object]
) -> None:
    """Runs a strategy in a task of its own: one that resists being cancelled is left behind with it."""
    try:
        running = chosen.run(work, context, options)
        if not isinstance(running, AsyncGenerator):
            if inspect.iscoroutine(running):
                running.close()
            raise TypeError("its function is no async generator: it must yield pieces")
        async with aclosing(running) as yielded:
            async for item in yielded:
                await items.put(item)
        await items.put(_END)
    except Exception as error:
        await items.put(_Failed(error))


async def _next(chosen: Strategy[Any], work: EngineSequence, items: asyncio.Queue[object], left: float) -> object:
    """The next thing that a strategy yields, `_END` at its end."""
    try:
        if left <= 0:
            raise TimeoutError
        async with asyncio.timeout(left):
            item = await items.get()
    except TimeoutError:
        raise StrategyTimeout(chosen, "did not go on or end in time, and was ended.") from None
    if not isinstance(item, _Failed):
        return item
    if isinstance(item.error, EngineError):
        raise item.error
    why = f"failed: {type(item.error).__name__}: {item.error}"
    if work.past_deadline:  # its spans wrote nothing more, which it may not expect
        log.info("The strategy %r (%s) %s at its deadline", chosen.name, chosen.origin, why)
        raise DeadlineExceeded(f"The strategy {chosen.name!r} {why}") from item.error
    raise StrategyError(chosen, why) from item.error
