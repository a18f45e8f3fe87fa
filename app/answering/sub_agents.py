"""Sub-agents of an answer: each task that a call delegates is a tool loop on a fork of the answer's sequence.

They share the prefix, the limits and the rights of the agent that delegates, and run side by side. One that fails is a
result of its own. Knows nothing of chats or HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from app.answering.answer_plan import AnswerPlan, plan_calls
from app.answering.tool_service import DELEGATE, OfferedTools
from app.errors import from_exception
from engine.tool_parsers import read_tools
from reasoning.agent import Agent, BudgetSpent, Called, Limit, Limited, Limits, SubAgent, SubTask, Tools, Wrote
from reasoning.dialogue import after_answer
from reasoning.strategy import Event, Spent
from reasoning.turn import Content
from tools.context import SubAgentAnswer, SubAgentTask
from tools.errors import ToolError
from tools.outcome import Event as CallEvent
from tools.tool import Tool

_ASKED = (
    "You are now a sub-agent with one task. Do it, and answer with its result alone, which goes to the agent that gave "
    "you the task:\n\n{instructions}"
)

Listen = Callable[[str], Callable[[CallEvent], None]]  # to the calls of a sub-agent, by its id


@dataclass(frozen=True, slots=True)
class SubAgentStarted(Event):
    """A sub-agent begins a task of the call `call_id`. `tools`: names of those that it may call."""

    agent: str
    call_id: str
    instructions: str
    tools: list[str]


@dataclass(frozen=True, slots=True)
class SubAgentDone(Event):
    """The end of a sub-agent. `text`: its answer, or why it has none. `limit` ended its calling. `tokens`: written."""

    agent: str
    text: str
    failed: bool
    limit: Limit | None
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """The tools that an answer may call on its way, within limits of steps, tokens, and seconds of `clock`.

    `on_begin` hears who does the tasks that calls delegate; a remote model's loop has nobody.
    """

    tools: Tools
    limits: Limits
    clock: Callable[[], float] = time.monotonic
    on_begin: Callable[[SubAgents], None] = lambda sub_agents: None


@dataclass(slots=True)
class _Working:
    """A sub-agent under way; `tools` are the calls that it makes."""

    id: str
    task: SubAgentTask
    offered: list[Tool]
    tools: OfferedTools
    agent: SubAgent | None = None  # once it has its fork
    limit: Limit | None = None
    ended: str | None = None  # by which its last turn was
    began: float = 0.0


@dataclass(slots=True)
class SubAgents:
    """The sub-agents of one answer by `plan`, which `agent` writes. `hear` gets their events and what they spend."""

    plan: AnswerPlan
    agent: Agent
    hear: Callable[[Event], None]
    user: str
    count: int = 0

    async def run(
        self, tools: OfferedTools, call_id: str, tasks: Sequence[SubAgentTask], listen: Listen
    ) -> list[SubAgentAnswer]:
        """Returns an answer for each task, in their order; `tools` are those of the call's own agent.

        Raises:
            ToolError: too few tokens of the answer's limit are left.
            EngineError: the sequence cannot be forked.
        """
        answers = dict[int, SubAgentAnswer]()
        ready, asked = dict[int, _Working](), list[SubTask]()
        for at, task in enumerate(tasks):
            self.count += 1
            offered, refused = _allowed(tools, task)
            working = _Working(
                f"agent_{self.count}", task, offered, tools.narrowed(offered, listen(f"agent_{self.count}"))
            )
            names = [tool.name for tool in offered]
            self.hear(SubAgentStarted(working.id, call_id, task.instructions, names))
            try:
                if refused is not None:
                    raise ToolError(refused)
                asked.append(await self._asked(working))
                ready[at] = working
            except Exception as error:
                answers[at] = self._failed(working, error)
        if not ready:
            return [answers[at] for at in range(len(tasks))]
        try:
            made = await self.agent.delegate(asked)
        except BudgetSpent as error:
            for working in ready.values():
                self._failed(working, ToolError(f"The answer's limit of tokens is all but reached: {error}"))
            raise ToolError(f"The answer's limit of tokens is all but reached: {error}") from None
        for working, agent in zip(ready.values(), made, strict=True):
            working.agent = agent
        try:
            running = {at: asyncio.create_task(self._run(working)) for at, working in ready.items()}
            try:
                await asyncio.gather(*running.values())
            finally:
                for each in running.values():
                    each.cancel()
                await asyncio.wait(running.values())
            answers |= {at: each.result() for at, each in running.items()}
        finally:
            for agent in made:
                agent.close()
            for working in ready.values():
                tools.session.tainted_by |= working.tools.session.tainted_by
        return [answers[at] for at in range(len(tasks))]

    async def _asked(self, working: _Working) -> SubTask:
        """
        Raises:
            ApiError, CannotContinue: the model cannot be asked so.
        """
        served, config = self.plan.served, self.plan.reasoning_config
        text = _ASKED.format(instructions=working.task.instructions)
        tokens = after_answer(served.engine.tokenizer, text, self.plan.variables)
        style = replace(self.agent.style, first=None)
        if working.offered:
            specs = read_tools([tool.spec() for tool in working.offered])
            style = replace(style, plan=await plan_calls(served, specs, "auto", True, self.user))
        # A strategy writes the answer alone; a budget's minimum is the answer's, not that of each part of it.
        budget = None if config.budget is None else replace(config.budget, min_tokens=0, waits=0)
        alone = replace(self.plan, reasoning_config=replace(config, strategy=None, options=None, budget=budget))
        tokens = alone.reasoning_config.prompt(tokens, served, calls=True)
        return SubTask(tokens, style, working.tools if working.offered else None, alone.generator())

    async def _run(self, working: _Working) -> SubAgentAnswer:
        working.began = time.monotonic()
        try:
            text = await self._written(working)
            if not text:
                raise ToolError("It ended without an answer.")
        except Exception as error:
            return self._failed(working, error)
        if working.ended == "length":
            text += " […]"
        self._done(working, text, failed=False)
        return SubAgentAnswer(text, untrusted=working.tools.read_untrusted)

    async def _written(self, working: _Working) -> str:
        """Returns the text of the last turn, once it is whole."""
        agent, read, text = working.agent, 0, list[str]()
        assert agent is not None
        async with aclosing(agent.run()) as happening:
            async for each in happening:
                match each:
                    case Wrote(piece, deltas, reason):
                        self.hear(Spent(piece.spent, agent.read - read))
                        read, working.ended = agent.read, reason or working.ended
                        text += [delta.text for delta in deltas if isinstance(delta, Content)]
                    case Called():
                        text.clear()  # it was said on the way to a call
                    case Limited(limit):
                        working.limit = limit
        return "".join(text).strip()

    def _failed(self, working: _Working, error: Exception) -> SubAgentAnswer:
        text = str(error) if isinstance(error, ToolError) else from_exception(error).message
        self._done(working, text, failed=True)
        return SubAgentAnswer(text, failed=True, untrusted=working.tools.read_untrusted)

    def _done(self, working: _Working, text: str, *, failed: bool) -> None:
        tokens = 0 if working.agent is None else working.agent.agent.spent
        seconds = time.monotonic() - working.began if working.began else 0.0
        self.hear(SubAgentDone(working.id, text, failed, working.limit, tokens, seconds))


async def delegated(
    sub_agents: SubAgents | None, tools: OfferedTools, call_id: str, tasks: Sequence[SubAgentTask], listen: Listen
) -> list[SubAgentAnswer]:
    """Has `sub_agents` do the tasks of a call. Raises as `SubAgents.run`, and `ToolError` where there are none."""
    if sub_agents is None:
        raise ToolError("The model of this answer is another server's, and has no sub-agents; do the tasks yourself.")
    return await sub_agents.run(tools, call_id, tasks, listen)


def _allowed(tools: OfferedTools, task: SubAgentTask) -> tuple[list[Tool], str | None]:
    """Returns the tools of a task, and why it may not have all that it names."""
    able = {name: tool for name, tool in tools.offered.items() if name != DELEGATE}
    if task.tools is None:
        return list(able.values()), None
    if DELEGATE in task.tools:
        return [], f"A sub-agent may not call {DELEGATE}; accepted: {', '.join(able) or 'no tools'}."
    if wrong := next((name for name in task.tools if name not in able), None):
        there = ", ".join(able) or "none"
        return [], f"The agent that delegates may not call {wrong!r:.70}, so its sub-agents may not; accepted: {there}."
    return [able[name] for name in dict.fromkeys(task.tools)], None
