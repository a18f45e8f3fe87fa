"""Chats as examples: the tokens that are learned are those that the assistant writes, under prompts as served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ChatTemplateError
from engine.model.finetuning.chat_examples import ChatExample, chat_examples
from engine.model.tokenizer import Tokenizer
from tests.tiny import byte_tokenizer, write_checkpoint, write_gemma4_checkpoint, write_harmony_checkpoint

PEBBLE = Path(__file__).parents[4] / "models/pebble"
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture(scope="module")
def pebble() -> Tokenizer:
    return Tokenizer.load(PEBBLE)


def shown(tokenizer: Tokenizer, examples: list[ChatExample]) -> list[list[tuple[str, str]]]:
    """Returns each turn's prompt and completion as text."""

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special=False)

    return [[(text(each.prompt(at)), text(each.completion(at))) for at in range(len(each.turns))] for each in examples]


def test_turns_of_a_chat_share_an_example_and_end_with_the_stop_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path))
    examples = chat_examples(tokenizer, CHAT)
    [turns] = shown(tokenizer, examples)
    first = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert turns[0] == (first, "yes<|im_end|>")
    assert turns[1] == (
        f"{first}yes<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n", "no<|im_end|>"
    )  # fmt: skip
    ids = examples[0].token_ids
    assert tokenizer.decode([ids[at] for at in examples[0].learned], skip_special=False) == "yes<|im_end|>no<|im_end|>"


def test_a_turn_that_is_left_out_is_read_and_not_learned(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path))
    [turns] = shown(tokenizer, chat_examples(tokenizer, CHAT, left_out=(1,)))
    assert [completion for _, completion in turns] == ["no<|im_end|>"] and "yes" in turns[0][0]


def test_thinking_that_later_prompts_drop_makes_examples_of_their_own(pebble: Tokenizer) -> None:
    chat = [CHAT[0], {**CHAT[1], "reasoning_content": "hm"}, CHAT[2], {**CHAT[3], "reasoning_content": "oh"}]
    [[first], [second]] = shown(pebble, chat_examples(pebble, chat))
    assert first[1] == "<think>\nhm\n</think>\n\nyes<|im_end|>"
    assert "hm" not in second[0] and second[1] == "<think>\noh\n</think>\n\nno<|im_end|>"


def test_variables_choose_the_prompt(pebble: Tokenizer) -> None:
    [[turn]] = shown(pebble, chat_examples(pebble, CHAT[:2], variables={"enable_thinking": False}))
    assert turn[0].endswith("<think>\n\n</think>\n\n") and turn[1] == "yes<|im_end|>"


def test_calls_are_learned_and_their_results_read(pebble: Tokenizer) -> None:
    chat: list[dict[str, Any]] = [
        CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "1"}, {"role": "assistant", "content": "two"},
    ]  # fmt: skip
    [[call, answer]] = shown(pebble, chat_examples(pebble, chat, TOOLS, {"enable_thinking": False}))
    assert call[1] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert answer[0].count("<tool_call>\n{") == 1 + 1 and answer[1] == "two<|im_end|>"  # one is the instruction


def test_a_prompt_is_the_one_that_the_server_sends(pebble: Tokenizer) -> None:
    [example] = chat_examples(pebble, CHAT)
    assert example.prompt(1) == pebble.apply_chat_template(CHAT[:3])


@pytest.mark.parametrize("write", [write_harmony_checkpoint, write_gemma4_checkpoint])
def test_a_template_that_writes_its_turn_otherwise_is_refused(write: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    with pytest.raises(ChatTemplateError, match=r"messages\[1\].*chat_template_kwargs"):
        chat_examples(tokenizer, CHAT[:2])


def test_a_template_without_a_stop_token_gets_one() -> None:
    config = {"eos_token": "<|im_end|>", "chat_template": "{% for m in messages %}{{ m['content'] }};{% endfor %}"}
    tokenizer = Tokenizer(byte_tokenizer().to_str(), config)
    [[turn]] = shown(tokenizer, chat_examples(tokenizer, CHAT[:2]))
    assert turn == ("hi;", "yes;<|im_end|>")
