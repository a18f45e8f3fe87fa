"""Coverage of the official JSON Schema suite, keyword by keyword: the table in docs/constraints.md.

`python -m tests.engine.structured_output.coverage` writes it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from engine.structured_output import spec
from engine.structured_output.matcher import ConstraintRefused
from tests.engine.structured_output.sources import Group, accepts, compact, guidance, suite, vocabulary

PAGE = Path(__file__).parents[3] / "docs/constraints.md"
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"


@dataclass(frozen=True)
class Result:
    """One schema: the reason of its refusal, or the results of its instances."""

    group: Group
    refused: str | None
    false_accepts: tuple[str, ...] = ()
    false_refusals: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def results() -> tuple[Result, ...]:
    return tuple(map(result, suite()))


def result(group: Group) -> Result:
    try:
        made = guidance("small").compile(spec.JsonSchema.of(group.schema, compact=True))
    except ConstraintRefused as refused:
        return Result(group, str(refused))
    wrong: dict[bool, list[str]] = {True: [], False: []}
    for what, instance, valid in group.tests:
        taken = accepts(made.matcher(), vocabulary("small").tokenize(compact(instance).encode()))
        if taken != valid:
            wrong[taken].append(what)
    return Result(group, None, tuple(wrong[True]), tuple(wrong[False]))


def table() -> str:
    lines = ["| file of the suite | held | refused | why refused |", "|---|---|---|---|"]
    by_file: dict[str, list[Result]] = {}
    for each in results():
        by_file.setdefault(each.group.file, []).append(each)
    for file, some in by_file.items():
        reasons = Counter(_short(each.refused) for each in some if each.refused is not None)
        why = "; ".join(f"{reason} ({n})" if n > 1 else reason for reason, n in reasons.most_common())
        held = sum(each.refused is None for each in some)
        lines.append(f"| {file} | {held} | {len(some) - held} | {why} |")
    held = sum(each.refused is None for each in results())
    lines.append(f"| **all** | **{held}** | **{len(results()) - held}** | |")
    return "\n".join(lines)


def not_taken() -> Iterator[str]:
    """Valid instances that a held schema does not let through, as lines of the page."""
    for each in results():
        for what in each.false_refusals:
            yield f"- {each.group.file}: {each.group.description}: {what}"


def _short(reason: str | None) -> str:
    return (reason or "").removeprefix("JSON Schema keyword not supported: ").replace("|", "\\|")


def section() -> str:
    listed = "\n".join(not_taken())
    return f"{table()}\n\nValid instances that a held schema does not let through:\n\n{listed}\n"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{section()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
