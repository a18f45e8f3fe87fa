"""Budget forcing: Waits, a minimum of thinking, and a maximum."""

from __future__ import annotations

from collections.abc import Sequence

from bench.reasoning.asked import MAX_TOKENS, Kind, Question, Row, each, row, tell
from engine import GREEDY, Engine, Span
from reasoning.budget import BudgetForcing, ThinkingBudget
from reasoning.thinking import Piece

WAITS = (0, 1, 2, 4)
WAIT_TEXTS = {"game24": "\nWait, ", "arithmetic": "\nWait"}  # as the model's own thinking has them
MAXIMA = (32, 64, 128, 256, 512, 1024)
MINIMA = {"game24": (128, 256, 512), "arithmetic": (64, 128, 256)}


async def budgeted(engine: Engine, name: str, asked: Sequence[Question], budget: ThinkingBudget) -> Row:
    """Answers within a budget, greedily."""

    async def one(question: Question) -> tuple[bool, int, int, int]:
        forcing = BudgetForcing(budget, engine.tokenizer)
        async with await engine.open(question.prompt(engine)) as seq:
            pieces: list[Piece] = [p async for p in forcing.answer(seq, Span(GREEDY, MAX_TOKENS), opened=False)]
        text = "".join(piece.text for piece in pieces if piece.part == "answer")
        whole = pieces[-1].finish_reason == "stop"
        return question.right(text, whole), sum(p.spent for p in pieces), forcing.thinking_tokens, forcing.waits

    right, tokens, thinking, waits = zip(*await each(asked, one), strict=True)
    return tell(row(name, right, tokens, thinking, {"waits": sum(waits) / len(waits)}))


async def waited(engine: Engine, kind: Kind, asked: Sequence[Question]) -> list[Row]:
    """0 to 4 Waits, and thinking of a minimum length without any."""
    budgets = {f"waits={waits}": ThinkingBudget(waits=waits, wait_text=WAIT_TEXTS[kind]) for waits in WAITS}
    budgets |= {f"minimum={least}": ThinkingBudget(min_tokens=least) for least in MINIMA[kind]}
    return [await budgeted(engine, f"{kind}/{name}", asked, budget) for name, budget in budgets.items()]


async def cut(engine: Engine, kind: Kind, asked: Sequence[Question]) -> list[Row]:
    """Thinking of at most so many tokens."""
    return [await budgeted(engine, f"{kind}/maximum={m}", asked, ThinkingBudget(max_tokens=m)) for m in MAXIMA]
