"""What a search needs to know of a task: how to ask for next steps, how to ask for a judgement, and what is right.

Prompts are token ids, since how a question is put is the model's own format; `Asking` makes them for chat models.
Knows nothing of searches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from ponder import ChatFormat

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model wrote when asked for steps. `ended`: it ended its turn; else a stop or the limit of tokens did."""

    text: str
    token_ids: tuple[int, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class Thought(Generic[S]):
    """A step to another state. `kept` are tokens that it leaves in the branch, for what comes after to read.

    With `afresh` they follow what all branches begin with, rather than what the step's own branch has kept so far.
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
        """Whether a reply is itself a step and stays in its branch, rather than a list of steps to choose from."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts at which a reply is over."""
        ...

    def propose_prompt(self, state: S) -> Sequence[int]:
        """What asks for next steps, appended to the branch. May be empty where the problem `writes_on`."""
        ...

    def read(self, state: S, reply: Reply) -> Sequence[Thought[S]]:
        """The steps in a reply, legal ones only; at most one where the problem `writes_on`."""
        ...

    def value_prompt(self, state: S) -> Sequence[int]:
        """What asks for one of the search's labels, appended to a throw-away fork of the branch."""
        ...

    def check(self, state: S) -> float | Awaitable[float | None] | None:
        """Score a state from 0 (hopeless) to 1 (solved), where code can tell; None: the model is to judge."""
        ...

    def done(self, state: S) -> bool:
        """Whether no more steps follow."""
        ...

    def answer(self, state: S) -> str:
        """What is told of a state, finished or not."""
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
        """What follows the head to ask `text`."""
        return self._whole(text)[len(self.head()) :]

    def _whole(self, text: str) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.format.apply_chat_template([*system, {"role": "user", "content": text}], **self.variables)
