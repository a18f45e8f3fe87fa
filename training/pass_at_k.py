"""The baseline that any search must beat: how often one of k sampled answers solves a puzzle.

`python -m training.pass_at_k` samples `--samples` answers of every puzzle, forks of one prompt in one batch, and prints
the unbiased estimate of Chen et al. (2021): 1 - C(n - c, k) / C(n, k) for c right answers of n. The interval is a
bootstrap over puzzles. Writes `pass_at_k.json` beside the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from random import Random

from engine import Engine, EngineConfig, Sampling, Span
from training import reply
from training.conversation import Case
from training.evaluate import MAX_TOKENS, SEED, judged
from training.tasks import countdown

K = (1, 4, 16, 64)
RESULTS = "pass_at_k.json"


@dataclass(frozen=True, slots=True)
class PassRow:
    """`estimates` and their 95% intervals are in the order of `ks`; `tokens` is the mean length of an answer."""

    puzzle: str
    thinking: bool
    puzzles: int
    samples: int
    temperature: float
    ks: tuple[int, ...]
    estimates: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...]
    tokens: float


def pass_at_k(n: int, right: int, k: int) -> float:
    """Returns the chance that k of n answers, sampled without replacement, hold one of the `right` ones."""
    return 1 - comb(n - right, k) / comb(n, k)


def interval(values: Sequence[float], rng: Random, draws: int = 2000) -> tuple[float, float]:
    """95% of the means of resampled puzzles lie in it."""
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(draws))
    return means[int(draws * 0.025)], means[int(draws * 0.975)]


async def _solve(engine: Engine, case: Case, samples: int, temperature: float, seed: int) -> tuple[int, int]:
    """Right answers among the samples, and the tokens of all of them."""
    prompt = engine.tokenizer.apply_chat_template(case.prompt.as_json(), enable_thinking=case.prompt.enable_thinking)
    async with await engine.open(prompt) as root:
        forks = root.fork(samples)
        span = Span(Sampling(temperature=temperature, seed=seed), max_tokens=MAX_TOKENS)
        results = await asyncio.gather(*(fork.generate_all(span) for fork in forks))
        for fork in forks:
            fork.close()
    said = [reply.read(result.text, ended=result.finish_reason == "stop") for result in results]
    right = sum(judged(case, [made])["right answer"] is True for made in said)
    return right, sum(len(result.token_ids) for result in results)


async def measure(model: Path, puzzles: int, samples: int, temperature: float) -> list[PassRow]:
    ks = tuple(k for k in K if k <= samples)
    rows = []
    async with await Engine.start(EngineConfig(model=str(model))) as engine:
        for game in ("countdown3", "countdown4", "game24"):
            for thinking in (True, False):
                began = time.monotonic()
                rng = Random(f"{SEED}-pass-{game}")
                cases = [countdown.case(rng, game, thinking=thinking) for _ in range(puzzles)]
                outcomes = [await _solve(engine, case, samples, temperature, at) for at, case in enumerate(cases)]
                each = [[pass_at_k(samples, right, k) for right, _ in outcomes] for k in ks]
                rows.append(
                    PassRow(
                        puzzle=game,
                        thinking=thinking,
                        puzzles=puzzles,
                        samples=samples,
                        temperature=temperature,
                        ks=ks,
                        estimates=tuple(sum(values) / puzzles for values in each),
                        intervals=tuple(interval(values, Random(SEED)) for values in each),
                        tokens=sum(tokens for _, tokens in outcomes) / (puzzles * samples),
                    )
                )
                print(f"{game}, thinking {thinking}: {time.monotonic() - began:.0f} s", flush=True)
    return rows


def table(rows: Sequence[PassRow]) -> str:
    lines = [
        "| puzzle | thinking | " + " | ".join(f"pass@{k}" for k in rows[0].ks) + " | tokens an answer |",
        "|---|---|" + "---|" * (len(rows[0].ks) + 1),
    ]
    for row in rows:
        cells = [
            f"{share:.0%} ({low:.0%} – {high:.0%})"
            for share, (low, high) in zip(row.estimates, row.intervals, strict=True)
        ]
        lines.append(f"| {row.puzzle} | {'on' if row.thinking else 'off'} | {' | '.join(cells)} | {row.tokens:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m training.pass_at_k", description="Measure pass@k on puzzles.")
    parser.add_argument("--model", type=Path, default=Path("models/pebble"))
    parser.add_argument("--puzzles", type=int, default=30)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    arguments = parser.parse_args()
    measured = asyncio.run(measure(arguments.model, arguments.puzzles, arguments.samples, arguments.temperature))
    print(table(measured))
    document = json.dumps([asdict(row) for row in measured], indent=2)
    (arguments.model / RESULTS).write_text(document + "\n", encoding="utf-8")
