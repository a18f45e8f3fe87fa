"""Budget forcing: Waits, a minimum of thinking, and a maximum."""

from __future__ import annotations

from collections.abc import Sequence

from bench.reasoning.asked import MAX_TOKENS, BenchQuestion, BenchRow, Kind, each, row, tell
from engine import GREEDY, Engine, Span
from reasoning.budget import BudgetForcing, ThinkingBudget
from reasoning.thinking import Piece

WAITS = (0, 1, 2, 4)
WAIT_TEXTS = {"game24": "\nWait, ", "arithmetic": "\nWait"}  # as the model's own thinking has them
MAXIMA = (32, 64, 128, 256, 512, 1024)
MINIMA = {"game24": (128, 256, 512), "arithmetic": (64, 128, 256)}


async def answered(
    engine: Engine, asked: Sequence[BenchQuestion], budget: ThinkingBudget
) -> list[tuple[bool, int, int, int]]:
    """Answers within a budget, greedily: of each whether it is right, its tokens, those of thinking, and Waits."""

    async def one(question: BenchQuestion) -> tuple[bool, int, int, int]:
        forcing = BudgetForcing(budget, engine.tokenizer)
        async with await engine.open(question.prompt(engine)) as seq:
            pieces: list[Piece] = [p async for p in forcing.answer(seq, Span(GREEDY, MAX_TOKENS), opened=False)]
        text = "".join(piece.text for piece in pieces if piece.part == "answer")
        whole = pieces[-1].finish_reason == "stop"
        return question.right(text, whole), sum(p.spent for p in pieces), forcing.thinking_tokens, forcing.waits

    return await each(asked, one)


async def budgeted(engine: Engine, name: str, asked: Sequence[BenchQuestion], budget: ThinkingBudget) -> BenchRow:
    """The row of `answered`."""
    right, tokens, thinking, waits = zip(*await answered(engine, asked, budget), strict=True)
    return tell(row(name, right, tokens, thinking, {"waits": sum(waits) / len(waits)}))


async def waited(engine: Engine, kind: Kind, asked: Sequence[BenchQuestion]) -> list[BenchRow]:
    """0 to 4 Waits, and thinking of a minimum length without any."""
    budgets = {f"waits={waits}": ThinkingBudget(waits=waits, wait_text=WAIT_TEXTS[kind]) for waits in WAITS}
    budgets |= {f"minimum={least}": ThinkingBudget(min_tokens=least) for least in MINIMA[kind]}
    return [await budgeted(engine, f"{kind}/{name}", asked, budget) for name, budget in budgets.items()]


async def cut(engine: Engine, kind: Kind, asked: Sequence[BenchQuestion]) -> list[BenchRow]:
    """Thinking of at most so many tokens."""
    return [await budgeted(engine, f"{kind}/maximum={m}", asked, ThinkingBudget(max_tokens=m)) for m in MAXIMA]


async def turned(engine: Engine, kind: Kind, asked: Sequence[BenchQuestion]) -> list[BenchRow]:
    """Returns the effect of one Wait on answers that were right, on those that were wrong, and where a checker asks for
    it.

    Separates the mechanism from the model: if thinking on finds solutions, and loses others, it is the model that does
    not know which it has.
    """
    before = await answered(engine, asked, ThinkingBudget())
    after = await answered(engine, asked, ThinkingBudget(waits=1, wait_text=WAIT_TEXTS[kind]))
    pairs = list(zip(before, after, strict=True))
    groups = {
        "a Wait where the answer was right": [then for first, then in pairs if first[0]],
        "a Wait where the answer was wrong": [then for first, then in pairs if not first[0]],
        "no Wait": list(before),
        "a Wait in any case": list(after),
        "a Wait where a checker refuses": [first if first[0] else then for first, then in pairs],
    }
    return [
        tell(row(f"{kind}/{name}", [a[0] for a in group], [a[1] for a in group], [a[2] for a in group]))
        for name, group in groups.items()
        if group
    ]
