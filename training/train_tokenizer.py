"""The tokenizer: byte-level BPE trained on our own samples, and the chat template in front of it.

Digits stand alone, so that a number's columns are tokens; bytes are the alphabet, so that nothing is unknown. A word
falls into the same pieces with a space before it and without: only its first piece differs, and that has a version
which begins with the space. So a word copied from a sentence to the start of an answer or into quotes is one other
token, not another spelling. Special tokens take the first ids. `render` is the one place where messages become text.
Knows nothing of tasks.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.model.chat_template import ChatTemplate
from training.conversation import Conversation

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # kept in decoded text, as Qwen3 does

# A digit; a word with the space before it; other signs with the space before them; line ends, which are one piece
# before any text, so that a prompt's last tokens are those of the whole text; other white space.
PIECES = Regex(r"\d| ?\p{L}+(?:'\p{L}+)?| ?[^\s\p{L}\d]+|[\r\n]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+")

_BARE = Regex(r"\d|\p{L}+(?:'\p{L}+)?|[^\s\p{L}\d]+|[\r\n]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+")  # the same without it
SPACE = "Ġ"  # a space in the alphabet of byte-level BPE
TWINS = 0.4  # the most of the vocabulary that begins with a space

_ASSISTANT = re.compile(rf"(?<={re.escape(TURN_START)}assistant\n)(.*?{re.escape(TURN_END)})", re.DOTALL)


def chat_template() -> str:
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8").rstrip("\n")


@lru_cache(maxsize=1)
def _template() -> ChatTemplate:
    return ChatTemplate(chat_template(), {})


def render(made: Conversation, *, add_generation_prompt: bool) -> str:
    """The text of a chat."""
    return _template().render(
        made.as_json(),
        tools=list(made.tools) or None,
        add_generation_prompt=add_generation_prompt,
        variables={"enable_thinking": made.enable_thinking},
    )


def segments(made: Conversation) -> list[tuple[str, bool]]:
    """The text of a chat in parts that are learned (written by the model) or only read.

    Of an assistant message before the last user message, and of one with thinking off, the empty thought is read: there
    the prompt gives it. Tokenised one by one, the parts give the tokens that the model meets when it writes.
    """
    last_user = max((at for at, message in enumerate(made.messages) if message.role == "user"), default=-1)
    assistants = [(at, message) for at, message in enumerate(made.messages) if message.role == "assistant"]
    parts: list[tuple[str, bool]] = []
    pieces = _ASSISTANT.split(render(made, add_generation_prompt=False))
    for (at, message), read, written in zip(assistants, pieces[0::2], pieces[1::2], strict=False):
        given = EMPTY_THOUGHT if at < last_user or not made.enable_thinking else ""
        parts += [(read + given, False), (written.removeprefix(given), message.learned)]
    return [*parts, (pieces[-1], False)]


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over pieces without their space, then the versions with one, the most frequent first."""
    texts = list(texts)
    bare = _tokenizer(models.BPE(), _BARE)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - int(vocab_size * TWINS),
        special_tokens=[*SPECIAL, *MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(texts, trainer)
    learned = json.loads(bare.to_str())["model"]
    vocab, merges = dict(learned["vocab"]), [(left, right) for left, right in learned["merges"]]
    for piece in _after_a_space(bare, texts)[: vocab_size - len(vocab)]:
        vocab[SPACE + piece] = len(vocab)
        merges.append((SPACE, piece))
    made = _tokenizer(models.BPE(vocab=vocab, merges=merges), PIECES)
    made.add_special_tokens([*SPECIAL, *MARKS])
    return made


def _tokenizer(model: models.BPE, pieces: Regex) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _after_a_space(bare: Tokenizer, texts: list[str]) -> list[str]:
    """Tokens that were met behind a single space, the most frequent first; digits stand alone and have no second
    version."""
    known = set(bare.get_vocab())
    counts: Counter[str] = Counter()
    for encoded in bare.encode_batch(texts):
        counts.update(b for a, b in pairwise(encoded.tokens) if a == SPACE)
    without = {SPACE, *SPECIAL, *MARKS, *string.digits}
    return [token for token, _ in counts.most_common() if token not in without and SPACE + token not in known]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there. Raises KeyError when it is not."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"The tokenizer has no token {token!r}; was it trained by `training.train_tokenizer`?")
    return int(found)
