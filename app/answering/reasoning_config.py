"""Resolves how a request reasons: effort, thinking budget, strategy. One meaning of the four fields for every API.

`ReasoningResolver` checks a request's fields, and `AnswerGenerator` writes an answer as they ask.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from app.admission.request_budget import RequestBudget
from app.answering.checkers import Checkers
from app.answering.served_model import ServedModel
from app.config import Settings
from app.config.efforts import BUDGETS, BudgetFields, Effort, Thinking
from app.errors import invalid
from engine.errors import InvalidParameter
from engine.params import Span
from reasoning.budget import BudgetForcing, ThinkingBudget
from reasoning.deep_research import ResearchOptions
from reasoning.strategies import TIMEOUT_S, Strategies, run_strategy
from reasoning.strategy import (
    Check,
    Context,
    ContextDocument,
    Event,
    Options,
    SearchSource,
    Strategy,
    StrategyQuota,
    Yields,
)
from reasoning.thinking import Markers, Piece, empty_thinking, think_and_answer

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence

log = logging.getLogger("ponder")


@dataclass(frozen=True, slots=True)
class WaitInserted(Event):
    """The thinking was made to go on for the `number`th time, of `of` at most."""

    number: int
    of: int


@dataclass(frozen=True, slots=True)
class ReasoningRequest:
    """A request's fields of reasoning, each None where it is absent. Any: JSON."""

    effort: Effort | None = None
    thinking: BudgetFields | None = None
    strategy: str | None = None
    strategy_options: Mapping[str, Any] | None = None
    thinks: bool | None = None  # whether there is to be thinking, as the chat template's `enable_thinking`
    checker: Mapping[str, Any] | None = None


Collections = Literal["own", "all"] | list[int]


@dataclass(slots=True)
class Searches:
    """Makes the searches of strategies for an API's requests: (model, user, question, collections). `make` is there
    where the documents are, in the primary process."""

    make: Callable[[ServedModel, str, str, Collections], Awaitable[SearchSource]] | None = None

    async def of(
        self, config: ReasoningConfig, served: ServedModel, user: str, messages: Sequence[Mapping[str, Any]]
    ) -> SearchSource | None:
        """Returns the search that a request's strategy asks for, None where it asks for none. Any: JSON.

        Raises:
            ApiError: 400: this process has no documents.
            NotFound: there is no such collection.
        """
        options = config.options
        if not isinstance(options, ResearchOptions) or options.collections is None:
            return None
        if self.make is None:
            raise invalid(
                "strategy", "deep_research needs documents, which API workers lack; accepted: api_workers = 1."
            )
        asked = messages[-1].get("content") if messages and messages[-1].get("role") == "user" else ""
        return await self.make(served, user, asked if isinstance(asked, str) else "", options.collections)


