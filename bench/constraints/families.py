"""Schemas by family: how many each library takes, how soon, and the instances it lets through.

`python -m bench.constraints.families`: Ponder beside llguidance alone and xgrammar, in turn on each schema, at Qwen's
151,936 tokens. Families are the tool schemas of the leaderboard with their known answers, the schemas that installed
packages carry, and the official suite: the files on keywords that `engine/structured_output/schema_rewrite.py` writes
in others, and the rest. `--folder DIR` measures other schemas, each folder in DIR a family of JSON files, as
JSONSchemaBench has them.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import typer

from bench.constraints import material, on_hardware
from bench.constraints.peers import CONTESTANTS, Contestant
from bench.report import RESULTS
from engine.model.tokenizer import Tokenizer
from engine.structured_output.schema_rewrite import schemas, supersets
from engine.structured_output.vocabulary import Vocabulary
from tests.engine.structured_output import bfcl, sources

Json = dict[str, Any]  # Any: plain JSON
NAMES = ("Ponder", "llguidance", "xgrammar")
WRITTEN = ("format", "oneOf", "uniqueItems", "dependentRequired", "dependentSchemas")
MAX_BYTES = 400_000  # of a file that may be a schema


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema as JSON text, and texts with whether each is valid."""

    family: str
    schema: str
    texts: tuple[tuple[str, bool], ...] = ()


def cases(tokenizer: Tokenizer, step: int) -> Iterator[SchemaCase]:
    """All of them; of the leaderboard's every `step`th."""
    known = {sample.schema: sample.text for sample in material.samples(tokenizer, 10_000)}
    for schema in bfcl.parameters()[::step]:
        source = material.dumped(schema)
        yield SchemaCase("tools of the leaderboard", source, ((known[source], True),) if source in known else ())
    for source in installed():
        yield SchemaCase("schemas in installed packages", source)
    for group in sources.suite():
        texts = tuple((material.dumped(value), valid) for _, value, valid in group.tests)
        family = f"official suite: {group.file}" if group.file in WRITTEN else "official suite: the rest"
        yield SchemaCase(family, material.dumped(group.schema), texts)


def of_folder(folder: Path, step: int) -> Iterator[SchemaCase]:
    """Every `step`th schema of each folder in `folder`."""
    for family in sorted(each for each in folder.iterdir() if each.is_dir()):
        for file in sorted(family.glob("*.json"))[::step]:
            yield SchemaCase(family.name, material.dumped(json.loads(file.read_text(encoding="utf-8-sig"))))


def installed() -> Iterator[str]:
    """JSON Schemas among the files of this environment's packages."""
    for file in sorted(Path(sysconfig.get_path("purelib")).rglob("*.json")):
        try:
            if file.stat().st_size > MAX_BYTES or "json-schema.org" not in (text := file.read_text(encoding="utf-8")):
                continue
            schema = json.loads(text)
        except ValueError:
            continue
        if isinstance(schema, dict) and "$schema" in schema and schema.keys() & {"type", "properties", "$ref", "allOf"}:
            yield material.dumped(schema)


def measure(step: int, deadline_s: float, folder: Path | None = None) -> list[Json]:
    """A row for each family and library. Schemas that Ponder refuses are tried with `"strict": false`, too."""
    tokenizer = sources.qwen()
    known = Vocabulary.of(tokenizer, material.SIZE)
    vocabulary = material.portable(known)
    found: dict[tuple[str, str], Json] = {}
    contestants = [Contestant(name, vocabulary, deadline_s) for name in NAMES if CONTESTANTS[name].version is not None]
    try:
        for turn, case in enumerate(of_folder(folder, step) if folder else cases(tokenizer, step)):
            ids = [known.tokenize(text.encode()) for text, _ in case.texts]  # byte for byte: the tokenizer normalises
            for each in contestants if turn % 2 else contestants[::-1]:
                row = found.setdefault((case.family, each.name), _row(case.family, each.name))
                answer = each.ask(case.schema, ids)
                row["schemas"] += 1
                if answer.refused is not None:
                    row["timed_out" if answer.timed_out else "refused"] += 1
                    if each.name == "Ponder" and not answer.timed_out:
                        wider = map(material.dumped, _loosened(json.loads(case.schema)))
                        row["as_superset"] += any(each.ask(some, []).refused is None for some in wider)
                    continue
                row["taken"] += 1
                row["compile_ms"].append(1e3 * answer.compile_s)
                for (_, valid), taken in zip(case.texts, answer.taken, strict=True):
                    row["valid" if valid else "invalid"] += 1
                    row["false_accepts"] += taken and not valid
                    row["false_refusals"] += valid and not taken
    finally:
        for each in contestants:
            each.close()
    for row in found.values():
        times = sorted(row.pop("compile_ms"))
        row["compile_ms_p50"] = round(median(times), 2) if times else None
        row["compile_ms_p95"] = round(times[int(0.95 * (len(times) - 1))], 2) if times else None
    return list(found.values())


def _loosened(schema: Json) -> Iterator[Json]:
    """Supersets, as the server tries them; none of a schema that needs another document."""
    if all(str(part.get("$ref", "#")).startswith("#") for part in schemas(schema)):
        yield from supersets(schema)


def _row(family: str, name: str) -> Json:
    counts = ("schemas", "taken", "refused", "timed_out", "as_superset")
    texts = ("valid", "invalid", "false_accepts", "false_refusals")
    return {"family": family, "name": name, **dict.fromkeys((*counts, *texts), 0), "compile_ms": []}


def table(rows: list[Json]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| family | library | taken | as a superset | compiling p50 / p95, ms | invalid taken | valid not taken |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['family']} | {row['name']} | {row['taken']} of {row['schemas']} "
            f"| {row['as_superset']} | {row['compile_ms_p50']} / {row['compile_ms_p95']} "
            f"| {row['false_accepts']} of {row['invalid']} | {row['false_refusals']} of {row['valid']} |"
        )


def main(step: int = 6, deadline_s: float = 30.0, folder: Path | None = None, write: bool = True) -> None:
    """Measure and print; keep the JSON."""
    rows = measure(step, deadline_s, folder)
    command = f"python -m bench.constraints.families --step {step}{' --folder DIR' if folder else ''}"
    results = on_hardware({"families": rows}, command)
    for line in table(rows):
        typer.echo(line)
    if write:
        name = "constraints-schemas" if folder else "constraints-families"
        path = RESULTS / f"{results['date']}-{name}-{results['slug']}.json"
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
