"""A request's checker: a program that scores an answer's text from 0 to 1, for best-of-n, votes and trees.

Comparisons with a known answer run in place. Expressions and schemas run in a process that can be ended, Python in the
interpreter for small pure code, and a tool as the user's own call. Knows nothing of strategies.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.errors import invalid
from app.request_body import is_large
from engine.errors import InvalidParameter
from reasoning.evaluate.judging import BadAnswer, Choices, Puzzle, judge_of
from reasoning.strategy import Check
from tools.outcome import Call
from tools.sandbox import Pure, SandboxFailed
from tools.session import Session
from tools.workers.process_pool import ProcessPool, WorkerFailed
from tools.workers.schema_check import check_schema

if TYPE_CHECKING:
    from app.answering.tool_service import ToolService

Json = Mapping[str, Any]  # Any: plain JSON

CHECK_S = 2.0
_MEMORY_BYTES = 256 << 20
MAX_CODE = 20_000  # characters, of any text of a checker
MAX_PARTS = 5_000  # values of a schema, say
_FIELDS = {
    **dict.fromkeys(["exact", "number", "contains", "regex", "puzzle"], ("answer",)),
    "choice": ("answer", "choices"),
    "json_schema": ("schema",),
    "python": ("code",),
    "tool": ("name", "arguments"),
}
CHECKER = (
    '{"type": "exact", "number", "contains", "regex" or "puzzle", "answer": …}, {"type": "choice", "answer": …, '
    '"choices": […]}, {"type": "json_schema", "schema": {…}}, {"type": "python", "code": "…"} or {"type": "tool", '
    '"name": "…", "arguments": {…}}'
)


class Checkers:
    """Makes checkers of requests, and owns the processes that some of them need, from the first use on.

    `tool_service` has the tools that a checker may call; without one, in an API worker or for a replay, none may.
    """

    def __init__(self) -> None:
        self.tool_service: ToolService | None = None
        self._workers = ProcessPool("tools.workers.schema_check", timeout_s=CHECK_S, memory_bytes=_MEMORY_BYTES)
        self._pure: Pure | None = None
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        await asyncio.to_thread(self._workers.close)
        if self._pure is not None:
            await self._pure.close()

    def make(self, fields: Json, user: str) -> Check:
        """The checker that a request describes, for `user`.

        Raises:
            ApiError: 400, naming the field.
        """
        if is_large([fields], MAX_PARTS, long=MAX_CODE):
            message = f"checker has over {MAX_PARTS:,} values or a text over {MAX_CODE:,} characters; accepted: less."
            raise invalid("checker", message)
        kind = fields.get("type")
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise invalid("checker.type", f"checker.type is {kind!r:.60}; accepted: {', '.join(_FIELDS)}.")
        if unknown := fields.keys() - {"type", *_FIELDS[kind]}:
            name = f"checker.{min(unknown)}"
            raise invalid(name, f"{name:.80} is not a field of such a checker; accepted: {', '.join(_FIELDS[kind])}.")
        match kind:
            case "json_schema":
                return _Judged(self._workers, {"schema": _schema(fields.get("schema"))})
            case "regex":
                return _Judged(self._workers, {"regex": _regex(fields.get("answer"))})
            case "python":
                return self._python(fields.get("code"))
            case "tool":
                return self._tool(fields.get("name"), fields.get("arguments") or {}, user)
        try:
            judge = judge_of(kind, _wanted(fields))
        except BadAnswer as error:
            raise invalid("checker.answer", f"checker: {error}") from None
        return lambda text: float(judge(text.strip()))

    def _python(self, code: Any) -> Check:
        if not isinstance(code, str) or not 0 < len(code) <= MAX_CODE:
            message = f"checker.code: accepted: 1 to {MAX_CODE} characters of Python that end with a score of `answer`."
            raise invalid("checker.code", message)

        async def check(text: str) -> float:
            try:
                finished = await (await self._interpreter()).run(f"answer = {text!r}\n{code}")
            except SandboxFailed as error:
                raise _failed(str(error)) from None
            if finished.exit != "ok":
                raise _failed(f"the code did not end well ({finished.exit}): {finished.reason:.300}")
            try:
                score = json.loads({"True": "true", "False": "false"}.get(str(finished.value), str(finished.value)))
            except ValueError:
                score = finished.value
            return _score(score)

        return check

    async def _interpreter(self) -> Pure:
        async with self._opening:
            self._pure = self._pure or await Pure.open()
            return self._pure

    def _tool(self, name: Any, arguments: Any, user: str) -> Check:
        if self.tool_service is None:
            raise invalid(
                "checker.type", "checker.type is 'tool', and there are no tools in this process (an API worker, or a "
                "replay); accepted: another type, or a run.",
            )  # fmt: skip
        executor = self.tool_service.executor
        tool = executor.registry.get(name) if isinstance(name, str) else None
        if tool is None:
            there = ", ".join(sorted(each.name for each in executor.registry))
            message = f"checker.name is {name!r:.70}; accepted: a tool of this server: {there}."
            raise invalid("checker.name", message)
        if not isinstance(arguments, dict) or "answer" in arguments:
            message = "checker.arguments: accepted: an object without `answer`, which is added."
            raise invalid("checker.arguments", message)

        async def check(text: str) -> float:
            session = Session(user, f"checker-{uuid.uuid4().hex}")
            call = Call("check", tool.name, {**arguments, "answer": text})
            (outcome,) = await executor.run([call], session)
            if not outcome.ok:
                raise _failed(f"the tool {tool.name!r}: {outcome.text:.300}")
            return _score(outcome.result.value)

        return check


@dataclass(frozen=True, slots=True)
class _Judged:
    """A check in a worker's process."""

    workers: ProcessPool
    request: dict[str, Any]

    def __call__(self, text: str) -> Awaitable[float]:
        return self._ask(text)

    async def _ask(self, text: str) -> float:
        try:
            return _score(await self.workers.ask({**self.request, "text": text}))
        except WorkerFailed as error:
            why = f"it took more than {CHECK_S:g} s" if error.late else str(error)
            raise _failed(f"an answer could not be checked: {why}") from None
        except ValueError as error:
            raise _failed(f"an answer could not be checked: {error}") from None


