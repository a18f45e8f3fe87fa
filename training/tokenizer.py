"""The tokenizer: byte-level BPE trained on our own samples, and the chat template in front of it.

Digits stand alone, so that a number's columns are tokens; bytes are the alphabet, so that nothing is unknown. Special
tokens take the first ids. `render` is the one place where messages become text. Knows nothing of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # kept in decoded text, as Qwen3 does

# A digit; a word with the space before it; other signs with the space before them; white space.
PIECES = Regex(r"\d| ?\p{L}+(?:'\p{L}+)?| ?[^\s\p{L}\d]+|\s+(?!\S)|\s+")


def chat_template() -> str:
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8").rstrip("\n")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(chat_template())


def render(messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, enable_thinking: bool = True) -> str:
    """The text of a chat. Raises `jinja2.TemplateError` for a role that the template does not know."""
    return _template().render(
        messages=messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
    )


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL, *MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there. Raises KeyError when it is not."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"The tokenizer has no token {token!r}; was it trained by `training.tokenizer`?")
    return int(found)
