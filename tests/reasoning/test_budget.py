"""Budget forcing on the scripted model, whose thinking is capitals and whose answers are small letters."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Sampling, Span, Stats
from engine.structured_output.layout import Constrained
from engine.structured_output.spec import JsonSchema
from reasoning.budget import BudgetForcing, ThinkingBudget
from reasoning.thinking import Markers, Piece, Tally, think_and_answer

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
AT_ONCE = 40
PEBBLE = Path(__file__).resolve().parents[2] / "models/pebble"


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    config = EngineConfig(str(model), dtype="float32", kv_blocks=1024, prefix_cache=False)
    async with await Engine.start(config) as engine:
        yield engine


@dataclass(frozen=True)
class Setting:
    budget: ThinkingBudget
    max_tokens: int
    opened: bool
    seed: int
    constraint: Constrained | None = None


@dataclass(frozen=True)
class Outcome:
    setting: Setting
    pieces: list[Piece]
    forcing: BudgetForcing
    tokens: list[int]
    prompt: int

    @property
    def thinking(self) -> str:
        return "".join(p.text for p in self.pieces if p.part == "thinking")

    @property
    def content(self) -> str:
        return "".join(p.text for p in self.pieces if p.part == "answer")

    @property
    def tally(self) -> Tally:
        tally = Tally()
        for piece in self.pieces:
            tally.add(piece)
        return tally


async def write(engine: Engine, setting: Setting) -> Outcome:
    prompt = engine.tokenizer.encode("<|im_start|>assistant\n" + "<think>" * setting.opened, special=True)
    forcing = BudgetForcing(setting.budget, engine.tokenizer)
    span = Span(Sampling(seed=setting.seed), setting.max_tokens, constraint=setting.constraint)
    async with await engine.open(prompt) as seq:
        pieces = [piece async for piece in forcing.answer(seq, span, opened=setting.opened)]
        return Outcome(setting, pieces, forcing, seq.tokens, len(prompt))


async def write_all(engine: Engine, settings: list[Setting]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for at in range(0, len(settings), AT_ONCE):
        outcomes += await asyncio.gather(*(write(engine, one) for one in settings[at : at + AT_ONCE]))
    return outcomes


def draw(rng: random.Random, constraint: Constrained | None = None) -> Setting:
    """Any setting that does not contradict itself."""
    waits = rng.choice((0, 0, 1, 2, 4))
    wait_text = rng.choice(("Wait", "W", "\nWAIT, "))
    closing = rng.choice(("", "", "SO:\n"))
    least = 2 + len(closing) + waits * (len(wait_text) + 1)
    most = rng.choice((None, least + rng.randint(0, 60)))
    minimum = rng.choice((0, rng.randint(0, 60 if most is None else most)))
    limit = max(least, minimum) + rng.randint(0, 80)
    budget = ThinkingBudget(minimum, most, waits, wait_text, closing)
    return Setting(budget, limit, rng.random() < 0.4, rng.randrange(2**40), constraint)


def check(outcome: Outcome) -> None:
    """Returns what no setting may break."""
    budget, forcing, tally = outcome.setting.budget, outcome.forcing, outcome.tally
    assert forcing.thinking_tokens == tally.reasoning_tokens
    assert tally.completion_tokens <= outcome.setting.max_tokens
    finish = [p.finish_reason for p in outcome.pieces]
    assert finish[:-1] == [None] * (len(finish) - 1) and finish[-1] in ("stop", "length")
    if budget.max_tokens is not None:
        assert tally.reasoning_tokens <= budget.max_tokens
    assert tally.reasoning_tokens >= budget.min_tokens
    assert not set(outcome.content) & set(string.ascii_uppercase), "thinking in the content"
    if budget.waits:
        assert outcome.thinking.count(budget.wait_text) >= forcing.waits
        assert forcing.waits <= budget.waits
        cut = outcome.setting.max_tokens - tally.completion_tokens
        room = cut if budget.max_tokens is None else min(cut, budget.max_tokens - tally.reasoning_tokens)
        if forcing.waits < budget.waits:  # the next one and a token after it would not have fitted, or no end was drawn
            assert forcing.ended in ("maximum", None) or room < len(budget.wait_text) + 1 + len(budget.closing_text)
    if forcing.ended == "maximum" and budget.max_tokens is not None:
        assert tally.reasoning_tokens == budget.max_tokens or outcome.pieces[-1].finish_reason == "length"


def given(outcome: Outcome) -> int:
    """Tokens that were not drawn: the prompt's, the markers, the Waits and the closing text."""
    budget, opened = outcome.setting.budget, outcome.setting.opened
    markers = 0
    for token in outcome.tokens[outcome.prompt :]:
        markers += outcome.forcing._markers.closing == token or outcome.forcing._markers.opening == token
    assert opened or markers or not budget.demands_thinking
    closing = budget.closing_text if outcome.thinking.endswith(budget.closing_text) else ""
    if outcome.forcing.ended != "maximum":
        closing = ""
    return outcome.prompt + markers + outcome.forcing.waits * len(budget.wait_text) + len(closing)


