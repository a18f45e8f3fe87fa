"""Constraints measured: compiling, masks, constrained rows beside free ones, bombs; and against xgrammar and outlines.

With Qwen's vocabulary of 152k tokens on schemas that people wrote (constraints_material.py). The parts know nothing of
each other: this puts them in order, and `Scale` says how much of each.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import hardware
from bench.constraints import material
from bench.constraints.beside_engine import beside_bombs, endless, random_model, side_by_side
from bench.constraints.constraint_pages import spread
from bench.constraints.masks import compiling, filling, forbidding
from bench.constraints.peers import CONTESTANTS, Contestant, PeerAnswer
from engine import Engine, EngineConfig
from engine.model.tokenizer import Tokenizer
from engine.structured_output.compiler import default_compiler
from engine.structured_output.vocabulary import Vocabulary
from engine.tool_parsers import choose_parser
from tests.engine.structured_output import sources

Json = dict[str, Any]  # Any: plain JSON
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount that is measured of each."""

    tool_schemas: int = 1000  # at most; there are some 450 with a known answer
    suite_schemas: int = 1000
    sets: int = 20
    tools: int = 64
    walks: int = 200
    rows: int = 64
    steps: int = 500
    repeats: int = 100
    batch: int = 16
    tokens: int = 128
    turns: int = 9
    streams: int = 8
    stream_tokens: int = 400
    bomb_turns: int = 5
    peer_schemas: int = 120
    peer_deadline_s: float = 30.0
    groups: int = 1000


QUICK = Scale(
    tool_schemas=60, suite_schemas=40, sets=3, walks=10, steps=40, repeats=10, tokens=32, turns=2,
    stream_tokens=60, bomb_turns=1, peer_schemas=6, groups=40,
)  # fmt: skip


async def constraints(tokenizer: Tokenizer, vocab_size: int, model: Path, scale: Scale, tell: Tell) -> Json:
    """All of it. `model` has that tokenizer and as many logits; `tell` gets the name of the next part."""
    vocabulary = Vocabulary.of(tokenizer, vocab_size)
    known = material.samples(tokenizer, scale.tool_schemas)
    tell("compiling")
    compiler = default_compiler(tokenizer, vocab_size)
    tool_parser = choose_parser(tokenizer, None, "hermes")
    assert tool_parser is not None
    compiled, admitted = compiling(
        compiler,
        [*known, *material.suite_samples(tokenizer, scale.suite_schemas)],
        tool_parser,
        material.tool_sets(scale.tools, scale.sets),
    )
    tell("masks")
    filled, bits = filling(admitted, vocabulary, rows=scale.rows, steps=scale.steps, walks=scale.walks)
    forbidden = forbidding(bits, vocab_size, repeats=scale.repeats)
    compiler.close()
    admitted.clear()
    tell("constrained and free rows side by side")
    held = [endless(sample.schema) for sample in known[: scale.batch // 2]]
    async with await Engine.start(EngineConfig(str(model), max_model_len=2048, prefix_cache=False)) as engine:
        shape = f"{engine.dtype}, {engine.threads} threads"
        runs = [
            await side_by_side(
                engine, held, rows=scale.batch, tokens=scale.tokens, turns=scale.turns, logprobs=logprobs
            )
            for logprobs in (0, None)
        ]
        tell("streams beside compile bombs")
        bombed = await beside_bombs(engine, streams=scale.streams, tokens=scale.stream_tokens, turns=scale.bomb_turns)
    tell("peers")
    peers = _peers(material.portable(vocabulary), known[: scale.peer_schemas], scale.peer_deadline_s)
    tell("the official suite")
    suite = _suite(scale.groups)
    return {
        "vocab_size": vocab_size,
        "compiling": compiled,
        "filling": filled,
        "forbidding": forbidden,
        "side_by_side": [{"model": shape, **run} for run in runs],
        "bombs": bombed,
        "peers": peers,
        "suite": suite,
    }


def on_hardware(results: Json, command: str) -> Json:
    """The results with the day and the machine."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "slug": hardware.slug(),
        "hardware": hardware.describe(),
        **results,
    }


def qwen_sized(folder: Path) -> tuple[Tokenizer, int, Path]:
    """Qwen's tokenizer, its size, and a random model that has it, made in `folder`."""
    model = random_model(folder / "random-qwen3", material.tokenizer_source(), material.SIZE)
    return Tokenizer.load(model), material.SIZE, model


def _peers(vocabulary: Vocabulary, samples: Sequence[material.SchemaSample], deadline_s: float) -> list[Json]:
    """Every installed contestant on every schema, one after the other on each."""
    contestants = _installed(vocabulary, deadline_s)
    answers: dict[str, list[PeerAnswer]] = {each.name: [] for each in contestants}
    try:
        for turn, sample in enumerate(samples):
            for each in contestants if turn % 2 else contestants[::-1]:
                answers[each.name].append(each.ask(sample.schema, [sample.ids]))
    finally:
        for each in contestants:
            each.close()
    rows = []
    for name, library in CONTESTANTS.items():
        given = answers.get(name, [])
        good = [answer for answer in given if answer.refused is None]
        row: Json = {
            "name": name,
            "package": library.package,
            "version": library.version,
            "compiled": len(good),
            "refused": sum(answer.refused is not None and not answer.timed_out for answer in given),
            "timed_out": sum(answer.timed_out for answer in given),
        }
        if good:
            row["compile_s"] = spread([answer.compile_s for answer in good])
            row["mask_s"] = spread([seconds for answer in good for seconds in answer.mask_s])
            row["whole_s"] = spread([answer.compile_s + sum(answer.mask_s) for answer in good])
            row["not_taken"] = sum(not all(answer.taken) for answer in good)
        rows.append(row)
    return rows


def _suite(groups: int) -> list[Json]:
    """Returns the verdicts of every installed contestant on the instances of the official suite."""
    contestants = {each.name: each for each in _installed(material.bytes_vocabulary(), 20)}
    rows = []
    for name, library in CONTESTANTS.items():
        row: Json = {"name": name, "package": library.package, "version": library.version}
        if (contestant := contestants.get(name)) is not None:
            with contestant:
                row |= _judged(contestant, sources.suite()[:groups])
        rows.append(row)
    return rows


def _judged(contestant: Contestant, groups: Sequence[sources.Group]) -> Json:
    counts = dict.fromkeys(
        ("admitted", "refused", "timed_out", "valid", "invalid", "false_accepts", "false_refusals"), 0
    )
    for group in groups:
        texts = [material.dumped(value).encode() for _, value, _ in group.tests]
        answer = contestant.ask(material.dumped(group.schema), texts)
        if answer.refused is not None:
            counts["timed_out" if answer.timed_out else "refused"] += 1
            continue
        counts["admitted"] += 1
        for (_, _, valid), taken in zip(group.tests, answer.taken, strict=True):
            counts["valid" if valid else "invalid"] += 1
            counts["false_accepts"] += taken and not valid
            counts["false_refusals"] += valid and not taken
    return counts


def _installed(vocabulary: Vocabulary, deadline_s: float) -> list[Contestant]:
    return [
        Contestant(name, vocabulary, deadline_s) for name, library in CONTESTANTS.items() if library.version is not None
    ]
