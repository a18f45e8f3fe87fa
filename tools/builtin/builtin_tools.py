"""The tools that come with the server, as its settings offer them.

The small ones are there so that the model need not guess: `ask_user` asks which meaning is meant, `calculator` does
arithmetic, `current_time` and `date_arithmetic` know the time and calendars. `delegate` has sub-agents do tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from ponder import Context, NotAnswered, Retry, SubAgentTask, Tool, ToolError, Toolset, tool
from tools.calculation import CalculationError, calculate, dates
from tools.context import MAX_INSTRUCTIONS, MAX_TASKS
from tools.result import shorten
from tools.sql import SqlDatabase

if TYPE_CHECKING:
    from tools.builtin.notes import NoteStore

Choice = Annotated[str, Field(min_length=1, max_length=200)]


@tool(permission="none", timeout=5)
async def ask_user(
    ctx: Context,
    question: Annotated[str, Field(min_length=1, max_length=1000)],
    choices: Annotated[list[Choice], Field(min_length=2, max_length=10)] | None = None,
) -> str:
    """Ask the user which of several meanings is meant, or for what only they know, and wait for the answer.

    Args:
        question: one question, in the user's language.
        choices: the answers to choose from; left out, the user writes freely.
    """
    if choices is not None and len(set(choices)) < len(choices):
        raise Retry("Give each choice once.")
    try:
        answer = await ctx.ask(question, choices)
    except NotAnswered:
        return "Nobody answered. Go on with what is likeliest and say what you took it to mean, or say what is missing."
    return f"The user answered: {answer}"


class DelegatedTask(BaseModel):
    """A sub-agent's task; without `tools` it may call all that the caller may."""

    model_config = ConfigDict(extra="forbid")

    instructions: Annotated[str, Field(min_length=1, max_length=MAX_INSTRUCTIONS)]
    tools: Annotated[list[str], Field(max_length=128)] | None = None


DELEGATED_CHARS = 16_000  # of all answers together, as the caller reads them


@tool(permission="none", timeout=5, idempotent=False, max_chars=DELEGATED_CHARS)
async def delegate(
    ctx: Context, tasks: Annotated[list[DelegatedTask], Field(min_length=1, max_length=MAX_TASKS)]
) -> str:
    """Have sub-agents do independent tasks side by side, and wait for their answers.

    Args:
        tasks: what each is to do, with all that it has to know, and the names of the tools that it may call.
    """
    wanted = [SubAgentTask(each.instructions, None if each.tools is None else tuple(each.tools)) for each in tasks]
    answers = await ctx.delegate(wanted)
    if all(answer.failed for answer in answers):
        raise ToolError(" ".join(f"Sub-agent {number}: {each.text}" for number, each in enumerate(answers, 1)))
    most = DELEGATED_CHARS // len(answers) - 40  # for the line above
    return "\n\n".join(
        f"Sub-agent {number}{' failed' if each.failed else ''}:\n{shorten(each.text, most)[0]}"
        for number, each in enumerate(answers, 1)
    )


@tool(permission="none", timeout=5)
def calculator(expression: Annotated[str, Field(min_length=1, max_length=1000)]) -> str:
    """Evaluate an arithmetic expression exactly.

    Args:
        expression: numbers, + - * / ^ %, brackets, functions and units, like 15% of 80 or 2 km + 300 m in miles.
    """
    try:
        return str(calculate(expression))
    except CalculationError as error:
        raise Retry(str(error)) from None


Text = Annotated[str, Field(max_length=100)]


@tool(permission="none", timeout=5, idempotent=True)
def current_time(zone: Text = "UTC") -> str:
    """The current date and time.

    Args:
        zone: a time zone like Europe/Berlin.
    """
    try:
        return str(dates.now(zone))
    except CalculationError as error:
        raise Retry(str(error)) from None


@tool(permission="none", timeout=5, idempotent=True)
def date_arithmetic(start: Text, add: Text = "", until: Text = "", zone: Text = "UTC") -> str:
    """Add a duration to a date, tell the time between two dates, or tell a date's weekday and week.

    Args:
        start: a date or time like 2026-03-29 or 2026-03-29T14:30, or now, today, tomorrow, yesterday.
        add: a duration like 3 days, -2 weeks, 1 year 2 months, 10 workdays, P1DT4H.
        until: another date or time; the answer is how long it is from start.
        zone: the time zone of times without one.
    """
    if add and until:
        raise Retry("Give add for a later or earlier date, or until for the time between two dates; not both.")
    try:
        first = dates.moment(start, zone)
        if until:
            last = dates.moment(until, zone)
            notes = " ".join((*first.notes, *last.notes))
            return f"{dates.difference(first, last)} {notes}".strip()
        return str(dates.add(first, dates.duration(add)) if add else first)
    except CalculationError as error:
        raise Retry(str(error)) from None


@dataclass(frozen=True, slots=True)
class BuiltinConfig:
    """`searxng_url`: the operator's own search engine. `web`: whether pages may be fetched."""

    notes: NoteStore | Path | None = None
    databases: Mapping[str, SqlDatabase] = field(default_factory=dict)
    web: bool = True
    searxng_url: str = ""


@dataclass(frozen=True, slots=True)
class BuiltinTools:
    """`off`: the names of disabled tools, and the remedy for each."""

    tools: list[Tool | Toolset]
    off: dict[str, str]


def builtin_tools(config: BuiltinConfig) -> BuiltinTools:
    """
    Raises:
        ValueError: the search engine's address is no URL.
    """
    tools: list[Tool | Toolset] = [ask_user, calculator, current_time, date_arithmetic, delegate]
    off = dict[str, str]()
    if config.notes is not None:
        from tools.builtin.notes import Notes

        tools.append(Notes(config.notes))
    else:
        off["remember, recall, forget, list_notes"] = "No store of notes is configured."
    if config.databases:
        from tools.builtin.databases import Databases

        tools.append(Databases(config.databases))
    else:
        off["sql_query, sql_schema"] = "No database is attached."
    if config.web:
        from tools.builtin.pages import Pages

        tools.append(Pages())
    else:
        off["http_fetch"] = "Fetching is switched off."
    if config.searxng_url:
        from tools.builtin.pages import Web
        from tools.web.search import SearXNG

        tools.append(Web(SearXNG(config.searxng_url)))
    else:
        off["web_search"] = "No search engine is configured; give the address of a SearXNG server."
    return BuiltinTools(tools, off)
