"""The problem that a tree search solves, and the search's options.

Prompts are token ids, since how a question is put is the model's own format; `Asking` makes them for chat models.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from pydantic import Field, model_validator

from ponder import ChatFormat, Options

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's reply when asked for steps. `ended`: it ended its turn; else a stop or the limit of tokens did."""

    text: str
    token_ids: tuple[int, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class Thought(Generic[S]):
    """A step to another state. `kept` are tokens that it leaves in the branch, for later steps to read.

    With `afresh` they follow the prefix of all branches, rather than the tokens that the step's own branch has kept.
    """

    text: str
    state: S
    kept: tuple[int, ...] = ()
    afresh: bool = False


class Problem(Protocol[S]):
    """A task. States are hashable, and equal ones are one node, however they were reached."""

    @property
    def start(self) -> S: ...

    @property
    def writes_on(self) -> bool:
        """Returns whether a reply is itself a step and stays in its branch, rather than a list of steps to choose
        from."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts at which a reply is over."""
        ...

    def propose_prompt(self, state: S) -> Sequence[int]:
        """Returns the prompt for next steps, appended to the branch. May be empty where the problem `writes_on`."""
        ...

    def read(self, state: S, reply: Reply) -> Sequence[Thought[S]]:
        """The steps in a reply, legal ones only; at most one where the problem `writes_on`."""
        ...

    def value_prompt(self, state: S) -> Sequence[int]:
        """Returns the prompt for one of the search's labels, appended to a throw-away fork of the branch."""
        ...

    def check(self, state: S) -> float | Awaitable[float | None] | None:
        """Score a state from 0 (hopeless) to 1 (solved), where code can; None: the model is to judge."""
        ...

    def done(self, state: S) -> bool:
        """Returns whether no more steps follow."""
        ...

    def answer(self, state: S) -> str:
        """Returns the answer's text for a state, finished or not."""
        ...


@dataclass(frozen=True, slots=True)
class Asking:
    """Puts questions to a chat model, each in a chat of its own that begins with `system`, if it is given."""

    format: ChatFormat
    system: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)  # Any: a model's authors name them

    def head(self) -> list[int]:
        """Tokens that all questions share, for the sequence that a search begins with.

        They end with a control token, as ordinary ones could be others before another text.
        """
        one, other = self._whole("?"), self._whole("!")
        same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        while same and one[same - 1] not in self.format.control_ids:
            same -= 1
        return one[:same]

    def question(self, text: str) -> list[int]:
        """Returns the tokens after the head that ask `text`."""
        return self._whole(text)[len(self.head()) :]

    def _whole(self, text: str) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.format.apply_chat_template([*system, {"role": "user", "content": text}], **self.variables)


Search = Literal["bfs", "dfs", "mcts"]
SAMPLES = 4  # of one step each

Value = Literal["read", "votes", "check", "likelihood", "head"]


class TreeOptions(Options):
    """A search's options.

    `beam` is how many states are followed at once: a level's best (bfs), or the leaves of a round (mcts); dfs follows
    one. Every state is asked `samples` times for next steps: by default once for a list, or 4 times for one each.

    `value` says where values come from: the log-probabilities of the labels, read at once; `votes` sampled judgements;
    the problem's checker alone; the probability of the steps that lead there; or the model's value head (`head`). The
    checker's word counts before the model's in any case. States below `threshold` are not followed. A finished state
    solves the task where the checker says so or, where it says nothing, from the value `solved_value` on.

    Raises:
        ValidationError: a value is out of range, or two contradict each other.
    """

    search: Search = "bfs"
    value: Value = "read"
    beam: int = Field(5, ge=1, le=64)
    samples: int | None = Field(None, ge=1, le=32)
    depth: int = Field(4, ge=1, le=64)
    threshold: float = Field(0.0, ge=0, lt=1)
    solved_value: float = Field(0.9, gt=0, le=1)
    votes: int = Field(3, ge=1, le=32)
    exploration: float = Field(1.4, ge=0, le=10)  # UCT's constant
    labels: dict[str, float] = Field(
        {"sure": 1.0, "likely": 0.5, "impossible": 0.0}, min_length=2, description="words and their values, 0 to 1"
    )
    temperature: float = Field(0.7, ge=0, le=2)
    seed: int | None = None
    step_tokens: int = Field(128, ge=1, le=4096)
    tokens: int | None = Field(None, ge=1, description="most tokens written and read")
    nodes: int = Field(200, ge=2, le=100_000)
    seconds: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if any(not 0 <= value <= 1 for value in self.labels.values()) or not all(self.labels):
            raise ValueError(f"labels are {self.labels}; accepted: words with values from 0 to 1")
        if self.value == "votes" and self.votes > 1 and self.temperature == 0:
            raise ValueError(f"votes is {self.votes} at temperature 0, where all are the same; accepted: 1")
        if self.search != "bfs" and self.value == "likelihood":
            raise ValueError(f"value is 'likelihood' with {self.search}; accepted: bfs, as it falls with every step")
        if self.search == "bfs" and self.beam * self.depth >= self.nodes:
            least = self.beam * self.depth + 1
            raise ValueError(f"nodes is {self.nodes}; accepted: more than beam × depth, so at least {least}")
        return self

    def times(self, writes_on: bool) -> int:
        """Returns how often each state is asked for next steps."""
        return self.samples or (SAMPLES if writes_on else 1)
