"""Deep research over a live sequence: its limits, its branches, and that it ends whatever the model does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine import Engine, InvalidParameter, Span
from reasoning.deep_research import HELD_CHARS, NOTHING, PARTIAL, ResearchOptions, deep_research
from reasoning.strategies import run_strategy
from reasoning.strategy import Event, FoundPassage, Spent, StrategyQuota
from reasoning.thinking import Piece
from reasoning.tree import NodeAdded, NodePruned, SearchEnded
from tests.reasoning.test_strategies import context, engine, run

__all__ = ["engine"]  # a fixture


@dataclass
class Shelf:
    """A search that finds a passage for each query, but for `nothing`. `able`: texts are taken for supported."""

    question: str = "Who built it, and when?"
    parts: Sequence[str] = ("Who built it", "When was it built")
    writes: bool = True
    able: bool = True
    nothing: bool = False
    quote: str = "It was built in 1931."
    asked: list[str] = field(default_factory=list)
    noted_: list[str] = field(default_factory=list)
    now: int = 0
    most: int = 0

    async def find(self, query: str, limit: int) -> Sequence[FoundPassage]:
        self.asked.append(query)
        number = len(self.asked)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if self.nothing:
            return []
        return [FoundPassage(f"S{number}", "a.txt", f"{self.quote} {query}", 0.9, (f"{self.quote} ({number})",))]

    async def supported(self, text: str, labels: Sequence[str]) -> str:
        return f"{text} [{labels[0] if labels else 'S1'}]" if self.able else ""

    def noted(self, question: str, text: str) -> None:
        self.noted_.append(text)

    def references(self, report: str) -> str:
        return ""


class SlowShelf(Shelf):
    async def supported(self, text: str, labels: Sequence[str]) -> str:
        await asyncio.sleep(20)
        return ""


async def researched(engine: Engine, shelf: Shelf, quota: StrategyQuota | None = None, **options: Any) -> list[Any]:
    ctx = context(engine, search=shelf, quota=quota or StrategyQuota())
    ctx = replace(ctx, span=replace(ctx.span, max_tokens=400))
    items: list[Piece | Event] = await run(engine, deep_research, ResearchOptions(**options), context=ctx)
    return items


def text_of(items: list[Any]) -> str:
    return "".join(item.text for item in items if isinstance(item, Piece) and item.part == "answer")


async def test_branches_are_the_questions_and_notes_stand_below_them(engine: Engine) -> None:
    shelf = Shelf(writes=False)
    items = await researched(engine, shelf)
    nodes = [item for item in items if isinstance(item, NodeAdded)]
    assert [(node.depth, node.parent) for node in nodes[:3]] == [(0, None), (1, 0), (1, 0)]
    assert sorted(node.parent or 0 for node in nodes[3:]) == [1, 2]
    assert shelf.asked == list(shelf.parts) and len(shelf.noted_) == 2
    assert text_of(items) == (
        "**Who built it?**\n\nIt was built in 1931. (1) [S1]\n\n"
        "**When was it built?**\n\nIt was built in 1931. (2) [S2]"
    )
    (ended,) = [item for item in items if isinstance(item, SearchEnded)]
    assert ended.solved and ended.written == 0 and ended.nodes == len(nodes)


async def test_a_model_that_writes_nonsense_still_ends_with_what_was_found(engine: Engine) -> None:
    shelf = Shelf(able=False)  # nothing that it writes is supported
    items = await researched(engine, shelf, questions=2)
    assert set(shelf.parts) <= set(shelf.asked) or shelf.noted_, "its own questions, or those of the user"
    assert text_of(items).count("It was built in 1931.") == len(shelf.noted_) > 0
    spent = [item for item in items if isinstance(item, Spent)]
    assert sum(each.written for each in spent) > 0, "the report that was given up counts"


async def test_a_model_that_writes_is_shown(engine: Engine) -> None:
    items = await researched(engine, Shelf(), questions=2)
    text = text_of(items)
    assert text and "It was built" not in text and HELD_CHARS > 0
    assert [item.finish_reason for item in items if isinstance(item, Piece)][-1] in ("stop", "length")


@pytest.mark.parametrize("questions", [1, 3])
async def test_tokens_of_plans_and_notes_have_a_limit(engine: Engine, questions: int) -> None:
    shelf = Shelf()
    items = await researched(engine, shelf, questions=questions, rounds=4, tokens=64, note_tokens=32)
    (ended,) = [item for item in items if isinstance(item, SearchEnded)]
    assert 0 < ended.written <= 64
    assert ended.ended != "tokens" or text_of(items).startswith(f"{PARTIAL} the limit of tokens was reached")


async def test_notes_side_by_side_stay_within_the_tokens_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def plan(self: Any) -> list[str]:
        return [] if self.asked else ["one", "two", "three"]

    monkeypatch.setattr("reasoning.deep_research._Research.plan", plan)
    ctx = context(engine, search=Shelf(), variables={"forever": True})  # answers that only a limit ends
    options = ResearchOptions(tokens=100, note_tokens=80)
    items = await run(engine, deep_research, options, context=replace(ctx, span=replace(ctx.span, max_tokens=400)))
    (ended,) = [item for item in items if isinstance(item, SearchEnded)]
    assert 80 < ended.written <= 100 and ended.ended == "tokens"
    assert text_of(items).startswith(f"{PARTIAL} the limit of tokens was reached")


async def test_searches_have_a_limit_and_run_side_by_side_within_the_quota(engine: Engine) -> None:
    shelf = Shelf(writes=False, parts=tuple(f"question {number}" for number in range(6)))
    items = await researched(engine, shelf, StrategyQuota(branches=2), questions=6, searches=4)
    assert len(shelf.asked) == 4 and shelf.most == 2
    notice = text_of(items).partition("\n\n")[0]
    assert notice == f"{PARTIAL} the limit of searches was reached.* Not looked into: question 4; question 5."


async def test_at_the_deadline_the_report_has_what_was_found(engine: Engine) -> None:
    """Notes take longer to be checked than the request has."""
    shelf, prompt = SlowShelf(), engine.tokenizer.encode("<think>", special=True)
    ctx = replace(context(engine, search=shelf), span=Span(max_tokens=400))
    async with await engine.open(prompt, deadline_s=4.0) as seq:
        items = [item async for item in run_strategy(deep_research, seq, ctx, ResearchOptions())]
        written = seq.tokens[len(prompt) :]
    assert text_of(items).startswith(PARTIAL.split("{")[0]) and "It was built in 1931." in text_of(items)
    assert len(written) == sum(item.spent for item in items if isinstance(item, Piece))


async def test_where_nothing_is_found_it_says_so(engine: Engine) -> None:
    items = await researched(engine, Shelf(writes=False, nothing=True))
    assert text_of(items) == NOTHING
    assert [item.why for item in items if isinstance(item, NodePruned)] == ["hopeless", "hopeless"]


async def test_notes_that_the_context_cannot_hold_are_given_as_they_are(engine: Engine) -> None:
    shelf = Shelf(able=False, quote="It was built in 1931. " * 100)  # the context holds 2,048 tokens
    items = await researched(engine, shelf, questions=2)
    assert text_of(items).startswith("It was built") or text_of(items).startswith("**")
    last = [item for item in items if isinstance(item, Piece)][-1]
    assert last.finish_reason == "length" and sum(i.spent for i in items if isinstance(i, Piece)) <= 400


@pytest.mark.parametrize(
    ("fields", "options", "told"),
    [
        ({"search": None}, {}, "collections are missing"),
        ({"calls": True}, {}, "accepted: no tools"),
        ({"quota": StrategyQuota(seconds=60.0)}, {"seconds": 61.0}, "seconds is 61; accepted: at most 60"),
    ],
    ids=["search", "calls", "seconds"],
)
async def test_what_it_cannot_keep_to_is_refused(
    engine: Engine, fields: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    ctx = context(engine, **{"search": Shelf(), **fields})
    with pytest.raises(InvalidParameter, match=told):
        await run(engine, deep_research, ResearchOptions(**options), context=ctx)
