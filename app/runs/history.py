"""A branch of a chat as its template takes it: questions, answers, and what answers called on their way.

With the calls and results that stand in an earlier answer's sequence, the next prompt begins with that sequence, so its
K/V is used again. Knows nothing of templates: `plain` is for one that takes no calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.data.database import Row
from app.data.steps import Step

Messages = list[dict[str, Any]]  # as chat templates take them: role and content, and a call's JSON
IMPORTED = "an imported chat"  # whose words may be anybody's
DOCUMENTS = "documents"


@dataclass(frozen=True, slots=True)
class History:
    """The conversation down to the question, with calls and without. `read_from`: whose untrusted text it rests on."""

    messages: Messages
    plain: Messages
    question: str
    read_from: frozenset[str]

    @classmethod
    def of(
        cls, branch: Sequence[Row], *, system: str | None = None, imported: bool = False, grounded: bool = False
    ) -> History:
        """`branch` ends with the question, and `system` stands before it all. A turn without an answer (it failed, or
        was stopped at once) is left out.
        """
        *turns, question = branch
        first = Messages() if system is None else [{"role": "system", "content": system}]
        messages, plain = [*first], [*first]
        read_from = {name for name, read in ((IMPORTED, imported), (DOCUMENTS, grounded)) if read}
        for asked, answer in zip(turns[::2], turns[1::2], strict=True):
            if not answer["content"]:
                continue
            said = [{"role": "user", "content": asked["content"]}]
            spoken = [{"role": "assistant", "content": answer["content"]}]
            messages += said + (_acted(answer["steps"]) or spoken)
            plain += said + spoken
            read_from |= _untrusted(answer["steps"])
        last = {"role": "user", "content": question["content"]}
        return cls([*messages, last], [*plain, last], question["content"], frozenset(read_from))


def _acted(steps: Sequence[Step]) -> Messages:
    """An answer's calls, results and last words; nothing where they cannot be shown as a whole."""
    made = Messages()
    if not steps or not steps[-1].content:
        return made
    for step in steps[:-1]:
        calls = list[dict[str, Any]]()  # Any: JSON
        for call in step.calls:
            given = _object(call.arguments)
            if given is None:
                return []
            calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": given}})
        made.append({"role": "assistant", "content": step.content, "tool_calls": calls})
        made += [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
            for call, result in zip(step.calls, step.results, strict=True)
        ]
    return [*made, {"role": "assistant", "content": steps[-1].content}]


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _untrusted(steps: Sequence[Step]) -> set[str]:
    return {
        call.name for step in steps for call, result in zip(step.calls, step.results, strict=True) if result.untrusted
    }
