"""What a docstring tells a model: what the tool does, and what each argument is.

Google's style. Everything before the first section is the description; of the sections only `Args:` is for the model,
the others are for the people who read the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass

_ARGS = ("Args", "Arguments", "Parameters")
_SECTION = re.compile(rf"^({'|'.join(_ARGS)}|Returns?|Yields?|Raises|Examples?|Notes?|See Also|Warnings?):[ \t]*(.*)$")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """What a docstring tells the model: the text before its first section, and what `Args:` says of each argument."""

    description: str
    arguments: Mapping[str, str]


def parse_docstring(text: str) -> Docstring:
    """Reads Google's style. Sections other than `Args:` are for the people who read the code.

    Raises:
        ValueError: `Args:` shares its line with other text, or an entry is not `name: text`.
    """
    description, arguments = list[str](), dict[str, str]()
    section, indent, name = "", 0, ""
    for line in inspect.cleandoc(text).splitlines():
        if header := _SECTION.match(line):
            section = "Args" if header[1] in _ARGS else header[1]
            if section == "Args" and header[2]:
                raise ValueError(
                    f"the line {line.strip()!r} holds more than `Args:`; write each argument on its own line below"
                )
            indent, name = 0, ""
        elif not section:
            if re.search(r"\bArgs:", line):
                raise ValueError(f"the line {line.strip()!r} has `Args:` within it; write it on a line of its own")
            description.append(line)
        elif line.strip() and not line[0].isspace():
            section = "text"  # unindented prose ends a section
        elif section == "Args" and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            if depth > indent and name:
                arguments[name] += " " + line.strip()
            elif (entry := _ENTRY.match(line.strip())) and entry[1] not in arguments:
                name = entry[1]
                arguments[name] = entry[2]
            else:
                raise ValueError(
                    f"the line {line.strip()!r} below `Args:` is not `name: what it is`, once for each argument"
                )
    return Docstring(" ".join("\n".join(description).split()), arguments)
