"""What the exported model can do, measured through our own engine: `python -m training.evaluate`.

Every question comes from a seed and from phrasings that training never used; an answer is right when it ends by itself
and contains what the exchange calls right. Prints a table with 95% Wilson intervals and writes it beside the weights.
Knows nothing of how the model was trained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from engine import Engine, EngineConfig, Sampling, Span
from training import mixture, words
from training.exchange import Conversation, Exchange
from training.tasks import arithmetic, beyond, counting, identity, memory, smalltalk

SEED = 20_000_003  # training draws from "seed-step" strings, never from this
MAX_TOKENS = 600
RESULTS = "evaluation.json"


@dataclass(frozen=True, slots=True)
class Result:
    """One row: `right` of `n`, and the interval that holds the true share with 95% confidence."""

    ability: str
    n: int
    right: int
    low: float
    high: float


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval of Wilson (1927), sound also near 0 and 1."""
    share, denominator = right / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / denominator
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5 / denominator
    return max(0.0, middle - half), min(1.0, middle + half)


def _alone(made: Exchange, *, system: str | None = None, enable_thinking: bool = True) -> Conversation:
    return Conversation((made,), system, enable_thinking)


def _arithmetic(operator: str, digits: int) -> Callable[[Random], Conversation]:
    return lambda rng: _alone(arithmetic.sample(rng, "held_out", digits, operator))


def _arithmetic_without_thinking(rng: Random) -> Conversation:
    return _alone(arithmetic.without_thinking(arithmetic.sample(rng, "held_out")), enable_thinking=False)


def _named(rng: Random) -> Conversation:
    name = words.proper_name(rng, words.NAMES)
    system = identity.naming_system(rng, "held_out", name)
    return _alone(identity.sample(rng, "held_out", "who", name), system=system)


def _remembered(told: bool) -> Callable[[Random], Conversation]:
    """A fact or its absence, asked after one to four other turns."""

    def make(rng: Random) -> Conversation:
        others = [x for x in mixture.history(rng, "held_out", rng.randint(1, 4))[0] if x.task != "memory tell"]
        if not told:
            return Conversation((*others, memory.ask(rng, "held_out", memory.fact(rng), told=False)))
        first, known = memory.tell(rng, "held_out", memory.fact(rng))
        return Conversation((first, *others, memory.ask(rng, "held_out", known)))

    return make


ABILITIES: dict[str, Callable[[Random], Conversation]] = {
    "addition, up to 2 digits": _arithmetic("+", 2),
    "addition, up to 4 digits": _arithmetic("+", 4),
    "subtraction, up to 4 digits": _arithmetic("-", 4),
    "multiplication, up to 2 by 2 digits": _arithmetic("×", 4),
    "division by up to 12, with remainder": _arithmetic("/", 4),
    "any of these without thinking": _arithmetic_without_thinking,
    "remembers a fact after other turns": _remembered(told=True),
    "admits what it was not told": _remembered(told=False),
    "says who and what it is": lambda rng: _alone(identity.sample(rng, "held_out")),
    "uses the name a system prompt gives it": _named,
    "small talk": lambda rng: _alone(smalltalk.sample(rng, "held_out")),
    "counts and lists": lambda rng: _alone(counting.sample(rng, "held_out")),
    "admits what is beyond it": lambda rng: _alone(beyond.sample(rng, "held_out")),
}


def is_right(made: Conversation, text: str) -> bool:
    answer = text.rpartition("</think>")[2].strip()
    return re.search(made.last.right, answer, re.IGNORECASE | re.DOTALL) is not None


async def _answer(engine: Engine, made: Conversation, sampling: Sampling) -> bool:
    prompt = engine.tokenizer.apply_chat_template(made.prompt(), enable_thinking=made.enable_thinking)
    async with await engine.open(prompt) as sequence:
        result = await sequence.generate_all(Span(sampling, max_tokens=MAX_TOKENS))
    return result.finish_reason == "stop" and is_right(made, result.text)


async def evaluate(model: Path, n: int) -> list[Result]:
    """Ask `n` questions of every ability, at the model's own sampling defaults."""
    defaults = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    sampling = Sampling(temperature=defaults["temperature"], top_p=defaults["top_p"], top_k=defaults["top_k"], seed=1)
    results = []
    async with await Engine.start(EngineConfig(model=str(model))) as engine:
        for ability, make in ABILITIES.items():
            rng = Random(f"{SEED}-{ability}")
            asked = [make(rng) for _ in range(n)]
            right = sum(await asyncio.gather(*(_answer(engine, made, sampling) for made in asked)))
            results.append(Result(ability, n, right, *wilson(right, n)))
    return results


def table(results: list[Result]) -> str:
    rows = [f"| {r.ability} | {r.n} | {r.right / r.n:.1%} | {r.low:.1%} – {r.high:.1%} |" for r in results]
    return "\n".join(["| ability | questions | right | 95% interval |", "|---|---|---|---|", *rows])


def run(model: Path, n: int) -> list[Result]:
    """Evaluate, print the table, and leave it in the model's folder."""
    results = asyncio.run(evaluate(model, n))
    print(table(results))
    document = json.dumps([asdict(result) for result in results], indent=2)
    (model / RESULTS).write_text(document + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description="Measure a model's abilities.")
    parser.add_argument("--model", type=Path, default=Path("models/pebble"))
    parser.add_argument("-n", type=int, default=200, help="questions for each ability")
    arguments = parser.parse_args()
    run(arguments.model, arguments.n)
