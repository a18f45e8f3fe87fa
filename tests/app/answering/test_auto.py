"""`model: auto` on two real models: who answers, what is told of it, and that nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from app.answering.answer_plan import AnswerPlan
from app.answering.model_cascade import CONFIDENCE, ENTROPY, FIRST_CONFIDENCE, ModelCascade, ModelChosen, gate_of
from app.answering.model_registry import ModelRegistry
from app.answering.reasoning_config import ReasoningConfig
from app.answering.served_model import ServedModel
from app.errors import ApiError, invalid
from engine import GREEDY, InvalidParameter, Span, TokenLogprob
from reasoning.agent import Wrote
from reasoning.budget import ThinkingBudget
from reasoning.route import Confident, Decided, FirstTokens, Gate, Routed, Tried, Whole
from reasoning.strategy import Event, Spent
from reasoning.thinking import Piece, think_and_answer
from tests.app.conftest import Server

QUESTION = [{"role": "user", "content": "Use 2, 3 and 4 to make 24."}]
SPAN = Span(GREEDY, 60)
LONG = Span(GREEDY, 1000, ignore_eos=True)
Items = list[Piece | Event]


def auto_of(server: Server, gate: Gate) -> ModelCascade:
    models: ModelRegistry = server.app.state.ponder.models
    return ModelCascade([models.get("small"), models.get("pebble")], gate)


async def prompted(served: ServedModel, span: Span = SPAN, *, thinking: bool = True) -> AnswerPlan:
    return AnswerPlan(served, await served.chat_tokens(QUESTION, {"enable_thinking": thinking}), span)


async def all_of(
    auto: ModelCascade, span: Span = SPAN, *, thinking: bool = True, tenant: str = "", **changes: Any
) -> Items:
    asked = await auto.plans(lambda served: prompted(served, span, thinking=thinking))
    asked = [replace(each, **changes) for each in asked]
    async with aclosing(auto.answer(asked, tenant)) as items:
        return [item async for item in items if not isinstance(item, Wrote)]


def kinds(items: Sequence[Piece | Event]) -> list[str]:
    """The names of the items' types, runs of one name once."""
    names = [type(item).__name__ for item in items]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


def pieces(items: Items) -> list[Piece]:
    return [item for item in items if isinstance(item, Piece)]


def only(items: Items, kind: type[Any]) -> Any:
    (found,) = [item for item in items if isinstance(item, kind)]
    return found


async def alone(served: ServedModel) -> list[Piece]:
    prompt = await served.chat_tokens(QUESTION, {})
    async with await served.engine.open(prompt) as seq:
        opened = served.opens_thinking(prompt)
        return [piece async for piece in think_and_answer(seq, SPAN, served.markers, opened=opened)]


def text(written: Sequence[Piece]) -> list[tuple[str, str]]:
    return [(part, "".join(p.text for p in written if p.part == part)) for part in ("thinking", "answer")]


async def free(server: Server) -> None:
    """Both engines hold nothing any more: closing a sequence is a command that they take between two steps."""
    for served in server.app.state.ponder.models:
        stats = await served.engine.stats()
        assert stats.sequences == stats.blocks_used == stats.running == stats.waiting == 0, served.name


def test_a_bar_that_nothing_reaches_gives_the_last_ones_answer_as_it_is_written(both: Server) -> None:
    auto = auto_of(both, Confident(1.0))
    items = both.on_loop(all_of(auto, tenant="someone"))
    assert kinds(items) == ["Tried", "Spent", "ModelChosen", "Piece", "Tried", "Routed"]
    small, large = [item for item in items if isinstance(item, Tried)]
    assert (small.model, small.passed, large.model, large.passed) == ("small", False, "pebble", True)
    assert small.why.startswith("confidence is 0.") and "accepted: at least 1" in small.why
    assert 0 < small.verdicts[0].measured < 1
    spent: Spent = only(items, Spent)
    assert spent.written == small.tokens > 0
    assert spent.read == len(both.on_loop(prompted(auto.steps[0])).prompt)
    again: Spent = only(both.on_loop(all_of(auto, tenant="someone")), Spent)
    assert again.read < spent.read  # what the model still knows was not read again
    report: Routed = only(items, Routed)
    assert report.escalated and report.model == "pebble" and report.tried == (small, large)
    assert only(items, ModelChosen).plan.served is auto.steps[1]
    assert text(pieces(items)) == text(both.on_loop(alone(auto.steps[1])))
    assert pieces(items)[-1].finish_reason is not None
    both.on_loop(free(both))


