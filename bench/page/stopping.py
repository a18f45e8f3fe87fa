"""From the press of Stop to an engine that has nothing to do, by the engine's own account."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.page.browsing import Json, browser, spread
from tests.e2e.real_server import PEBBLE, running

THINKING = {"min_tokens": 1500, "max_tokens": 3000}  # so that it is still at it when it is stopped
PRESSED = """() => addEventListener("click", () => (window.pressed = Date.now()), { capture: true })"""


def stop_to_idle(n: int = 40) -> Json:
    """Milliseconds, of answers by the bundled model that are stopped on the page.

    Raises:
        RuntimeError: after a stop the engine's counters said that something ran.
    """
    delays = []
    with tempfile.TemporaryDirectory() as name, running(Path(name), "--model", str(PEBBLE)) as server:
        idle = server.folder / "idle"
        server.turn(idle=str(idle))
        with browser() as chromium:
            page = chromium.new_page()
            for _ in range(n):
                chat, _ = server.ask("Use 4, 6 and 9 to make 33.", thinking=THINKING)
                page.goto(f"{server.direct}/c/{chat}")
                page.get_by_role("region", name="What the model thought").wait_for()
                page.evaluate(PRESSED)
                idle.write_text("")
                page.get_by_role("button", name="Stop", exact=True).click()
                page.locator("article[aria-busy=false][aria-label=Ponder]").wait_for()
                metrics = server.http.get("/metrics").text
                if "ponder_requests_running 0.0" not in metrics or 'ponder_kv_blocks{state="used"} 0.0' not in metrics:
                    raise RuntimeError("The engine was not idle after a stop.")
                (became,) = idle.read_text().split()
                delays.append(float(became) * 1000 - float(page.evaluate("window.pressed")))
    return {"ms": spread(delays)}
