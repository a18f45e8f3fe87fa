"""A tool's result: the text as the model reads it, the value as programs do, and the sources it cites.

Text that somebody else may have written is put between delimiters that it cannot close, so the model can be instructed
to treat it as data. A long text is cut in the middle, where it says how much is missing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from tools.context import APP_TYPE, Source
from tools.errors import ToolError

_DELIMITER = re.compile(r"<(?=[\s/\\]*untrusted)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of a call as the host keeps it. `version`: of its name in the chat, from 1. `size`: bytes."""

    id: str
    name: str
    version: int
    media_type: str
    size: int


@dataclass(frozen=True, slots=True)
class Artifacts:
    """The files of a call: those that are kept, and a sentence for each that is not."""

    kept: tuple[Artifact, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """`value` is JSON. `truncated`: characters that were cut out of the text. `ms`: milliseconds the call took."""

    text: str
    value: Any = None  # any JSON value
    sources: tuple[Source, ...] = ()
    untrusted: bool = True
    truncated: int = 0
    ms: float = 0.0
    artifacts: tuple[Artifact, ...] = ()

    def with_artifacts(self, files: Artifacts) -> Result:
        """The result with a call's files, which the text names. An app is not named: it shows the same result."""
        notes = list(files.refused)
        if named_files := [each for each in files.kept if each.media_type != APP_TYPE]:
            named = ", ".join(f"{each.name} (version {each.version}, {each.size} bytes)" for each in named_files)
            notes.insert(0, f"Files that the person sees: {named}.")
        return replace(self, text="\n".join([self.text, *notes]), artifacts=files.kept)

    def framed(self, name: str) -> str:
        """The text as the model reads it; `name` is the tool's."""
        return frame(self.text, name) if self.untrusted else self.text


def result_of(value: object, sources: tuple[Source, ...] = (), *, untrusted: bool, max_chars: int) -> Result:
    """A tool's return value as a result. A string is its own text, anything else is written as JSON.

    Raises:
        ToolError: the value cannot be written as JSON.
    """
    try:
        data = strict_json(value)
    except (PydanticSerializationError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ToolError(
            f"the tool returned {type(value).__name__}, which cannot be written as JSON ({error}); it should return "
            "str, int, float, bool, None, list, dict, a dataclass or a pydantic model."
        ) from None
    text = "" if data is None else data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    short, cut = shorten(text or "(no output)", max_chars)
    return Result(short, data, sources, untrusted, cut)


def strict_json(value: object) -> Any:
    """The value as JSON that everybody reads: infinities are strings, and halves of characters question marks."""
    written = json.dumps(to_jsonable_python(value), ensure_ascii=False)
    return json.loads(written.encode("utf-8", "replace"), parse_constant=str)


def shorten(text: str, limit: int) -> tuple[str, int]:
    """At most `limit` characters, and how many were cut out: two thirds of the rest is the beginning."""
    if len(text) <= limit:
        return text, 0
    cut = len(text) - limit  # the note takes characters too, so its count is settled in a few rounds
    while True:
        note = f"\n[… {cut} of {len(text)} characters were cut here …]\n"
        kept = max(limit - len(note), 0)
        if len(text) - kept == cut:
            break
        cut = len(text) - kept
    head = kept - kept // 3
    return text[:head] + note + text[len(text) - kept // 3 :], cut


def frame(text: str, name: str) -> str:
    """Untrusted text between delimiters; one inside gets another bracket, and keeps its length."""
    return f'<untrusted from="{name}">\n{_DELIMITER.sub("‹", text)}\n</untrusted>'
