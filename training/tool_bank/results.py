"""Results of tools, and the sentences that tell them to the user.

Sample: '{"temperature": 12, "sky": "rain"}' → "Temperature: 12, sky: rain."; '{"ok": true}' → "Done." Knows nothing of
requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from training.conversation import Phrasing
from training.tool_bank import Concept, values


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """`told` is the answer without a full stop, `brief` the same after a label; either must hold the `facts`."""

    content: str
    told: str
    brief: str
    facts: tuple[str, ...]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _done(rng: Random) -> ToolOutcome:
    if rng.random() < 0.3:
        number = values.draw(rng, rng.choice(("code", "int 1 9999")), "train").json
        content = {"ok": True, rng.choice(("id", "number", "reference")): number}
        return ToolOutcome(json.dumps(content), f"Done ({number})", f"done ({number})", (str(number),))
    content_ok = rng.choice(
        ('{"ok": true}', '{"status": "ok"}', "ok", "done", '{"success": true}', '"done"', "success")
    )
    return ToolOutcome(content_ok, "Done", "done", ("done",))


def result(rng: Random, concept: Concept, phrasing: Phrasing) -> ToolOutcome:
    """A plausible result: the values that the concept gives, as an object or plain, or that it is done."""
    if not concept.gives:
        return _done(rng)
    found: dict[str, Any] = {}
    for param in concept.gives:
        found[param.names[0]] = values.draw(rng, param.kind, phrasing).json
    shown = {key: _shown(value) for key, value in found.items()}
    listed = ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in shown.items())
    told = _capital(listed)
    content = json.dumps(found, ensure_ascii=False)
    if len(found) == 1 and rng.random() < 0.4:
        (key,) = found
        named = json.dumps({"result": found[key]}, ensure_ascii=False)
        content = rng.choice((named, shown[key]))
        is_number = isinstance(found[key], int | float) and not isinstance(found[key], bool)
        told = f"The result is {shown[key]}" if is_number else shown[key]
    brief = listed if len(shown) > 1 else "".join(shown.values())
    return ToolOutcome(content, told, brief, tuple(shown.values()))


def answer(results: tuple[ToolOutcome, ...], labels: tuple[str, ...] = ()) -> str:
    """One sentence for each result, after its label where several calls differ in one value."""
    told = [one.told for one in results]
    if set(told) == {"Done"}:
        return "Done."
    if labels:
        return " ".join(f"{label}: {one.brief}." for label, one in zip(labels, results, strict=True))
    return " ".join(f"{text}." for text in told)