@dataclass(frozen=True, slots=True)
class ReasoningResolver:
    """The server's side of thinking: the budgets that efforts stand for, the strategies, and their limits."""

    strategies: Strategies = field(default_factory=Strategies)
    efforts: Mapping[Thinking, BudgetFields] = field(default_factory=lambda: BUDGETS)
    quota: StrategyQuota = field(default_factory=StrategyQuota)
    seconds: float = TIMEOUT_S  # of a strategy
    checkers: Checkers = field(default_factory=Checkers)
    searches: Searches = field(default_factory=Searches)

    def of(self, asked: ReasoningRequest, served: ServedModel, user: str) -> ReasoningConfig:
        """Checks the request of `user`.

        Raises:
            ApiError, InvalidParameter: something is out of range, contradicts something else, or asks for thinking of a
                model that does not think.
        """
        if asked.strategy is None and asked.strategy_options is not None:
            known = ", ".join(sorted(each.name for each in self.strategies))
            message = f"strategy_options are given without a strategy; accepted: strategy, one of {known}."
            raise invalid("strategy_options", message)
        if asked.effort is not None and asked.thinking is not None:
            raise invalid("thinking", "thinking and reasoning_effort are both given; accepted: one of them.")
        budget = None if asked.thinking is None else ThinkingBudget(**dict(asked.thinking))
        said = "thinking" if budget is not None else "reasoning_effort"
        if asked.effort is not None and asked.effort != "none":
            budget = ThinkingBudget(**dict(self.efforts[asked.effort]))
        if asked.thinks is False and budget is not None:
            message = f"{said} asks for thinking, and enable_thinking is false; accepted: one of them."
            raise invalid(said, message)
        if asked.thinks and asked.effort == "none":
            message = 'reasoning_effort is "none", and thinking is asked for elsewhere; accepted: one of them.'
            raise invalid("reasoning_effort", message)
        chosen: Strategy[Any] | None = None
        options: Options | None = None
        if asked.strategy is not None:
            chosen, options = self._chosen(asked, budget is not None)
            if chosen.name == "budget":
                budget, said = ThinkingBudget(**dict(options)), "strategy"
                chosen = options = None
        if budget is not None:
            if served.markers is None:
                message = f"{said} asks for thinking, and the model {served.name!r} does not think; accepted: "
                raise invalid(said, message + ('"none".' if said == "reasoning_effort" else f"no {said}."))
            BudgetForcing(budget, served.engine.tokenizer)  # refuses a budget that cannot be kept
        unthinking = asked.effort == "none"
        thinks = False if unthinking else asked.thinks
        checker = None if asked.checker is None else self._checker(asked.checker, chosen, options, user)
        return ReasoningConfig(
            chosen, options, budget, unthinking, thinks, quota=self.quota, seconds=self.seconds, checker=checker,
            checker_fields=asked.checker,
        )  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings) -> ReasoningResolver:
        """With the strategies of installed packages; those that cannot be loaded are logged."""
        strategies = Strategies()
        strategies.load_entry_points()
        for origin, why in strategies.faults.items():
            log.warning("The strategies of %s were not loaded: %s", origin, why)
        quota = StrategyQuota(settings.strategy_branches, settings.strategy_nodes, settings.strategy_seconds)
        return cls(strategies, {**BUDGETS, **settings.efforts}, quota, settings.strategy_seconds)

    def _checker(
        self, fields: Mapping[str, Any], chosen: Strategy[Any] | None, options: Options | None, user: str
    ) -> Check:
        if chosen is None or not chosen.takes_checker(options):
            what = "there is no strategy to ask it"
            if chosen is not None:
                what = f"the strategy {chosen.name!r} with these options does not ask it"
            message = (
                f"checker is given, and {what}; accepted: strategy 'best_of_n' without another verifier, 'tree', or "
                "'self_consistency' with weight 'checker'."
            )
            raise invalid("checker", message)
        return self.checkers.make(fields, user)

    def _chosen(self, asked: ReasoningRequest, budgeted: bool) -> tuple[Strategy[Any], Options]:
        assert asked.strategy is not None
        chosen = self.strategies.get(asked.strategy)
        options = self.strategies.options(asked.strategy, asked.strategy_options or {})
        if budgeted:
            message = (
                f"a budget of thinking and the strategy {chosen.name!r} are both given; accepted: one of them, or the "
                "strategy 'budget' with its options."
            )
            raise invalid("strategy", message)
        if chosen.name == "budget" and (asked.effort == "none" or asked.thinks is False):
            message = "the strategy 'budget' needs thinking, which is turned off; accepted: one of them."
            raise invalid("strategy", message)
        return chosen, options


