"""Measures the cost of constraints beside the model: compiling as a request waits for it, filling bitmasks, applying
them to the logits.

Everything runs in this process and on the paths that the engine takes: its compiler, its threads, its kernel.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.constraints.constraint_pages import interval, spread
from bench.constraints.material import SchemaSample, walk
from engine.kernels.token_bitmask import apply_token_bitmask
from engine.structured_output.bitmask import Masks
from engine.structured_output.compiler import Compiler, Outcome
from engine.structured_output.layout import Layout
from engine.structured_output.matcher import Compiled, ConstraintRefused, Matcher, words
from engine.structured_output.mode_machine import ModeMachine
from engine.structured_output.spec import Constraint, JsonSchema
from engine.structured_output.vocabulary import Vocabulary
from engine.tool_parsers import ToolParser, ToolSpec

Json = dict[str, Any]  # Any: plain JSON


def outcome(compiler: Compiler, constraint: Constraint) -> Outcome:
    """Compiles a constraint and waits for the outcome."""
    ready = threading.Event()
    outcomes: list[Outcome] = []

    def done(made: Outcome) -> None:
        outcomes.append(made)
        ready.set()

    known = compiler.get(constraint, done)
    if known is not None:
        return known
    ready.wait()
    return outcomes[0]


def compiling(
    compiler: Compiler,
    samples: Sequence[SchemaSample],
    tool_parser: ToolParser,
    tool_sets: Sequence[tuple[ToolSpec, ...]],
) -> tuple[Json, list[tuple[SchemaSample, Compiled]]]:
    """Seconds to compile new schemas and sets of tools, and to find compiled ones. Also the outcomes."""
    outcome(compiler, JsonSchema.of({"type": "object"}))  # the first one reads the vocabulary
    clock = time.perf_counter
    seconds, admitted, refused = [], [], 0
    for sample in samples:
        began = clock()
        made = outcome(compiler, JsonSchema(sample.schema))
        if isinstance(made, ConstraintRefused):
            refused += 1
            continue
        seconds.append(clock() - began)
        admitted.append((sample, made))
    plans, sets, hits = [], [], []
    for tools in tool_sets:
        began = clock()
        plan = tool_parser.plan(tools, "required")
        planned = clock()
        made = outcome(compiler, plan.body)
        sets.append(clock() - planned)
        plans.append(planned - began)
        if isinstance(made, ConstraintRefused):
            raise RuntimeError(f"a set of tools was refused: {made}")
        hits.append(_hit(compiler, tool_parser.plan(tools, "required").body))
    one = [_hit(compiler, JsonSchema.of(json.loads(sample.schema))) for sample, _ in admitted]
    return {
        "cold_s": spread(seconds),
        "refused": refused,
        "tools": len(tool_sets[0]),
        "tools_cold_s": spread(sets),
        "tools_plan_s": spread(plans),
        "hit_s": spread(one),
        "tools_hit_s": spread(hits),
    }, admitted


def _hit(compiler: Compiler, constraint: Constraint) -> float:
    """Seconds to find a constraint by an equal one, as the next request brings it: nothing in it was hashed before."""
    began = time.perf_counter()
    found = compiler.get(constraint, lambda made: None)
    seconds = time.perf_counter() - began
    assert found is not None
    return seconds


class _Endless:
    """Modes of one text after another, so that a batch stays full."""

    def __init__(self, made: Sequence[tuple[Compiled, tuple[int, ...]]], random: Random) -> None:
        self._made = made
        self._random = random
        self._begin()
        for _ in range(random.randrange(len(self._ids))):
            self.step()

    def _begin(self) -> None:
        compiled, self._ids = self._random.choice(self._made)
        self.modes, self._at = ModeMachine(Layout(), compiled, frozenset()), 0

    def step(self) -> None:
        """Take the text's next token."""
        if self._at == len(self._ids):
            self._begin()
        assert self.modes.accept(self._ids[self._at])
        self._at += 1


def filling(
    admitted: Sequence[tuple[SchemaSample, Compiled]], vocabulary: Vocabulary, *, rows: int, steps: int, walks: int
) -> tuple[Json, Tensor]:
    """Seconds for one row, along known answers and along random walks, and for a batch on the engine's threads."""
    clock = time.perf_counter
    random = Random(1)
    walked = [(made, walk(made.matcher(), vocabulary, random, 48)) for _, made in random.choices(admitted, k=walks)]
    replayed = [(made, sample.ids) for sample, made in admitted]
    masks = Masks(vocabulary.size, torch.device("cpu"))
    row = np.zeros(words(vocabulary.size), dtype=np.int32)
    single: dict[str, list[float]] = {"replayed": [], "walked": []}
    texts = []
    for name, pairs in (("replayed", replayed), ("walked", walked)):
        for made, ids in pairs:
            matcher: Matcher = made.matcher()
            taken = 0
            for token in ids:
                began = clock()
                matcher.fill(row)
                single[name].append(clock() - began)
                if not matcher.accept(token):
                    break  # valid, but written another way than constraints have it, with keys in another order
                taken += 1
            if taken:
                texts.append((made, ids[:taken]))
    batch = [_Endless(texts, random) for _ in range(rows)]
    seconds = []
    for _ in range(steps):
        began = clock()
        masks.start([each.modes for each in batch])
        masks.wait()
        seconds.append(clock() - began)
        for each in batch:
            each.step()
    return {
        **{f"{name}_s": spread(values) for name, values in single.items()},
        "rows": rows,
        "batch_s": spread(seconds),
    }, torch.from_numpy(_bits(batch, vocabulary.size))


def _bits(batch: Sequence[_Endless], vocabulary: int) -> np.ndarray:
    bits = np.zeros((len(batch), words(vocabulary)), dtype=np.int32)
    for row, each in zip(bits, batch, strict=True):
        each.modes.fill(row)
    return bits


def forbidding(bits: Tensor, vocabulary: int, *, repeats: int) -> Json:
    """Seconds to write a batch's masks into fp32 logits, beside a copy of those logits: the same bytes, read and
    written once."""
    rows = len(bits)
    logits, other = torch.randn(rows, vocabulary), torch.randn(rows, vocabulary)
    every, one = torch.arange(rows), torch.tensor([0])
    clock = time.perf_counter
    seconds: dict[str, list[float]] = {"batch": [], "copy": [], "one": []}
    for turn in range(repeats + 1):
        began = clock()
        apply_token_bitmask(logits, bits, every)
        forbidden = clock()
        logits.copy_(other)
        copied = clock()
        apply_token_bitmask(logits[:1], bits[:1], one)
        done = clock()
        if turn:  # the first one warms up
            for name, value in (("batch", forbidden - began), ("copy", copied - forbidden), ("one", done - copied)):
                seconds[name].append(value)
    ratios = [batch / copy for batch, copy in zip(seconds["batch"], seconds["copy"], strict=True)]
    moved = 2 * logits.nbytes
    return {
        "rows": rows,
        "threads": torch.get_num_threads(),
        "batch_s": spread(seconds["batch"]),
        "copy_s": spread(seconds["copy"]),
        "copy_gb_per_s": moved / spread(seconds["copy"])["p50"] / 1e9,
        "over_copy": interval(ratios),
        "one_s": spread(seconds["one"]),
    }
