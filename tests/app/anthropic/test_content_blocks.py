"""Conversations of content blocks as chat messages: the blocks that are read, their order, and their signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.answering.thinking_signature import KEY_FILE, ThinkingSigner
from app.anthropic.content_blocks import conversation
from app.errors import ApiError
from app.openai.chat_messages import NO_RESULT, turns

Json = dict[str, Any]
HI: Json = {"role": "user", "content": "hi"}


@pytest.fixture
def signer(tmp_path: Path) -> ThinkingSigner:
    return ThinkingSigner(tmp_path)


def call(id: str = "a") -> Json:
    return {"type": "tool_use", "id": id, "name": "add", "input": {"x": 1}}


def result(id: str = "a", content: Any = "2", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def roles(signer: ThinkingSigner, *messages: Json, system: Any = None) -> list[tuple[str, str]]:
    """Role and content of each message as a template takes it."""
    return [(each["role"], each["content"]) for each in turns(conversation(system, messages, signer).messages)]


def test_a_string_is_one_text_block(signer: ThinkingSigner) -> None:
    blocks = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    assert roles(signer, HI) == roles(signer, blocks) == [("user", "hi")]


def test_blocks_of_a_user_are_paragraphs_and_those_of_an_assistant_one_text(signer: ThinkingSigner) -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "assistant", "content": blocks}
    assert roles(signer, {"role": "user", "content": blocks}, answer, HI) == [
        ("user", "a\n\nb"), ("assistant", "ab"), ("user", "hi"),
    ]  # fmt: skip


def test_a_result_that_refers_to_tools_describes_them(signer: ThinkingSigner) -> None:
    names = [{"type": "tool_reference", "tool_name": name} for name in ("add", "gone")]
    messages = [HI, {"role": "assistant", "content": [call()]}, {"role": "user", "content": [result(content=names)]}]
    made = conversation(None, messages, signer, {"add": '{"name": "add"}'})
    assert made.messages[-1]["content"] == '{"name": "add"}\n\nThere is no tool gone any more.'
    assert made.loaded == {"add", "gone"}


def test_results_come_before_the_text_of_their_turn(signer: ThinkingSigner) -> None:
    asked = {"role": "assistant", "content": [call("a"), call("b")]}
    told = {"role": "user", "content": [{"type": "text", "text": "go on"}, result("b", "B"), result("a", "A")]}
    made = turns(conversation(None, [HI, asked, told], signer).messages)
    assert [(each["role"], each.get("tool_call_id")) for each in made[2:]] == [
        ("tool", "b"), ("tool", "a"), ("user", None),
    ]  # fmt: skip
    assert made[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 1}}


def test_a_call_without_a_result_is_given_one(signer: ThinkingSigner) -> None:
    asked = {"role": "assistant", "content": [call("a"), call("b")]}
    told = {"role": "user", "content": [result("b"), {"type": "text", "text": "stop"}]}
    assert roles(signer, HI, asked, told)[2:] == [
        ("tool", "2"), ("tool", NO_RESULT), ("user", "stop"),
    ]  # fmt: skip
    assert roles(signer, HI, asked)[2:] == [("tool", NO_RESULT)] * 2


def test_a_failed_result_says_so(signer: ThinkingSigner) -> None:
    asked = {"role": "assistant", "content": [call()]}
    text = [{"type": "text", "text": "no"}, {"type": "text", "text": "file"}]
    told = {"role": "user", "content": [result(content=text, is_error=True)]}
    assert roles(signer, HI, asked, told)[2] == ("tool", "Error: no\n\nfile")


def test_a_system_message_within_stays_where_it_is(signer: ThinkingSigner) -> None:
    """Until a template does not take it: that is any API's history."""
    late = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert roles(signer, HI, late, HI) == [("user", "hi"), ("system", "Be brief."), ("user", "hi")]


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=2; cch=1a2b3;\nBe brief.",
        [{"type": "text", "text": "x-anthropic-billing-header: cch=1a2b3;"}, {"type": "text", "text": "Be brief."}],
    ],
    ids=["line", "block"],
)
def test_metadata_is_no_part_of_the_system_prompt(signer: ThinkingSigner, system: Any) -> None:
    assert roles(signer, HI, system=system)[0] == ("system", "Be brief.")


def test_the_text_of_a_document_is_read(signer: ThinkingSigner) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It is red."}
    found = {"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "blue"}]}
    content = [{"type": "document", "source": source, "title": "Paint"}, found]
    assert roles(signer, {"role": "user", "content": content}) == [("user", "Paint\nIt is red.\n\nT\ns\nblue")]


def test_thinking_is_given_to_the_template(signer: ThinkingSigner) -> None:
    block = {"type": "thinking", "thinking": "Hm.", "signature": signer.sign("Hm.")}
    made = conversation(None, [HI, {"role": "assistant", "content": [block, call()]}], signer).messages
    assert made[1]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"type": "thinking", "thinking": "Ha.", "signature": "Hm."}, "signature"),
        ({"type": "thinking", "thinking": "Ha.", "signature": ""}, "signature"),
        ({"type": "redacted_thinking", "data": "abc"}, "data"),
        ({"type": "image", "source": {}}, "type"),
        ({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}, "type"),
        ({"type": "tool_use", "id": "a", "name": "add", "input": "{}"}, "input"),
        ({"type": "text", "text": "a", "cache_control": {"type": "always"}}, "cache_control"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["type"],
)
def test_a_block_that_is_not_accepted_is_named(signer: ThinkingSigner, block: Json, place: str) -> None:
    with pytest.raises(ApiError, match="accepted") as refused:
        conversation(None, [HI, {"role": "assistant", "content": [block]}, HI], signer)
    assert refused.value.param == f"messages[1].content[0].{place}"


def test_an_answer_is_not_continued(signer: ThinkingSigner) -> None:
    with pytest.raises(ApiError, match="does not continue"):
        conversation(None, [HI, {"role": "assistant", "content": "The answer is"}], signer)


def test_a_signature_holds_for_one_text_and_one_server(tmp_path: Path, signer: ThinkingSigner) -> None:
    signature = signer.sign("Hm.")
    assert ThinkingSigner(tmp_path).verify("Hm.", signature) and not signer.verify("Ha.", signature)
    assert not ThinkingSigner(tmp_path / "other").verify("Hm.", signature)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [KEY_FILE]
