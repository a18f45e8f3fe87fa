"""English that no template made: the docstrings of the standard library of the Python that runs this.

It gives the tokenizer ordinary words, and the model examples of text it should admit it cannot follow. Which sentences
there are depends a little on the version of Python. Knows nothing of tasks.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from functools import lru_cache
from pathlib import Path

_SENTENCE = re.compile(r"[A-Z][a-z][A-Za-z ,'-]{18,110}[.?]")
_WORD = re.compile(r"\b[a-z]{3,12}\b")


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
