from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.training.conftest import TINY
from training.export import export
from training.model import Model
from training.tokenizer import render

CHAT = [
    {"role": "system", "content": "You are called Ada."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "2 + 2 = 4."},
    {"role": "user", "content": "thanks <b>"},
]


@pytest.fixture(scope="module")
def theirs(tiny_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    out: Path = tmp_path_factory.mktemp("model")
    export(Model(TINY), tiny_tokenizer, out)
    return AutoTokenizer.from_pretrained(out)


@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:2], CHAT[:5]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("enable_thinking", [True, False])
def test_renders_as_transformers_does(
    theirs: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
    enable_thinking: bool,
) -> None:
    options = {"add_generation_prompt": add_generation_prompt, "enable_thinking": enable_thinking}
    assert render(messages, **options) == theirs.apply_chat_template(messages, tokenize=False, **options)


def test_a_turn_more_only_adds_to_the_text() -> None:
    whole = render(CHAT, add_generation_prompt=True)
    for length in (2, 4, 6):
        assert whole.startswith(render(CHAT[:length], add_generation_prompt=False))


def test_thinking_of_earlier_turns_is_dropped_and_of_the_last_kept() -> None:
    assert "A greeting." not in render(CHAT, add_generation_prompt=False)
    assert "A greeting." in render(CHAT[:3], add_generation_prompt=False)


def test_thinking_off_opens_with_an_empty_thought() -> None:
    ending = "<|im_start|>assistant\n"
    assert render(CHAT, add_generation_prompt=True).endswith(ending)
    off = render(CHAT, add_generation_prompt=True, enable_thinking=False)
    assert off.endswith(ending + "<think>\n\n</think>\n\n")


@pytest.mark.parametrize("messages", [[{"role": "tool", "content": "x"}], [*CHAT, CHAT[0]]])
def test_a_role_it_does_not_know_is_refused(messages: list[dict[str, str]]) -> None:
    with pytest.raises(TemplateError, match="system"):
        render(messages, add_generation_prompt=True)
