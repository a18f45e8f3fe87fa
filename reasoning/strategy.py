"""The interface of a strategy: a name, options, and a function of a live sequence that yields pieces of an answer and
events.

Ours and those of plugins are made of the same three things, see docs/strategies.md. Knows nothing of which strategies
there are, nor of HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from engine.errors import InvalidParameter
from engine.params import Span
from reasoning.thinking import Markers, Piece

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence
    from engine import Tokenizer


@dataclass(frozen=True, slots=True)
class Event:
    """A strategy's report on its work, such as a branch it gave up. Subclasses are plain data."""


@dataclass(frozen=True, slots=True)
class Spent(Event):
    """Tokens that are no part of the answer: `written` by the model, and `read` by it for the first time."""

    written: int
    read: int = 0


class Options(BaseModel):
    """Base of a strategy's options: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class StrategyQuota:
    """Limits of one answer: sequences side by side, nodes of a search, and seconds."""

    branches: int = 64
    nodes: int = 2_000
    seconds: float = 600.0


Check = Callable[[str], float | Awaitable[float]]  # scores an answer's text from 0 to 1


@dataclass(frozen=True, slots=True)
class ContextDocument:
    """A document that was retrieved for the question: the whole prompt with it alone, and its retrieval score."""

    prompt: tuple[int, ...]
    score: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class FoundPassage:
    """A passage that a search found. `label` is its source's in the whole answer, `quotes` are its sentences that
    answer best, word for word; `score`: how well it answers, 0 to 1."""

    label: str
    title: str
    text: str
    score: float
    quotes: tuple[str, ...] = ()


class SearchSource(Protocol):
    """The host's search for a strategy, in what the request allows. `question` is the user's, `parts` are the questions
    that it consists of; `writes`: the model is able to write from passages."""

    question: str
    parts: Sequence[str]
    writes: bool

    async def find(self, query: str, limit: int) -> Sequence[FoundPassage]:
        """Returns up to `limit` passages that seem to answer, the best first."""
        ...

    async def supported(self, text: str, labels: Sequence[str]) -> str:
        """Returns the sentences of a text that passages support, with their labels. `labels`: of the passages; none for
        all that were found so far."""
        ...

    def noted(self, question: str, text: str) -> None:
        """Hears the answer to a question, so that a stop keeps it."""
        ...

    def references(self, report: str) -> str:
        """Returns the list of the sources that a report cites; nothing where the host shows them by itself."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """The context of a strategy beside the sequence.

    `span` is the answer's: sampling, stops, constraint, and `max_tokens` (always set) for thinking and answer together.
    With `opened` the prompt has opened the thinking, with `closed` it has closed it. `checker` scores an answer's text,
    where the request brings one. `documents` are there where the answer rests on some, `search` where there is
    something to search in.
    `problem` is a task for a search, see `reasoning.tree`. `variables` are the chat template's. `value_head`: the
    engine reads one.
    """

    tokenizer: Tokenizer
    span: Span
    markers: Markers | None
    opened: bool = False
    closed: bool = False
    calls: bool = False
    checker: Check | None = None
    documents: tuple[ContextDocument, ...] = ()
    search: SearchSource | None = None
    problem: Any = None  # Any: a Problem with states of any type
    variables: Mapping[str, Any] = field(default_factory=dict)  # Any: a model's authors name them
    quota: StrategyQuota = field(default_factory=StrategyQuota)
    value_head: bool = False


def refuse_fields(context: Context, what: str, *names: str) -> None:
    """For strategies that cannot keep to everything a span may ask.

    Raises:
        InvalidParameter: one of the span's fields `names` is set.
    """
    for name in names:
        if getattr(context.span, name) not in (None, ()):
            raise InvalidParameter(name, f"{name} is set, and {what} cannot keep to it; accepted: {name} not set.")


OptionsT = TypeVar("OptionsT", bound=BaseModel)
Yields = AsyncGenerator[Piece | Event, None]


@dataclass(frozen=True, slots=True)
class Strategy(Generic[OptionsT]):
    """`run(seq, context, options)` yields the answer's pieces, the last one with a finish reason, and events.

    It works on `seq` and may fork it: forks are closed when it ends. The tokens it leaves in `seq` are the turn.
    `takes_checker` says whether it asks the request's checker, given its options, `takes_documents` whether it reads
    the context's documents: preparing their prompts takes time. `takes_search`: it searches by itself.
    """

    name: str
    options: type[OptionsT]
    run: Callable[[EngineSequence, Context, OptionsT], Yields]
    origin: str = "ponder"
    takes_checker: Callable[[OptionsT], bool] = lambda _: False
    takes_documents: bool = False
    takes_search: bool = False

    @property
    def about(self) -> str:
        """The first paragraph of the function's docstring."""
        return (self.run.__doc__ or "").strip().split("\n\n")[0]


def strategy(
    name: str,
    options: type[OptionsT],
    *,
    takes_checker: Callable[[OptionsT], bool] = lambda _: False,
    takes_documents: bool = False,
    takes_search: bool = False,
) -> Callable[[Callable[[EngineSequence, Context, OptionsT], Yields]], Strategy[OptionsT]]:
    """Makes a strategy of an async generator function; a request's checker is refused unless it `takes_checker`."""

    def made(run: Callable[[EngineSequence, Context, OptionsT], Yields]) -> Strategy[OptionsT]:
        return Strategy(
            name, options, run, takes_checker=takes_checker, takes_documents=takes_documents, takes_search=takes_search
        )

    return made
