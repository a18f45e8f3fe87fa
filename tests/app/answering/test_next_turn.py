"""Tests that the next turn of a chat is warmed, over HTTP and on the bundled model, whose template drops thoughts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.answering.next_turn import NextTurn, NextTurnWarmer
from app.errors import invalid
from engine import Engine, EngineConfig, Span, Stats
from engine.params import GREEDY
from tests.app.chatting import ask, new_chat
from tests.app.conftest import PEBBLE, Server, serving

Json = dict[str, Any]
BLOCK = 16
QUESTION = "Use 4, 6, 9 and 1 to make 24. " * 3
TRIED = "I have tried it for a long time and did not find a way to do it."
FURTHER = "And what is 27 + 58?"


@pytest.fixture(scope="module")
def warming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(PEBBLE, tmp_path_factory.mktemp("warming")) as server:
        yield server


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(PEBBLE, tmp_path_factory.mktemp("cold"), warm_next_turn=False) as server:
        yield server


@pytest.fixture
def http(warming: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=warming.url, timeout=60) as client:
        yield client


def posted(http: httpx.Client, path: str, body: Json) -> Json:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def settled(server: Server) -> Stats:
    """The engine's statistics, once no next turn waits to be rendered or prefilled."""
    turns = server.app.state.ponder.models.default.next_turns

    def done(stats: Stats) -> bool:
        rendered = turns is None or turns._task is None or turns._task.done()
        return rendered and server.engine._core.next_deadline() is None and stats.blocks_used == 0

    return server.until(done)


def chat(http: httpx.Client, messages: list[Json], **fields: Any) -> Json:
    fields = {"temperature": 0, "max_tokens": 300, "chat_template_kwargs": {"enable_thinking": True}, **fields}
    return posted(http, "/v1/chat/completions", {"model": "default", "messages": messages, **fields})


