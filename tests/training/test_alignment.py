"""Guided alignment: the spans that heads look at, in text and in the loss."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.training.conftest import TINY
from training import mixture
from training.alignment import NOWHERE, ROLES
from training.conversation import Conversation, Message, SpokenCall, Tool
from training.torch_model import Model, missed
from training.trainer import Optimizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The bundled model's, whose tokens are words."""
    return Tokenizer.from_file(str(Path(__file__).parents[2] / "models" / "pebble" / "tokenizer.json"))


class Read:
    """A conversation as it is trained on, and what each role looks at from the token before a text."""

    def __init__(self, made: Conversation, tokenizer: Tokenizer) -> None:
        self.row = mixture.row(Random(0), made, tokenizer)
        self.tokenizer = tokenizer
        self.text = ""
        self.ends = list[int]()
        for token in self.row.tokens:
            self.text += tokenizer.decode([token], skip_special_tokens=False)
            self.ends.append(len(self.text))

    def position(self, before: str, after: str) -> int:
        """Returns the position of the token that ends where `after` begins, behind the last `before`."""
        at = self.text.rindex(before + after) + len(before)
        return self.ends.index(at)

    def looks(self, role: str, position: int) -> str | None:
        first, end = getattr(self.row.alignment, role)[position]
        if (first, end) == NOWHERE:
            return None
        return self.tokenizer.decode(self.row.tokens[first:end], skip_special_tokens=False)


def quoting() -> Conversation:
    return Conversation(
        (
            Message("system", "[S1] The mill was sold in spring.\n[S2] The dam was finished in autumn. It is long."),
            Message("user", "When was the dam finished?"),
            Message("assistant", "[S2] The dam was finished in autumn."),
        ),
        enable_thinking=False,
    )


def calling() -> Conversation:
    def tool(name: str, described: str) -> Tool:
        properties = {"town": {"type": "string"}}
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "description": described, "parameters": parameters}}

    call = SpokenCall("hire_car", {"town": "Rotterdam"})
    tools = (tool("get_weather", "Weather of a town."), tool("hire_car", "Hire a car."), tool("sell_boat", "Sell it."))
    messages = (Message("user", "a car in Rotterdam please"), Message("assistant", calls=(call,)))
    return Conversation(messages, tools, enable_thinking=False)


def test_a_quotation_looks_at_its_sentence_and_each_token_at_the_next(tokenizer: Tokenizer) -> None:
    read = Read(quoting(), tokenizer)
    sentence = "The dam was finished in autumn."
    quoted = read.position("", f"[S2] {sentence}<|im_end|>") + 1
    assert read.looks("source", quoted - 1) is not None
    for position in range(quoted - 1, len(read.row.tokens) - 4):
        source = read.looks("source", position)
        assert source is not None and sentence in source.strip() and "mill" not in source
    for position in range(quoted + 4, len(read.row.tokens) - 4):
        place = read.looks("place", position)
        following = tokenizer.decode([read.row.tokens[position + 1]], skip_special_tokens=False)
        assert place is not None and place.strip() == following.strip()


def test_tokens_look_at_the_label_of_their_line_until_the_message_ends(tokenizer: Tokenizer) -> None:
    read = Read(quoting(), tokenizer)
    assert read.looks("label", read.position("mill", " was sold")) == "1"
    assert read.looks("label", read.position("dam was", " finished in autumn. It")) == "2"
    assert read.looks("label", read.position("It is", " long")) == "2"
    assert read.looks("label", read.position("When was", " the dam")) is None


def test_words_of_a_question_look_at_themselves_in_the_sentence_that_answers(tokenizer: Tokenizer) -> None:
    read = Read(quoting(), tokenizer)
    asked = read.position("", "When was the dam") + 1
    looking = [at for at, span in enumerate(read.row.alignment.match) if span != NOWHERE]
    assert looking and min(looking) >= asked
    for at in looking:
        first, end = read.row.alignment.match[at]
        assert read.row.tokens[first:end] == [read.row.tokens[at]]
        assert read.text.index("The dam") <= read.ends[end - 1] <= read.text.index(" It is long")


def test_an_answer_that_is_not_learned_has_no_question(tokenizer: Tokenizer) -> None:
    source, asked, answered = quoting().messages
    before = (Message("user", "Hello!"), Message("assistant", "Hello, friend.", learned=False))
    plain, longer = (
        Read(Conversation(messages, enable_thinking=False), tokenizer)
        for messages in ((source, asked, answered), (source, *before, asked, answered))
    )
    words = [
        [read.looks("match", at) for at, span in enumerate(read.row.alignment.match) if span != NOWHERE]
        for read in (plain, longer)
    ]
    assert words[0] and words[0] == words[1]


def test_a_call_looks_at_its_schema_and_its_argument_at_the_request(tokenizer: Tokenizer) -> None:
    read = Read(calling(), tokenizer)
    name = read.looks("source", read.position('{"name": "', 'hire_car", "arguments"'))
    assert name is not None and "Hire a car." in name and "Weather" not in name and "sell" not in name.split("{")[0]
    argument = read.looks("place", read.position('"town": "Rotter', 'dam"}'))
    assert argument is not None and "Rotterdam please".find(argument.strip()) >= 0
    assert read.looks("label", read.position("Hire", " a car.")) == "hire_car"


@pytest.mark.parametrize("task", sorted(mixture.TASKS))
def test_nothing_looks_ahead(task: str, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        made = mixture.TASKS[task](Random(seed), "train", 0.3)
        row = mixture.row(Random(0), made, tokenizer)
        for spans in row.alignment.roles():
            assert len(spans) == len(row.tokens)
            assert all(span == NOWHERE or 0 <= span[0] < span[1] <= at + 1 for at, span in enumerate(spans))


def test_what_is_missed_is_the_log_of_the_attention_outside() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 1, 5, 8)
    looks, spans = torch.tensor([1, 3]), torch.tensor([[0, 1], [1, 3]])
    attention = torch.softmax((queries @ keys.mT * 8**-0.5 + torch.full((5, 5), -math.inf).triu(1)), -1)[0]
    wanted = -torch.stack([attention[1, 0], attention[3, 1:3].sum()]).log()
    torch.testing.assert_close(missed(queries[None], keys[None], looks, spans), wanted)


def test_guided_heads_learn_to_look_there() -> None:
    torch.manual_seed(0)
    model = Model(TINY)
    optimizer = Optimizer(model)
    tokens = torch.randint(0, TINY.vocab_size, (4, 12), dtype=torch.int32)
    spans = np.full((len(ROLES), 4, 12, 2), -1, np.int32)
    spans[:, :, 6:] = (2, 4)
    batch = mixture.stacked(tokens.numpy(), np.ones((4, 12), np.float32), spans)
    first = last = torch.zeros(len(ROLES))
    for step in range(80):
        loss, last = model.loss([batch])
        first = last.detach() if not step else first
        (0 * loss + last.sum()).backward()
        optimizer.step(1.0)
    assert bool((last < 0.3 * first).all())
