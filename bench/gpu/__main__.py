"""`python -m bench.gpu [--minutes N] [--only PART] [--out FILE]` measures; `--table FILE` shows what was."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from bench import hardware
from bench.gpu.attending import attention
from bench.gpu.decoding import decode, deterministic, prefill
from bench.gpu.forks import forks
from bench.gpu.gpu_peers import peers
from bench.gpu.gpu_sampling import sampling
from bench.gpu.matrices import ceilings, matrices, quantized
from bench.gpu.rows import Figure, Json, Missing, write
from bench.gpu.setting import Setting, Sizes
from bench.gpu.startup import startup
from bench.gpu.table import table
from bench.gpu.timing import timer_for
from bench.gpu.whole import overhead, whole

RESULTS = Path(__file__).parents[1] / "results"
# The most important first, should the time run out; some need figures of those before them.
PARTS: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "ceilings": ceilings, "decode": decode, "attention": attention, "prefill": prefill, "forks": forks,
    "sampling": sampling, "overhead": overhead, "quantized": quantized, "whole": whole, "peers": peers,
    "startup": startup, "deterministic": deterministic, "matrices": matrices,
}  # fmt: skip


def measure(
    setting: Setting, names: Sequence[str], keep: Callable[[], None], say: Callable[[str], None] = print
) -> None:
    """Run parts into the setting's results; `keep` is called after each figure, so that a kill loses one at most."""
    for name in names:
        part: Json = {"figures": []}
        setting.results[name] = part
        began = setting.timer.now()
        try:
            with torch.inference_mode():
                for figure in _in_time(setting, PARTS[name](setting)):
                    part["figures"].append(figure.json())
                    say(f"{name}: {figure.what}: {figure.value:.4g} {figure.unit}" + _said(figure))
                    keep()
        except Missing as missing:
            part["error"] = f"missing: {missing}"
        except torch.OutOfMemoryError as error:
            part["error"] = f"missing: memory, {error}"[:600]
        except Exception as error:  # one part takes none of the others with it
            traceback.print_exc()
            part["error"] = f"{type(error).__name__}: {error}"[:600]
        part["seconds"] = setting.timer.now() - began
        if "error" in part:
            say(f"{name}: {part['error']}")
        keep()


def _in_time(setting: Setting, figures: Iterator[Figure]) -> Iterator[Figure]:
    while True:
        if setting.left_s <= 0:
            raise Missing("time, it was over")
        figure = next(figures, None)
        if figure is None:
            return
        yield figure


def _said(figure: Figure) -> str:
    share = "" if figure.share is None else f", share {figure.share:.3f}"
    return share + ("" if figure.met is None else f", goal {figure.goal} {'met' if figure.met else 'MISSED'}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.5, help="no figure is begun after so long")
    parser.add_argument("--taken", type=float, default=0.0, metavar="S", help="seconds of these minutes that are gone")
    parser.add_argument("--only", action="append", choices=list(PARTS), default=[], help="this part; repeatable")
    parser.add_argument("--out", type=Path, help="where the JSON goes; parts that it has already are kept")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of a file, and measure nothing")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text("utf-8"))))
        return 0
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing is measured.")
        return 0
    today = datetime.date.today().isoformat()
    out: Path = options.out or RESULTS / f"{today}-gpu-{hardware.slug()}.json"
    results: Json = json.loads(out.read_text("utf-8")) if out.exists() else {}
    results |= {"date": today, "command": "python -m bench.gpu", "hardware": hardware.describe()}
    device = torch.device("cuda", torch.cuda.current_device())
    until = time.perf_counter() + 60 * options.minutes - options.taken
    sizes = Sizes() if not options.only else Sizes(peers_s=float("inf"))
    setting = Setting(device, timer_for(device), sizes, until, results)

    def keep() -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write(out, results)

    names = parts(options.only, results)
    measure(setting, names, keep, lambda line: print(line, file=sys.stderr, flush=True))
    print(table(results))
    return int(any(failed(results[name]) for name in names))


def parts(only: Sequence[str], results: Json) -> list[str]:
    """Returns the parts to measure: all, or `only` these, and first the ceilings that they are held to."""
    return list(PARTS) if not only else [*(() if "ceilings" in (*only, *results) else ("ceilings",)), *only]


def failed(part: Json) -> bool:
    """Returns whether a part ended otherwise than with all its figures, or for want of time, memory or a package."""
    return not part.get("error", "missing").startswith("missing")


if __name__ == "__main__":
    sys.exit(main())
