"""English that no template made: the docstrings of the standard library and of the packages that Ponder needs.

It gives the tokenizer ordinary words, and the model text that it has to admit it cannot follow, or to quote from. Which
sentences there are depends a little on the versions of Python and of the packages. Knows nothing of tasks.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from functools import lru_cache
from pathlib import Path

PACKAGES = (
    *("torch", "numpy", "transformers", "pydantic", "networkx", "sympy", "huggingface_hub", "jinja2", "fastapi"),
    *("starlette", "httpx", "anyio", "click", "uvicorn", "hypothesis", "rich", "typer", "sqlalchemy", "matplotlib"),
)
_FILES_EACH = 50  # enough variety, and read in a few seconds
_SENTENCE = re.compile(r"[A-Z][a-z][A-Za-z ,'-]{18,110}[.?]")
_WORD = re.compile(r"\b[a-z]{3,12}\b")
_ROLE = re.compile(r":[a-z:]+:`~?\.?([^`]+)`|``?([^`]+)``?|\*{1,2}(\w[^*]*)\*{1,2}")
_PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,.;'\"()/%_-]+\.")
_BREAK = re.compile(r"(?<=[a-z0-9)'\"])\.\s+(?=[A-Z])")
_ABBREVIATED = re.compile(r"\b(e\.g|i\.e|etc|cf|vs|Fig|Eq|Dr|al|approx|resp|No)\.", re.IGNORECASE)


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    wanted = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, wanted):
            found.append(ast.get_docstring(node) or "")
        if isinstance(node, (ast.Module, ast.ClassDef)):
            waiting += [child for child in node.body if isinstance(child, wanted)]
    return [text for text in found if text]


@lru_cache(maxsize=1)
def sentences() -> tuple[str, ...]:
    """Plain sentences of 20 to 110 letters, each once, in a fixed order."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                found.update(dict.fromkeys(_SENTENCE.findall(" ".join(text.split()))))
    return tuple(found)


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """The lower-case words of those sentences, each once."""
    return tuple(dict.fromkeys(_WORD.findall(" ".join(sentences()))))


def _paragraph(text: str) -> tuple[str, ...]:
    """The sentences of a plain paragraph of a docstring, or nothing where it holds code or marks."""
    text = _ROLE.sub(lambda match: next(group for group in match.groups() if group), " ".join(text.split()))
    if not 40 < len(text) < 1200 or not _PLAIN.fullmatch(text) or _ABBREVIATED.search(text) or ". . ." in text:
        return ()
    parts = [part.rstrip(".") + "." for part in _BREAK.split(text)]
    return tuple(parts) if all(4 <= len(part.split()) <= 55 for part in parts) else ()


def _files() -> list[Path]:
    paths = sysconfig.get_paths()
    files = [*sorted(Path(paths["stdlib"]).glob("*.py")), *sorted(Path(paths["stdlib"]).glob("[a-z]*/*.py"))]
    files = [path for path in files if not {"site-packages", "test", "idlelib"} & set(path.parts[-2:])]
    for package in PACKAGES:
        files += sorted((Path(paths["purelib"]) / package).rglob("*.py"))[:_FILES_EACH]
    return files


@lru_cache(maxsize=1)
def paragraphs() -> tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]:
    """By module with two or more: its name and its plain paragraphs as sentences, each once, in a fixed order."""
    seen: set[tuple[str, ...]] = set()
    out = []
    for path in _files():
        found = []
        for docstring in _docstrings(path):
            for block in re.split(r"\n\s*\n", docstring):
                paragraph = _paragraph(block)
                if paragraph and paragraph not in seen:
                    seen.add(paragraph)
                    found.append(paragraph)
        if len(found) >= 2:
            name = path.parent.name if path.stem == "__init__" else path.stem
            out.append((name.strip("_"), tuple(found)))
    return tuple(out)
