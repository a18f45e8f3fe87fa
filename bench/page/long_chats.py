"""Opening a chat of many messages, and typing in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.page.browsing import Json, browser, scripted, spread
from tests.app.chatting import file, imported, message

if TYPE_CHECKING:
    from tests.e2e.support.real_server import RealServer

SIZES = (2, 300, 1000)  # messages; the first is what any chat takes
OPENED = 5  # times
KEYS = "The quick brown fox jumps over the lazy dog, twice."
ANSWER = (
    "There are two ways.\n\n1. The **first** one is short.\n2. The second one reads `rows` in order:\n\n```python\n"
    "def total(rows):\n    return sum(row.price for row in rows if row.paid)\n```\n\nBoth give the same result, "
    "as [the page](https://example.com) says. " + "They differ in how long they take. " * 8
)

# Of each key, the milliseconds from its event to the end of the frame after it.
WATCH = """() => {
    const delays = (window.delays = []);
    const after = new MessageChannel(); // its message comes when the frame is done
    after.port1.onmessage = ({ data }) => delays.push(performance.now() - data);
    addEventListener("keydown", (event) => requestAnimationFrame(() => after.port2.postMessage(event.timeStamp)), {
        capture: true,
    });
}"""
SHOWN = """([words, count]) => new Promise((resolve) => {
    let opened = null;
    const look = () => {
        const shown = document.querySelectorAll("main article");
        if (opened === null && shown.item(shown.length - 1)?.innerText.includes(words)) opened = performance.now();
        if (opened === null || shown.length < count) return requestAnimationFrame(look);
        requestAnimationFrame(() => setTimeout(() => resolve([opened, performance.now()])));
    };
    look();
})"""


def _import(server: RealServer, count: int) -> str:
    """Adds a chat of so many messages, and returns its id."""
    words = (f"{ANSWER} {at}" if at % 2 else f"What about number {at}?" for at in range(count))
    chain = [
        message(f"m{at}", f"m{at - 1}" if at else None, ("user", "assistant")[at % 2], text)
        for at, text in enumerate(words)
    ]
    (chat,) = imported(server.http, file(*chain))
    return chat


def long_chats() -> Json:
    """By messages: milliseconds from the navigation to the last message, and to all of them, and from a key to the
    frame after it."""
    found: Json = {}
    with scripted({"tale": "A tale."}) as server, browser() as chromium:
        for count in SIZES:
            chat = _import(server, count)
            opened, whole, typed = list[float](), list[float](), list[float]()
            for _ in range(OPENED):
                page = chromium.new_page()
                page.goto(f"{server.direct}/c/{chat}", wait_until="commit")
                last, all_of_them = page.evaluate(SHOWN, [f"{ANSWER[-30:].strip()} {count - 1}", count])
                opened.append(last)
                whole.append(all_of_them)
                page.get_by_role("textbox", name="Message").focus()
                page.wait_for_timeout(500)
                page.evaluate(WATCH)
                page.keyboard.type(KEYS, delay=60)
                page.wait_for_timeout(200)
                typed += page.evaluate("window.delays")
                page.close()
            found[f"{count} messages"] = {
                "opened_ms": spread(opened), "whole_ms": spread(whole), "key_ms": spread(typed)
            }  # fmt: skip
    return found