def computed(outcome: Outcome) -> int:
    """Tokens that went through the model, were each to go once. What a limit ends has a last token that never went."""
    last = outcome.pieces[-1]
    cut = bool(last.token_ids) or (last.part == "thinking" and outcome.forcing.ended == "maximum")
    return len(outcome.tokens) - (last.finish_reason == "length" and cut)


def through(before: Stats, after: Stats) -> tuple[int, int]:
    return after.prompt_tokens - before.prompt_tokens, after.step_tokens - before.step_tokens


async def test_a_thousand_budgets_are_exact_and_prefill_nothing_twice(engine: Engine) -> None:
    rng = random.Random(7)
    before = await engine.stats()
    outcomes = await write_all(engine, [draw(rng) for _ in range(1000)])
    for outcome in outcomes:
        check(outcome)
    after = await engine.stats()
    assert after.preemptions == 0
    assert through(before, after) == (sum(map(given, outcomes)), sum(map(computed, outcomes)))
    assert {outcome.forcing.ended for outcome in outcomes} == {"model", "maximum", None}


async def test_budgets_are_exact_with_an_answer_held_to_a_schema(engine: Engine) -> None:
    rng = random.Random(8)
    constraint = Constrained(JsonSchema.of(SCHEMA, compact=True))
    await engine.compile(constraint.body)
    outcomes = await write_all(engine, [draw(rng, constraint) for _ in range(200)])
    for outcome in outcomes:
        check(outcome)
    whole = [outcome for outcome in outcomes if outcome.pieces[-1].finish_reason == "stop"]
    assert len(whole) >= 40
    assert {json.loads(outcome.content)["n"] for outcome in whole} == {1, 22, 333}


@pytest.mark.parametrize("waits", [0, 1, 2, 4])
async def test_where_nothing_else_ends_it_there_are_exactly_as_many_waits(engine: Engine, waits: int) -> None:
    outcomes = await write_all(
        engine, [Setting(ThinkingBudget(waits=waits, wait_text="wait"), 1000, True, seed) for seed in range(40)]
    )
    for outcome in outcomes:
        assert outcome.forcing.waits == outcome.thinking.count("wait") == waits
        assert outcome.forcing.ended == "model"


async def test_an_open_budget_writes_what_no_budget_writes(engine: Engine) -> None:
    markers = Markers.of(engine.tokenizer)
    for seed in range(8):
        mine = await write(engine, Setting(ThinkingBudget(max_tokens=500), 400, True, seed))
        prompt = mine.tokens[: mine.prompt]
        async with await engine.open(prompt) as seq:
            span = Span(Sampling(seed=seed), 400)
            plain = [p async for p in think_and_answer(seq, span, markers, opened=True)]
            assert (seq.tokens, plain[-1].finish_reason) == (mine.tokens, mine.pieces[-1].finish_reason)
        assert "".join(p.text for p in plain if p.part == "answer") == mine.content


