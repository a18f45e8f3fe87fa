"""Rebuilds an answer that nobody finished from a run's log: the server crashed, or was killed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from app.data.run_rows import Answer, LoggedEvent
from app.runs.recorder import StepRecorder
from tools.outcome import Call
from tools.result import frame


def remains(events: Sequence[LoggedEvent], error: str) -> Answer:
    """The answer as far as it was logged, as failed with `error`."""
    content, thinking, recorder = list[str](), list[str](), StepRecorder()
    calls: dict[str, Call] = {}
    for event in events:
        match event.type, json.loads(event.data):
            case "answer.delta", {"text": text}:
                content.append(text)
                recorder.wrote(text)
            case "thinking.delta", {"text": text}:
                thinking.append(text)
            case "tool.call", {"call_id": id, "name": name, "arguments": arguments}:
                recorder.next()
                calls[id] = Call(id, name, arguments)
            case "tool.result", {"call_id": id, "name": name, "text": text, "untrusted": untrusted} if id in calls:
                recorder.returned(calls.pop(id), frame(text, name) if untrusted else text, untrusted=untrusted)
            case "tool.error", {"call_id": id, "name": name, "message": text} if id in calls:
                # Whether these were the tool's own words is not logged.
                recorder.returned(calls.pop(id), f"The call failed: {frame(text, name)}", untrusted=True)
    return Answer("failed", "".join(content), "".join(thinking), error=error, steps=recorder.steps())