def test_a_bar_that_everything_reaches_gives_the_first_ones_answer_when_it_is_whole(both: Server) -> None:
    auto = auto_of(both, Confident(0.0))
    items = both.on_loop(all_of(auto))
    assert kinds(items) == ["Tried", "Routed", "ModelChosen", "Piece"]
    report: Routed = only(items, Routed)
    assert not report.escalated and report.model == "small" and report.tried[0].why == ""
    assert only(items, ModelChosen).plan.served is auto.steps[0]
    assert text(pieces(items)) == text(both.on_loop(alone(auto.steps[0])))
    both.on_loop(free(both))


def test_a_model_whose_first_tokens_are_too_unsure_is_stopped_there(both: Server) -> None:
    asked = list[int]()  # tokens with a log-probability whenever the gate was asked: pieces may have several

    class Recording(FirstTokens):
        def stops(self, logprobs: Sequence[TokenLogprob]) -> bool:
            asked.append(len(logprobs))
            return FirstTokens.stops(self, logprobs)

    auto = auto_of(both, Recording(1.0))
    items = both.on_loop(all_of(auto))
    assert kinds(items) == ["Tried", "Spent", "ModelChosen", "Piece", "Tried", "Routed"]
    small, large = [item for item in items if isinstance(item, Tried)]
    assert (small.passed, large.passed) == (False, True) and small.why.startswith("first tokens is 0.")
    assert all(tokens < 16 for tokens in asked[:-1]) and 16 <= asked[-1] <= small.tokens == only(items, Spent).written
    sure = only(both.on_loop(all_of(auto_of(both, FirstTokens(0.0)))), Tried)
    assert sure.tokens > small.tokens and sure.verdicts[0].measured == pytest.approx(small.verdicts[0].measured)
    assert text(pieces(items)) == text(both.on_loop(alone(auto.steps[1])))
    both.on_loop(free(both))


def test_a_model_that_begins_sure_is_given_with_all_that_it_writes(both: Server) -> None:
    auto = auto_of(both, FirstTokens(0.0))
    items = both.on_loop(all_of(auto))
    assert kinds(items) == ["Tried", "Routed", "ModelChosen", "Piece"]
    assert text(pieces(items)) == text(both.on_loop(alone(auto.steps[0])))
    both.on_loop(free(both))


def test_a_cost_is_in_tokens_of_the_largest_model(both: Server) -> None:
    auto = auto_of(both, Confident(1.0))
    small, large = [item for item in both.on_loop(all_of(auto)) if isinstance(item, Tried)]
    ratio = auto.steps[0].parameters / auto.steps[1].parameters
    assert 0 < ratio < 1
    assert large.cost == large.tokens and small.cost == pytest.approx(small.tokens * ratio)


def test_what_was_given_and_escalated_is_counted(both: Server) -> None:
    auto = auto_of(both, Confident(1.0))
    both.on_loop(all_of(auto))
    auto.gate = Confident(0.0)
    both.on_loop(all_of(auto))
    assert auto.counts == {("small", False): 1, ("pebble", True): 1, ("small", True): 1}


def test_an_answer_that_a_limit_cut_is_escalated_by_the_gate_whole(both: Server) -> None:
    items = both.on_loop(all_of(auto_of(both, Whole()), Span(GREEDY, 1)))
    first = next(item for item in items if isinstance(item, Tried))
    assert not first.passed and "an answer that ends by itself" in first.why
    assert pieces(items)[-1].finish_reason == "length"


