"""Engines over several processes: a model for them, sequences that do all that divides them, and their ranks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from engine import GREEDY, Engine, Sampling, Span
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer

PROMPT = list(range(20, 60))
SPANS = [
    Span(GREEDY, max_tokens=24, ignore_eos=True),
    Span(Sampling(seed=5), max_tokens=24, ignore_eos=True),
    Span(Sampling(0.8, top_p=0.9, repetition_penalty=1.2, seed=6), max_tokens=24, ignore_eos=True),
]


def checkpoint(path: Path, name: str = "qwen3", **changed: Any) -> Path:
    """A random model with a tokenizer. Any: options of a configuration of transformers."""
    tokenizer = byte_tokenizer()
    config, model, options = tiny.MODELS[name]
    size = {"vocab_size": len(tokenizer.get_vocab())}
    tiny.save(tiny.build(config, model, {**options, **size, **changed}), path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def ranks_below(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children(recursive=True) if "engine.parallel.rank" in each.cmdline()]


async def answers(engine: Engine) -> list[tuple[int, ...]]:
    """Forks of one prefix, a cut, and more sequences than the pool holds."""
    found = []
    async with await engine.open(PROMPT) as root:
        found.append((await root.generate_all(SPANS[0])).token_ids)
        kids = root.fork(len(SPANS))
        results = await asyncio.gather(*(kid.generate_all(span) for kid, span in zip(kids, SPANS, strict=True)))
        found += [each.token_ids for each in results]
        kids[1].truncate(len(PROMPT) + 3)
        found.append((await kids[1].generate_all(SPANS[1])).token_ids)
    many = [await engine.open([*PROMPT[:32], at, at + 1]) for at in range(60, 68)]
    spans = [replace(SPANS[at % 3], max_tokens=90) for at in range(8)]
    results = await asyncio.gather(*(seq.generate_all(span) for seq, span in zip(many, spans, strict=True)))
    found += [each.token_ids for each in results]
    for seq in many:
        seq.close()
    return found
