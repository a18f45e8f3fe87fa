"""Chromium for the parts of the benchmark, servers for it to look at, and the spread of the measurements."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.conftest import ARGS
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

Json = dict[str, Any]  # Any: plain JSON
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS.split())
        yield browser
        browser.close()


@contextlib.contextmanager
def scripted(texts: Mapping[str, str], card: Path | None = None) -> Iterator[RealServer]:
    """The real server with a model that writes these texts, and says of itself what the file `card` does."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_scripted(Path(folder) / "model", texts)
        if card is not None:
            said = json.loads(card.read_text("utf-8"))
            (model / "ponder.json").write_text(json.dumps({name: said[name] for name in ("about", "starters")}))
        with running(Path(folder), "--model", str(model), "--dtype", "float32") as server:
            yield server


def throttled(page: Page, rate: float) -> CDPSession:
    """The page's processor so many times slower, until the session is detached."""
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setCPUThrottlingRate", {"rate": rate})
    return session


def spread(values: Sequence[float], digits: int = 1) -> Json:
    """Median, p95 and the ends of at least one value."""
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "median": round(statistics.median(ordered), digits),
        "p95": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))], digits),
        "min": round(ordered[0], digits),
        "max": round(ordered[-1], digits),
    }
