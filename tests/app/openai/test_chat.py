"""Chat completions, seen through the official client."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.app.conftest import Server, serving
from tests.tiny import write_harmony_checkpoint

HI: list[Any] = [{"role": "user", "content": "hi"}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
FOREVER = {"chat_template_kwargs": {"forever": True}}


def test_an_answer_has_the_shape_and_the_counts_of_openai(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HI, max_tokens=5, extra_body=FOREVER)
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-") and reply.model == "tiny"
    (choice,) = reply.choices
    assert choice.message.role == "assistant" and choice.message.content == "01234"
    assert choice.finish_reason == "length"
    usage = reply.usage
    assert usage is not None and usage.completion_tokens == 5
    assert usage.total_tokens == usage.prompt_tokens + 5


def test_a_stream_says_what_the_whole_reply_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 40, "seed": 11, "extra_body": THINK}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    deltas = [c.choices[0].delta for c in chunks[:-1]]
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    thinking = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert thinking == getattr(whole.choices[0].message, "reasoning_content")  # noqa: B009  # not in the client's types
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize("variables", [{"enable_thinking": True}, {"open_thinking": True}])
@pytest.mark.parametrize("seed", range(6))
def test_thinking_never_shows_as_content(client: openai.OpenAI, variables: dict[str, bool], seed: int) -> None:
    extra = {"chat_template_kwargs": variables}
    reply = client.chat.completions.create(model="tiny", messages=HI, max_tokens=300, seed=seed, extra_body=extra)
    message = reply.choices[0].message
    assert message.model_extra is not None
    content, thinking = message.content, message.model_extra["reasoning_content"]
    assert content and content.islower() and content.isalpha()
    assert thinking.isupper() and thinking.isalpha()
    assert reply.usage is not None
    details = reply.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens is not None
    assert details.reasoning_tokens >= len(thinking) + 1  # the closing marker is a token too
    assert details.reasoning_tokens < reply.usage.completion_tokens


def test_one_budget_covers_thinking_and_answer(client: openai.OpenAI) -> None:
    for limit in range(1, 12):
        reply = client.chat.completions.create(model="tiny", messages=HI, max_tokens=limit, seed=5, extra_body=THINK)
        assert reply.usage is not None and reply.usage.completion_tokens <= limit
        if reply.choices[0].finish_reason == "length":
            assert reply.usage.completion_tokens == limit


def test_the_same_seed_gives_the_same_answer_and_another_one_another(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        reply = client.chat.completions.create(model="tiny", messages=HI, max_tokens=30, seed=seed)
        return reply.choices[0].message.content

    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in range(5)}) > 1


def test_n_answers_share_a_prompt_and_differ(client: openai.OpenAI, nothing_lost: None) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HI, n=4, max_tokens=25, seed=3, temperature=1)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert len({c.message.content for c in reply.choices}) > 1
    again = client.chat.completions.create(model="tiny", messages=HI, n=4, max_tokens=25, seed=3, temperature=1)
    assert [c.message.content for c in again.choices] == [c.message.content for c in reply.choices]
    texts: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        model="tiny", messages=HI, n=4, max_tokens=25, seed=3, temperature=1, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {c.index: c.message.content for c in reply.choices}


def test_logprobs_come_with_their_tokens_and_alternatives(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": HI, "max_tokens": 6, "seed": 2, "logprobs": True, "top_logprobs": 3
    }  # fmt: skip
    reply = client.chat.completions.create(**asked)
    entries = reply.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == reply.choices[0].message.content
    for entry in entries:
        assert entry.bytes == list(entry.token.encode()) and entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        values = [t.logprob for t in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and entry.logprob <= values[0] + 1e-6
    streamed = [
        e.token for c in client.chat.completions.create(**asked, stream=True)
        if c.choices[0].logprobs for e in c.choices[0].logprobs.content
    ]  # fmt: skip
    assert streamed == [e.token for e in entries]


@pytest.mark.parametrize("stop", ["45", ["45"], ["zzz", "45", "78"]])
def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, stop: Any) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HI, max_tokens=50, stop=stop, extra_body=FOREVER)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("0123", "stop")
    chunks = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=50, stop=stop, stream=True, extra_body=FOREVER
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "0123"


def test_a_stop_string_does_not_cut_the_thinking(client: openai.OpenAI) -> None:
    for seed in range(4):
        asked: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 200, "seed": seed, "extra_body": THINK}
        free = client.chat.completions.create(**asked).choices[0].message.model_extra["reasoning_content"]
        stopped = client.chat.completions.create(**asked, stop=[free[:1]])
        assert stopped.choices[0].message.model_extra["reasoning_content"] == free


def test_the_engines_own_options_work(client: openai.OpenAI, server: Server) -> None:
    def ask(**extra: Any) -> Any:
        temperature = extra.pop("temperature", 1)
        return client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=30, temperature=temperature, extra_body=extra
        ).choices[0]  # fmt: skip

    greedy = ask(temperature=0, ignore_eos=True).message.content
    assert ask(top_k=1, ignore_eos=True).message.content == greedy
    assert ask(min_p=0.9999, ignore_eos=True).message.content == greedy
    for seed in range(5):  # the end of sequence has no text, so tokens are counted and not letters
        reply = client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=30, seed=seed, extra_body={"ignore_eos": True}
        )
        assert reply.usage is not None and reply.usage.completion_tokens == 30
        assert reply.choices[0].finish_reason == "length"
    assert len(ask(min_tokens=25).message.content) >= 25
    letter = server.engine.tokenizer.encode("k")[0]
    assert ask(logit_bias={str(letter): 100}).message.content == "k" * 30
    assert ask(logit_bias={str(letter): 100}, stop_token_ids=[letter]).message.content == ""
    repeated = ask(temperature=0, repetition_penalty=50.0, ignore_eos=True).message.content
    assert repeated != greedy


def test_content_may_come_in_parts_and_developer_is_system(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    a = client.chat.completions.create(model="tiny", messages=parts, max_tokens=9, seed=1)
    b = client.chat.completions.create(model="tiny", messages=HI, max_tokens=9, seed=1)
    assert a.choices[0].message.content == b.choices[0].message.content
    for role in ("developer", "system"):
        messages: list[Any] = [{"role": role, "content": "be brief"}, *HI]
        reply = client.chat.completions.create(model="default", messages=messages, max_tokens=2)
        assert reply.usage is not None and b.usage is not None
        assert reply.usage.prompt_tokens == b.usage.prompt_tokens + len("<>system\nbe brief<>\n") - 2


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "a question of some length, asked twice"}]
    cached = []
    for _ in range(2):
        usage = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens is not None
        assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] < cached[1]


def test_models_are_listed_under_both_names(client: openai.OpenAI, model: Any) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", "default", "all-MiniLM-L6-v2"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"
    assert client.chat.completions.create(model=str(model), messages=HI, max_tokens=1).model == "tiny"


def test_leaving_a_stream_cancels_it(client: openai.OpenAI, server: Server, nothing_lost: None) -> None:
    started = server.stats().generated_tokens
    with client.chat.completions.create(
        model="tiny", messages=HI, n=3, max_tokens=1500, stream=True, extra_body=FOREVER
    ) as stream:
        for _, _chunk in zip(range(9), stream, strict=False):
            pass
    ended = server.until(lambda s: s.sequences == 0).generated_tokens
    assert ended - started < 3 * 1500


def test_leaving_a_request_cancels_it(server: Server, nothing_lost: None) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 1900, "n": 2, **FOREVER}
    started = server.stats().generated_tokens
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.4)
    server.until(lambda s: s.sequences == 0)
    assert server.stats().generated_tokens - started < 2 * 1900


def test_streams_run_side_by_side(client: openai.OpenAI, nothing_lost: None) -> None:
    alone = client.chat.completions.create(model="tiny", messages=HI, max_tokens=60, seed=4).choices[0].message.content
    answers: list[str | None] = []

    def ask() -> None:
        reply = client.chat.completions.create(model="tiny", messages=HI, max_tokens=60, seed=4)
        answers.append(reply.choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [alone] * 12


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, "max_tokens": 5, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": False}}, {"reasoning_effort": "none"}),
        ({"reasoning": {"max_tokens": 9}}, {"thinking": {"max_tokens": 9}}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"structured_outputs": {"regex": "[a-c]{4}"}}, {"guided_regex": "[a-c]{4}"}),
        ({"structured_outputs": {"choice": ["ab", "cd"], "json_object": False}}, {"guided_choice": ["ab", "cd"]}),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, {"guided_json": {"enum": [1, 2]}}),
        ({"structured_outputs": {}}, {}),
        ({"top_logprobs": 0}, {}),
        ({"skip_special_tokens": True, "include_reasoning": True, "add_generation_prompt": True}, {}),
        ({"verbosity": "medium"}, {}),
        ({"verbosity": "low"}, {"messages": [{"role": "system", "content": "Answer briefly."}, *HI]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_servers_names_mean_the_same(http: httpx.Client, theirs: Any, ours: Any) -> None:
    """Greedy, so that equal requests have equal answers; the penalty shows in what is repeated."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "seed": 4}
    first, second = chat(http, **asked, **theirs), chat(http, **asked, **ours)
    assert first["choices"] == second["choices"]
    assert first["usage"]["total_tokens"] == second["usage"]["total_tokens"]


