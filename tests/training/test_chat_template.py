from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.errors import ChatTemplateError
from tests.training.conftest import TINY
from training import mixture, reply
from training.conversation import Conversation, Message, ModelReply, SpokenCall
from training.export import export
from training.torch_model import Model
from training.train_tokenizer import EMPTY_THOUGHT, TURN_END, _template, render, segments

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = SpokenCall("weather", {"city": "Malmö"})
CHAT = Conversation(
    (
        Message("system", "You are called Ada."),
        Message("user", "hi"),
        Message("assistant", "Hello!", thinking="A greeting."),
        Message("user", "weather in Malmö & Rome?"),
        Message("assistant", "I look.", thinking="Two cities.", calls=(CALL, SpokenCall("weather", {"city": "Rome"}))),
        Message("tool", "rain"),
        Message("tool", "sun"),
        Message("assistant", "Rain and sun."),
    ),
    (WEATHER,),
)


@pytest.fixture(scope="module")
def theirs(tiny_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    out: Path = tmp_path_factory.mktemp("model")
    export(Model(TINY), tiny_tokenizer, out)
    return AutoTokenizer.from_pretrained(out)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 7, 8])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("enable_thinking", [True, False])
@pytest.mark.parametrize("tools", [(), (WEATHER,)])
def test_renders_as_transformers_does(
    theirs: PreTrainedTokenizerBase,
    length: int,
    add_generation_prompt: bool,
    enable_thinking: bool,
    tools: tuple[dict[str, Any], ...],
) -> None:
    made = Conversation(CHAT.messages[:length], tools, enable_thinking)
    expected = theirs.apply_chat_template(
        made.as_json(),
        tools=list(tools) or None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
    )
    assert render(made, add_generation_prompt=add_generation_prompt) == expected


def test_tools_are_listed_after_the_system_prompt() -> None:
    opening = render(CHAT, add_generation_prompt=False).partition(TURN_END)[0]
    assert opening.startswith("<|im_start|>system\nYou are called Ada.\n\n# Tools")
    assert '{"name": "weather", "description": "The weather <now>."' in opening


def test_calls_follow_the_content_and_are_read_back() -> None:
    text = render(Conversation(CHAT.messages[:5], CHAT.tools), add_generation_prompt=False)
    said = text.rpartition("assistant\n")[2].removesuffix(TURN_END + "\n")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Malmö"}}\n</tool_call>\n<tool_call>' in said
    message = CHAT.messages[4]
    assert reply.read(said) == ModelReply(message.thinking, message.content, message.calls)
    assert reply.written(reply.read(said)) == said


def test_thinking_is_kept_after_the_last_question_only() -> None:
    whole = render(CHAT, add_generation_prompt=False)
    assert "A greeting." not in whole and "Two cities." in whole
    assert "A greeting." in render(Conversation(CHAT.messages[:3]), add_generation_prompt=False)


def test_thinking_off_opens_with_an_empty_thought() -> None:
    ending = "<|im_start|>assistant\n"
    asked = CHAT.messages[:2]
    assert render(Conversation(asked), add_generation_prompt=True).endswith(ending)
    off = render(Conversation(asked, enable_thinking=False), add_generation_prompt=True)
    assert off.endswith(ending + EMPTY_THOUGHT)


def test_an_answer_without_thinking_is_rendered_as_it_was_written() -> None:
    asked = Conversation(CHAT.messages[:2], enable_thinking=False)
    answered = Conversation((*CHAT.messages[:2], Message("assistant", "Hello!"), CHAT.messages[3]))
    written = render(asked, add_generation_prompt=True) + "Hello!"
    assert render(answered, add_generation_prompt=False).startswith(written)


def test_an_unknown_role_is_refused() -> None:
    messages = [*CHAT.as_json(), {"role": "function", "content": "x"}]
    with pytest.raises(ChatTemplateError, match="system"):
        _template().render(messages, tools=None, add_generation_prompt=True, variables={})


def test_the_parts_are_the_text_and_what_is_learned_is_what_the_model_writes() -> None:
    parts = segments(CHAT)
    assert "".join(text for text, _ in parts) == render(CHAT, add_generation_prompt=False)
    learned = [text for text, is_learned in parts if is_learned]
    assert learned[0] == "Hello!" + TURN_END  # its empty thought is read: the thought itself is gone by then
    assert learned[1].startswith("<think>\nTwo cities.\n</think>\n\nI look.\n<tool_call>")
    assert learned[2] == f"{EMPTY_THOUGHT}Rain and sun.{TURN_END}"


def test_an_unlearned_answer_is_read() -> None:
    made = Conversation((Message("user", "a"), Message("assistant", "b", learned=False)))
    assert not any(learned for _, learned in segments(made))


def test_parts_give_the_tokens_of_the_whole_text(tiny_tokenizer: Tokenizer) -> None:
    rng = Random(5)
    for _ in range(60):
        parts = segments(mixture.conversation(rng, 0.8))
        one_by_one = [token for text, _ in parts for token in tiny_tokenizer.encode(text).ids]
        assert one_by_one == tiny_tokenizer.encode("".join(text for text, _ in parts)).ids


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": "Rome"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {}}',
    ],
)
def test_a_call_that_is_no_call_breaks_the_reply(text: str) -> None:
    assert reply.read(text).broken
