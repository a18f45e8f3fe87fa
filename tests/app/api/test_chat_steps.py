"""Calls in a chat's history, on the bundled model: they are kept, read again at no cost, and taint what comes after."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import LOCAL_USER
from app.db.run_store import LoggedEvent, Place
from app.db.store import Store
from app.runs.live_runs import recover_runs
from app.runs.prompt_builder import IMPORTED, History
from tests.app import postgres
from tests.app.chatting import Json, begin, file, imported, log_of, message, new_chat, read
from tests.app.conftest import Server, serving
from tests.app.runs.test_runs import BusyEngine, events
from tests.app.runs.test_tool_runs import ASKING, CALCULATOR, http, of_type, plugged, plugin, there
from tests.tiny import write_checkpoint

DATABASES = postgres.DATABASES_SLOW

__all__ = ["http", "plugin"]  # fixtures

ASKED = {"tools": ["calculator"], "temperature": 0, "max_tokens": 300, "thinking": False}
READING = CALCULATOR.replace('"none"', '"read"')  # what it gives may be by anybody
WRITING = CALCULATOR.replace('permission="none"', 'permission="write", approval="never"')
ACTED: list[Json] = [
    {
        "content": "", "calls": [{"id": "c1", "name": "calculate", "arguments": '{"expression": "23 * 17"}'}],
        "results": [{"call_id": "c1", "text": "391", "untrusted": False}],
    },
    {"content": "23 * 17 = 391."},
]  # fmt: skip


def tokens_of(http: httpx.Client, run: str) -> tuple[list[int], int]:
    """The whole sequence, and how many of it were the prompt."""
    recipe = json.loads(http.get(f"/api/runs/{run}/trace").text.splitlines()[0])
    return recipe["tokens"], recipe["prompt_tokens"]


def asked(http: httpx.Client, chat: str, content: str, **fields: Any) -> tuple[str, list[Json]]:
    run = begin(http, chat, content, **{**ASKED, **fields})["run_id"]
    return run, log_of(http, run)


def test_what_an_answer_called_is_kept_and_costs_nothing_in_the_next_turn(http: httpx.Client) -> None:
    chat = new_chat(http)
    sequences = list[list[int]]()
    for number, question in enumerate(("What is 23 * 17?", "What is 40 * 2?", "Thank you!")):
        run, log = asked(http, chat, question)
        tokens, prompt = tokens_of(http, run)
        assert bool(of_type(log, "tool.result")) == (number < 2)
        if sequences:
            before = sequences[-1]
            assert tokens[: len(before)] == before and prompt > len(before)
            assert log[-1]["usage"]["cached_tokens"] >= len(before) - 16  # whole blocks are found again
        sequences.append(tokens)
    first, second, third = read(http, chat)["messages"][1::2]
    (step, last), call = first["steps"], first["steps"][0]["calls"][0]
    assert (call["name"], json.loads(call["arguments"])) == ("calculator", {"expression": "23 * 17"})
    assert step["results"] == [{"call_id": call["id"], "text": "391", "untrusted": False}]
    assert last == {"content": first["content"], "calls": [], "results": []} and "391" in first["content"]
    assert len(second["steps"]) == 2 and third["steps"] == []


def test_a_stopped_answer_keeps_what_it_had_called(pebble: Server, http: httpx.Client, plugin: Any) -> None:
    plugin(ASKING, there)
    chat = new_chat(http)
    run = begin(http, chat, "What is 23 * 17?", **{**ASKED, "tools": ["calculate"]})["run_id"]
    with ExitStack() as busy:  # so that the answer cannot go on after its call
        for _, kind, event in events(http, run):
            if kind == "approval.requested":
                busy.enter_context(BusyEngine(pebble))
                http.post(f"/api/runs/{run}/approvals/{event['approval_id']}", json={"decision": "once"})
            elif kind == "tool.result":
                assert http.get(f"/api/runs/{run}").json()["status"] == "running"
                assert http.post(f"/api/runs/{run}/cancel").status_code == 202
    answer = read(http, chat)["messages"][1]
    assert answer["status"] == "cancelled"
    assert [result["text"].splitlines()[1] for step in answer["steps"] for result in step["results"]] == ["391"]


@pytest.mark.slow
@pytest.mark.parametrize("source", [READING, CALCULATOR], ids=["untrusted", "trusted"])
def test_what_was_read_before_makes_a_later_call_ask(http: httpx.Client, plugin: Any, source: str) -> None:
    plugin(source, there)
    chat = new_chat(http)
    _, log = asked(http, chat, "What is 23 * 17?", tools=["calculate"])
    assert of_type(log, "tool.result")[0]["untrusted"] == (source is READING)
    changed = WRITING.replace("an arithmetic", "some arithmetic")
    plugin(changed, lambda reply: there(reply) and "some" in plugged(reply)[0]["description"])
    run = begin(http, chat, "What is 40 * 2?", **{**ASKED, "tools": ["calculate"]})["run_id"]
    reasons = list[str]()
    for _, kind, event in events(http, run):
        if kind == "approval.requested":
            reasons.append(event["reason"])
            assert http.post(f"/api/runs/{run}/approvals/{event['approval_id']}", json={"decision": "no"}).is_success
    assert bool(reasons) == (source is READING)
    assert all("from calculate" in reason for reason in reasons)


def test_an_imported_chat_makes_calls_ask(http: httpx.Client, plugin: Any) -> None:
    plugin(WRITING, there)
    one = message("0", None, "user", "What is 23 * 17?")
    (chat,) = imported(http, file(one, message("1", "0", "assistant", "391", steps=ACTED)))
    run = begin(http, chat, "What is 40 * 2?", **{**ASKED, "tools": ["calculate"]})["run_id"]
    reasons = list[str]()
    for _, kind, event in events(http, run):
        if kind == "approval.requested":
            reasons.append(event["reason"])
            assert http.post(f"/api/runs/{run}/approvals/{event['approval_id']}", json={"decision": "no"}).is_success
    assert reasons and all(IMPORTED in reason for reason in reasons)


def test_calls_are_read_even_where_no_tools_are_offered(pebble: Server, http: httpx.Client) -> None:
    one = message("0", None, "user", "What is 23 * 17?")
    (chat,) = imported(http, file(one, message("1", "0", "assistant", "23 * 17 = 391.", steps=ACTED)))
    run, _ = asked(http, chat, "Thank you!", tools=None)
    tokens, prompt = tokens_of(http, run)
    shown = pebble.engine.tokenizer.decode(tokens[:prompt])
    assert '{"name": "calculate", "arguments": {"expression": "23 * 17"}}' in shown


def test_calls_are_left_out_where_they_leave_no_room(pebble: Server, http: httpx.Client) -> None:
    room = pebble.engine.max_model_len
    steps: list[Json] = [json.loads(json.dumps(ACTED[0])) for _ in range(room // 1000 + 1)]
    for at, step in enumerate(steps):
        step["calls"][0]["id"] = step["results"][0]["call_id"] = f"c{at}"
        step["results"][0]["text"] = "0123456789" * 400
    one = message("0", None, "user", "What is 23 * 17?")
    (chat,) = imported(http, file(one, message("1", "0", "assistant", "391", steps=[*steps, ACTED[1]])))
    run, log = asked(http, chat, "Thank you!", tools=None)
    tokens, prompt = tokens_of(http, run)
    shown = pebble.engine.tokenizer.decode(tokens[:prompt])
    assert log[-1]["type"] == "run.completed" and "391" in shown and "0123456789" not in shown


def branch(*steps: Any, content: str = "23 * 17 = 391.") -> list[Json]:
    answer = {"id": "b", "role": "assistant", "content": content, "steps": list(steps)}
    first, last = ({"id": id, "role": "user", "content": said, "steps": []} for id, said in (("a", "q"), ("c", "more")))
    return [first, answer, last]


async def test_a_crash_leaves_the_steps_that_were_logged(tmp_path: Path, address: str | None) -> None:
    store = await Store.open(tmp_path, address)
    chat = (await store.chats.create(LOCAL_USER))["id"]
    await store.runs.begin(LOCAL_USER, chat, "run_1", Place("question", at_leaf=True), {})
    logged: list[Json] = [
        {"type": "run.started"}, {"type": "thinking.delta", "text": "hm"}, {"type": "answer.delta", "text": "I look. "},
        {"type": "tool.call", "call_id": "a", "name": "read", "arguments": "{}"},
        {"type": "tool.call", "call_id": "b", "name": "sum", "arguments": '{"x": 1}'},
        {"type": "tool.result", "call_id": "b", "name": "sum", "text": "2", "untrusted": False},
        {"type": "tool.result", "call_id": "a", "name": "read", "text": "page", "untrusted": True},
        {"type": "answer.delta", "text": "So "},
        {"type": "tool.call", "call_id": "c", "name": "read", "arguments": "{}"},
        {"type": "tool.error", "call_id": "c", "name": "read", "kind": "error", "message": "gone"},
        {"type": "tool.call", "call_id": "d", "name": "read", "arguments": "{}"},
    ]  # fmt: skip
    store.runs.write_events("run_1", [LoggedEvent(at, e["type"], json.dumps(e)) for at, e in enumerate(logged, 1)])
    ending = LoggedEvent(0, "run.failed", "{}")
    assert await store.runs.fail_unfinished(ending, lambda events: recover_runs(events, "crashed")) == 1
    answer = (await store.chats.whole(LOCAL_USER, chat))[1][1]
    assert (answer["status"], answer["content"], answer["thinking"]) == ("failed", "I look. So ", "hm")
    first, second, last = answer["steps"]
    assert first.content == "I look. " and [call.id for call in first.calls] == ["b", "a"]
    assert [(r.text, r.untrusted) for r in first.results] == [
        ("2", False), ('<untrusted from="read">\npage\n</untrusted>', True)
    ]  # fmt: skip
    assert second.content == "So " and "gone" in second.results[0].text and not last.calls
    await store.close()


def test_a_turn_without_an_answer_is_left_out_of_the_history() -> None:
    history = History.of(branch(content=""))
    assert history.messages == history.plain == [{"role": "user", "content": "more"}]


@pytest.mark.slow
def test_a_template_that_takes_no_calls_gets_the_answers_alone(tmp_path: Path) -> None:
    copy = write_checkpoint(tmp_path / "model")
    path = copy / "tokenizer_config.json"
    config = json.loads(path.read_text())
    refusing = "{% for m in messages if m.tool_calls %}{{ raise_exception('No calls here.') }}{% endfor %}"
    path.write_text(json.dumps({**config, "chat_template": refusing + config["chat_template"]}))
    with serving(copy, tmp_path / "data") as server, httpx.Client(base_url=server.url, timeout=30) as http:
        one = message("0", None, "user", "What is 23 * 17?")
        (chat,) = imported(http, file(one, message("1", "0", "assistant", "so: 391", steps=ACTED)))
        run = begin(http, chat, "more")["run_id"]
        assert log_of(http, run)[-1]["type"] == "run.completed"
        tokens, prompt = tokens_of(http, run)
        shown = server.engine.tokenizer.decode(tokens[:prompt])
        assert "so: 391" in shown and "calculate" not in shown
