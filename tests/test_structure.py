"""The house keeps its shape: no import cycles, small files and folders, names and docstrings in the field's words."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("engine", "app", "tools", "reasoning", "retrieval", "training", "bench")
MAX_LINES = 500
MAX_FILES = 20  # of a folder
MAX_TWICE = 10  # classes whose name another module has, too

# Words that classes and functions are not named by: docs/glossary.md has the field's.
NOT_OUR_WORDS = {"backlog", "ticket", "manner", "manners", "toolshed", "dialect", "grounds", "shelf", "rung"}
WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
OWN_CONSTANTS = re.compile(r"^_?(MOST|LONGEST|LEAST|LARGEST)(_|$)")
QUESTION = re.compile(r"(What|Who|Whose|Whom|Whether|Which|Where|When|How|Why|Whatever|Whoever|Wherever)\b")
QUESTION_IN_QUOTES = re.compile(rf'"""\s*{QUESTION.pattern}')


@cache
def _modules() -> dict[str, Path]:
    found = {"ponder": ROOT / "ponder.py"}
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _test_modules() -> dict[str, Path]:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(path: Path) -> set[str]:
    """Returns the modules of ours that a file imports anywhere, for types too."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                found.add(whole if whole in _modules() else node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & _modules().keys()


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: _imported(path) - {name} for name, path in _modules().items()}
    graph["ponder"] = (
        set()
    )  # the plugins' page loads a module when a name of it is used, and built-in plugins import it
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_files_are_read_in_one_sitting() -> None:
    files = _modules() | _test_modules()
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_folders_are_seen_at_a_glance() -> None:
    counts = Counter(path.parent for path in [*_modules().values(), *_test_modules().values()])
    assert {str(folder): count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_a_class_has_a_name_of_its_own() -> None:
    homes = defaultdict(set)
    for module, path in _modules().items():
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(module)
    twice = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert len(twice) <= MAX_TWICE, twice


@pytest.mark.parametrize("package", [*PRODUCT, "tests"])
def test_docstrings_begin_with_a_verb_or_a_noun(package: str) -> None:
    asked = []
    for module, path in (_modules() | _test_modules()).items():
        if module.partition(".")[0] != package or not QUESTION_IN_QUOTES.search(path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if QUESTION.match(text):
                    asked.append(f"{module}: {text.splitlines()[0]}")
    assert asked == []


def test_names_are_the_fields() -> None:
    found = []
    for module, path in _modules().items():
        for node in ast.walk(_tree(path)):
            name = node.name if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else ""
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and OWN_CONSTANTS.match(node.id):
                found.append(f"{module}: {node.id}")
            if NOT_OUR_WORDS & {word.lower() for word in WORDS.findall(name)}:
                found.append(f"{module}: {name}")
    assert found == []


@pytest.mark.parametrize("page", sorted(path for top in PRODUCT for path in (ROOT / top).rglob("README.md")), ids=str)
def test_a_folders_page_names_what_is_in_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    gone = [name for name in re.findall(r"`([a-z_0-9]+(?:\.py|/))`", text) if not (page.parent / name).exists()]
    files = {path.name for path in page.parent.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert gone == []
    assert len(text.splitlines()) <= 15 and len(files - set(re.findall(r"[a-z_0-9]+\.py", text))) <= len(files) // 3
