"""Event to paint, stop to idle, and cut connections, in the page.

Event to paint is from the moment an event is handed to the connection to the frame that shows its text, by the
machine's one clock. Stop to idle is from the press of Stop to an engine with nothing to do, by the engine's own
counters. The last cuts the connection again and again while the page reads one long answer, and counts the letters that
are lost or doubled.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from bench.page.browsing import Json, browser, scripted, spread, throttled
from tests.e2e.support.real_server import PEBBLE, running

if TYPE_CHECKING:
    from playwright.sync_api import Page, Response

    from tests.e2e.support.real_server import RealServer


SENTENCES = 700
TEXT = "".join(f"Sentence {i} of the tale." + ("\n\n" if i % 6 == 0 else " ") for i in range(SENTENCES))

# After each frame in which the text grew: when it was painted, and how many letters there are.
WATCH = """() => {
    const shown = (window.shown = []);
    const after = new MessageChannel(); // its message comes when the frame is done
    let letters = 0;
    after.port1.onmessage = ({ data }) => shown.push([performance.timeOrigin + performance.now(), data]);
    const look = () => {
        const prose = [...document.querySelectorAll(".prose")].at(-1);
        const now = prose ? prose.textContent.replace(/\\s/g, "").length : 0;
        if (now > letters) after.port2.postMessage((letters = now));
        requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
}"""


def event_to_paint(rates: tuple[int, ...] = (50, 200)) -> Json:
    """By tokens a second: milliseconds from each answer.delta's bytes to the frame that shows all of its text."""
    return {f"{rate} tokens/s": _at(rate, 1) for rate in rates} | {
        "200 tokens/s, processor 4 times slower": _at(200, 4)
    }


def _at(rate: int, slower: float, seconds: float = 8) -> Json:
    with scripted({"tale": TEXT}) as server, browser() as chromium:
        sent = server.folder / "sent.jsonl"
        server.turn(hold=True)
        page = chromium.new_page()
        chat, run = server.ask("tale it is", max_tokens=int(rate * seconds))
        page.goto(f"{server.direct}/c/{chat}")
        page.locator("article[aria-busy=true]").wait_for()
        throttled(page, slower)
        page.evaluate(WATCH)
        server.turn(step_s=1 / rate, sent=str(sent))
        page.locator("article[aria-busy=false][aria-label=Ponder]").wait_for(timeout=60_000 + 1000 * seconds)
        shown: list[tuple[float, int]] = page.evaluate("window.shown")
        written = {seq: at * 1000 for at, seq in map(json.loads, sent.read_text().splitlines())}
        delays, letters = [], 0
        for event in _numbered(server.http.get(f"/api/runs/{run}/events?follow=false").text):
            if event[1]["type"] != "answer.delta":
                continue
            letters += len("".join(event[1]["text"].split()))
            seen = next((at for at, there in shown if there >= letters), None)
            if seen is not None and event[0] in written:
                delays.append(seen - written[event[0]])
    return {"ms": spread(delays), "over_50_ms": sum(delay > 50 for delay in delays)}


def _numbered(text: str) -> list[tuple[int, Json]]:
    events, number = [], 0
    for line in text.splitlines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            events.append((number, json.loads(line[6:])))
    return events


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


LONG = "\n\n".join(" ".join(f"Sentence {i * 6 + j} of this." for j in range(6)) for i in range(260))
STEP_S = 0.06  # of the engine: the answer takes longer than all cuts
BETWEEN_S = 0.4  # at most, from an open stream to its cut


def cut(page: Page, server: RealServer, *, times: int, seed: int) -> Json:
    """Ask for `long`, cut its stream so many times, each at a random moment after it is open again, and compare the
    page with the store once it is whole. Lost and doubled are letters.
    """
    random = Random(seed)
    server.turn(step_s=STEP_S)
    chat, run = server.ask("long it is")
    streams = [0]
    page.on("response", lambda response: _count(streams, response))
    page.goto(f"{server.url}/c/{chat}")
    for number in range(times):
        while streams[0] <= number and server.snapshot(run)["status"] == "running":
            page.wait_for_timeout(20)
        page.wait_for_timeout(random.uniform(0, BETWEEN_S) * 1000)
        server.wire.drop()
    still = server.snapshot(run)["status"] == "running"
    server.turn()
    page.locator("article[aria-busy=false][aria-label=Ponder]").wait_for(timeout=60_000)
    shown = "".join("".join(page.locator(".prose").all_inner_texts()).split())
    stored = "".join(server.snapshot(run)["answer"].split())
    lost = doubled = 0
    if shown != stored:
        for _, a, b, c, d in difflib.SequenceMatcher(None, stored, shown, autojunk=False).get_opcodes():
            lost, doubled = lost + max(0, (b - a) - (d - c)), doubled + max(0, (d - c) - (b - a))
    return {
        "cuts": times, "streams": streams[0], "ended_before_the_last_cut": not still, "letters": len(stored),
        "lost": lost, "doubled": doubled, "equal": shown == stored == "".join(LONG.split()),
    }  # fmt: skip


def _count(streams: list[int], response: Response) -> None:
    streams[0] += "/events?after=" in response.url and response.status == 200


def cuts(times: int = 100) -> Json:
    with scripted({"long": LONG}) as server, browser() as chromium:
        return cut(chromium.new_page(), server, times=times, seed=8)
