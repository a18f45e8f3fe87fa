"""docs/api.md and docs/operations.md say what is so today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.config import Settings
from app.openai.fields import CHAT_REFUSED, COMPLETION_REFUSED, NO_EFFECT
from app.openai.schemas import ChatRequest, CompletionRequest, SamplingRequest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def table(heading: str) -> dict[str, str]:
    """Field -> works, no effect or refused, of the section's table."""
    section = (DOCS / "api.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| (works|no effect|refused) \|", section, re.MULTILINE)
    return {name: state for names, state in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_shared_fields_are_listed() -> None:
    listed = table("Sampling, stops and limits: both endpoints")
    assert {n for n, state in listed.items() if state == "works"} == set(SamplingRequest.model_fields)
    assert {n for n, state in listed.items() if state == "no effect"} == NO_EFFECT


@pytest.mark.parametrize(
    ("heading", "schema", "refused"),
    [("Chat completions", ChatRequest, CHAT_REFUSED), ("Completions", CompletionRequest, COMPLETION_REFUSED)],
    ids=["chat", "completions"],
)
def test_each_endpoints_own_fields_are_listed(heading: str, schema: type, refused: dict[str, object]) -> None:
    listed = table(heading)
    own = set(schema.model_fields) - set(SamplingRequest.model_fields)  # type: ignore[attr-defined]  # a pydantic model
    # `best_of` is a field so that n may be its value, and refused otherwise.
    works, refusals = own - {"best_of"}, set(refused) | (own & {"best_of"})
    assert {n for n, state in listed.items() if state == "works"} == works
    assert {n for n, state in listed.items() if state == "refused"} == refusals


def test_every_setting_is_listed_with_its_default() -> None:
    section = (DOCS / "operations.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))
    assert set(listed) == set(Settings.model_fields)
    for name, shown in listed.items():
        default = Settings.model_fields[name].default
        if shown.startswith("`"):
            assert shown.strip("`") == str(default).lower() or shown.strip("`") == str(default), name
        else:
            assert default in (None, ()), name
