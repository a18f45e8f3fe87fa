"""`python -m bench.reasoning`: measure missing parts, show tables, plot pictures.

Every part is written to the results as soon as it is done, and a part that is there is not measured again, unless the
models are others.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bench import hardware
from bench.reasoning import reasoning_report
from bench.reasoning.asked import MODELS, questions
from bench.reasoning.reasoning_parts import ALONE, PARTS, run

RESULTS = Path(__file__).parents[1] / "results"


class Results:
    """The parts that are done, on disk after each."""

    def __init__(self, path: Path, n: int) -> None:
        """Raises SystemExit where the file is of other questions or models."""
        self.path = path
        self.made: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        setting = {"n": n, "models": {name: _digest(name) for name in ("pebble", "pebble-draft")}}
        for key, value in setting.items():
            if self.made.setdefault(key, value) != value:
                raise SystemExit(f"{path} was measured with {key} {self.made[key]}, now {value}; take another --out.")
        self.made.setdefault("hardware", hardware.describe())
        self.made.setdefault("seconds", {})

    def keep(self, name: str, made: Any, seconds: float) -> None:  # Any: plain JSON
        self.made[name] = made
        self.made["seconds"][name] = round(seconds)
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(self.made, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)


def _digest(model: str) -> str:
    return hashlib.sha256((MODELS / model / "model.safetensors").read_bytes()).hexdigest()[:16]


def measure(results: Results, n: int, processes: int, only: list[str]) -> None:
    """Every part that is not there yet, so many at once; the one that measures time comes last, alone."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the server has it; read by the processes that start now
    wanted = [name for name in PARTS if name not in results.made and (not only or name in only)]
    print(f"Measuring {', '.join(wanted) or 'nothing: all is there'}.", file=sys.stderr, flush=True)
    for together in ([name for name in wanted if name != ALONE], [name for name in wanted if name == ALONE]):
        if not together:
            continue
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(run, name, n): name for name in together}
            for count, future in enumerate(as_completed(running), 1):
                made, seconds = future.result()
                results.keep(running[future], made, seconds)
                text = f"{running[future]}: {seconds:.0f} s ({count} of {len(running)} parts)"
                print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.reasoning", description="Accuracy against tokens.")
    parser.add_argument("-n", type=int, default=300, help="questions of each kind")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="parts measured at once")
    parser.add_argument("--only", action="append", choices=list(PARTS), default=[], help="this part alone; repeatable")
    parser.add_argument("--pictures", type=Path, default=reasoning_report.PICTURES, help="where to draw")
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS / f"{today}-reasoning-{hardware.slug()}.json")
    options = parser.parse_args()
    if options.n < 2 or options.processes < 1:
        parser.error("-n must be 2 or more, and --processes 1 or more")
    try:
        questions("game24", options.n)
    except ValueError as error:
        parser.error(str(error))
    results = Results(options.out, options.n)
    measure(results, options.n, options.processes, options.only)
    print(reasoning_report.table(results.made))
    for path in reasoning_report.pictures(results.made, options.pictures):
        print(f"Drawn: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
