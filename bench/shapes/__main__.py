"""`python -m bench.shapes`: shapes of a small decoder, trained on the same data and compared seed by seed."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench import hardware, report
from bench.shapes import shapes_page
from bench.shapes.ablation import ASKED, PLAN, SHAPES, Ablation, run_all

COMPARED = ("qwen3", "lfm2")


def ablation_of(work: Path, steps: int, n: int) -> Ablation:
    """Returns the ablation of this many steps; fewer shorten the curriculum."""
    plan = replace(PLAN, steps=steps, ramp_steps=max(1, PLAN.ramp_steps * steps // PLAN.steps))
    return Ablation(work, Path("models/pebble/tokenizer.json"), SHAPES, plan, ASKED, n)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.shapes", description=__doc__)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), default=[], help=f"default: {COMPARED}")
    parser.add_argument("--seed", action="append", type=int, default=[], help="repeatable (default: 1, 2, 3)")
    parser.add_argument("--steps", type=int, default=PLAN.steps)
    parser.add_argument("-n", type=int, default=100, help="held-out cases of each ability")
    parser.add_argument("--work", type=Path, default=Path("build/shapes"), help="checkpoints and results of runs")
    parser.add_argument("--kept", action="store_true", help="train nothing: sum up the runs that are there")
    parser.add_argument("--write", action="store_true", help="keep the JSON, and bring docs/performance.md up to date")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.n < 2:
        parser.error("--steps takes 1 or more, -n 2 or more: an interval needs two cases.")
    torch.set_num_threads(1)  # of a process: two of them keep two cores busy
    ablation = ablation_of(options.work, options.steps, options.n)
    shapes, seeds = options.shape or (list(SHAPES) if options.kept else COMPARED), options.seed or [1, 2, 3]
    load = round(os.getloadavg()[0], 1)
    try:
        if options.kept:
            found = [ablation.kept(shape, seed) for seed in seeds for shape in shapes]
            rows = [row for row in found if row is not None]
        else:
            rows = run_all(ablation, shapes, seeds, lambda line: print(line, file=sys.stderr, flush=True))
        summary = shapes_page.summed_up(rows, SHAPES)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    results: report.Results = {
        "date": datetime.date.today().isoformat(),
        "slug": f"shapes-{hardware.slug()}",
        "command": f"python -m bench.shapes --steps {options.steps} -n {options.n}",
        "hardware": hardware.describe(),
        "load_before": load,
        **summary,
    }
    report.show(results, shapes_page.tables(results), keep=options.write)
    if options.write:
        shapes_page.write_page(results)


if __name__ == "__main__":
    main()
