"""The Agent Skills format: a `SKILL.md` whose YAML front matter names and describes a skill, above its instructions.

Every problem of a file is found at once, each with the accepted values. Fields that the format does not have are noted,
for published skills carry them. Knows nothing of folders.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import yaml

FILE = "SKILL.md"
MAX_BYTES = 256 << 10  # of SKILL.md
MAX_FRONT_MATTER = 16 << 10  # characters
MAX_NAME, MAX_DESCRIPTION, MAX_COMPATIBILITY = 64, 1024, 500  # characters
MAX_METADATA = 64  # keys
FIELDS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")

_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_FENCE = re.compile(r"^---[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill as its `SKILL.md` has it. `body` is Markdown; `notes` name what the file has beyond the format."""

    name: str
    description: str
    body: str
    license: str | None = None
    compatibility: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    allowed_tools: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class BadSkill(ValueError):
    """A folder is no skill; `problems` says what is wrong, each with what would be accepted."""

    def __init__(self, *problems: str) -> None:
        super().__init__(" ".join(problems))
        self.problems = problems


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """A safe loader for which every plain scalar is a text: the format's values are, and 1.10 is to stay 1.10."""

    yaml_implicit_resolvers: Mapping[str, list[tuple[str, re.Pattern[str]]]] = {}


def parse_skill(content: bytes) -> Skill:
    """Reads a `SKILL.md`. A byte order mark and any kind of line break are accepted.

    Raises:
        BadSkill: it does not have the format.
    """
    if len(content) > MAX_BYTES:
        raise BadSkill(f"{FILE} has {len(content)} bytes; accepted: at most {MAX_BYTES}, with the rest in other files.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSkill(f"{FILE} is not UTF-8 (byte {error.start}); accepted: UTF-8.") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    opening = _FENCE.match(text)
    closing = None if opening is None else _FENCE.search(text, opening.end())
    if opening is None or closing is None:
        lacks = "does not begin with a line ---" if opening is None else "has no second line ---"
        raise BadSkill(f"{FILE} {lacks}; accepted: YAML between two lines ---, then Markdown.")
    fields = _front_matter(text[opening.end() : closing.start()])
    body = text[closing.end() :].strip()
    problems = list[str]()

    def read(check: Callable[[str, object], str], key: str) -> str | None:
        try:
            return check(key, fields[key]) if key in fields else None
        except BadSkill as bad:
            problems.extend(bad.problems)
            return None

    name, description = read(_name, "name"), read(_description, "description")
    licence, compatibility = read(_text, "license"), read(_compatibility, "compatibility")
    problems += [f"{key} is missing; accepted: {what}." for key, what in _REQUIRED.items() if key not in fields]
    metadata = _metadata(fields.get("metadata", {}), problems)
    allowed = _allowed_tools(fields.get("allowed-tools", ""), problems)
    if problems or name is None or description is None:
        raise BadSkill(*problems)
    notes = [f"{key} is no field of the format; it has no effect." for key in fields if key not in FIELDS]
    if not body:
        notes.append("There are no instructions below the front matter.")
    return Skill(name, description, body, licence, compatibility, metadata, allowed, tuple(notes))


_REQUIRED = {
    "name": f"1 to {MAX_NAME} of a-z, 0-9 and single hyphens between them, as the folder is called",
    "description": f"1 to {MAX_DESCRIPTION} characters that say what the skill does and when to use it",
}


def _front_matter(text: str) -> Mapping[str, object]:
    if len(text) > MAX_FRONT_MATTER:
        raise BadSkill(f"The front matter has {len(text)} characters; accepted: at most {MAX_FRONT_MATTER}.")
    try:
        for event in yaml.parse(text, _Loader):
            if isinstance(event, yaml.AliasEvent):
                raise BadSkill(f"The front matter has the alias *{event.anchor}; accepted: values written out.")
        node = yaml.compose(text, _Loader)
        loaded = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        at = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1} of {FILE})"
        hint = "; quote a text that has ': ' or begins with a sign" if "mapping values" in str(error.problem) else ""
        raise BadSkill(f"The front matter is not YAML: {error.problem or error}{at}{hint}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise BadSkill(f"The front matter is not YAML: {reason}.") from None
    if not isinstance(loaded, dict) or not isinstance(node, yaml.MappingNode):
        raise BadSkill("The front matter is no mapping; accepted: lines such as name: my-skill.")
    counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
    if twice := [key for key, count in counts.items() if count > 1]:
        raise BadSkill(f"The front matter has {twice[0]!r:.60} twice; accepted: each field once.")
    return {str(key): value for key, value in loaded.items()}


def _text(key: str, value: object) -> str:
    """A field's text on one line; characters that do not show, or turn text around, are refused."""
    if not isinstance(value, str):
        kind = "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else "no text"
        raise BadSkill(f"{key} is {kind}; accepted: a text.")
    text = " ".join(value.split())
    if hidden := [each for each in text if not each.isprintable()]:
        raise BadSkill(f"{key} has the character U+{ord(hidden[0]):04X}, which does not show; accepted: without it.")
    return text


def _bounded(key: str, value: object, most: int) -> str:
    text = _text(key, value)
    if not text:
        raise BadSkill(f"{key} is empty; accepted: 1 to {most} characters.")
    if len(text) > most:
        raise BadSkill(f"{key} has {len(text)} characters; accepted: at most {most}.")
    return text


def _name(key: str, value: object) -> str:
    name = _bounded(key, value, MAX_NAME)
    if not _NAME.fullmatch(name):
        raise BadSkill(f"name is {name!r}; accepted: a-z, 0-9 and single hyphens between them.")
    return name


def _description(key: str, value: object) -> str:
    return _bounded(key, value, MAX_DESCRIPTION)


def _compatibility(key: str, value: object) -> str:
    return _bounded(key, value, MAX_COMPATIBILITY)


def _metadata(value: object, problems: list[str]) -> dict[str, str]:
    """The map of metadata. A value that is a list or a map of its own is kept as its text."""
    if value == "":  # the field without a value
        return {}
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        problems.append(f"metadata is no map of at most {MAX_METADATA} keys; accepted: lines such as author: me.")
        return {}
    return {str(key): each if isinstance(each, str) else repr(each) for key, each in value.items()}


def _allowed_tools(value: object, problems: list[str]) -> tuple[str, ...]:
    """The names of tools, divided by spaces or commas, or as a list. Brackets keep their spaces: Bash(git add *)."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    if not isinstance(value, str):
        problems.append("allowed-tools is no list of names; accepted: names divided by spaces.")
        return ()
    return tuple(re.findall(r"[^\s,(]+(?:\([^)]*\))?", value))
