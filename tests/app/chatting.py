"""Helpers for tests of chats: begin one, ask in it and wait for the answer, read it, send a file of chats."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx

Json = dict[str, Any]


def new_chat(http: httpx.Client) -> str:
    reply = http.post("/api/chats")
    assert reply.status_code == 201, reply.text
    return str(reply.json()["id"])


def begin(http: httpx.Client, chat: str, content: str | None = None, **fields: Any) -> Json:
    """The run's id and its message's, while it is being made."""
    asked = fields if content is None else {"content": content, **fields}
    reply = http.post(f"/api/chats/{chat}/runs", json={"max_tokens": 2, **asked})
    assert reply.status_code == 202, reply.text
    return dict(reply.json())


def ask(http: httpx.Client, chat: str, content: str | None = None, **fields: Any) -> Json:
    """The answer's message, once it is made."""
    begun = begin(http, chat, content, **fields)
    log_of(http, begun["run_id"])
    return next(each for each in read(http, chat, all="true")["messages"] if each["id"] == begun["message_id"])


def log_of(http: httpx.Client, run: str) -> list[Json]:
    """A run's events, once it has ended."""
    lines = http.get(f"/api/runs/{run}/events").text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def read(http: httpx.Client, chat: str, **parameters: str) -> Json:
    reply = http.get(f"/api/chats/{chat}", params=parameters)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def change(http: httpx.Client, chat: str, **fields: Any) -> Json:
    reply = http.patch(f"/api/chats/{chat}", json=fields)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def message(id: str, parent: str | None, role: str, content: str, **fields: Any) -> Json:
    """A message of a file."""
    return {"id": id, "parent_id": parent, "role": role, "content": content, "created_at": 1.0, **fields}


def file(*messages: Json, leaf: str | None = None, **fields: Any) -> Json:
    """A file of one chat, which ends at its last message unless told."""
    leaf_id = leaf or (messages[-1]["id"] if messages else None)
    chat = {"title": "t", "created_at": 1.0, "updated_at": 2.0, "leaf_id": leaf_id, "messages": list(messages)}
    return {"format": "ponder.chats", "version": 1, "chats": [{**chat, **fields}]}


_moments = itertools.count(1)


def begun_elsewhere(sent: Json) -> Json:
    """The file with its chats begun at other moments, so that an import takes them for others than those here."""
    return {**sent, "chats": [{**each, "created_at": 1e6 + next(_moments)} for each in sent["chats"]]}


def imported(http: httpx.Client, sent: Json) -> list[str]:
    reply = http.post("/api/chats/import", json=sent)
    assert reply.status_code == 201, reply.text
    return list(reply.json()["chat_ids"])
