"""docs/strategies.md: the strategy written from scratch runs as it stands, and every option it names is there."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, Sampling, Span
from reasoning.strategies import Strategies, run_strategy
from reasoning.strategy import Context, Event
from reasoning.thinking import Markers, Piece
from tests.reasoning.puzzles import Puzzle, holds

ROOT = Path(__file__).resolve().parents[2]
BUILT_IN = sorted(
    {Path(sys.modules[each.run.__module__].__file__ or "") for each in Strategies()}
    | set((ROOT / "reasoning/tree").glob("*.py"))
)
PAGE = (Path(__file__).resolve().parents[2] / "docs/strategies.md").read_text(encoding="utf-8")
PEBBLE = Path(__file__).resolve().parents[2] / "models/pebble"


def code(heading: str) -> str:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]  # there is one


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(EngineConfig(str(model), dtype="float32", kv_blocks=512)) as engine:
        yield engine


def test_it_is_short() -> None:
    body = code("One written from scratch").split('"""\n')[1]
    assert len(body.strip().splitlines()) <= 20


@pytest.mark.parametrize("path", BUILT_IN, ids=lambda path: path.stem)
def test_built_in_strategies_import_what_a_plugin_could(path: Path) -> None:
    """The public face, pydantic and the standard library; a package of several files also itself."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    own = "reasoning.tree." if path.parent.name == "tree" else "nothing of its own"
    foreign = [
        module
        for module in modules
        if module.partition(".")[0] not in {"ponder", "pydantic", *sys.stdlib_module_names}
        and not module.startswith(own)
    ]
    assert modules and not foreign


@pytest.mark.parametrize("waits", [0, 1, 3])
@pytest.mark.parametrize("opened", [True, False])
async def test_it_does_what_it_says(engine: Engine, waits: int, opened: bool) -> None:
    names: dict[str, Any] = {}
    exec(code("One written from scratch"), names)
    strategies = Strategies()
    strategies.add(names["wait"], "the page")
    prompt = engine.tokenizer.encode("<think>" if opened else "Say:\n", special=True)
    for seed in range(4):
        context = Context(
            engine.tokenizer, Span(Sampling(seed=seed), 300), Markers.of(engine.tokenizer), opened=opened
        )  # fmt: skip
        options = strategies.options("wait", {"waits": waits, "most": 250})
        async with (
            await engine.open(prompt) as seq,
            aclosing(run_strategy(strategies.get("wait"), seq, context, options)) as items,
        ):
            pieces: list[Piece | Event] = [item async for item in items]
        thinking = "".join(p.text for p in pieces if isinstance(p, Piece) and p.part == "thinking")
        content = "".join(p.text for p in pieces if isinstance(p, Piece) and p.part == "answer")
        assert thinking.count("Wait") == waits and content.islower()
        assert sum(p.spent for p in pieces if isinstance(p, Piece) and p.part == "thinking") <= 250
    assert (await engine.stats()).blocks_used == 0


async def test_the_search_runs_as_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(code("A task for the tree"), names)
    async with await Engine.start(EngineConfig(str(PEBBLE), dtype="float32", kv_blocks=600)) as engine:
        asking = names["Asking"](engine.tokenizer, variables={"enable_thinking": False})
        end = await names["solve"](engine, Puzzle((2, 3, 4), 24, asking), asking)
    assert end.solved == holds(end.answer, (2, 3, 4), 24)
    assert "NodeAdded" in capsys.readouterr().out


def test_the_table_names_every_strategy_and_no_option_that_is_not_there() -> None:
    rows = {row[1]: row[2] for row in re.finditer(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", PAGE, re.MULTILINE)}
    for strategy in Strategies():
        outside = re.sub(r"\([^)]*\)", "", rows.pop(strategy.name))
        named = set(re.findall(r"`(\w+)`", outside))
        assert named <= set(strategy.options.model_fields), strategy.name
        assert strategy.name == "tree" or named == set(strategy.options.model_fields)
    assert not rows
