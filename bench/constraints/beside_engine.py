"""Constrained and free rows side by side in one batch of a running engine, and streams beside a bomb that compiles.

The model is random, small, and as wide at its end as the vocabulary: the cost of constraints per row is the same for a
large model, so here it weighs most. Its output layer prefers the characters that close JSON, or it would never leave
its first string. All is greedy: sampling would take time of its own on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.constraints.constraint_pages import interval, spread
from engine import GREEDY, Engine, Span
from engine.model.tokenizer import Tokenizer
from engine.structured_output.layout import Constrained
from engine.structured_output.matcher import ConstraintRefused
from engine.structured_output.spec import Constraint, Grammar, JsonSchema, Regex, sequence

Json = dict[str, Any]  # Any: plain JSON
_PROMPT = 16
_RETRY_S = 1.0
_TRIES = 5
# Logits are normal, and the largest of 150,000 is 4.5 deviations out: a row 3.5 times as long is it one time in ten.
_CLOSING = {'"': 3.5, "}": 3.5, "]": 3.5, ",": 3.5, "1": 3.0}


def random_model(path: Path, source: str, vocab_size: int, *, hidden: int = 256, layers: int = 8) -> Path:
    """A random checkpoint of Qwen3's shape with this tokenizer.json, its output layer apart from its embedding."""
    import torch
    import transformers  # a development dependency

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.1,  # at the usual 0.02 each token depends on the last one alone, and text runs in circles
    )
    model: Any = transformers.Qwen3ForCausalLM(config)  # Any: its classes are untyped
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(source, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    tokenizer = Tokenizer.load(path)
    with torch.no_grad():
        for text, factor in _CLOSING.items():
            (token,) = tokenizer.encode(text)
            model.lm_head.weight[token] *= factor
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def endless(schema: str) -> Constraint:
    """A list of so many such objects that no span is long enough for it."""
    return JsonSchema.of({"type": "array", "items": json.loads(schema), "minItems": 64})


@dataclass(frozen=True, slots=True)
class _Stream:
    """The times of a row's tokens: (seconds by the clock, how many)."""

    pieces: tuple[tuple[float, int], ...]

    def tpot(self, begin: float, end: float) -> float:
        """Seconds a token, of tokens after `begin` and not after `end`."""
        return (end - begin) / max(1, sum(count for at, count in self.pieces if begin < at <= end))

    def gaps(self) -> list[float]:
        times = [at for at, _ in self.pieces]
        return [after - before for before, after in itertools.pairwise(times)]


async def _stream(engine: Engine, prompt: Sequence[int], span: Span, stop: asyncio.Event) -> _Stream:
    """Runs until the span is over, or until `stop`."""
    pieces = []
    async with await engine.open(prompt) as seq:
        async for out in seq.generate(span):
            if out.token_ids:
                pieces.append((time.perf_counter(), len(out.token_ids)))
            if stop.is_set():
                break
    return _Stream(tuple(pieces))


async def _batch(
    engine: Engine, rows: int, constraints: Sequence[Constraint], tokens: int, logprobs: int | None
) -> Json:
    """Seconds a token of free and of constrained rows that start together, while all of them run.

    On a busy machine a row may end before another has begun; then all of them start again, up to `_TRIES` times.
    """
    free = Span(GREEDY, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
    held = [
        Span(GREEDY, max_tokens=8 * tokens, logprobs=logprobs, constraint=Constrained(each)) for each in constraints
    ]
    for _ in range(_TRIES):
        free_over, never = asyncio.Event(), asyncio.Event()
        before = await engine.stats()
        tasks = [asyncio.create_task(_stream(engine, _prompt(i), span, free_over)) for i, span in enumerate(held)]
        others = [asyncio.create_task(_stream(engine, _prompt(i), free, never)) for i in range(len(held), rows)]
        free_rows = await asyncio.gather(*others)
        after = await engine.stats()
        free_over.set()
        constrained_rows = await asyncio.gather(*tasks)
        every = [*free_rows, *constrained_rows]
        begin, end = max(each.pieces[0][0] for each in every), min(each.pieces[-1][0] for each in every)
        if begin < end:
            return {
                "free": statistics.fmean(each.tpot(begin, end) for each in free_rows),
                "constrained": statistics.fmean(each.tpot(begin, end) for each in constrained_rows) if held else None,
                "steps": after.steps - before.steps,
            }
    raise RuntimeError("a row ended before the others had begun")


async def side_by_side(
    engine: Engine, constraints: Sequence[Constraint], *, rows: int, tokens: int, turns: int, logprobs: int | None
) -> Json:
    """As ratios to the mean of two batches of as many free rows, one before and one after; those two as noise.

    With `logprobs` no token is forced, so all rows take the same steps.
    """
    for each in constraints:
        await engine.compile(each)
    alone, free, constrained, noise, tpots = [], [], [], [], []
    for turn in range(turns + 1):
        first = (await _batch(engine, rows, (), tokens, logprobs))["free"]
        mixed = await _batch(engine, rows, constraints, tokens, logprobs)
        second = (await _batch(engine, rows, (), tokens, logprobs))["free"]
        if not turn:  # the first one warms up
            continue
        mean = (first + second) / 2
        alone.append(mean)
        tpots.append(mixed["constrained"])
        noise.append(second / first)
        free.append(mixed["free"] / mean)
        constrained.append(mixed["constrained"] / mean)
    return {
        "rows": rows,
        "constrained_rows": len(constraints),
        "tokens": tokens,
        "forced": logprobs is None,
        "free_alone_tpot_s": statistics.median(alone),
        "constrained_tpot_s": statistics.median(tpots),
        "constrained_over_free_alone": interval(constrained),
        "free_beside_over_free_alone": interval(free),
        "free_alone_over_itself": interval(noise),
    }


def bombs() -> dict[str, Constraint]:
    """Constraints that take long to compile, or would."""
    counted = {f"key{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}$"} for i in range(3000)}
    return {
        "oneOf in oneOf": JsonSchema.of(_nested("oneOf", 5, 4)),
        "anyOf in anyOf": JsonSchema.of(_nested("anyOf", 6, 4)),
        "maxLength 5000": JsonSchema.of({"type": "string", "maxLength": 5000}),
        "enum of 30,000": JsonSchema.of({"enum": [f"value {i}" for i in range(30_000)]}),
        "3,000 patterns": JsonSchema.of({"type": "object", "properties": counted}),
        "recursive": JsonSchema.of({"type": "array", "items": {"$ref": "#"}}),
        "catastrophic regex": Regex(r"(.*a){20}.{30}"),
        "counts of counts": Regex(r"((a{1,100}){1,100}){1,100}"),
        "300 alternatives, 50 times": Regex(f"({'|'.join(f'[a-z]{{{i}}}x{i}' for i in range(1, 300))}){{1,50}}"),
        "rules in rules": Grammar("start: a{1000}\na: b{1000}\nb: c{1000}\nc: /[a-z]+/"),
    }


def _nested(keyword: str, depth: int, width: int) -> Json:
    if not depth:
        return {"type": "integer"}
    part = _nested(keyword, depth - 1, width)
    return {keyword: [{"type": "object", "properties": {f"k{i}": part}, "required": [f"k{i}"]} for i in range(width)]}


async def beside_bombs(engine: Engine, *, streams: int, tokens: int, turns: int) -> Json:
    """Gaps between a stream's tokens, with one bomb after another being asked for all the while, and without."""
    quiet: list[float] = []
    loud: list[float] = []
    ratios, medians, noise = [], [], []
    asked: dict[str, list[float]] = {}
    outcomes: dict[str, str] = {}
    made = bombs()  # made outside of the measurement, as a client would
    constraints = engine._core._constraints
    assert constraints is not None
    compiler = constraints.compiler
    for turn in range(turns + 1):
        before = await _gaps(engine, streams, tokens)
        over = asyncio.Event()
        bomber = asyncio.create_task(_bomb(engine, made, turn, over, asked, outcomes))
        with_bombs = await _gaps(engine, streams, tokens)
        over.set()
        await bomber
        while compiler.stats.running:  # one beyond its deadline runs on, and must not run into the quiet phase
            await asyncio.sleep(0.05)
        after = await _gaps(engine, streams, tokens)
        if not turn:  # the first one warms up
            continue
        calm = spread([*before, *after])
        under = spread(with_bombs)
        quiet += [*before, *after]
        loud += with_bombs
        ratios.append(under["p99"] / calm["p99"])
        medians.append(under["p50"] / calm["p50"])
        noise.append(spread(after)["p99"] / spread(before)["p99"])
    return {
        "streams": streams,
        "tokens": tokens,
        "quiet_itl_s": spread(quiet),
        "with_bombs_itl_s": spread(loud),
        "p99_over_quiet": interval(ratios),
        "p50_over_quiet": interval(medians),
        "quiet_p99_over_itself": interval(noise),
        "bombs": {name: {"outcome": outcomes[name], "median_s": statistics.median(asked[name])} for name in asked},
    }


async def _gaps(engine: Engine, streams: int, tokens: int) -> list[float]:
    span = Span(GREEDY, max_tokens=tokens, ignore_eos=True)
    done = await asyncio.gather(*(_stream(engine, _prompt(i), span, asyncio.Event()) for i in range(streams)))
    return [gap for each in done for gap in each.gaps()]


async def _bomb(
    engine: Engine,
    made: dict[str, Constraint],
    turn: int,
    over: asyncio.Event,
    asked: dict[str, list[float]],
    outcomes: dict[str, str],
) -> None:
    """Ask for one bomb after another, each new to every cache, until it is over."""
    for salt in itertools.count():
        for name, constraint in made.items():
            began = time.perf_counter()
            try:
                await engine.compile(sequence(f"{turn} {salt} ", constraint))
                outcomes[name] = "compiled"
            except ConstraintRefused as refused:
                outcomes[name] = str(refused)
            asked.setdefault(name, []).append(time.perf_counter() - began)
            if "try again" in outcomes[name]:  # a client would wait, and this one shares the engine's process
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S):
                        await over.wait()
            if over.is_set():
                return


def _prompt(row: int) -> list[int]:
    return [1000 + 97 * row + i for i in range(_PROMPT)]
