"""Evaluates the exported model, measured through our own engine: `python -m training.evaluate`.

Every question comes from a seed, and from phrasings, names and puzzles that training never used. A case is asked, its
tool calls are answered, and its judge decides; a reply that ran out of tokens or broke a tool call is wrong. The tools'
schemas are enforced on calls, as the server does, unless `--free`. Prints a table with 95% Wilson intervals and writes
it beside the weights. Knows nothing of how the model was trained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from engine import GREEDY, Engine, EngineConfig, Sampling, Span, SpanResult
from engine.structured_output.layout import Constrained
from engine.tool_parsers import choose_parser, read_tools
from training import reply
from training.abilities import ABILITIES, AUROC, Ability, xquad
from training.conversation import Case, Message, ModelReply, Verdict

SEED = 20_000_003  # training samples from "seed-step" strings, never from this
MAX_TOKENS = 768
MAX_TURNS = 4  # messages of the model in a case whose calls are answered
RESULTS = "evaluation.json"


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One row: `right` of `n`, the interval that holds the true share with 95% confidence, and the goal."""

    ability: str
    measure: str
    n: int
    right: int
    low: float
    high: float
    goal: float | None


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval of Wilson (1927), sound also near 0 and 1."""
    share, denominator = right / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / denominator
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5 / denominator
    return max(0.0, middle - half), min(1.0, middle + half)


def held(engine: Engine, case: Case) -> Constrained | None:
    """Free text or calls of the case's tools, thinking before and between; None where there are no tools."""
    tokenizer = engine.tokenizer
    tool_parser = choose_parser(tokenizer, tokenizer.tool_template)
    opening, closing = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    if not case.prompt.tools or tool_parser is None or opening is None or closing is None:
        return None
    plan = tool_parser.plan(read_tools(case.prompt.tools), "auto")
    return Constrained(plan.body, replace(plan.layout, think=(opening, closing)))


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One message of the model: the tokens before it, its own without the end of the turn, and what they say."""

    prompt: list[int]
    result: SpanResult
    reply: ModelReply


async def turns(engine: Engine, case: Case, sampling: Sampling = GREEDY, *, free: bool = False) -> list[ModelTurn]:
    """Returns the model's messages, until it calls no more tools."""
    constraint = None if free else held(engine, case)
    messages = case.prompt.as_json()
    tools = list(case.prompt.tools) or None
    taken: list[ModelTurn] = []
    while len(taken) < MAX_TURNS:
        prompt = engine.tokenizer.apply_chat_template(
            messages, tools=tools, enable_thinking=case.prompt.enable_thinking
        )
        async with await engine.open(prompt) as sequence:
            result = await sequence.generate_all(Span(sampling, max_tokens=MAX_TOKENS, constraint=constraint))
        text = engine.tokenizer.decode(result.token_ids, skip_special=False)  # the markers are in no section
        made = reply.read(text, ended=result.finish_reason == "stop")
        taken.append(ModelTurn(prompt, result, made))
        if case.answer_call is None or not made.calls or made.broken:
            break
        messages.append(Message("assistant", made.content, made.thinking, made.calls).as_json())
        messages += [Message("tool", case.answer_call(call)).as_json() for call in made.calls]
    return taken


async def replies(engine: Engine, case: Case, *, free: bool = False) -> list[ModelReply]:
    """Returns what the model says in its messages, greedily sampled."""
    return [turn.reply for turn in await turns(engine, case, free=free)]


def judged(case: Case, said: Sequence[ModelReply]) -> Verdict:
    """Returns the judge's verdict; a broken reply makes all measures wrong except those counted in parts."""
    broken = any(made.broken for made in said)
    return {name: x and not broken if isinstance(x, bool) else x for name, x in case.judge(said).items()}


async def measure(
    engine: Engine, ability: Ability, cases: Sequence[Case], *, free: bool = False
) -> list[EvaluationResult]:
    """Returns one row for each measure of the cases' judges, over the cases that it applies to."""
    said = await asyncio.gather(*(replies(engine, case, free=free) for case in cases))
    verdicts = [judged(case, answers) for case, answers in zip(cases, said, strict=True)]
    rows = []
    for name in dict.fromkeys(name for verdict in verdicts for name in verdict):
        outcomes = [verdict[name] for verdict in verdicts if name in verdict]
        counted = [(int(x), 1) if isinstance(x, bool) else x for x in outcomes]
        right, n = sum(right for right, _ in counted), sum(of for _, of in counted)
        if n:
            rows.append(EvaluationResult(ability.name, name, n, right, *wilson(right, n), ability.goals.get(name)))
    return rows


