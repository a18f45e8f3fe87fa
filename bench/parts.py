"""A benchmark in parts: each is kept as soon as it is measured, and one alone can be measured again."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import hardware

RESULTS = Path(__file__).parent / "results"

Json = dict[str, Any]  # Any: plain JSON


def measure_parts(name: str, about: str, parts: Mapping[str, Callable[[], Json]]) -> Json:
    """Runs the command `python -m bench.NAME` and returns all results, older parts included."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
    parser.add_argument("--only", action="append", choices=list(parts), default=[], help="this part alone; repeatable")
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS / f"{today}-{name}-{hardware.slug()}.json")
    options = parser.parse_args()
    made: Json = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    made |= {"date": today, "command": f"python -m bench.{name}", "hardware": hardware.describe()}
    for part in options.only or parts:
        began, load = time.monotonic(), os.getloadavg()[0]
        made[part] = {**parts[part](), "load_before": round(load, 1)}  # of the machine: other processes' load
        options.out.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        print(json.dumps({part: made[part]}, indent=1, ensure_ascii=False), flush=True)
    return made