def two_turns(server: Server, question: str, **fields: Any) -> tuple[Json, Json]:
    """The replies to a question and, once the engine was idle, to a further one."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        first = chat(http, [{"role": "user", "content": question}], **fields)
        settled(server)
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        history = [{"role": "user", "content": question}, said, {"role": "user", "content": FURTHER}]
        return first, chat(http, history, **fields)


def uncached(reply: Json) -> int:
    usage = reply["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def test_the_second_turn_after_a_thought_finds_the_answer_cached(warming: Server, cold: Server) -> None:
    (first, second), (plain, without) = two_turns(warming, QUESTION), two_turns(cold, QUESTION)
    assert first["choices"] == plain["choices"]
    assert first["choices"][0]["message"]["reasoning_content"]
    assert first["usage"] == plain["usage"]  # nothing of it counts
    assert second["choices"][0]["message"] == without["choices"][0]["message"]
    further = uncached(second)
    assert further < uncached(without)
    # What is left is the question, the heads around it, and less than a block of the answer.
    tokens = len(warming.engine.tokenizer.encode(FURTHER))
    assert further < tokens + 16 + BLOCK


@pytest.mark.slow
def test_hits_are_counted_in_the_metrics(warming: Server) -> None:
    two_turns(warming, "Use 2, 3, 5 and 7 to make 24. " * 3)
    text = httpx.get(f"{warming.url}/metrics").text
    values = dict(line.split() for line in text.splitlines() if line.startswith("ponder_warmed"))
    assert 0 < float(values["ponder_warmed_hit_tokens_total"]) <= float(values["ponder_warmed_tokens_total"])


def test_responses_are_warmed(warming: Server, http: httpx.Client) -> None:
    asked = {"model": "default", "temperature": 0, "max_output_tokens": 300, "reasoning": {"effort": "low"}}
    first = posted(http, "/v1/responses", {**asked, "input": f"Make 18 from 5, 6 and 7, please. {TRIED}"})
    hits = settled(warming).warmed_hit_tokens
    posted(http, "/v1/responses", {**asked, "input": FURTHER, "previous_response_id": first["id"]})
    assert warming.stats().warmed_hit_tokens > hits


def test_messages_are_warmed(warming: Server, http: httpx.Client) -> None:
    question = {"role": "user", "content": "Use 4, 6, 9 and 1 to make 24."}
    asked = {"model": "default", "temperature": 0, "max_tokens": 1100}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    first = posted(http, "/v1/messages", {**asked, "messages": [question]})
    hits = settled(warming).warmed_hit_tokens
    answer = {"role": "assistant", "content": first["content"]}
    posted(http, "/v1/messages", {**asked, "messages": [question, answer, {"role": "user", "content": FURTHER}]})
    assert warming.stats().warmed_hit_tokens > hits


def test_runs_of_the_page_are_warmed(warming: Server, http: httpx.Client) -> None:
    id = new_chat(http)
    ask(http, id, f"Make 33 from 4, 6 and 9, please. {TRIED}", thinking=True, max_tokens=300, temperature=0)
    hits = settled(warming).warmed_hit_tokens
    ask(http, id, FURTHER, thinking=True, max_tokens=2)
    assert warming.stats().warmed_hit_tokens > hits


def test_the_schemas_of_tools_are_part_of_it(warming: Server) -> None:
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
    fields = {
        "tools": tools,
        "tool_choice": "none",
        "thinking": {"max_tokens": 40, "min_tokens": 30},
        "chat_template_kwargs": {},
    }
    hits = settled(warming).warmed_hit_tokens
    first, second = two_turns(warming, "Tell me what you can do, in a few words.", **fields)
    assert first["choices"][0]["message"]["content"]
    assert warming.stats().warmed_hit_tokens > hits
    assert uncached(second) < len(warming.engine.tokenizer.encode(FURTHER)) + 16 + BLOCK


def test_another_user_finds_nothing_warmed(tmp_path: Path) -> None:
    async def both() -> list[int]:
        async with await Engine.start(EngineConfig(str(PEBBLE), device="cpu", kv_blocks=64)) as engine:
            tokens = engine.tokenizer.encode("One two three four five six seven eight nine ten. " * 4)
            engine.warm(tokens, tenant="ana")
            while (await engine.stats()).warmed_tokens < len(tokens) // BLOCK * BLOCK:
                await asyncio.sleep(0.01)
            found = []
            for tenant in ("bob", "ana"):
                async with await engine.open(tokens, tenant=tenant) as seq:
                    found.append((await seq.generate_all(Span(GREEDY, max_tokens=1))).cached_tokens)
            return found

    bob, ana = asyncio.run(both())
    assert bob == 0 < ana


def test_the_core_in_a_process_of_its_own_warms_too() -> None:
    async def cached() -> int:
        config = EngineConfig(str(PEBBLE), device="cpu", kv_blocks=64, runs_in="process")
        async with await Engine.start(config) as engine:
            tokens = engine.tokenizer.encode("One two three four five six seven eight nine ten. " * 4)
            engine.warm(tokens)
            while not (await engine.stats()).warmed_tokens:
                await asyncio.sleep(0.01)
            async with await engine.open(tokens) as seq:
                return (await seq.generate_all(Span(GREEDY, max_tokens=1))).cached_tokens

    assert asyncio.run(cached()) >= BLOCK


def test_nothing_is_rendered_while_the_engine_is_busy() -> None:
    rendered = list[int]()

    async def render(after: Any) -> list[int]:
        rendered.append(len(after))
        return [1, 2, 3]

    async def busy() -> None:
        async with await Engine.start(EngineConfig(str(PEBBLE), device="cpu", kv_blocks=64)) as engine:
            warmer = NextTurnWarmer(engine)
            async with await engine.open([1, 2, 3]) as seq:
                with seq.generate(Span(GREEDY, max_tokens=200, ignore_eos=True)) as stream:
                    warmer.answered(NextTurn(render, lambda: [{"role": "assistant", "content": "a"}], ""))
                    async for _ in stream:
                        assert not rendered
            while not rendered:
                await asyncio.sleep(0.01)
            warmer.close()

    asyncio.run(busy())


def test_a_turn_that_cannot_be_rendered_is_left_out(warming: Server) -> None:
    async def render(after: Any) -> list[int]:
        raise invalid("messages", "too long")

    async def refused() -> None:
        warmer = NextTurnWarmer(warming.engine)
        warmer.answered(NextTurn(render, lambda: [{"role": "assistant", "content": "a"}], ""))
        assert warmer._task is not None
        await warmer._task

    warming.on_loop(refused())


@pytest.mark.parametrize(
    "said", [[], [{"role": "assistant", "content": ""}], [{"role": "assistant", "content": "", "tool_calls": [{}]}]]
)
def test_nothing_is_rendered_where_no_text_ends_the_answer(said: list[Json]) -> None:
    async def render(after: Any) -> list[int]:
        raise AssertionError("it is rendered")

    assert asyncio.run(NextTurn(render, lambda: said, "").shared_prompt()) == []
