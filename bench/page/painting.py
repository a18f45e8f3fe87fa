"""From the moment an event is handed to the connection to the frame that shows its text, by the machine's one clock."""

from __future__ import annotations

import json

from bench.page.browsing import Json, browser, scripted, spread, throttled

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
