"""Helpers to test a plugin: run a tool, inspect its effects, and let a scripted model call it.

The real executor runs the calls; only the model and the person are scripted. Everything is permitted and approved
unless the test says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.call_policy import CallPolicy, Decision, NeedsApproval
from tools.context import Context, Question, ToolProgressStep
from tools.errors import NotAnswered
from tools.executor import Executor
from tools.journal import Journal
from tools.options import PERMISSIONS
from tools.outcome import Call, Event, Outcome
from tools.registry import Offer, Registry
from tools.result import Result, result_of
from tools.session import Session
from tools.tool import Tool


class FakeContext(Context):
    """A context that remembers: `steps` of progress, pieces of `outputs`, `questions`; `sources` as every context,
    and attached `files` with `keeps_files`.

    `answers` are given to the tool's questions in turn; after the last, nobody answers. `provided` are the host's
    values, by type.
    """

    def __init__(
        self,
        *,
        user: str = "ana",
        chat: str | None = "chat-1",
        call_id: str = "call-1",
        answers: Sequence[str] = (),
        provided: Mapping[type, object] | None = None,
        keeps_files: bool = False,
    ) -> None:
        self.steps = list[ToolProgressStep]()
        self.outputs = list[str]()
        self.questions = list[Question]()
        self._answers = list(answers)
        super().__init__(
            user=user,
            chat=chat,
            call_id=call_id,
            provided=provided or {},
            ask=self._answered,
            on_progress=self.steps.append,
            on_output=self.outputs.append,
            keeps_files=keeps_files,
        )

    async def _answered(self, question: Question) -> str:
        self.questions.append(question)
        if not self._answers:
            raise NotAnswered(f"The test has no answer to {question.text!r}; give it as FakeContext(answers=[…]).")
        return self._answers.pop(0)


async def call_tool(tool: Tool, ctx: Context | None = None, /, **arguments: Any) -> Result:
    """Runs a tool on arguments as a model would write them (JSON), and returns the result that a model would read.

    Raises:
        BadArguments: they do not fit the schema.
        Exception: as the tool raises it, `Retry` too.
    """
    ctx = FakeContext() if ctx is None else ctx
    value = await tool.call(ctx, arguments)
    return result_of(value, tuple(ctx.sources), untrusted=tool.untrusted, max_chars=tool.max_chars)


def run_tool(tool: Tool, ctx: Context | None = None, /, **arguments: Any) -> Result:
    """`call_tool` for a test that is not async itself.

    Raises:
        RuntimeError: an event loop is running; await `call_tool` there.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call_tool(tool, ctx, **arguments))
    raise RuntimeError("run_tool starts an event loop, and one is running: in an async test, await call_tool(…).")


@dataclass(frozen=True, slots=True)
class Calls:
    """A scripted turn that calls tools: names with their arguments, in order."""

    calls: tuple[tuple[str, Mapping[str, Any]], ...]


def calls(name: str, **arguments: Any) -> Calls:
    """A turn with one call; a list of them is a turn with several calls at once."""
    return Calls(((name, arguments),))


@dataclass(slots=True)
class Log:
    """A log of a run: every call with its outcome, the events, the approvals, and the model's last words."""

    called: list[tuple[Call, Outcome]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    asked: list[NeedsApproval] = field(default_factory=list)
    answer: str = ""

    @property
    def read(self) -> list[str]:
        """The texts of the outcomes, as the model read them."""
        return [outcome.text for _, outcome in self.called]


Turn = str | Calls | Sequence[Calls] | Callable[[list[str]], "str | Calls | Sequence[Calls]"]


class ScriptedModel:
    """A scripted model: a text ends the run, calls are run and read.

    A turn may also be a function of the text read so far, to script a model that obeys it.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = tuple(turns)

    async def run(
        self,
        *offers: Offer,
        user: str = "ana",
        approve: bool | Callable[[NeedsApproval], Awaitable[Decision]] = True,
        policy: CallPolicy | None = None,
        journal: Journal | None = None,
        run: str = "run-1",
    ) -> Log:
        """Runs the script with the tools. `approve` is every approval's answer, or the function that gives it.

        Raises:
            AssertionError: the script ends without a text.
        """
        log = Log()

        async def answered(asked: NeedsApproval) -> Decision:
            log.asked.append(asked)
            if callable(approve):
                return await approve(asked)
            return Decision("once" if approve else "no", asked.arguments_hash)

        registry = Registry()
        registry.add(*offers)
        executor = Executor(registry, policy or CallPolicy(default=PERMISSIONS), journal)
        session = Session(user, run, "chat-1", answered)
        try:
            for number, turn in enumerate(self.turns):
                said = turn(log.read) if callable(turn) else turn
                if isinstance(said, str):
                    log.answer = said
                    return log
                wanted = [said] if isinstance(said, Calls) else said
                made = [
                    Call(f"call-{number}-{place}", name, arguments)
                    for place, (name, arguments) in enumerate(each for one in wanted for each in one.calls)
                ]
                outcomes = await executor.run(made, session, log.events.append)
                log.called += zip(made, outcomes, strict=True)
        finally:
            await registry.close()
        raise AssertionError(f"The script of {len(self.turns)} turns ends with calls; end it with the model's text.")


def assert_tool_called(log: Log, name: str, **arguments: Any) -> Outcome:
    """The outcome of the first call of `name` with the given arguments among its own.

    Raises:
        AssertionError: there was none; the message lists the calls there were.
    """
    for call, outcome in log.called:
        if call.name == name and isinstance(call.arguments, Mapping):
            given = call.arguments
            if all(key in given and given[key] == value for key, value in arguments.items()):
                return outcome
    wanted = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    made = "; ".join(f"{call.name}({call.arguments})" for call, _ in log.called) or "no calls at all"
    raise AssertionError(f"There was no call {name}({wanted}); there were: {made}")