def test_the_effort_max_is_the_largest_budget(http: httpx.Client) -> None:
    assert chat(http, reasoning_effort="max")["choices"][0]["message"]


def test_the_embedder_is_among_the_models(http: httpx.Client) -> None:
    models = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
    assert [name for name, each in models.items() if each["embeds"]] == ["all-MiniLM-L6-v2"]
    assert http.get("/v1/models/all-MiniLM-L6-v2").json() == models["all-MiniLM-L6-v2"]


def test_fields_that_nobody_knows_are_named_in_a_header_where_the_operator_says_so(model: Path, tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 2, "temprature": 1, "größe": 2}
    with serving(model, tmp_path, unknown_fields="warn") as server, httpx.Client(base_url=server.url) as http:
        reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200 and reply.headers["X-Ponder-Ignored-Fields"] == "gr%C3%B6%C3%9Fe, temprature"
        known = http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, "max_tokens": 2})
        assert "X-Ponder-Ignored-Fields" not in known.headers
        assert http.post("/v1/chat/completions", json={**body, "audio": {"voice": "x"}}).status_code == 400


def test_a_model_that_speaks_harmony_thinks_and_answers_in_channels(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "default", "messages": HI, "max_tokens": 60, "temperature": 0}
    schema = {"type": "json_schema", "json_schema": {"name": "said", "schema": {"enum": ["abc"]}}}
    at = {"type": "object", "properties": {"at": {"enum": ["door"]}}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": at}}
    with (
        serving(write_harmony_checkpoint(tmp_path / "harmony"), tmp_path / "data") as server,
        httpx.Client(base_url=f"{server.url}/v1", timeout=60) as http,
    ):

        def said(**more: Any) -> tuple[Any, Any]:
            message = http.post("chat/completions", json={**asked, **more}).json()["choices"][0]["message"]
            return message.get("reasoning_content"), message["content"]

        assert said() == said(reasoning_effort="low") == ("abc", "abc")
        assert said(reasoning_effort="none")[1] == said(chat_template_kwargs={"enable_thinking": False})[1] == "abc"
        assert not said(reasoning_effort="none")[0]
        assert said(response_format=schema) == ("abc", '"abc"')
        for effort in ("low", "none"):
            more = {**asked, "tools": [tool], "reasoning_effort": effort}
            assert said(**more)[1] == said(**more, tool_choice="none")[1] == "abc"
            required = {**more, "tool_choice": "required", "max_tokens": 120}
            reply = http.post("chat/completions", json=required).json()
            (choice,) = reply["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            assert call["function"] == {"name": "look", "arguments": '{"at":"door"}'}
            result = {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": "Open."}
            assert said(**{**more, "messages": [*HI, choice["message"], result]})[1] == "abc"
