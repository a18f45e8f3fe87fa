"""Tokens that a hybrid model reads again in an agent's day, and the bytes of states that it takes.

A random model of Qwen3.5's kinds of layers, small: a reuse is counted in tokens, which do not depend on the weights.
Every request sends its whole prompt, as a client of the API does: 8,000 tokens of history, a turn of 1,000, four tool
results of 150 with a written call before each, then four branches of 60 tokens from there, and a retry of the last
answer. `python -m bench.kv.state_reuse` prints the share of each prompt's already read tokens that is not read again,
and the bytes of states beside those of a policy that keeps one for every block of K/V.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.report import ROOT
from engine import GREEDY, Engine, EngineConfig, Span
from engine.outputs import Stats

HISTORY, TURN, RESULT, WRITTEN, BRANCH = 8000, 1000, 150, 40, 60
SHAPE: dict[str, Any] = {  # Any: arguments of an untyped class
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16_384,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def random_model(path: Path) -> Path:
    """A random checkpoint with a borrowed tokenizer."""
    import transformers

    torch.manual_seed(1)
    transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SHAPE)).save_pretrained(path)
    (path / "tokenizer.json").write_bytes((ROOT / "models" / "pebble" / "tokenizer.json").read_bytes())
    return path


def drawn(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(300, 4000) for _ in range(count)]


async def ask(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """Returns the prompt with its answer, and the prompt's tokens that were not read."""
    async with await engine.open(prompt) as seq:
        result = await seq.generate_all(Span(GREEDY, max_tokens=WRITTEN, ignore_eos=True))
        return list(seq.tokens), result.cached_tokens


async def day(engine: Engine) -> list[tuple[str, int, int]]:
    """Returns each request's name, tokens read before, and how many of those were not read again."""
    draw, found = random.Random(1), list[tuple[str, int, int]]()
    known, _ = await ask(engine, drawn(draw, HISTORY))

    async def one(name: str, prompt: list[int], before: int) -> list[int]:
        tokens, cached = await ask(engine, prompt)
        found.append((name, before, cached))
        return tokens

    known = await one("turn", known + drawn(draw, TURN), len(known))
    for _ in range(4):
        known = await one("tool result", known + drawn(draw, RESULT), len(known))
    branches = [known + drawn(draw, BRANCH) for _ in range(4)]
    for branch in branches:
        await one("branch", branch, len(known))
    await one("retry", branches[-1], len(branches[-1]))
    return found


def report(found: list[tuple[str, int, int]], stats: Stats) -> None:
    """Prints the shares, and the bytes of states by policy."""
    for kind in dict.fromkeys(kind for kind, _, _ in found):
        shares = [cached / before for each, before, cached in found if each == kind]
        print(f"{kind:12} n={len(shares)} reused {min(shares):.1%} to {max(shares):.1%}")
    before, cached = sum(each for _, each, _ in found), sum(each for _, _, each in found)
    states, blocks = stats.states, stats.blocks_used + stats.blocks_cached
    slots = states.used + states.cached
    print(f"{'all':12} n={len(found)} reused {cached / before:.2%} of {before} tokens read before")
    print(f"checkpoints as they are: {slots} of {states.slot_bytes} bytes, {slots * states.slot_bytes} bytes")
    print(f"one for each of {blocks} blocks: {blocks * states.slot_bytes} bytes")


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(str(random_model(Path(directory))), dtype="float32", kv_blocks=1500)
        async with await Engine.start(config) as engine:
            report(await day(engine), await engine.stats())


if __name__ == "__main__":
    asyncio.run(main())
