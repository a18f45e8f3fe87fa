"""Frames under load: 3,000 tokens of mixed markdown at 200 a second, and a search of 500 states.

On the tests' scripted server, which sends citations and searches as the real one does, in pieces of 25 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from app.runs.events import AnswerDelta, AnswerDone, CitationRef, RunCompleted
from bench.page.browsing import Json, browser, throttled
from tests.e2e.support.fake_server import USAGE, Pace, serve
from tests.e2e.support.told import dam, found, searched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RATE = 200  # tokens a second
TOKENS = 3000
LETTERS = 4  # of a token
PIECE_S = 0.025
SLOW = 50  # ms

# How long it was from each frame to the next, in ms.
FRAMES = """() => {
    const frames = (window.frames_ms = []);
    let last = performance.now();
    const next = () => {
        const now = performance.now();
        frames.push(now - last);
        last = now;
        requestAnimationFrame(next);
    };
    requestAnimationFrame(next);
}"""


def section(i: int) -> str:
    """Some 200 tokens: a heading, a cited sentence, a list, code, a table, formulas."""
    rows = "\n".join(f"| {row} | {row * i} | the {row}th of them |" for row in range(1, 7))
    code = "\n".join(f"    total += values[{line}] * {i}  # step {line} of it" for line in range(8))
    return f"""## Part {i}

In the **{i}th** part it is said that the dam was finished in 1931. [S1]

- the first of *{i}* things, with `code_{i}` in it
- the second, a [link](https://example.org/{i})
  - and one below

```python
def part_{i}(values):
    total = 0
{code}
    return total
```

| n | n × {i} | what |
|---|---|---|
{rows}

So $\\frac{{{i}}}{{2}} + x^{{{i}}}$ it is, and

$$\\sum_{{k=0}}^{{{i}}} k^2 = \\frac{{n(n+1)(2n+1)}}{{6}}$$

> A quotation of the {i}th kind.

"""


def long_code(i: int) -> str:
    """Some 400 tokens in one block, which no line of it ends."""
    lines = "\n".join(f"    if value == {line}: return '{line} of {i}'" for line in range(45))
    return f"```python\ndef long_{i}(value):\n{lines}\n```\n\n"


def document() -> str:
    parts, i = "", 0
    while len(parts) < TOKENS * LETTERS:
        i += 1
        parts += section(i) if i % 5 else long_code(i)
    return parts[: TOKENS * LETTERS]


def told() -> Iterator[Any]:  # Any: steps of a script
    """The events of the document at the rate, its citations as soon as their sentences are there."""
    sources, passage = dam()
    text = document()
    yield found("answer", sources)
    said = "that the dam was finished in 1931. [S1]"
    cited = [at for at in range(len(text)) if text.startswith(said, at)]
    step = int(RATE * PIECE_S * LETTERS)
    for start in range(0, len(text), step):
        yield AnswerDelta(text=text[start : start + step])
        for number, at in enumerate(cited, 1):
            if start < at + len(said) <= start + step:
                place = {"sentence": number, "start": at, "end": at + len(said)}
                yield CitationRef.model_validate({**place, "support": "supported", "citations": [passage]})
        yield Pace(PIECE_S)
    yield AnswerDone(text=text, finish_reason="stop")
    yield RunCompleted(usage=USAGE)


def answer() -> Json:
    """Frames while the document streams, at the machine's pace and with the processor slowed down."""
    with browser() as chromium:
        return {"as it is": _answer(chromium, 1), "processor 4 times slower": _answer(chromium, 4)}


def _answer(chromium: Browser, slower: float) -> Json:
    with serve() as fake:
        page = chromium.new_page()
        page.goto(fake.url, wait_until="networkidle")
        throttled(page, slower)
        fake.play(list(told()))
        page.evaluate(FRAMES)
        _ask(page)
        page.locator("article[aria-busy=false][aria-label=Ponder]").wait_for(timeout=180_000)
        made = _summary(page)
        page.close()
    return made


def tree(nodes: int = 500) -> Json:
    """Frames while a search grows by 200 states a second, and while its tree is dragged and zoomed."""
    with browser() as chromium:
        return {"as it is": _tree(chromium, nodes, 1), "processor 4 times slower": _tree(chromium, nodes, 4)}


def _tree(chromium: Browser, nodes: int, slower: float) -> Json:
    with serve() as fake:
        page = chromium.new_page()
        page.goto(fake.url, wait_until="networkidle")
        throttled(page, slower)
        script: list[Any] = []
        for i, event in enumerate(searched(nodes)):
            script += [event, Pace(PIECE_S)] if i % 12 == 0 else [event]
        fake.play([*script, Pace(60)])
        page.evaluate(FRAMES)
        _ask(page)
        page.get_by_text("found").first.wait_for(timeout=120_000)
        growing = _summary(page)
        drawing = page.get_by_role("application")
        at = drawing.bounding_box()
        assert at is not None
        for _ in range(4):
            drawing.press("+")
        page.evaluate("window.frames_ms.length = 0")
        x, y = at["x"] + at["width"] / 2, at["y"] + at["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        for i in range(90):
            page.mouse.move(x + 120 * ((i // 15) % 2 or -1) * (i % 15) / 15, y + i % 30)
        page.mouse.up()
        for i in range(20):
            drawing.press("-" if i % 2 else "+")
        panning = _summary(page)
        page.close()
    return {"growing": growing, "panning and zooming": panning}


def _ask(page: Page) -> None:
    box = page.get_by_role("textbox", name="Message")
    box.fill("Go on")
    box.press("Enter")


def _summary(page: Page) -> Json:
    frames: list[float] = page.evaluate("window.frames_ms.slice(1)")
    slow = [frame for frame in frames if frame > SLOW]
    return {
        "frames": len(frames),
        "seconds": round(sum(frames) / 1000, 1),
        f"over_{SLOW}_ms": len(slow),
        "share_percent": round(100 * len(slow) / max(1, len(frames)), 2),
        "longest_ms": round(max(frames, default=0.0), 1),
    }
