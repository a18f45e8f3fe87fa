"""A connection that is cut again and again while the page reads one long answer: what is lost, what is doubled."""

from __future__ import annotations

import difflib
from random import Random
from typing import TYPE_CHECKING

from bench.page.browsing import Json, browser, scripted

if TYPE_CHECKING:
    from playwright.sync_api import Page, Response

    from tests.e2e.real_server import RealServer

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