async def test_a_model_that_opens_its_thinking_itself_is_held_too(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("<|im_start|>assistant\n<|ponder|>", special=True)
    for most in (2, 3, 9):
        forcing = BudgetForcing(ThinkingBudget(max_tokens=most), engine.tokenizer)
        async with await engine.open(prompt) as seq:
            pieces = [p async for p in forcing.answer(seq, Span(Sampling(seed=most), 60), opened=False)]
        assert 2 <= sum(p.spent for p in pieces if p.part == "thinking") <= most
        assert "".join(p.text for p in pieces if p.part == "answer").islower()


async def test_a_budget_holds_over_all_turns_of_an_answer(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("<|im_start|>assistant\n<think>", special=True)
    forcing = BudgetForcing(ThinkingBudget(max_tokens=20, min_tokens=19), engine.tokenizer)
    spent: list[int] = []
    async with await engine.open(prompt) as seq:
        for turn in range(4):
            pieces = [p async for p in forcing.answer(seq, Span(Sampling(seed=turn), 60), opened=True)]
            spent.append(sum(p.spent for p in pieces if p.part == "thinking"))
            assert pieces[-1].finish_reason is not None
            seq.append(prompt)
    assert spent[0] >= 19 and sum(spent) <= 20
    assert spent[2:] == [0, 0]


async def test_a_margin_ends_the_thinking_at_the_end_of_a_line() -> None:
    async with await Engine.start(EngineConfig(str(PEBBLE), dtype="float32", kv_blocks=200)) as engine:
        prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "Use 4, 6 and 9 to make 33."}])

        async def thinking(margin: float | None, least: int = 0) -> tuple[str, BudgetForcing]:
            forcing = BudgetForcing(ThinkingBudget(least, margin=margin), engine.tokenizer)
            async with await engine.open(prompt) as seq:
                pieces = [p async for p in forcing.answer(seq, Span(GREEDY, 300), opened=False)]
            assert not any(p.logprobs for p in pieces)
            assert sum(p.spent for p in pieces if p.part == "thinking") == forcing.thinking_tokens
            return "".join(p.text for p in pieces if p.part == "thinking"), forcing

        whole, free = await thinking(None)
        assert (await thinking(0.0))[0] == whole and free.ended == "model"
        cut, braked = await thinking(25.0)
        assert braked.ended == "margin" and cut.endswith("\n") and whole.startswith(cut) and len(cut) < len(whole)
        later, held = await thinking(25.0, braked.thinking_tokens + 1)
        assert held.thinking_tokens > braked.thinking_tokens and whole.startswith(later)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 1}, "max_tokens"), ({"waits": -1}, "waits"), ({"waits": 1, "wait_text": ""}, "wait_text"),
        ({"margin": -1.0}, "margin"), ({"margin": float("nan")}, "margin"), ({"margin": 1.0, "waits": 1}, "margin"),
        ({"waits": 2, "max_tokens": 11}, "max_tokens"), ({"closing_text": "abc", "max_tokens": 4}, "max_tokens"),
    ],
)  # fmt: skip
async def test_a_contradiction_is_refused_by_name(engine: Engine, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter, match="accepted") as refused:
        BudgetForcing(ThinkingBudget(**fields), engine.tokenizer)
    assert refused.value.name == f"thinking.{name}"


@pytest.mark.parametrize(
    ("budget", "closed", "name"),
    [
        (ThinkingBudget(min_tokens=31), False, "thinking.min_tokens"),
        (ThinkingBudget(waits=6), False, "thinking.waits"),
        (ThinkingBudget(min_tokens=1), True, "thinking"), (ThinkingBudget(waits=1), True, "thinking"),
    ],
)  # fmt: skip
async def test_what_the_answer_has_no_place_for_is_refused(
    engine: Engine, budget: ThinkingBudget, closed: bool, name: str
) -> None:
    async with await engine.open([5]) as seq:
        with pytest.raises(InvalidParameter, match="accepted") as refused:
            async for _ in BudgetForcing(budget, engine.tokenizer).answer(
                seq, Span(max_tokens=30), opened=False, closed=closed
            ):
                raise AssertionError("nothing may be written")
        assert refused.value.name == name and len(seq) == 1


async def test_leaving_in_mid_thought_frees_every_block(engine: Engine) -> None:
    setting = Setting(ThinkingBudget(min_tokens=200, waits=2), 400, True, 0)
    prompt = engine.tokenizer.encode("<think>", special=True)
    for stop in range(20):
        async with await engine.open(prompt) as seq:
            pieces = BudgetForcing(setting.budget, engine.tokenizer).answer(seq, Span(max_tokens=400), opened=True)
            for _ in range(stop):
                await anext(pieces)
            await pieces.aclose()
    assert (await engine.stats()).blocks_used == 0