@dataclass(frozen=True, slots=True)
class ReasoningConfig:
    """A request's checked reasoning config. `unthinking`: there must be no thinking, even if the chat template opens
    it.
    """

    strategy: Strategy[Any] | None = None  # Any: each has its own options
    options: Options | None = None
    budget: ThinkingBudget | None = None
    unthinking: bool = False
    thinks: bool | None = None  # the chat template's `enable_thinking`, None: absent
    reduced: bool = False  # the budget is not the one asked for, and does not say whether to think
    quota: StrategyQuota = field(default_factory=StrategyQuota)
    seconds: float = TIMEOUT_S
    checker: Check | None = None
    checker_fields: Mapping[str, Any] | None = None  # as the request has it

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        thinks = True if self.budget is not None and not self.reduced else self.thinks
        return {} if thinks is None else {"enable_thinking": thinks}

    def prompt(self, tokens: list[int], served: ServedModel, *, calls: bool) -> list[int]:
        """A chat's prompt, with its thinking closed where there must be none and the template has not done so.
        `calls`: a call may stand in place of the answer, so its header is left open."""
        if served.markers is None:
            return tokens
        if not self.unthinking or served.closes_thinking(tokens):
            return tokens if calls else [*tokens, *served.markers.missing_header(tokens)]
        opened = served.opens_thinking(tokens)
        return [*tokens, *empty_thinking(served.engine.tokenizer, served.markers, opened=opened)]

    @property
    def reads_documents(self) -> bool:
        """Returns whether the strategy works on documents."""
        return self.strategy is not None and self.strategy.takes_documents

    @property
    def searches(self) -> bool:
        """Returns whether the strategy searches by itself."""
        return self.strategy is not None and self.strategy.takes_search

    def check(self, *, answers: int = 1) -> None:
        """
        Raises:
            ApiError: several answers are asked for of a strategy that makes several itself.
        """
        if self.strategy is not None and answers > 1:
            message = f"n is {answers}; accepted: 1 together with the strategy {self.strategy.name!r}."
            raise invalid("n", message)

    def check_routed(self) -> None:
        """
        Raises:
            ApiError: a strategy is asked for of several models together.
        """
        if self.strategy is not None:
            message = (
                f"the strategy {self.strategy.name!r} is asked for of 'auto'; accepted: the name of one model, or the "
                "strategy 'budget'."
            )
            raise invalid("strategy", message)

    def recorded(self) -> dict[str, Any]:
        """As JSON, for `restored`."""
        if self.strategy is not None and self.options is not None:
            checker = {} if self.checker_fields is None else {"checker": dict(self.checker_fields)}
            return {
                "strategy": self.strategy.name, "strategy_options": self.options.model_dump(mode="json"), **checker,
            }  # fmt: skip
        if self.budget is not None:
            return {"strategy": "budget", "strategy_options": asdict(self.budget)}
        return {"reasoning_effort": "none"} if self.unthinking else {}


def reduced_by_load(reasoning_config: ReasoningConfig, served: ServedModel) -> ReasoningConfig:
    """Returns `reasoning_config`, with less thinking where many wait for the model."""
    request_budget = RequestBudget.current()
    most = None if request_budget is None else request_budget.thinking_limit(served)
    if request_budget is None or most is None or served.markers is None or reasoning_config.strategy is not None:
        return reasoning_config
    if reasoning_config.unthinking or reasoning_config.thinks is False:
        return reasoning_config
    budget = reasoning_config.budget
    if budget is not None and budget.max_tokens is not None and budget.max_tokens <= most:
        return reasoning_config
    kept = budget or ThinkingBudget()
    less = replace(kept, max_tokens=most, min_tokens=min(kept.min_tokens, most), waits=0)
    request_budget.reduce_thinking(served.name, most)
    return replace(
        reasoning_config, budget=less, thinks=reasoning_config.thinks if budget is None else True, reduced=True
    )


def restored(
    recorded: Mapping[str, Any], served: ServedModel, reasoning_resolver: ReasoningResolver
) -> ReasoningConfig:
    """
    Raises:
        ApiError, InvalidParameter: it cannot be had on this server.
    """
    asked = ReasoningRequest(
        recorded.get("reasoning_effort"), None, recorded.get("strategy"), recorded.get("strategy_options"),
        checker=recorded.get("checker"),
    )  # fmt: skip
    return reasoning_resolver.of(asked, served, "replay")


