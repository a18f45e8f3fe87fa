"""How long constraints take with Qwen's 151,936 tokens: `python -m tests.engine.constrain.measure [tables]`.

Prints compile times over the leaderboard's tool schemas and tool sets, mask times along random walks, and with `tables`
what automata take for a few constraints (minutes). Times depend on the machine and what else it does: compare the
columns of one run.
"""

from __future__ import annotations

import sys
import time
from random import Random

import numpy as np

from engine.constrain import spec
from engine.constrain.fsm import FiniteStates
from engine.constrain.matcher import Compiled, ConstraintRefused, Matcher, words
from tests.engine.constrain import bfcl
from tests.engine.constrain.sources import guidance, vocabulary


def quantiles(name: str, seconds: list[float]) -> None:
    p50, p95, p99, top = (1e3 * np.quantile(seconds, q) for q in (0.5, 0.95, 0.99, 1.0))
    print(f"{name}: n {len(seconds)}, p50 {p50:.3f}, p95 {p95:.3f}, p99 {p99:.3f}, max {top:.3f} ms", flush=True)


def masks(matcher: Matcher, random: Random, steps: int = 60) -> list[float]:
    """Seconds of each mask along a random walk."""
    size = vocabulary("qwen").size
    row = np.zeros(words(size), dtype=np.int32)
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        matcher.fill(row)
        taken.append(time.perf_counter() - start)
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        pieces = [id for id in random.sample(list(ids), min(8, len(ids))) if id not in vocabulary("qwen").eos]
        if not pieces or matcher.must_end() or not matcher.accept(int(pieces[0])):
            break
    return taken


def main() -> None:
    start = time.perf_counter()
    backend = guidance("qwen")
    print(f"llguidance reads the vocabulary: {time.perf_counter() - start:.2f} s")
    compiling, filling, copying = [], [], []
    for seed, schema in enumerate(bfcl.parameters()[::6]):
        constraint = spec.JsonSchema.of(schema)
        start = time.perf_counter()
        made: Compiled = backend.compile(constraint)
        compiling.append(time.perf_counter() - start)
        start = time.perf_counter()
        matcher = made.matcher()
        copying.append(time.perf_counter() - start)
        filling += masks(matcher, Random(seed))
    quantiles("llguidance, compile a schema", compiling)
    quantiles("llguidance, a new matcher", copying)
    quantiles("llguidance, a mask", filling)
    for count in (1, 8, 64):
        tools = list({tool["name"]: tool for tools in bfcl.tool_sets() for tool in tools}.values())
        sets = [tools[i : i + count] for i in range(0, min(len(tools), 20 * count), count)]
        compiling = []
        for some in sets:
            bodies = spec.OneOf(
                tuple(
                    spec.sequence(
                        f'\n{{"name": "{tool["name"]}", "arguments": ', spec.JsonSchema.of(tool["parameters"]), "}\n"
                    )
                    for tool in some
                )
            )
            start = time.perf_counter()
            backend.compile(bodies)
            compiling.append(time.perf_counter() - start)
        quantiles(f"llguidance, compile {count} tools", compiling)
    if "tables" in sys.argv:
        tables()


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}, "days": {"type": "integer"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TABLES: dict[str, spec.Constraint] = {
    "yes or no": spec.choice(["yes", "no"]),
    "50 choices": spec.choice([f"value number {i}" for i in range(50)]),
    "a date": spec.Regex("[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "an integer": spec.JsonSchema.of({"type": "integer"}),
    "a string": spec.JsonSchema.of({"type": "string"}),
    "a string of 10": spec.JsonSchema.of({"type": "string", "maxLength": 10}),
    "a tool of three": spec.sequence('{"name": "get_weather", "arguments": ', spec.JsonSchema.of(CITY), "}"),
    "any text": spec.Regex("(?s:.*)"),
    "20 letters": spec.Regex(r"\w{1,20}"),
}


def tables() -> None:
    automata = FiniteStates(vocabulary("qwen"))
    automata.compile(spec.Literal("a"))  # starts the process
    row = np.zeros(words(vocabulary("qwen").size), dtype=np.int32)
    for name, constraint in TABLES.items():
        start = time.perf_counter()
        guidance("qwen").compile(constraint)
        other = time.perf_counter() - start
        start = time.perf_counter()
        try:
            table = automata.compile(constraint)
        except ConstraintRefused as refused:
            print(f"{name}: {refused} (llguidance {1e3 * other:.1f} ms)", flush=True)
            continue
        taken = time.perf_counter() - start
        matcher = table.matcher()
        start = time.perf_counter()
        for _ in range(1000):
            matcher.fill(row)
        fill = 1e6 * (time.perf_counter() - start) / 1000
        print(
            f"{name}: table {taken:.2f} s, {len(table.final)} states, {table.size >> 10} KiB, mask {fill:.1f} µs; "
            f"llguidance {1e3 * other:.1f} ms",
            flush=True,
        )
    automata.close()


if __name__ == "__main__":
    main()
