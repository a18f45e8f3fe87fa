"""Streamed calls: OpenAI's contract for deltas (`toolbox.join` asserts it), and the same reply as without streaming."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.app.conftest import Server
from tests.app.toolbox import (
    ADD,
    LIGHTS_OFF,
    TOOLS,
    TRIP,
    WEATHER,
    ask,
    begins_call,
    chat,
    check_call,
    join,
    named,
    stream,
    without_ids,
)

pytestmark = [pytest.mark.usefixtures("nothing_lost_by_pebble"), pytest.mark.slow]

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
OPEN_THINKING = {"chat_template_kwargs": {"open_thinking": True}}
PROMPTS = ["Weather in Oslo?", "What is 17 + 26?", "Who are you, and what is this all about?"]
CHOICES: list[Any] = ["auto", "required", "none", named("plan.trip")]
VARIABLES: dict[str, Any] = {"may think": {}, "does not": NO_THINKING, "thinks": OPEN_THINKING}
# Every choice with every way of thinking, and these going round beside them: a sample of all that can be combined.
REST: list[dict[str, Any]] = [
    {"tools": TOOLS, "max_tokens": 100},
    {"tools": [ADD, TRIP], "max_tokens": 70, "n": 3},
    {"tools": [TRIP], "max_tokens": 31, "parallel_tool_calls": False},  # most calls are cut off
    {"tools": [LIGHTS_OFF, TRIP, WEATHER], "max_tokens": 60, "n": 2, "stop": ["Anything", "\n\n"]},
    {"tools": TOOLS, "max_tokens": 60, "logprobs": True, "top_logprobs": 1},
]


@pytest.mark.parametrize("thinking", VARIABLES)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: c if isinstance(c, str) else "named")
def test_the_joined_stream_is_the_whole_reply(pebble_http: httpx.Client, choice: Any, thinking: str) -> None:
    for at, prompt in enumerate(PROMPTS):
        rest = REST[(at + CHOICES.index(choice) + len(thinking)) % len(REST)]
        body = chat(prompt, tool_choice=choice, temperature=1.3, seed=at, **VARIABLES[thinking], **rest)
        whole = pebble_http.post("/v1/chat/completions", json=body).json()
        joined = join(stream(pebble_http, body))
        assert without_ids(joined["choices"]) == without_ids(whole["choices"])
        for count in ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details"):
            assert joined["usage"][count] == whole["usage"][count]
        for one in joined["choices"]:
            calls = one["message"].get("tool_calls", [])
            complete = calls if one["finish_reason"] == "tool_calls" else calls[:-1]
            for call in complete:
                check_call(call, TOOLS)
            assert one["finish_reason"] != "stop" or not calls


def test_reasoning_comes_before_the_call_and_the_call_in_fragments(pebble_http: httpx.Client) -> None:
    trip = {"von": {"name": "東京", "near": True}, "stops": [None, {"name": 'say "hi"'}], "größe": -3}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"const": trip}}}
    body = chat("17 + 26?", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=500)
    body["logprobs"] = True  # no token is forced, so each is a step and a delta of its own
    chunks = stream(pebble_http, {**body, **OPEN_THINKING})
    kinds = [next(iter(c["choices"][0]["delta"]), "end") for c in chunks[:-1]]
    if join(chunks)["choices"][0]["finish_reason"] == "length":
        pytest.skip("the model thought and thought")
    assert kinds[0] == "role" and kinds[1] == "reasoning_content" and kinds[-1] == "end"
    first = kinds.index("tool_calls")
    assert set(kinds[1:first]) == {"reasoning_content"} and set(kinds[first:-1]) == {"tool_calls"}
    fragments = kinds.count("tool_calls") - 1
    (call,) = join(chunks)["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == trip and fragments > 10


def test_several_calls_have_each_their_index_and_id(pebble: Server, pebble_http: httpx.Client) -> None:
    body = chat(
        "hi", tools=[LIGHTS_OFF, ADD], tool_choice="required", n=2, temperature=1, seed=1, max_tokens=120,
        logit_bias={begins_call(pebble): 100}, **NO_THINKING,
    )  # fmt: skip
    for choice in join(stream(pebble_http, body))["choices"]:
        calls = choice["message"]["tool_calls"]
        assert len(calls) > 2 and len({call["id"] for call in calls}) == len(calls)


@pytest.mark.parametrize("seed", range(3))
def test_the_official_client_joins_the_stream_to_the_same_message(
    pebble_client: openai.OpenAI, pebble_http: httpx.Client, seed: int
) -> None:
    strict = [{**t, "function": {**t["function"], "strict": True}} for t in TOOLS]
    fields: dict[str, Any] = {"tools": strict, "tool_choice": "required", "temperature": 1.5, "seed": seed}
    fields |= {"parallel_tool_calls": False, "max_tokens": 300}
    whole = ask(pebble_http, "Weather in Oslo?", **fields, **NO_THINKING)["choices"][0]
    with pebble_client.chat.completions.stream(
        model="default", messages=[{"role": "user", "content": "Weather in Oslo?"}], **fields, extra_body=NO_THINKING
    ) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        final = events.get_final_completion().choices[0]
    (call,) = final.message.tool_calls or []
    (expected,) = whole["message"]["tool_calls"]
    assert (call.function.name, call.function.arguments) == tuple(expected["function"].values())
    assert [event.arguments for event in done] == [call.function.arguments]
    assert final.finish_reason == whole["finish_reason"] == "tool_calls"


def test_max_tokens_cuts_a_streamed_call_off(pebble_http: httpx.Client) -> None:
    body = chat("hi", tools=[TRIP], tool_choice="required", temperature=0, **NO_THINKING)
    cut = set()
    for limit in range(1, 40, 2):
        joined = join(stream(pebble_http, {**body, "max_tokens": limit}))["choices"][0]
        assert joined["finish_reason"] == "length"
        for call in joined["message"].get("tool_calls", []):
            assert call["function"]["name"] == "plan.trip"
            cut.add(call["function"]["arguments"])
    assert len(cut) > 3
    longest = max(cut, key=len)
    assert all(longest.startswith(each) for each in cut)


def test_leaving_a_stream_of_calls_cancels_it(pebble: Server, pebble_client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "default", "messages": [{"role": "user", "content": "hi"}], "tools": [LIGHTS_OFF, ADD], "n": 3,
        "tool_choice": "required", "logit_bias": {begins_call(pebble): 100}, "max_tokens": 1500,
    }  # fmt: skip
    started = pebble.stats().generated_tokens
    with pebble_client.chat.completions.create(**body, stream=True, extra_body=NO_THINKING) as chunks:
        for _, chunk in zip(range(12), chunks, strict=False):
            assert chunk.object == "chat.completion.chunk"
    pebble.until(lambda s: s.sequences == 0 and s.blocks_used == 0)
    assert pebble.stats().generated_tokens - started < 3 * 1500


def test_leaving_a_whole_reply_of_calls_cancels_it(pebble: Server) -> None:
    body = chat(
        "hi", tools=[LIGHTS_OFF, ADD], tool_choice="required", n=3, max_tokens=3000,
        logit_bias={begins_call(pebble): 100}, **NO_THINKING,
    )  # fmt: skip
    started = pebble.stats().generated_tokens
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{pebble.url}/v1/chat/completions", json=body, timeout=0.5)
    pebble.until(lambda s: s.sequences == 0 and s.blocks_used == 0)
    assert pebble.stats().generated_tokens - started < 3 * 3000


def test_calls_beside_free_answers_are_what_they_are_alone(pebble_http: httpx.Client, pebble: Server) -> None:
    """Only constrained rows are masked. Greedy, so that the size of a batch changes nothing but the last bits."""
    bodies = [
        chat("Who are you?", temperature=0, max_tokens=40, **NO_THINKING),
        chat("What is 17 + 26?", temperature=0, tools=[ADD], tool_choice="required", parallel_tool_calls=False),
        chat("Weather in Oslo?", temperature=0, tools=TOOLS, tool_choice=named("plan.trip"), max_tokens=90),
        chat("Name three.", temperature=0, max_tokens=40, response_format={"type": "json_object"}, **NO_THINKING),
    ]
    url = f"{pebble.url}/v1/chat/completions"
    alone = [without_ids(httpx.post(url, json=body, timeout=60).json()["choices"]) for body in bodies]
    together: dict[int, Any] = {}

    def run(at: int) -> None:
        together[at] = without_ids(httpx.post(url, json=bodies[at], timeout=60).json()["choices"])

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[at] for at in range(len(bodies))] == alone
