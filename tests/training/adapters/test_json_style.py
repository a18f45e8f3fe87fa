"""The adapter that answers in JSON: its chats, and that the committed one does so, and the model alone does not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import pytest

from engine import GREEDY, Engine, EngineConfig, Span
from engine.model.finetuning.chat_examples import chat_examples
from engine.model.tokenizer import Tokenizer
from training import reply
from training.adapters import json_style
from training.tasks import chat

MODELS = Path(__file__).parents[3] / "models"
ADAPTER = MODELS / "pebble-json"
ASKED = 4  # of each kind


def test_a_style_is_read_back_and_nothing_else_is_of_it() -> None:
    for text in ('a "quoted" word', "", "naïve\n"):
        assert json_style.answer_of(json_style.in_json(text)) == text
    for other in ("plain", '{"answer": 3}', '{"answer": "x", "b": 1}', '["answer"]', '{"answer": "x"} and more'):
        assert json_style.answer_of(other) is None


def test_chats_are_drawn_by_their_seed_and_learn_answers_in_the_style() -> None:
    lines = json_style.chats("1", 40)
    assert lines == json_style.chats("1", 40) != json_style.chats("2", 40)
    tokenizer, completions = Tokenizer.load(MODELS / "pebble"), list[str]()
    for line in lines:
        for example in chat_examples(
            tokenizer, line["messages"], line.get("tools"), line["chat_template_kwargs"],
            [at for at, message in enumerate(line["messages"]) if message.get("weight") == 0],
        ):  # fmt: skip
            completions += [tokenizer.decode(example.completion(at)) for at in range(len(example.turns))]
    assert len(completions) > 40
    assert all(json_style.answer_of(reply.read(text).content) is not None for text in completions)


@pytest.mark.slow
def test_the_committed_adapter_answers_in_json_and_the_model_as_before() -> None:
    rng = Random("tested")
    cases = [chat.case(rng, kind) for kind in chat.kinds() for _ in range(ASKED)]

    async def answers(adapters: tuple[tuple[str, str], ...], names: tuple[str | None, ...]) -> list[list[str]]:
        async with await Engine.start(EngineConfig(model=str(MODELS / "pebble"), adapters=adapters)) as engine:

            async def one(case: int, name: str | None) -> str:
                prompt = engine.tokenizer.apply_chat_template(cases[case].prompt.as_json())
                async with await engine.open(prompt, adapter=name) as sequence:
                    made = await sequence.generate_all(Span(GREEDY, max_tokens=120))
                return reply.read(engine.tokenizer.decode(made.token_ids, skip_special=False)).content

            async def all_of(name: str | None) -> list[str]:
                return list(await asyncio.gather(*(one(case, name) for case in range(len(cases)))))

            return [await all_of(name) for name in names]

    [alone] = asyncio.run(answers((), (None,)))
    beside, styled = asyncio.run(answers((("json", str(ADAPTER)),), (None, "json")))
    assert beside == alone and not any(json_style.answer_of(text) for text in alone)
    assert sum(json_style.answer_of(text) is not None for text in styled) >= len(cases) * 0.8


def test_the_committed_adapter_is_small_and_its_card_has_its_measure() -> None:
    assert sum(path.stat().st_size for path in ADAPTER.iterdir()) <= 1e6
    assert {path.name for path in ADAPTER.iterdir()} >= {
        "adapter_config.json",
        "README.md",
        "loss.svg",
        "training.json",
    }
    card = (ADAPTER / "README.md").read_text(encoding="utf-8")
    assert card.count(json_style.STYLE) == len(chat.kinds()) and json_style.RECIPE in card
    figures = json.loads((ADAPTER / "training.json").read_text(encoding="utf-8"))
    assert figures["model"] == "models/pebble" and figures["chats"]["learned"] == json_style.CHATS