def _score(value: Any) -> float:
    """Raises InvalidParameter: it is no score."""
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise _failed(f"it gave {value!r:.60}; accepted: true, false, or a number from 0 to 1")
    return float(value)


def _failed(message: str) -> InvalidParameter:
    return InvalidParameter("checker", f"checker: {message}.")


def _schema(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise invalid("checker.schema", "checker.schema: accepted: a JSON schema, an object.")
    try:
        check_schema(schema)
    except (ValueError, RecursionError) as error:
        raise invalid("checker.schema", f"checker.schema: {error}.") from None
    return schema


def _regex(expression: Any) -> str:
    if not isinstance(expression, str) or not 0 < len(expression) <= 1_000:
        raise invalid("checker.answer", "checker.answer: accepted: a regular expression of 1 to 1,000 characters.")
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise invalid("checker.answer", f"checker.answer is no expression of Python's re: {error}.") from None
    return expression


def _wanted(fields: Json) -> Any:
    """Returns the expected answer, as `judge_of` takes it."""
    answer, choices = fields.get("answer"), fields.get("choices")
    if isinstance(answer, dict) and answer.keys() == {"numbers", "target"}:
        numbers, target = answer["numbers"], answer["target"]
        whole = isinstance(numbers, list) and len(numbers) <= 12 and all(type(each) is int for each in numbers)
        return Puzzle(tuple(numbers), target) if whole and type(target) is int else None
    if isinstance(answer, str) and isinstance(choices, list) and all(isinstance(each, str) for each in choices):
        return Choices(answer, tuple(choices))
    return answer
