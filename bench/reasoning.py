"""Does thinking longer, sampling more or searching help? `python -m bench.reasoning`, on puzzles never trained on.

Accuracy against tokens, with Wilson's 95% intervals: budget forcing with 0 to 4 Waits, with a minimum in their place,
and cut at a maximum; best of n and self-consistency over the same samples; a tree of thoughts against best of n at as
many tokens and against random legal search at as many states; a cascade from the draft model to the large one. Every
part is written to the results when it is done, and a part that is there is not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from bench import hardware
from bench.puzzle_problem import Puzzle, leads_to, random_search
from engine import GREEDY, Engine, EngineConfig, Sampling, Span
from reasoning.budget import BudgetForcing, ThinkingBudget
from reasoning.candidate import Candidate, Draft, warm
from reasoning.self_consistency import vote_of
from reasoning.strategy import Context
from reasoning.thinking import Markers, Piece
from reasoning.tree import Asking, SearchEnded, TreeOptions, search
from training.conversation import Case, Conversation, Message, Reply
from training.evaluate import wilson
from training.tasks import arithmetic, countdown

MODELS = Path(__file__).parent.parent / "models"
RESULTS = Path(__file__).parent / "results"
SEED = 20_000_023
MAX_TOKENS = 768
SAMPLES = 16
TEMPERATURE = 0.7
AT_ONCE = 48
WAIT = "\nWait, "  # as the model's own thinking has it
WAITS = (0, 1, 2, 4)
MAXIMA = (16, 32, 64, 128, 256, 512)
MINIMA = (150, 300, 500)
COSTS = {"pebble-draft": 1.0, "pebble": 7.5}  # parameters that a token goes through, in millions, about

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Question:
    """A case, and the numbers and target of a puzzle; none for a sum."""

    case: Case
    numbers: tuple[int, ...] = ()
    target: int = 0

    def right(self, text: str, whole: bool = True) -> bool:
        (verdict,) = (v for k, v in self.case.judge([Reply("", text.strip(), (), not whole)]).items() if "right" in k)
        return verdict is True


@dataclass(frozen=True, slots=True)
class Row:
    """`tokens` and `thinking` are means an answer; `low` to `high` holds the true share with 95% confidence."""

    name: str
    n: int
    right: int
    share: float
    low: float
    high: float
    tokens: float
    thinking: float = 0.0
    more: dict[str, float] | None = None


def row(
    name: str,
    right: Sequence[bool],
    tokens: Sequence[float],
    thinking: Sequence[float] = (),
    more: dict[str, float] | None = None,
) -> Row:
    n, k = len(right), sum(right)
    mean = sum(thinking) / n if thinking else 0.0
    return Row(name, n, k, k / n, *wilson(k, n), sum(tokens) / n, mean, more)


def questions(kind: str, n: int) -> list[Question]:
    """Different ones, none of which is in the training set by the puzzles' rule or by its seed."""
    rng = Random(f"{SEED}-{kind}")
    found: dict[object, Question] = {}
    while len(found) < n:
        if kind == "arithmetic":
            case = arithmetic.case(rng, rng.choice("+-×/"))
            found.setdefault(case.prompt.messages[0].content, Question(case))
            continue
        numbers, target, _ = countdown.kept(rng, "game24" if kind == "game24" else "countdown3")
        asked = countdown.ask(rng, "held_out", numbers, target)
        case = replace(countdown.case(rng, "countdown3"), prompt=Conversation((Message("user", asked),)))
        case = replace(case, judge=_puzzle_judge(numbers, target))
        found.setdefault((tuple(sorted(numbers)), target), Question(case, numbers, target))
    return list(found.values())


def _puzzle_judge(numbers: tuple[int, ...], target: int) -> Callable[[Sequence[Reply]], Any]:
    from training import puzzle

    return lambda said: {"right answer": not said[-1].broken and puzzle.check(said[-1].content, numbers, target)}


