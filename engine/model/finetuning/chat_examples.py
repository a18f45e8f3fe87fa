"""Chats as examples to learn from: tokens, and which of them the assistant writes.

The idea: a turn is learned as it is served. Its prompt is what the chat template makes of the messages before it, and
its completion what the template writes of the turn behind that, up to the token that ends it. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ChatTemplateError
from engine.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A text and its learned `turns`: each from its first token to behind its last one, in order."""

    token_ids: tuple[int, ...]
    turns: tuple[tuple[int, int], ...]

    @property
    def learned(self) -> list[int]:
        """Returns the places of the learned tokens."""
        return [at for first, end in self.turns for at in range(first, end)]

    def prompt(self, turn: int) -> list[int]:
        """Returns the tokens before a turn."""
        return list(self.token_ids[: self.turns[turn][0]])

    def completion(self, turn: int) -> list[int]:
        """Returns the tokens of a turn, with the one that ends it."""
        first, end = self.turns[turn]
        return list(self.token_ids[first:end])


def chat_examples(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    variables: Mapping[str, object] | None = None,
    left_out: Collection[int] = (),
) -> list[ChatExample]:
    """Returns the examples of a chat. Messages, tools and variables are as `Tokenizer.encode_chat` takes them.

    Turns share an example where the prompt of the later one goes on from the earlier one. A template that drops the
    thinking of earlier turns makes more than one. `left_out` has places of the assistant's messages that are read only.

    Raises:
        ChatTemplateError: the model has no template, or it refuses the messages or does not go on from its own prompt.
    """
    examples, stops = list[ChatExample](), set(tokenizer.eos_token_ids)
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or at in left_out:
            continue
        prompt, whole = (
            tokenizer.encode_chat(list(messages[:end]), tools, variables or {}, add_generation_prompt=end == at)
            for end in (at, at + 1)
        )
        if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
            raise ChatTemplateError(
                f"the model's chat template writes messages[{at}] otherwise than its own prompt for it begins; "
                'accepted: variables in chat_template_kwargs with which it does not, such as {"enable_thinking": false}'
            )
        completion = whole[len(prompt) :]
        ending = next((place for place, token in enumerate(completion) if token in stops), None)
        if ending is not None:
            completion = completion[: ending + 1]
        elif tokenizer.eos_token_ids:
            completion = [*completion, tokenizer.eos_token_ids[0]]
        turns: tuple[tuple[int, int], ...] = ((len(prompt), len(prompt) + len(completion)),)
        if examples and tuple(prompt[: len(examples[-1].token_ids)]) == examples[-1].token_ids:
            turns = (*examples.pop().turns, *turns)
        examples.append(ChatExample((*prompt, *completion), turns))
    return examples
