"""`python -m bench.diffusion`: right answers against tokens a pass, for a diffusion model and its twin."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import hardware, report
from bench.diffusion import diffusion_page
from bench.diffusion.asking import AskedAnswer, ask_diffusion, ask_twin, held_out
from bench.report import interval
from engine.diffusion import Unmasking
from training.diffusion.pair import DIFFUSION, TWIN
from training.diffusion.questions import TASKS
from training.evaluate import wilson

Row = dict[str, Any]  # Any: plain JSON
WORK = Path("build/training/diffusion")
FULL = 16  # places of a block that holds a whole answer
WAYS = [
    *(Unmasking(FULL, tokens_per_step=k) for k in (1, 2, 4, 8, 16)),
    *(Unmasking(FULL, threshold=p) for p in (0.5, 0.7, 0.9, 0.95, 0.99)),
    *(Unmasking(size, tokens_per_step=1) for size in (8, 4)),
    *(Unmasking(size, threshold=0.9) for size in (8, 4)),
]


def row_of(task: str, way: Row, answers: Sequence[AskedAnswer]) -> Row:
    """Sums up the answers to a task, with 95% intervals: of right answers by Wilson, of tokens a pass by bootstrap."""
    right = sum(each.right for each in answers)
    low, high = wilson(right, len(answers))
    paces = [each.tokens / each.passes for each in answers]
    return {
        "task": task, **way, "n": len(answers), "right": right, "low": low, "high": high,
        "tokens_per_pass": statistics.fmean(paces), "tokens_per_pass_interval": interval(paces),
        "passes": statistics.fmean(each.passes for each in answers),
        "ms": statistics.median(each.ms for each in answers),
    }  # fmt: skip


def measure(model: Path, twin: Path, seed: int, n: int) -> list[Row]:
    """Asks both models `n` questions of each task."""
    rows = list[Row]()
    for task in TASKS:
        asked = held_out(task, n)
        rows.append(row_of(task, {"seed": seed, "model": "twin"}, asyncio.run(ask_twin(twin, asked))))
        found = ask_diffusion(model, asked, WAYS, lambda line: print(line, file=sys.stderr, flush=True))
        for way, answers in zip(WAYS, found, strict=True):
            how = {"block_size": way.block_size, "tokens_per_step": way.tokens_per_step, "threshold": way.threshold}
            rows.append(row_of(task, {"seed": seed, "model": "diffusion", **how}, answers))
    return rows


def folders(seed: int) -> tuple[Path, Path]:
    """Returns where training put the diffusion model of a seed, and its twin."""
    mine = Path("models") / DIFFUSION if seed == 1 else WORK / f"{DIFFUSION}-{seed}" / "model"
    return mine, WORK / f"{TWIN}-{seed}" / "model"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.diffusion", description=__doc__)
    parser.add_argument("-n", type=int, default=300, help="questions of each task")
    parser.add_argument("--seed", type=int, action="append", default=[], help="of training; repeatable (default: 1)")
    parser.add_argument("--write", action="store_true", help="keep the JSON, and bring docs/diffusion.md up to date")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = options.seed or [1]
    results: report.Results = {
        "date": datetime.date.today().isoformat(),
        "slug": f"diffusion-{hardware.slug()}",
        "command": "python -m bench.diffusion" + "".join(f" --seed {seed}" for seed in seeds),
        "hardware": hardware.describe(),
        "load_before": round(os.getloadavg()[0], 1),
        "rows": [row for seed in seeds for row in measure(*folders(seed), seed, options.n)],
    }
    report.show(results, diffusion_page.tables(results), keep=options.write)
    if options.write:
        diffusion_page.write_page(results)


if __name__ == "__main__":
    main()
