"""Writes the base model's own answers to prompts of the training mixture, with the states that they were written from.

A shard is a function of (seed, number): its prompts come from `training.mixture`, its answers from the engine, greedily
and at a temperature, many at once; one pass of the base over each gives its last normed states, of which the tied
embedding makes the base's distribution again. Shards are written whole or not at all, so a run that was stopped goes on
with the next. Knows nothing of drafters.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine import Engine, EngineConfig, Sampling, Span
from training import export, mixture
from training.plans import computes_bfloat16
from training.torch_model import Model
from training.train_tokenizer import TURN_END, segments

TEMPERATURES = (0.0, 0.7)  # an answer at each
TURNS = 3  # of a conversation that are answered
MAX_TOKENS = 640  # of an answer
CONVERSATIONS, SHARDS = 128, 30  # of a shard, and of a run
MAX_BATCH_TOKENS = 4096  # tokens that go through the base at once


@dataclass(frozen=True, slots=True)
class Answer:
    """`read` is the text before it, each part with a flag: written by an assistant. `tokens` end with the turn's end,
    unless the answer ran out of tokens."""

    read: tuple[tuple[str, bool], ...]
    tokens: tuple[int, ...]
    temperature: float

    def prompt(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the tokens before it, each part's in turn, as `training.mixture` has them."""
        return [token for text, _ in self.read for token in tokenizer.encode(text, add_special_tokens=False).ids]


def prompts(seed: int, number: int) -> list[tuple[tuple[str, bool], ...]]:
    """Samples what is read before each answer of a shard, at any difficulty, more often high than low.

    Tasks come as often as the mixture has tokens of them: by its tokens, half of the conversations would be puzzles.
    """
    rng = Random(f"answers-{seed}-{number}")
    shares, found = mixture.shares(1.0), []
    for _ in range(CONVERSATIONS):
        task = mixture.TASKS[rng.choices(tuple(shares), tuple(shares.values()))[0]]
        made = task(rng, "train", max(rng.random(), rng.random()))
        parts = segments(made)
        turns = [at for at, (_, written) in enumerate(parts) if written]
        found += [tuple(parts[:at]) for at in sorted(rng.sample(turns, min(TURNS, len(turns))))]
    return found


async def answer(engine: Engine, prompt: Sequence[int], temperature: float, seed: int, max_tokens: int) -> list[int]:
    """Samples one answer, with its turn's end where it has one."""
    async with await engine.open(list(prompt)) as sequence:
        span = Span(Sampling(temperature=temperature, seed=seed), max_tokens=max_tokens)
        result = await sequence.generate_all(span)
    end = engine.tokenizer.token_id(TURN_END)
    assert end is not None, "the bundled tokenizer has it"
    return [*result.token_ids, *([end] if result.finish_reason == "stop" else [])]


async def write(engine: Engine, tokenizer: Tokenizer, seed: int, number: int) -> list[Answer]:
    """Answers all prompts of a shard at each temperature."""

    async def one(read: tuple[tuple[str, bool], ...], temperature: float, at: int) -> Answer:
        prompt = Answer(read, (), temperature).prompt(tokenizer)
        tokens = await answer(engine, prompt, temperature, at, MAX_TOKENS)
        return Answer(read, tuple(tokens), temperature)

    asked = [(read, temperature) for read in prompts(seed, number) for temperature in TEMPERATURES]
    return list(await asyncio.gather(*(one(*each, number * 10_000 + at) for at, each in enumerate(asked))))


@torch.inference_mode()
def states(base: Model, rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, bfloat16: bool) -> list[Tensor]:
    """Returns for each prompt and answer the base's last normed states, (answer, hidden_size): the first token of the
    answer is sampled from the first."""
    order = sorted(range(len(rows)), key=lambda at: -len(rows[at][0]) - len(rows[at][1]))
    found: dict[int, Tensor] = {}
    while order:
        longest = sum(map(len, rows[order[0]]))
        batch, order = order[: max(1, MAX_BATCH_TOKENS // longest)], order[max(1, MAX_BATCH_TOKENS // longest) :]
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, at in enumerate(batch):
            whole = [*rows[at][0], *rows[at][1]]
            tokens[row, : len(whole)] = torch.tensor(whole)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            hidden = base.hidden(tokens)
        for row, at in enumerate(batch):
            prompt, answered = rows[at]
            found[at] = hidden[row, len(prompt) - 1 : len(prompt) + len(answered) - 1].bfloat16().clone()
    return [found[at] for at in range(len(rows))]


def digest(model: Path) -> str:
    """Returns the SHA-256 of a model's weights file."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def folder(work: Path, base: Path) -> Path:
    """Returns where the answers of a base of these weights lie."""
    return work / "answers" / digest(base)[:12]


def shard_path(work: Path, number: int) -> Path:
    return work / f"answers-{number:05}.jsonl"


def generate(base: Path, work: Path, seed: int = 1, shards: int = SHARDS) -> Path:
    """Writes the shards that are not there yet, and returns their folder."""
    asyncio.run(_generate(base, folder(work, base), seed, shards))
    return folder(work, base)


async def _generate(model: Path, work: Path, seed: int, shards: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    base = export.load(model)
    async with await Engine.start(EngineConfig(model=str(model), threads=1)) as engine:
        for number in range(shards):
            path = shard_path(work, number)
            if path.exists():
                continue
            made = await write(engine, tokenizer, seed, number)
            found = states(
                base, [(each.prompt(tokenizer), each.tokens) for each in made], bfloat16=computes_bfloat16("cpu")
            )
            save_file({"states": torch.cat(found)}, path.with_suffix(".safetensors"))
            partial = path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(asdict(each)) + "\n" for each in made), encoding="utf-8")
            partial.replace(path)
            print(f"shard {number}: {len(made)} answers, {sum(len(each.tokens) for each in made)} tokens", flush=True)


def read(work: Path) -> Iterator[tuple[Answer, Tensor]]:
    """Reads the answers that are there, each with its states, (answer, hidden_size)."""
    for path in sorted(work.glob("answers-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        made = [
            Answer(tuple((text, written) for text, written in line["read"]), tuple(line["tokens"]), line["temperature"])
            for line in lines
        ]
        found = load_file(path.with_suffix(".safetensors"))["states"]
        yield from zip(made, found.split([len(each.tokens) for each in made]), strict=True)
