"""`python -m bench.load`: measure each part, keep its figures, draw them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench import hardware
from bench.load import claims, faults, load_growth, load_report, overload, policies, soak
from bench.load.pictures import draw
from bench.parts import Json, measure_parts
from bench.report import newest

PARTS: dict[str, Callable[[], Json]] = {
    "policies on azure": partial(policies.on_trace, "azure"),
    "policies on mooncake": partial(policies.on_trace, "mooncake"),
    "burst": policies.burst,
    **claims.PARTS,
    "growth of requests": load_growth.requests,
    "growth of context": load_growth.context,
    "growth of streams": load_growth.streams,
    "overload": overload.overload,
    **faults.PARTS,
    "soak": soak.soak,
}


if __name__ == "__main__":
    measure_parts("load", "What happens under load.", PARTS)
    if kept := newest(f"load-{hardware.slug()}"):  # the page shows kept results, not a trial's written elsewhere
        draw(kept)
        load_report.write(kept)