class AnswerGenerator:
    """Writes an answer's turns by a `ReasoningConfig`; stands in for `think_and_answer`. One for each answer: a budget
    covers all its turns.

    `on_event` gets a strategy's events, in order with the pieces.
    """

    def __init__(
        self,
        reasoning_config: ReasoningConfig,
        served: ServedModel,
        variables: Mapping[str, Any],  # Any: a model's authors name them
        on_event: Callable[[Event], None] = lambda event: None,
        answer_tokens: int | None = None,
        documents: tuple[ContextDocument, ...] = (),
        search: SearchSource | None = None,
    ) -> None:
        """`answer_tokens`: at most so many tokens of a turn are no thinking. `documents` and `search` are for a
        strategy."""
        self._documents = documents
        self._search = search
        self._reasoning_config = reasoning_config
        self._answer_tokens = answer_tokens
        self._served = served
        self._variables = variables
        self._on_event = on_event
        budget = reasoning_config.budget
        self.forcing = None if budget is None else BudgetForcing(budget, served.engine.tokenizer)

    async def __call__(
        self,
        seq: EngineSequence,
        span: Span,
        markers: Markers | None,
        *,
        opened: bool,
        closed: bool = False,
        calls: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        """
        Raises:
            StrategyError: a strategy of a plugin fails.
            EngineError: as `generate` raises it.
        """
        if self.forcing is not None:
            happening: Yields | AsyncGenerator[Piece, None] = self._forced(
                self.forcing, seq, span, markers, opened=opened, closed=closed, calls=calls
            )
        elif (chosen := self._reasoning_config.strategy) is not None:
            happening = self._by(chosen, seq, span, markers, opened=opened, closed=closed, calls=calls)
        else:
            happening = think_and_answer(
                seq, span, markers, opened=opened, closed=closed, calls=calls, answer_tokens=self._answer_tokens
            )
        async with aclosing(happening) as each_happening:
            async for each in each_happening:
                if isinstance(each, Event):
                    self._on_event(each)
                else:
                    yield each

    async def _forced(
        self, forcing: BudgetForcing, seq: EngineSequence, span: Span, markers: Markers | None, **prompt: bool
    ) -> Yields:
        """Within the budget; each Wait is reported just before its piece."""
        waits = forcing.waits
        async with aclosing(forcing.answer(seq, span, markers, **prompt, answer_tokens=self._answer_tokens)) as pieces:
            async for piece in pieces:
                if forcing.waits > waits:
                    waits = forcing.waits
                    yield WaitInserted(waits, forcing.budget.waits)
                yield piece

    async def _by(
        self, chosen: Strategy[Any], seq: EngineSequence, span: Span, markers: Markers | None, **prompt: bool
    ) -> Yields:
        """By the strategy."""
        reasoning_config, tokenizer = self._reasoning_config, self._served.engine.tokenizer
        context = Context(
            tokenizer, span, markers, opened=prompt["opened"], closed=prompt["closed"], calls=prompt["calls"],
            checker=reasoning_config.checker, documents=self._documents, search=self._search,
            variables=self._variables, quota=reasoning_config.quota, value_head=self._served.engine.value_head,
        )  # fmt: skip
        running = run_strategy(chosen, seq, context, reasoning_config.options, timeout_s=reasoning_config.seconds)
        try:
            async with aclosing(running) as happening:
                async for each in happening:
                    yield each
        except InvalidParameter as error:
            raise _reworded(error, chosen, prompt["calls"]) from error


def _reworded(error: InvalidParameter, chosen: Strategy[Any], calls: bool) -> InvalidParameter:
    """A strategy's refusal in the words of a request."""
    if error.name == "constraint":
        what = "tools" if calls else "response_format"
        message = f"{what}: the strategy {chosen.name!r} cannot hold an answer to a form; accepted: no {what}."
        return InvalidParameter(what, message)
    if error.name in chosen.options.model_fields:
        return InvalidParameter(f"strategy_options.{error.name}", f"strategy_options.{error}")
    return error
