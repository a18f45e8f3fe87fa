"""How a search goes about it, and what it may cost."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ponder import Options

Search = Literal["bfs", "dfs", "mcts"]
SAMPLES = 4  # of one step each

Value = Literal["read", "votes", "check", "likelihood"]


class TreeOptions(Options):
    """A search's options.

    `beam` is how many states are followed at once: a level's best (bfs), or the leaves of a round (mcts); dfs follows
    one. Every state is asked `samples` times for next steps: by default once for a list, or 4 times for one each.

    `value` says where values come from: the log-probabilities of the labels, read at once; `votes` sampled judgements;
    the problem's checker alone; or the probability of the steps that lead there. The checker's word counts before the
    model's in any case. States below `threshold` are not followed. A finished state solves the task where the checker
    says so or, where it says nothing, from the value `solved_value` on.

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
        """How often each state is asked for next steps."""
        return self.samples or (SAMPLES if writes_on else 1)
