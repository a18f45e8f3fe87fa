"""Sub-agents with the bundled model: a loop on a fork for each task, and one set of limits for all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import pytest

from app.answering.served_model import ServedModel
from engine import GREEDY, Engine, EngineConfig, Span
from engine.tool_parsers import read_tools
from reasoning.agent import Agent, BudgetSpent, Called, Happened, Limited, Limits, Style, SubAgent, SubTask, Wrote
from reasoning.dialogue import after_answer, after_calls
from tests.reasoning.test_agent import CALCULATOR, PEBBLE, QUESTION, Answers
from tools.outcome import Call

SUM = "You are now a sub-agent with one task. Do it:\n\nWhat is 40 * 2?"


class Delegates:
    """Tools whose call has sub-agents do the tasks; with `calls` they may call, too."""

    def __init__(self, world: World, tasks: Sequence[str], *, calls: bool = True) -> None:
        self.world = world
        self.tasks = tasks
        self.inner = Answers("391") if calls else None
        self.agent: Agent | None = None
        self.logs = list[list[Happened]]()
        self.made = list[SubAgent]()
        self.refused = ""

    def only_reads(self, call: Call) -> bool:
        return True

    async def run(self, calls: Sequence[Call]) -> list[str]:
        assert self.agent is not None
        format = self.world.engine.tokenizer
        tasks = [SubTask(after_answer(format, each, {}), self.world.style, self.inner) for each in self.tasks]
        try:
            self.made = await self.agent.delegate(tasks)
        except BudgetSpent as error:
            self.refused = str(error)
            return ["391"]
        self.logs = await asyncio.gather(*(_log(each) for each in self.made))
        for each in self.made:
            each.close()
        return ["391"]


async def _log(sub: SubAgent) -> list[Happened]:
    async with aclosing(sub.run()) as happening:
        return [each async for each in happening]


class World:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.served = ServedModel(engine, "pebble")
        assert self.served.tool_parser is not None
        plan = self.served.tool_parser.plan(read_tools([CALCULATOR]), "auto")
        self.style = Style(
            plan, self.served.markers, lambda calls, texts: after_calls(engine.tokenizer, calls, texts, {}),
            self.served.opens_thinking, self.served.closes_thinking,
        )  # fmt: skip

    async def ask(self, tools: Delegates, limits: Limits) -> tuple[Agent, list[Happened], list[int]]:
        """Returns the agent, its log, and its whole sequence."""
        prompt = await self.served.chat_tokens([{"role": "user", "content": QUESTION}], {}, [CALCULATOR])
        agent = tools.agent = Agent(self.style, tools, Span(sampling=GREEDY), limits)
        async with await self.engine.open(prompt) as seq:
            async with aclosing(agent.run(seq, self.engine.max_model_len - len(prompt))) as happening:
                log = [each async for each in happening]
            return agent, log, list(seq.tokens)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    config = EngineConfig(model=str(PEBBLE), device="cpu", dtype="float32", kv_blocks=600, threads=1)
    async with await Engine.start(config) as engine:
        yield World(engine)


def answered(log: Sequence[Happened]) -> str:
    return "".join(each.piece.text for each in log if isinstance(each, Wrote) and each.piece.part == "answer")


async def test_sub_agents_call_and_answer_on_forks_that_share_the_prefix(world: World) -> None:
    tools = Delegates(world, [SUM, f"{SUM} Be brief."])
    _, log, tokens = await world.ask(tools, Limits())
    assert len(tools.logs) == 2 and tools.inner is not None and len(tools.inner.begun) == 2
    for each in tools.logs:
        assert [type(one) for one in each].count(Called) == 1 and "391" in answered(each)
    first = next(one.piece for one in tools.logs[0] if isinstance(one, Wrote) and one.piece.prompt_tokens)
    asked = len(tools.made[0].asked)
    assert first.prompt_tokens - first.cached_tokens <= asked + 1, "all but its task is the caller's K/V"
    assert "40 * 2" not in world.engine.tokenizer.decode(tokens), "the caller reads the result alone"
    assert "391" in answered(log)


async def test_what_sub_agents_use_counts_and_the_rest_goes_back(world: World) -> None:
    tools = Delegates(world, [SUM] * 2)
    agent, _, _ = await world.ask(tools, Limits(steps=6, tokens=2000))
    one, other = (each.agent for each in tools.made)
    # One of six steps is the call that delegates: two of the five that are left for each of the two.
    assert (one.limits.steps, other.limits.steps) == (2, 2)
    assert one.limits.tokens == other.limits.tokens <= (2000 - 250) // 2
    assert agent.lent_steps == one.steps + other.steps == 2
    assert agent.lent_tokens == one.spent + other.spent > 0


async def test_steps_of_sub_agents_end_the_calling_of_their_caller(world: World) -> None:
    tools = Delegates(world, [SUM] * 2)
    agent, log, _ = await world.ask(tools, Limits(steps=3))
    assert agent.lent_steps == 2 and [each.limit for each in log if isinstance(each, Limited)] == ["steps"]


async def test_without_a_step_left_for_each_a_sub_agent_answers_without_calls(world: World) -> None:
    tools = Delegates(world, [SUM] * 2)
    await world.ask(tools, Limits(steps=2))
    assert tools.inner is not None and tools.inner.begun == []
    assert all(answered(each).strip() for each in tools.logs)


async def test_a_sub_agent_without_tools_cannot_call(world: World) -> None:
    tools = Delegates(world, [SUM], calls=False)
    agent, _, _ = await world.ask(tools, Limits())
    assert not any(isinstance(each, Called) for each in tools.logs[0]) and answered(tools.logs[0]).strip()
    assert agent.lent_steps == 0


@pytest.mark.parametrize("tokens", [80, 200])
async def test_the_tokens_of_all_together_stay_within_the_limit(world: World, tokens: int) -> None:
    tools = Delegates(world, ["Tell me a long story about a dam."] * 3)
    agent, log, _ = await world.ask(tools, Limits(tokens=tokens))
    written = sum(each.piece.spent for log in [log, *tools.logs] for each in log if isinstance(each, Wrote))
    assert written <= tokens and agent.spent + agent.lent_tokens == written
    assert answered(log).strip(), "tokens for the last answer are kept"


async def test_too_few_tokens_are_refused(world: World) -> None:
    tools = Delegates(world, ["Tell me a story."] * 4)
    await world.ask(tools, Limits(tokens=48))
    assert "are left for each of 4; accepted: 16 or more" in tools.refused and tools.made == []


class DelegatesTwice(Delegates):
    """Delegates again while the first sub-agent has its share, and once it is closed."""

    async def run(self, calls: Sequence[Call]) -> list[str]:
        assert self.agent is not None
        task = SubTask(after_answer(self.world.engine.tokenizer, SUM, {}), self.world.style, None)
        (first,) = self.made = await self.agent.delegate([task])
        with pytest.raises(BudgetSpent):
            await self.agent.delegate([task])
        first.close()
        (second,) = await self.agent.delegate([task])
        self.made.append(second)
        second.close()
        return ["391"]


async def test_a_share_is_lent_once_and_again_when_it_is_back(world: World) -> None:
    tools = DelegatesTwice(world, [])
    agent, _, _ = await world.ask(tools, Limits())
    first, second = (each.agent.limits.tokens for each in tools.made)
    assert first == second > 1000 and agent.lent_tokens == 0 and all(each.seq.closed for each in tools.made)
