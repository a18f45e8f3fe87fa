"""Endless sequences of the bundled model: blocks held over 100,000 tokens, and the loss of what it no longer sees.

*Loss*: natural-log loss a token of pages of this repository's docs beyond the window, each token given by a bias that
leaves nothing else, in one span, so that K/V moves as it does when the model writes. Of the same number of tokens seen:
sinks and a window, a window alone, and the window's text computed anew after each shift; and of the whole text.
Intervals are of the mean difference between pages (Student's t, 95 %).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import report
from engine import GREEDY, Engine, EngineConfig, Sampling, Span, StreamingWindow
from engine.core.engine_core import EngineCore

TOKENS, EVERY = 100_000, 5_000
PAGES, LENGTH, TOTAL, SINKS = 10, 1_536, 256, 16


class Forced(dict[int, float]):
    """A bias that leaves the next token of `text` alone, of the core's sequence `id`."""

    def __init__(self, core: EngineCore, text: list[int]) -> None:
        super().__init__({text[0]: 100.0})
        self._core, self._text, self.id = core, text, -1

    def items(self) -> Any:  # Any: a view, in a dict
        known = self._core._sequences.get(self.id)  # none while the parameters are checked
        at = 0 if known is None else known.text_len
        return {self._text[min(at, len(self._text) - 1)]: 100.0}.items()


async def flat(model: Path, tokens: int = TOKENS) -> dict[str, Any]:  # Any: plain JSON
    """Counts the blocks that a sequence of so many tokens holds on the way."""
    window, used = StreamingWindow(SINKS, TOTAL - SINKS), []
    config = EngineConfig(str(model), kv_blocks=64, context_shift=True, speculation="off")
    async with await Engine.start(config) as engine, await engine.open([1], streaming=window) as seq:
        span = Span(Sampling(seed=1), max_tokens=EVERY, ignore_eos=True)
        for _ in range(tokens // EVERY):
            result = await seq.generate_all(span)
            used.append((await engine.stats()).blocks_used)
        return {"tokens": len(seq), "forgotten": result.forgotten_tokens, "blocks": used, "window_tokens": TOTAL}


async def _streamed(engine: Engine, text: list[int], window: StreamingWindow | None) -> list[float]:
    forced = Forced(engine._core, text)
    async with await engine.open(text[:1], streaming=window) as seq:
        forced.id = seq._id
        sampling = Sampling(temperature=0.0, logit_bias=forced)
        span = Span(sampling, max_tokens=len(text) - 1, ignore_eos=True, logprobs=0)
        result = await seq.generate_all(span)
    assert list(result.token_ids) == text[1:], "another token was sampled than the text's"
    return [-each.logprob for each in result.logprobs]


async def _recomputed(engine: Engine, text: list[int], window: StreamingWindow) -> list[float]:
    """Reads the loss of each token after the text that is seen of those before it, as one prompt for each shift."""
    losses, begin = list[float](), 1
    while begin < len(text):
        gone = window.forgotten(begin)
        end = min(len(text), window.total + gone + 1) if gone else min(len(text), window.total + 1)
        prompt = [*text[: window.sinks], *text[window.sinks + gone : end]]
        async with await engine.open(prompt) as seq:
            result = await seq.generate_all(Span(GREEDY, max_tokens=1, prompt_logprobs=0))
        assert result.prompt_logprobs is not None
        found = [each.logprob for each in result.prompt_logprobs if each is not None]
        losses += [-each for each in found[-(end - begin) :]]
        begin = end
    assert len(losses) == len(text) - 1
    return losses


def _pages(engine: Engine) -> Iterator[list[int]]:
    for path in sorted((report.ROOT / "docs").glob("*.md"), key=lambda each: -each.stat().st_size)[:PAGES]:
        tokens = engine.tokenizer.encode(path.read_text("utf-8"))[:LENGTH]
        if len(tokens) == LENGTH:
            yield tokens


async def loss(model: Path) -> dict[str, Any]:  # Any: plain JSON
    """Measures the loss of each way, over the same tokens of the same pages."""
    with_sinks, alone = StreamingWindow(SINKS, TOTAL - SINKS), StreamingWindow(0, TOTAL)
    config = EngineConfig(str(model), kv_blocks=300, context_shift=True, speculation="off", loop="plain")
    ways: dict[str, list[float]] = {"whole": [], "sinks": [], "window": [], "recomputed": []}
    async with await Engine.start(config) as engine:
        for page in _pages(engine):
            made = {
                "whole": await _streamed(engine, page, None),
                "sinks": await _streamed(engine, page, with_sinks),
                "window": await _streamed(engine, page, alone),
                "recomputed": await _recomputed(engine, page, with_sinks),
            }
            for way, losses in made.items():
                ways[way].append(statistics.fmean(losses[2 * TOTAL :]))
    pages = len(ways["whole"])
    differences = {}
    for way in ("whole", "window", "recomputed"):
        pairs = [a - b for a, b in zip(ways[way], ways["sinks"], strict=True)]
        mean, (_, high) = statistics.fmean(pairs), report.student_interval(pairs)
        differences[way] = [mean, high - mean]
    means = {way: statistics.fmean(found) for way, found in ways.items()}
    return {"pages": pages, "tokens": pages * (LENGTH - 1 - 2 * TOTAL), "loss": means, "beside_sinks": differences}


async def measure(model: Path) -> dict[str, Any]:  # Any: plain JSON
    return {"loss": await loss(model), "flat": await flat(model)}


def tables(made: dict[str, Any]) -> list[str]:  # Any: plain JSON
    lines = ["| of 256 tokens seen | nats a token | beside sinks and window |", "|---|---|---|"]
    for way, mean in made["loss"]["loss"].items():
        beside = made["loss"]["beside_sinks"].get(way)
        lines.append(f"| {way} | {mean:.3f} | {'–' if beside is None else f'{beside[0]:+.3f} ± {beside[1]:.3f}'} |")
    flat = made["flat"]
    held = f"{min(flat['blocks'])} to {max(flat['blocks'])} blocks of 16 tokens"
    return [*lines, "", f"{flat['tokens']:,} tokens, {flat['forgotten']:,} of them forgotten: {held}", ""]