async def each(items: Sequence[T], do: Callable[[T], Awaitable[U]], at_once: int = AT_ONCE) -> list[U]:
    """`do` for all, so many at once."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: T) -> U:
        async with gate:
            return await do(item)

    return await asyncio.gather(*map(one, items))


def prompt_of(engine: Engine, question: Question) -> list[int]:
    return engine.tokenizer.apply_chat_template(question.case.prompt.as_json())


async def budgeted(engine: Engine, name: str, asked: Sequence[Question], budget: ThinkingBudget) -> Row:
    async def one(question: Question) -> tuple[bool, int, int, int]:
        forcing = BudgetForcing(budget, engine.tokenizer)
        async with await engine.open(prompt_of(engine, question)) as seq:
            pieces: list[Piece] = [p async for p in forcing.answer(seq, Span(GREEDY, MAX_TOKENS), opened=False)]
        text = "".join(piece.text for piece in pieces if piece.part == "answer")
        whole = pieces[-1].finish_reason == "stop"
        return question.right(text, whole), sum(p.spent for p in pieces), forcing.thinking_tokens, forcing.waits

    right, tokens, thinking, waits = zip(*await each(asked, one), strict=True)
    return row(name, right, tokens, thinking, {"waits": sum(waits) / len(waits)})


async def sampled(engine: Engine, asked: Sequence[Question]) -> list[list[tuple[bool, int, float, str | None]]]:
    """For every question `SAMPLES` answers: right, tokens, confidence, vote."""

    async def one(item: tuple[int, Question]) -> list[tuple[bool, int, float, str | None]]:
        at, question = item
        span = Span(Sampling(temperature=TEMPERATURE, seed=at), MAX_TOKENS)
        context = Context(engine.tokenizer, span, Markers.of(engine.tokenizer))
        async with await engine.open(prompt_of(engine, question)) as seq:
            await warm(seq)
            drafts = [Draft(fork, context, index, True) for index, fork in enumerate(seq.fork(SAMPLES))]
            made: list[Candidate] = await asyncio.gather(*(draft.write() for draft in drafts))
        compare = "text" if question.numbers else "last_number"
        return [
            (question.right(c.text, c.whole), c.spent, c.confidence, vote_of(_voted(c), compare) if c.whole else None)  # type: ignore[arg-type]  # one of the two
            for c in made
        ]

    return await each(list(enumerate(asked)), one, at_once=3)


def _voted(candidate: Candidate) -> str:
    """An expression votes by its numbers and operators alone."""
    return re.sub(r"\s+", "", candidate.text) if "=" in candidate.text else candidate.text


def curves(kind: str, samples: list[list[tuple[bool, int, float, str | None]]]) -> list[Row]:
    """Best of n and self-consistency over the first n samples."""
    rows: list[Row] = []
    for n in (1, 2, 4, 8, 16):
        first = [answers[:n] for answers in samples]
        tokens = [sum(a[1] for a in answers) for answers in first]
        rows.append(row(f"{kind}/best of n by the checker/n={n}", [any(a[0] for a in f) for f in first], tokens))
        confident = [max(answers, key=lambda a: a[2])[0] for answers in first]
        rows.append(row(f"{kind}/best of n by confidence/n={n}", confident, tokens))
        voted = []
        for answers in first:
            votes = Counter(a[3] for a in answers if a[3] is not None)
            winner = votes.most_common(1)[0][0] if votes else None
            voted.append(next(a[0] for a in answers if a[3] == winner))
        rows.append(row(f"{kind}/self-consistency/n={n}", voted, tokens))
    return rows


async def searched(engine: Engine, kind: str, asked: Sequence[Question], name: str, options: TreeOptions) -> list[Row]:
    """A tree, and random legal search at as many states visited as the tree took of each puzzle."""
    asking = Asking(engine.tokenizer, variables={"enable_thinking": False})

    async def one(question: Question) -> SearchEnded:
        async with await engine.open(asking.head()) as seq:
            task = Puzzle(question.numbers, question.target, asking)
            async for event in search(seq, task, options, engine.tokenizer):
                last = event
        assert isinstance(last, SearchEnded)
        return last

    ends = await each(asked, one)
    pairs = list(zip(asked, ends, strict=True))
    right = [leads_to(end.answer, q.numbers, q.target) for q, end in pairs]
    states = [end.nodes - 1 for end in ends]
    tokens = [end.written + end.read for end in ends]
    written = [float(end.written) for end in ends]
    rng = Random(SEED)
    tries = 20
    lucky = [sum(random_search(q.numbers, q.target, end.nodes - 1, rng) for _ in range(tries)) for q, end in pairs]
    share = sum(lucky) / (tries * len(lucky))
    low, high = wilson(round(share * len(lucky)), len(lucky))
    chance = Row(
        f"{kind}/random legal search, states as {name}", len(lucky), round(share * len(lucky)), share, low, high, 0.0
    )
    mean = sum(states) / len(states)
    return [row(f"{kind}/{name}", right, tokens, written, {"states": mean}), replace(chance, more={"states": mean})]


async def cascaded(small: Engine, large: Engine, kind: str, asked: Sequence[Question]) -> list[Row]:
    """The frontier: for bars of confidence, accuracy and cost of small first, large where it is below the bar."""

    async def one(engine: Engine, question: Question) -> tuple[bool, int, float]:
        context = Context(engine.tokenizer, Span(GREEDY, MAX_TOKENS), Markers.of(engine.tokenizer))
        async with await engine.open(prompt_of(engine, question)) as seq:
            made = await Draft(seq, context, measured=True).write()
        return question.right(made.text, made.whole), made.spent, made.confidence

    first = await each(asked, lambda q: one(small, q))
    second = await each(asked, lambda q: one(large, q))
    whole = sum(tokens for _, tokens, _ in second) * COSTS["pebble"]
    rows: list[Row] = []
    for bar in sorted({0.0, 1.01, *(round(c, 3) for _, _, c in first)})[:: max(1, len(first) // 20)]:
        right = [s[0] if s[2] >= bar else b[0] for s, b in zip(first, second, strict=True)]
        up = [s[2] < bar for s in first]
        cost = sum(s[1] for s in first) * COSTS["pebble-draft"]
        cost += sum(b[1] for b, u in zip(second, up, strict=True) if u) * COSTS["pebble"]
        tokens = [float(s[1] + u * b[1]) for s, b, u in zip(first, second, up, strict=True)]
        more = {"bar": bar, "cost": cost / whole, "escalated": sum(up) / len(up)}
        rows.append(row(f"{kind}/cascade at {bar:g}", right, tokens, more=more))
    alone = row(f"{kind}/large alone", [b[0] for b in second], [float(b[1]) for b in second], more={"cost": 1.0})
    return [*rows, alone]


class Results:
    """The rows of every part, on disk after each."""

    def __init__(self, path: Path, n: int) -> None:
        self.path = path
        self.parts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.parts.setdefault("hardware", hardware.describe())
        if self.parts.setdefault("n", n) != n:
            raise SystemExit(f"{path} was measured with -n {self.parts['n']}; take that, or another file.")

    async def part(self, name: str, measure: Callable[[], Awaitable[list[Row]]]) -> None:
        if name in self.parts:
            return
        began = time.monotonic()
        rows = await measure()
        self.parts[name] = [asdict(one) for one in rows]
        self.path.write_text(json.dumps(self.parts, indent=1) + "\n")
        for one in rows:
            print(f"| {one.name} | {one.n} | {one.share:.1%} | {one.low:.1%} – {one.high:.1%} | {one.tokens:.0f} |")
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


async def measure(results: Results, n: int) -> None:
    """Every part that is not there yet."""
    async with await Engine.start(EngineConfig(str(MODELS / "pebble"), max_running=64)) as engine:
        game, sums = questions("game24", n), questions("arithmetic", n)

        async def waits() -> list[Row]:
            budgets = {f"waits={w}": ThinkingBudget(waits=w, wait_text=WAIT) for w in WAITS}
            budgets |= {f"minimum={m}": ThinkingBudget(min_tokens=m) for m in MINIMA}
            return [await budgeted(engine, f"game24/{k}", game, b) for k, b in budgets.items()]

        async def maxima() -> list[Row]:
            made = [(m, ThinkingBudget(max_tokens=m)) for m in MAXIMA]
            return [await budgeted(engine, f"game24/maximum={m}", game, b) for m, b in made]

        async def arithmetic_waits() -> list[Row]:
            made = [(w, ThinkingBudget(waits=w, wait_text="\nWait")) for w in WAITS]
            return [await budgeted(engine, f"arithmetic/waits={w}", sums, b) for w, b in made]

        async def trees() -> list[Row]:
            found: list[Row] = []
            ways: dict[str, dict[str, Any]] = {
                "tree, b=5, read": {"value": "read"},
                "tree, b=5, likelihood": {"value": "likelihood"},
                "tree, mcts, read": {"search": "mcts", "nodes": 100},
            }
            for name, fields in ways.items():
                options = TreeOptions(beam=5, temperature=0.0, **fields)
                found += await searched(engine, "game24", game, name, options)
            return found

        async def cascades() -> list[Row]:
            async with await Engine.start(EngineConfig(str(MODELS / "pebble-draft"), max_running=64)) as small:
                return [*await cascaded(small, engine, "mixed", [*game[: n // 2], *sums[: n - n // 2]])]

        async def samples() -> list[Row]:
            return curves("game24", await sampled(engine, game))

        async def arithmetic_samples() -> list[Row]:
            return curves("arithmetic", await sampled(engine, sums))

        await results.part("trees", trees)
        await results.part("waits", waits)
        await results.part("maxima", maxima)
        await results.part("arithmetic waits", arithmetic_waits)
        await results.part("cascades", cascades)
        await results.part("samples", samples)
        await results.part("arithmetic samples", arithmetic_samples)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.reasoning", description="Accuracy against tokens.")
    parser.add_argument("-n", type=int, default=300, help="questions of each kind")
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS / f"{today}-reasoning-{hardware.slug()}.json")
    options = parser.parse_args()
    asyncio.run(measure(Results(options.out, options.n), options.n))


if __name__ == "__main__":
    main()
