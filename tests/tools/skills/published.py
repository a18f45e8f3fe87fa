"""Three skills in the style of published ones: with references, scripts and odd but valid YAML."""

from __future__ import annotations

import stat
from pathlib import Path

# Two files, a table and a program, and a description of several lines.
MEASURE = """---
name: measuring-text
description: >-
  Measures texts: characters, words and the longest line.
  Use when the user asks how long a text is,
  or whether it fits: a tweet, an abstract.
license: Apache-2.0
metadata:
  author: ponder tests
  version: 1.10
allowed-tools: Bash(python scripts/*) Read
---

# Measuring text

1. Write the text as an argument: `python scripts/measure.py "the text"`.
2. Compare with [the limits](references/limits.md).
"""
MEASURE_SCRIPT = """import sys
from pathlib import Path

limits = (Path(__file__).parent.parent / "references" / "limits.md").read_text()
text = " ".join(sys.argv[1:])
if not text:
    sys.exit("usage: measure.py TEXT")
print(f"{len(text)} characters, {len(text.split())} words; {limits.count('|')} cells of limits")
Path("report.txt").write_text(f"measured {len(text)}")
"""
# A byte order mark, Windows' line breaks, quoted strings with escapes, a comment, a list.
CITE = (
    "\ufeff---\r\nname: \"citing-sources\"  # quoted\r\ndescription: 'Writes references: author, year, title. It''s "
    'for "works cited".\'\r\ncompatibility: "Needs nothing\\u002c not even a network"\r\n'
    "allowed-tools: [Read, Grep]\r\n"
    "---\r\n\r\nCite as Author (Year). *Title*.\r\n"
)
# No scripts, a field that is not the format's, a shell's program in a folder of another name.
COMMIT = """---
description: |
  Writes commit messages.
  For git.
name: commit-messages
version: 2.0.1
---
Write a subject of at most 72 characters: see tools/count.sh.
"""
COMMIT_SCRIPT = '#!/bin/sh\nprintf "%s" "$1" | wc -c\nexit 3\n'


def write_skills(folder: Path) -> Path:
    """Writes the three skills; returns the folder that has them."""
    measured = {"scripts/measure.py": MEASURE_SCRIPT, "references/limits.md": "| tweet | 280 |\n"}
    for name, content, beside in (
        ("measuring-text", MEASURE, measured),
        ("citing-sources", CITE, {"assets/logo.png": "\x89PNG\0\0"}),
        ("commit-messages", COMMIT, {"tools/count.sh": COMMIT_SCRIPT}),
    ):
        place = folder / name
        write(place / "SKILL.md", content)
        for path, text in beside.items():
            write(place / path, text)
    return folder


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file that every user may read, with the folders it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(path.stat().st_mode | stat.S_IRGRP | stat.S_IROTH)
    return path