@pytest.mark.parametrize("bar", [0.0, 1.0])
@pytest.mark.parametrize("wanted", [None, 2])
def test_log_probabilities_are_for_who_asked_for_them(both: Server, bar: float, wanted: int | None) -> None:
    items = both.on_loop(all_of(auto_of(both, Confident(bar)), replace(SPAN, logprobs=wanted), thinking=False))
    assert any(piece.logprobs for piece in pieces(items)) is (wanted is not None)


def test_a_budget_holds_the_thinking_of_every_model_asked(both: Server) -> None:
    def thinking(items: Items) -> int:
        return sum(piece.spent for piece in pieces(items) if piece.part == "thinking")

    auto = auto_of(both, Confident(1.0))
    config = ReasoningConfig(budget=ThinkingBudget(max_tokens=4))
    free, held = both.on_loop(all_of(auto)), both.on_loop(all_of(auto, reasoning_config=config))
    assert only(held, Routed).escalated and thinking(free) > 4 >= thinking(held) > 0
    first_free, first_held = (next(each for each in items if isinstance(each, Tried)) for items in (free, held))
    assert first_held.tokens < first_free.tokens


def test_a_model_that_has_no_room_is_not_asked(both: Server) -> None:
    auto = auto_of(both, Confident(1.0))

    async def make(served: ServedModel) -> AnswerPlan:
        if served.name == "small":
            raise invalid("messages", "Too long.", "context_length_exceeded")
        return await prompted(served)

    async def nowhere(served: ServedModel) -> AnswerPlan:
        raise invalid("messages", f"Too long for {served.name}.", "context_length_exceeded")

    async def wrong(served: ServedModel) -> AnswerPlan:
        raise invalid("messages", "Wrong.")

    async def answered() -> Items:
        async with aclosing(auto.answer(await auto.plans(make))) as items:
            return [item async for item in items if not isinstance(item, Wrote)]

    items = both.on_loop(answered())
    assert kinds(items) == ["ModelChosen", "Piece", "Tried", "Routed"] and only(items, Routed).model == "pebble"
    with pytest.raises(ApiError, match="Too long for pebble"):
        both.on_loop(auto.plans(nowhere))
    with pytest.raises(ApiError, match="Wrong"):
        both.on_loop(auto.plans(wrong))


def test_what_an_engine_refuses_is_raised_and_leaves_nothing(both: Server) -> None:
    with pytest.raises(InvalidParameter, match="token id -1"):
        both.on_loop(all_of(auto_of(both, Confident(1.0)), prompt=[-1]))
    both.on_loop(free(both))


def test_closing_it_while_the_first_writes_frees_both_engines(both: Server) -> None:
    auto = auto_of(both, Confident(1.0))

    async def closed() -> None:
        answering = auto.answer(await auto.plans(lambda served: prompted(served, LONG)))
        first = asyncio.ensure_future(anext(answering))
        while not (await auto.steps[0].engine.stats()).running:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()  # it was still writing
        await answering.aclose()
        await free(both)

    both.on_loop(closed())


def test_closing_it_while_the_last_writes_frees_both_engines(both: Server) -> None:
    auto = auto_of(both, gate_of("entropy", 0.0))

    async def closed() -> None:
        asked = await auto.plans(prompted)
        asked[-1] = replace(asked[-1], span=LONG)
        async with aclosing(auto.answer(asked)) as items:
            async for item in items:
                if isinstance(item, Piece):
                    assert (await auto.steps[1].engine.stats()).sequences == 1
                    break
        await free(both)

    both.on_loop(closed())


def test_a_gate_has_a_bar_of_its_own_and_refuses_one_that_makes_no_sense() -> None:
    assert gate_of("confidence", 0.25) == Confident(0.25) and gate_of("entropy", 0.25) == Decided(0.25)
    assert gate_of("confidence") == Confident(CONFIDENCE) and gate_of("entropy") == Decided(ENTROPY)
    assert gate_of("first_tokens") == FirstTokens(FIRST_CONFIDENCE) and gate_of("first_tokens", 0.5) == FirstTokens(0.5)
    assert gate_of("whole") == Whole()
    with pytest.raises(ValueError, match="accepted"):
        gate_of("confidence", 2.0)
