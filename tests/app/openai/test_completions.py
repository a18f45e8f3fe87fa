"""Plain completions, seen through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.app.conftest import Server


@pytest.mark.parametrize(
    "prompt",
    ["123", ["123", "7"], "ids", ["ids", "ids"]],
    ids=["string", "strings", "token ids", "lists of token ids"],
)
def test_every_kind_of_prompt_is_continued(client: openai.OpenAI, server: Server, prompt: Any) -> None:
    ids = server.engine.tokenizer.encode("123")
    given = ids if prompt == "ids" else [ids, ids] if prompt == ["ids", "ids"] else prompt
    reply = client.completions.create(model="tiny", prompt=given, max_tokens=4, temperature=0)
    assert reply.object == "text_completion"
    expected = {"7": "8901"}
    wanted = [expected.get(p, "4567") for p in (given if isinstance(given, list) and given is not ids else ["123"])
              if isinstance(p, str)] or ["4567"] * len(reply.choices)  # fmt: skip
    assert [c.text for c in reply.choices] == wanted
    assert [c.index for c in reply.choices] == list(range(len(wanted)))


def test_a_stream_says_what_the_whole_reply_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["ab", "c"], "n": 2, "max_tokens": 12, "seed": 1}
    whole = client.completions.create(**asked)
    texts: dict[int, str] = {}
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {c.index: c.text for c in whole.choices} and len(texts) == 4
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_sixteen_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="0").choices[0].text == "1234567890123456"


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="012", max_tokens=0, echo=True, logprobs=2)
    (choice,) = reply.choices
    assert choice.text == "012" and choice.finish_reason == "length"
    scored = choice.logprobs
    assert scored is not None and scored.token_logprobs is not None and scored.top_logprobs is not None
    assert scored.tokens == ["0", "1", "2"] and scored.text_offset == [0, 1, 2]
    first, *rest = scored.token_logprobs
    assert first is None and all(-0.1 < lp <= 0 for lp in rest)
    assert scored.top_logprobs[0] is None
    assert reply.usage is not None and reply.usage.completion_tokens == 0 and reply.usage.prompt_tokens == 3


def test_echo_and_a_continuation_run_on(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": "0é2", "max_tokens": 3, "echo": True, "logprobs": 1, "temperature": 0, "stop": ["zz"]
    }  # fmt: skip
    reply = client.completions.create(**asked).choices[0]
    assert reply.text == "0é2345" and reply.logprobs.text_offset[-1] == len(reply.logprobs.tokens) - 1
    streamed = list(client.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == reply.text
    assert [o for c in streamed for o in c.choices[0].logprobs.text_offset] == reply.logprobs.text_offset


def test_logprobs_without_echo_cover_the_answer_alone(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="tiny", prompt="1", max_tokens=3, logprobs=0, temperature=0).choices[0]
    assert (
        choice.logprobs is not None
        and choice.logprobs.tokens == ["2", "3", "4"]
        and choice.logprobs.top_logprobs is None
    )


def test_special_tokens_spelt_out_in_a_prompt_count_as_such(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="<|forever|>", max_tokens=3)
    assert reply.usage is not None and reply.usage.prompt_tokens == 1 and reply.choices[0].text == "012"