def auroc(right: Sequence[float], wrong: Sequence[float]) -> tuple[float, float, float]:
    """Returns the probability that a right one scores above a wrong one, and its 95% interval (Hanley and McNeil
    1982)."""
    won = sum((a > b) + (a == b) / 2 for a in right for b in wrong)
    area = won / (len(right) * len(wrong))
    above, below = area / (2 - area), 2 * area * area / (1 + area)
    variance = area * (1 - area) + (len(right) - 1) * (above - area * area) + (len(wrong) - 1) * (below - area * area)
    half = 1.96 * (variance / (len(right) * len(wrong))) ** 0.5
    return area, max(0.0, area - half), min(1.0, area + half)


async def rank(engine: Engine, ability: Ability, cases: Sequence[Case]) -> EvaluationResult:
    """Returns how well the probability of yes against no tells cases that are to be answered yes from others."""
    words = [engine.tokenizer.encode(word) for word in ("yes", "no")]

    async def score(case: Case) -> float:
        prompt = engine.tokenizer.apply_chat_template(case.prompt.as_json(), enable_thinking=False)
        async with await engine.open(prompt) as sequence:
            yes, no = await sequence.score(words)
        return sum(yes) - sum(no)

    scores = await asyncio.gather(*map(score, cases))
    split: dict[str, list[float]] = {"yes": [], "no": []}
    for case, found in zip(cases, scores, strict=True):
        split[case.wanted[0].content].append(found)
    area, low, high = auroc(split["yes"], split["no"])
    return EvaluationResult(
        ability.name, AUROC, len(cases), round(area * len(cases)), low, high, ability.goals.get(AUROC)
    )


async def evaluate(model: Path, n: int, only: str = "", *, free: bool = False) -> list[EvaluationResult]:
    """Asks `n` questions of every ability, greedily; `only` keeps the abilities whose names contain it."""
    results: list[EvaluationResult] = []
    async with await Engine.start(EngineConfig(model=str(model))) as engine:
        for ability in (*ABILITIES, *xquad(Path(os.environ.get("PONDER_SHARED", "../shared")))):
            if only not in ability.name:
                continue
            began = time.monotonic()
            rng = Random(f"{SEED}-{ability.name}")
            cases = ability.cases(rng, n)
            rows = await measure(engine, ability, cases, free=free)
            if ability.ranked:
                rows.append(await rank(engine, ability, cases))
            shares = ", ".join(f"{row.measure} {row.right / row.n:.0%}" for row in rows)
            print(f"{ability.name}: {shares} ({time.monotonic() - began:.0f} s)", flush=True)
            results += rows
    return results


def table(results: list[EvaluationResult]) -> str:
    rows = [
        f"| {r.ability} | {r.measure} | {r.n} | {r.right / r.n:.1%} | {r.low:.1%} – {r.high:.1%} | "
        + (f"{r.goal:.0%} |" if r.goal is not None else "|")
        for r in results
    ]
    return "\n".join(
        ["| ability | measured | asked | share | 95% interval | goal |", "|---|---|---|---|---|---|", *rows]
    )


def run(model: Path, n: int, only: str = "", *, free: bool = False) -> list[EvaluationResult]:
    """Evaluates, prints the table, and writes it to the model's folder."""
    results = asyncio.run(evaluate(model, n, only, free=free))
    print(table(results))
    if not only and not free:
        document = json.dumps([asdict(result) for result in results], indent=2)
        (model / RESULTS).write_text(document + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description="Measure a model's abilities.")
    parser.add_argument("--model", type=Path, default=Path("models/pebble"))
    parser.add_argument("-n", type=int, default=90, help="questions for each ability")
    parser.add_argument("--only", default="", help="abilities whose names contain this; writes no file")
    parser.add_argument("--free", action="store_true", help="do not hold calls to the tools' schemas; writes no file")
    arguments = parser.parse_args()
    run(arguments.model, arguments.n, arguments.only, free=arguments.free)
