"""`model: auto` for `/v1`: of the jobs that one request makes of several models, the one whose answer is given replies.

The reply is that job's own, with `routing` beside it: what was asked of whom, and why not all was. Knows nothing of how
replies look.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from app.answering.model_cascade import ModelCascade, ModelChosen, ModelPrompt
from app.errors import from_exception
from app.observability.metrics import RequestWatch
from reasoning.route import Routed
from reasoning.strategy import Event, Spent
from reasoning.thinking import Piece, Tally


def _size(asked: ModelPrompt) -> tuple[int, int]:
    """Tokens of the prompt, and that there may be of an answer."""
    return len(asked.prompt), asked.span.max_tokens or 0


def report_of(routed: Routed) -> dict[str, Any]:
    """As JSON. `cost` is in tokens of the largest model."""
    tried = [
        {
            "model": each.model, "passed": each.passed, "why": each.why, "tokens": each.tokens, "cost": each.cost,
            "seconds": round(each.seconds, 4), "verdicts": [asdict(verdict) for verdict in each.verdicts],
        }
        for each in routed.tried
    ]  # fmt: skip
    return {"model": routed.model, "escalated": routed.escalated, "cost": routed.cost, "tried": tried}


@dataclass(slots=True)
class Routing:
    """One answer under way: `begin` tells who gives it, then `pieces` gives it, as a `Generation` does.

    Close it whatever happens; `report` is there once the pieces are over.
    """

    auto: ModelCascade
    asked: Sequence[ModelPrompt]
    watch: RequestWatch
    tenant: str
    tally: Tally = field(default_factory=Tally)
    report: dict[str, Any] = field(default_factory=dict)
    outcome: str = "cancelled"
    _items: AsyncGenerator[Piece | Event, None] | None = None

    async def begin(self) -> int:
        """The place in `asked` of the model whose answer follows.

        Raises:
            What `ModelCascade.answer` raises.
        """
        self._items = self.auto.answer(self.asked, self.tenant)
        try:
            prompt, limit = (max(counts) for counts in zip(*map(_size, self.asked), strict=True))
            self.watch.admit([each.served for each in self.asked], self.tenant, prompt, limit)
            async for item in self._items:
                if isinstance(item, ModelChosen):
                    self.tally.prompt_tokens += len(item.asked.prompt)
                    return next(at for at, each in enumerate(self.asked) if each is item.asked)
                self._hear(item)
        except Exception as error:
            self._failed(error)
            raise
        raise AssertionError("a cascade always ends with an answer")

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        assert self._items is not None
        first = True
        try:
            async with aclosing(self._items) as items:
                async for item in items:
                    if not isinstance(item, Piece):
                        self._hear(item)
                        continue
                    if first:
                        first = False
                        self.tally.cached_tokens += item.cached_tokens
                    self.tally.add(item)
                    self.watch.tokens(0, item.spent, item.cached_tokens)
                    yield 0, item
            self.outcome = "completed"
        except Exception as error:
            self._failed(error)
            raise

    async def aclose(self) -> None:
        if self._items is not None:
            await self._items.aclose()
        self.watch.end(self.outcome)

    def _hear(self, item: Piece | Event) -> None:
        if isinstance(item, Spent):
            self.tally.add_unseen(item.written, item.read)
        elif isinstance(item, Routed):
            self.report = report_of(item)

    def _failed(self, error: Exception) -> None:
        self.outcome = "refused" if from_exception(error).status < 500 else "failed"
