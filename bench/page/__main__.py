"""`python -m bench.page`: measure each part, keep its figures, show them.

Every part is written to the results as soon as it is done. A part named with --only is measured again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import hardware
from bench.page import cutting, frames, lighthouse, loading, painting, stopping
from bench.page.browsing import Json
from hatch_build import build_page

RESULTS = Path(__file__).parents[1] / "results"
WEB = Path(__file__).parents[2] / "web"

PARTS: dict[str, Callable[[], Json]] = {
    "size": loading.size,
    "first paint": loading.first_paint,
    "event to paint": painting.event_to_paint,
    "answer": frames.answer,
    "tree": frames.tree,
    "cuts": cutting.cuts,
    "stop to idle": stopping.stop_to_idle,
    "lighthouse": lighthouse.lighthouse,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description="How fast and steady the page is.")
    parser.add_argument("--only", action="append", choices=list(PARTS), default=[], help="this part alone; repeatable")
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS / f"{today}-page-{hardware.slug()}.json")
    options = parser.parse_args()
    build_page(WEB)
    made: dict[str, Any] = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    made["hardware"] = hardware.describe()
    for name in options.only or PARTS:
        began, load = time.monotonic(), os.getloadavg()[0]
        made[name] = {**PARTS[name](), "load_before": round(load, 1)}  # of the machine: what others did beside it
        text = json.dumps(made, indent=1, ensure_ascii=False)
        options.out.write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        print(json.dumps({name: made[name]}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
