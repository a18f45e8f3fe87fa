"""The output items of a response as they grow, and their typed events.

A whole response has the items, a streamed one the events, and each event is one change to the items: so the two can't
differ. Events leave here without their numbers. Knows nothing of engines, requests or bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from app.openai.responses_items import CALL_PREFIX, SERVER_LABEL, Json, sealed
from engine.outputs import TokenLogprob
from reasoning.turn import CallMore, CallStart, Content, Delta, Reasoning
from tools.outcome import Outcome

Kind = Literal["message", "reasoning", "function_call", "mcp_call"]
Status = Literal["completed", "incomplete"]
Logprobs = Callable[[Sequence[TokenLogprob]], list[Json]]
_NONE: Mapping[str, Outcome] = MappingProxyType({})


@dataclass(slots=True)
class _Growing:
    """The one item that is being written, at `index` of the output."""

    kind: Kind
    index: int
    item: Json
    fragments: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def place(self) -> Json:
        return {"item_id": self.item["id"], "output_index": self.index}

    @property
    def part_place(self) -> Json:
        return {**self.place, "content_index": 0}  # an item of ours has one part


class Output:
    """`served` names the tools that the server runs; `logprobs` shows them, None where none were asked for.

    `namespaces` has the namespace of a function, and its name there. With `seals` thoughts have `encrypted_content`.
    """

    def __init__(
        self,
        served: Collection[str] = (),
        logprobs: Logprobs | None = None,
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        *,
        seals: bool = False,
    ) -> None:
        self.items: list[Json] = []
        self._served = served
        self._logprobs = logprobs
        self._namespaces = namespaces
        self._seals = seals
        self._growing: _Growing | None = None
        self._waiting: dict[str, int] = {}  # the server's calls that have not returned: id -> index

    @property
    def waiting(self) -> list[str]:
        """Ids of calls of the server's that have not returned."""
        return list(self._waiting)

    def take(self, delta: Delta) -> list[Json]:
        """Returns the events for a delta of the model's turn."""
        match delta:
            case Reasoning(text):
                return [*self._at("reasoning"), self._more("response.reasoning_text.delta", text)]
            case Content(text, entries):
                shown = [] if self._logprobs is None else self._logprobs(entries)
                return [*self._at("message"), self._said(text, shown)] if text or shown else []
            case CallStart():
                return [*self.end_item(), *self._call(delta)]
            case CallMore(_, arguments):
                assert self._growing is not None
                return [self._more(f"response.{self._growing.kind}_arguments.delta", arguments)]

    def end_item(self, status: Status = "completed") -> list[Json]:
        """The item that is being written is whole, or was cut off."""
        growing, self._growing = self._growing, None
        if growing is None:
            return []
        text = "".join(growing.fragments)
        match growing.kind:
            case "message" | "reasoning":
                return self._end_part(growing, text, status)
            case "function_call" | "mcp_call":
                return self._end_call(growing, text, status)

    def returned(self, id: str, outcome: Outcome) -> list[Json]:
        """A call of the server's has an outcome."""
        index = self._waiting.pop(id)
        item = self.items[index]
        place = {"item_id": item["id"], "output_index": index}
        text = outcome.result.text
        if outcome.ok:
            item |= {"status": "completed", "output": text}
        else:
            error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}
            item |= {"status": "failed", "error": error}
        return [{"type": f"response.mcp_call.{item['status']}", **place}, _done(item, index)]

    def end(self, status: Status, outcomes: Mapping[str, Outcome] = _NONE) -> list[Json]:
        """The answer is over. One that is complete without a word is a message without a word.

        `outcomes` are those of the server's calls: the newest may not have been sent, as the turn went to the client.
        """
        events = self.end_item(status)
        if status == "completed" and not any(item["type"] in ("message", "function_call") for item in self.items):
            events += [*self._at("message"), *self.end_item()]
        for id in self.waiting:
            if id in outcomes:
                events += self.returned(id, outcomes[id])
            else:  # the model was cut off before its turn was over, so it never ran
                index = self._waiting.pop(id)
                self.items[index]["status"] = "incomplete"
                events.append(_done(self.items[index], index))
        return events

    def _at(self, kind: Literal["message", "reasoning"]) -> list[Json]:
        """That an item of this kind is being written."""
        if self._growing is not None and self._growing.kind == kind:
            return []
        ended = self.end_item()
        if kind == "message":
            item = {"id": _id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        else:
            item = {"id": _id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        added = self._add(kind, item)
        assert self._growing is not None
        part = _text_part("") if kind == "message" else _reasoning_part("")
        return [*ended, added, {"type": "response.content_part.added", **self._growing.part_place, "part": part}]

    def _call(self, start: CallStart) -> list[Json]:
        if start.name not in self._served:
            namespace, name = self._namespaces.get(start.name, (None, start.name))
            item: Json = {
                "id": _id("fc"), "type": "function_call", "call_id": start.id, "name": name, "arguments": "",
                "status": "in_progress", **({} if namespace is None else {"namespace": namespace}),
            }  # fmt: skip
            return [self._add("function_call", item)]
        item = {
            "id": f"{CALL_PREFIX}{start.id}", "type": "mcp_call", "server_label": SERVER_LABEL, "name": start.name,
            "arguments": "", "output": None, "error": None, "status": "in_progress",
        }  # fmt: skip
        added = self._add("mcp_call", item)
        assert self._growing is not None
        self._waiting[start.id] = self._growing.index
        return [added, {"type": "response.mcp_call.in_progress", **self._growing.place}]

    def _add(self, kind: Kind, item: Json) -> Json:
        self._growing = _Growing(kind, len(self.items), item)
        self.items.append(item)
        return {"type": "response.output_item.added", "output_index": self._growing.index, "item": _copy(item)}

    def _more(self, event: str, text: str) -> Json:
        assert self._growing is not None
        self._growing.fragments.append(text)
        place = self._growing.part_place if self._growing.kind == "reasoning" else self._growing.place
        return {"type": event, **place, "delta": text}

    def _said(self, text: str, logprobs: list[Json]) -> Json:
        assert self._growing is not None
        self._growing.fragments.append(text)
        self._growing.logprobs += logprobs
        place = self._growing.part_place
        return {"type": "response.output_text.delta", **place, "delta": text, "logprobs": logprobs}

    def _end_part(self, growing: _Growing, text: str, status: Status) -> list[Json]:
        if growing.kind == "message":
            part = _text_part(text, growing.logprobs)
            done: Json = {"type": "response.output_text.done", "text": text, "logprobs": growing.logprobs}
        else:
            part = _reasoning_part(text)
            done = {"type": "response.reasoning_text.done", "text": text}
            if self._seals:
                growing.item["encrypted_content"] = sealed(text)
        growing.item |= {"status": status, "content": [part]}
        return [
            {**done, **growing.part_place},
            {"type": "response.content_part.done", **growing.part_place, "part": part},
            _done(growing.item, growing.index),
        ]

    def _end_call(self, growing: _Growing, arguments: str, status: Status) -> list[Json]:
        growing.item["arguments"] = arguments
        done: Json = {
            "type": f"response.{growing.kind}_arguments.done", **growing.place, "arguments": arguments,
        }  # fmt: skip
        if growing.kind == "mcp_call":
            return [done]  # it is over once it has returned
        growing.item["status"] = status
        return [done, _done(growing.item, growing.index)]


def _done(item: Json, index: int) -> Json:
    return {"type": "response.output_item.done", "output_index": index, "item": _copy(item)}


def _copy(item: Json) -> Json:
    """A copy of the item as it is now: its values are replaced, never changed."""
    return dict(item)


def _text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
