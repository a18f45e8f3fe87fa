"""The committed weights: that they load as they are, and that the chat's first offers work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine import GREEDY, Engine, EngineConfig, Span, SpanResult
from training import puzzle, reply
from training.abilities import ABILITIES
from training.conversation import Case
from training.train_tokenizer import chat_template

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("pebble", "pebble-draft")
PROMPTS, TOKENS = 50, 32

Theirs = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


@pytest.fixture(scope="module")
def theirs(name: str) -> Theirs:
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(MODELS / name)


def prompt_of(theirs: Theirs, case: Case) -> list[int]:
    made = theirs[1].apply_chat_template(
        case.prompt.as_json(),
        tools=list(case.prompt.tools) or None,
        enable_thinking=case.prompt.enable_thinking,
        add_generation_prompt=True,
        return_dict=True,
    )
    assert isinstance(made, BatchEncoding)
    return list(made["input_ids"])


def chosen(theirs: Theirs, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token after the prompt and after each token of an answer, to transformers.

    That is the answer and what follows it where transformers writes the same, greedily, and is computed in one pass.
    """
    with torch.inference_mode():
        logits = theirs[0](torch.tensor([prompt + answer])).logits[0]
    return [int(token) for token in logits[len(prompt) - 1 :].argmax(-1)]


def test_transformers_and_our_engine_write_the_same(name: str, theirs: Theirs) -> None:
    rng = Random(11)
    cases = [rng.choice(ABILITIES).cases(rng, 1)[0] for _ in range(PROMPTS)]

    async def ours() -> list[tuple[list[int], SpanResult]]:
        async with await Engine.start(EngineConfig(model=str(MODELS / name), dtype="float32")) as engine:

            async def one(case: Case) -> tuple[list[int], SpanResult]:
                prompt = engine.tokenizer.apply_chat_template(
                    case.prompt.as_json(),
                    tools=list(case.prompt.tools) or None,
                    enable_thinking=case.prompt.enable_thinking,
                )
                async with await engine.open(prompt) as sequence:
                    return prompt, await sequence.generate_all(Span(GREEDY, max_tokens=TOKENS))

            return list(await asyncio.gather(*(one(case) for case in cases)))

    made = asyncio.run(ours())
    assert [prompt for prompt, _ in made] == [prompt_of(theirs, case) for case in cases]
    assert {result.finish_reason for _, result in made} == {"stop", "length"}
    for prompt, result in made:
        answer = list(result.token_ids)
        if result.finish_reason == "stop":
            assert chosen(theirs, prompt, answer) == [*answer, theirs[1].eos_token_id]
        else:
            assert len(answer) == TOKENS and chosen(theirs, prompt, answer)[:-1] == answer


def solves_33(answer: str) -> bool:
    return puzzle.check(answer, (4, 6, 9), 33)


STARTERS = (
    solves_33,
    lambda answer: "number puzzles" in answer,
    lambda answer: "Biscuit" in answer,
)


@pytest.mark.parametrize(("place", "expected"), list(enumerate(STARTERS)))
def test_a_starter_gets_its_answer(place: int, expected: Callable[[str], bool]) -> None:
    model = MODELS / "pebble"
    starters = json.loads((model / "ponder.json").read_text(encoding="utf-8"))["starters"]
    assert len(starters) == len(STARTERS)

    async def answer() -> str:
        async with await Engine.start(EngineConfig(model=str(model))) as engine:
            prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": starters[place]}])
            async with await engine.open(prompt) as sequence:
                result = await sequence.generate_all(Span(GREEDY, max_tokens=600))
        assert result.finish_reason == "stop"
        return result.text

    said = reply.read(asyncio.run(answer())).content
    assert expected(said), said


def test_its_chat_template_is_the_one_it_was_trained_with(name: str) -> None:
    config = json.loads((MODELS / name / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == chat_template()


def test_both_share_a_tokenizer() -> None:
    assert len({(MODELS / name / "tokenizer.json").read_bytes() for name in NAMES}) == 1


def test_they_stay_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= 45e6
